"""What `make chart-check` finds in rendered manifests although helm took them."""

from tests.chart.lint import complaints

ROLE = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "a", "namespace": "x"}}


def test_an_object_that_is_rendered_twice_would_overwrite_itself():
    elsewhere = {**ROLE, "metadata": {"name": "a", "namespace": "y"}}

    assert complaints([ROLE, elsewhere]) == []
    assert "rendered twice" in complaints([ROLE, elsewhere, ROLE])[0]


def test_half_an_object_is_found():
    assert "without apiVersion, kind or name" in complaints([{"kind": "Secret", "metadata": {"name": "a"}}])[0]
