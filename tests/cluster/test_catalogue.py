"""Images are names: what each of them becomes on this machine."""

from pathlib import Path

import pytest

from e2e.cluster.catalogue import Catalogue, Environment
from e2e.cluster.paths import CHECKOUT, HERE
from slipway_api import __version__

VENV = Path("/somewhere/venv")


@pytest.fixture
def catalogue() -> Catalogue:
    environment = Environment(CHECKOUT, VENV / "bin" / "python", (VENV, Path("/usr")), Path("/somewhere/cache"))
    return Catalogue.load(HERE / "images.yaml", environment)


@pytest.mark.parametrize("part", ["operator", "gateway", "agent", "runtime"])
def test_each_part_has_an_image_with_the_version_of_the_checkout(catalogue: Catalogue, part: str) -> None:
    image = catalogue.find(f"slipway/{part}:{__version__}")

    assert image is not None
    assert image.command == [f"/somewhere/venv/bin/slipway-{part}"]
    assert image.user == 65532
    assert image.env["PATH"].startswith("/somewhere/venv/bin:")
    assert image.binds[str(CHECKOUT / "api")] == str(CHECKOUT / "api")


def test_only_the_runtime_has_the_embedded_model(catalogue: Catalogue) -> None:
    with_model = [i.name for i in catalogue.images if i.binds.get("/opt/slipway/models/tiny")]

    assert with_model == [f"slipway/runtime:{__version__}"]


def test_test_images_see_the_interpreter_but_not_the_checkout(catalogue: Catalogue) -> None:
    image = catalogue.find("localhost/python:3.11")

    assert image is not None
    assert image.binds == {str(VENV): str(VENV)}


def test_a_pulled_image_is_found_by_its_id_too(catalogue: Catalogue) -> None:
    image = catalogue.find("localhost/sh:1")

    assert image is not None
    assert catalogue.find(image.id) is image


@pytest.mark.parametrize("name", ["slipway/runtime:9.9.9", "slipway/runtime", "docker.io/library/busybox:1", ""])
def test_other_names_cannot_be_pulled(catalogue: Catalogue, name: str) -> None:
    assert catalogue.find(name) is None
