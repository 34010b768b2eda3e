"""The Engines of the chart are applied when the operator starts; what somebody else has changed in one is kept."""

import json

import pytest

from slipway_kube.errors import Conflict, Forbidden, KubeError, NotFound
from slipway_operator.installation_engines import TRIES, apply_engines, read_engines

pytestmark = pytest.mark.capability("OP-11")


class Cluster:
    """Keeps what is applied; the first calls fail with the given errors."""

    def __init__(self, *errors: KubeError) -> None:
        self.kept: dict[str, dict] = {}
        self.errors = list(errors)
        self.calls = 0

    async def apply(self, path: str, body: dict, *, field_manager: str, force: bool) -> bytes:
        self.calls += 1
        assert (field_manager, force) == ("slipway-engines", False)
        if self.errors:
            raise self.errors.pop(0)
        self.kept[path] = body
        return b"{}"


async def no_sleep(_seconds: float) -> None:
    """Time does not pass."""


@pytest.fixture
def folder(tmp_path):
    for name in ("vllm", "sglang"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"metadata": {"name": name}, "spec": {"image": name}}))
    return tmp_path


async def test_a_crd_that_comes_a_moment_later_is_waited_for(folder):
    cluster = Cluster(NotFound(404, "no such kind"), Forbidden(403, "no right yet"))

    await apply_engines(cluster, read_engines(folder), sleep=no_sleep)

    prefix = "/apis/slipway.dev/v1alpha1/engines"
    assert {path: body["spec"]["image"] for path, body in cluster.kept.items()} == {
        f"{prefix}/vllm": "vllm",
        f"{prefix}/sglang": "sglang",
    }


async def test_an_engine_that_somebody_changed_is_kept_and_the_others_are_applied(folder):
    cluster = Cluster(Conflict(409, "conflict with kubectl-edit"))

    await apply_engines(cluster, read_engines(folder), sleep=no_sleep)

    assert [path.rpartition("/")[2] for path in cluster.kept] == ["vllm"]


async def test_a_lasting_refusal_ends_the_command_with_its_cause(folder):
    cluster = Cluster(*[Forbidden(403, "cannot patch engines")] * (TRIES + 1))

    with pytest.raises(Forbidden, match="cannot patch engines"):
        await apply_engines(cluster, read_engines(folder), sleep=no_sleep)
    assert cluster.calls == TRIES
