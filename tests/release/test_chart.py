"""The packaged chart names the images of the release, and nothing else of it changes."""

import re
from collections.abc import Iterator

import pytest
import yaml

from e2e.cluster import build
from release import chart
from tests.chart.lint import parsed

DIGESTS = {
    part: f"sha256:{number:064x}" for number, part in enumerate(("operator", "gateway", "agent", "runtime"), start=1)
}
VALUES = (chart.CHART / "values.yaml").read_text()


def test_only_the_registry_and_the_digests_change():
    pinned = chart.pinned(VALUES, "registry.example/team", DIGESTS)

    changed = [line for line in pinned.splitlines() if line not in VALUES.splitlines()]
    assert len(changed) == 1 + len(DIGESTS)
    assert len(pinned.splitlines()) == len(VALUES.splitlines())
    values = yaml.safe_load(pinned)
    assert values["image"]["registry"] == "registry.example/team"
    assert {part: values[part]["image"]["digest"] for part in DIGESTS} == DIGESTS


def test_a_digest_without_a_value_is_refused():
    with pytest.raises(LookupError, match=re.escape("values.yaml has no elsewhere.image.digest")):
        chart.pinned(VALUES, "r", {"elsewhere": "sha256:0"})


@pytest.mark.apiserver
@pytest.mark.capability("PL-14")
def test_every_image_of_the_packaged_chart_is_of_the_release(tmp_path):
    helm = str(build.ensure() / "bin" / "helm")
    packaged = chart.package("0.1.0", "registry.example/team", DIGESTS, tmp_path, helm=helm)

    assert [path.name for path in tmp_path.iterdir()] == ["slipway-0.1.0.tgz"]
    text = chart.render(packaged, "slipway-system", helm=helm)
    manifests = parsed(text)
    images = {
        container["image"]
        for one in manifests
        if one["kind"] == "Deployment"
        for container in one["spec"]["template"]["spec"]["containers"]
    }
    wanted = {part: f"registry.example/team/slipway/{part}@{digest}" for part, digest in DIGESTS.items()}
    assert images == {wanted["operator"], wanted["gateway"]}
    assert wanted["runtime"] in text
    assert wanted["agent"] in text
    assert manifests[0] == {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "slipway-system"}}
    assert {"InferenceService", "WarmPool"} <= {
        one["spec"]["names"]["kind"] for one in manifests if one["kind"] == "CustomResourceDefinition"
    }


@pytest.mark.apiserver
@pytest.mark.capability("PL-16")
def test_a_version_with_metadata_of_a_build_makes_valid_labels(tmp_path):
    """Flux installs `0.1.0+` and the digest of the chart; a label may have no plus and at most 63 characters."""
    helm = str(build.ensure() / "bin" / "helm")
    packaged = chart.package("0.1.0+" + "a81cf7c3432b" * 6, "registry.example/team", DIGESTS, tmp_path, helm=helm)

    manifests = parsed(chart.render(packaged, "slipway-system", helm=helm))
    labels = list(labels_of([one for one in manifests if one["kind"] != "CustomResourceDefinition"]))
    valid = re.compile(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?")
    assert any(value.startswith("slipway-0.1.0_a81cf7c3432b") for value in labels)
    assert [one for one in labels if not valid.fullmatch(one)] == []


def labels_of(tree: object) -> Iterator[str]:
    """The values of all `labels` and `matchLabels` below."""
    if isinstance(tree, list):
        for one in tree:
            yield from labels_of(one)
    elif isinstance(tree, dict):
        for name, below in tree.items():
            if name in ("labels", "matchLabels") and isinstance(below, dict):
                yield from (value for value in below.values() if isinstance(value, str))
            yield from labels_of(below)
