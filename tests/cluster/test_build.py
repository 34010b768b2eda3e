"""Which build belongs to which sources, and what it says it is."""

import shutil
from pathlib import Path

import pytest

from e2e.cluster.build import SOURCES, fingerprint, link_flags, version_of
from e2e.cluster.paths import HERE
from e2e.cluster.toolchain import parse_version

GO_MOD = "require (\n\tk8s.io/kubernetes v1.36.3\n\thelm.sh/helm/v4 v4.2.4\n)\n"


@pytest.mark.parametrize("name", SOURCES)
def test_a_change_of_any_source_asks_for_a_new_build(tmp_path: Path, name: str) -> None:
    for source in SOURCES:
        shutil.copyfile(HERE / source, tmp_path / source)
    before = fingerprint(tmp_path)
    assert before == fingerprint(HERE)

    with (tmp_path / name).open("a") as file:
        file.write("\n")

    assert fingerprint(tmp_path) != before


def test_every_go_file_is_a_source() -> None:
    assert {path.name for path in HERE.glob("*.go")} <= set(SOURCES)


def test_the_binary_is_stamped_with_the_versions_of_go_mod() -> None:
    flags = link_flags(GO_MOD)

    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags
    assert "-X k8s.io/client-go/pkg/version.gitMinor=36" in flags
    assert "-X helm.sh/helm/v4/internal/version.version=v4.2.4" in flags


def test_a_module_that_is_not_required_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"does not require k8s\.io/kops"):
        version_of("k8s.io/kops", GO_MOD)


@pytest.mark.parametrize(
    ("said", "version"),
    [("go version go1.26.8 linux/amd64", (1, 26)), ("go version go1.27rc1 linux/arm64", (1, 27)), ("gccgo", (0, 0))],
)
def test_a_go_toolchain_says_its_version(said: str, version: tuple[int, int]) -> None:
    assert parse_version(said) == version
