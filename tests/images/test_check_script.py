"""images/check.sh with a buildah that builds nothing: what it does about a bad image, and about a missing tool."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "images" / "check.sh"

BUILDAH = """#!/bin/sh
# --root STORE --runroot RUN VERB ...
verb=$5
case "$verb $*" in
  build*"--target gateway"*) echo "ModuleNotFoundError: No module named 'croniter'" >&2; exit 1;;
  from*) echo container;;
  run*--help*) ;;
  run*"command -v gcc"*) exit {compiler};;
  run*) exit 1;;
esac
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the script needs root")


def check(folder: Path, *targets: str, compiler: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    for name in ("buildah", "curl"):
        tool = folder / name
        tool.write_text(BUILDAH.replace("{compiler}", str(compiler)))
        tool.chmod(0o755)
    path = {"PATH": f"{folder}:/usr/bin:/bin", "BASE": "localhost/base", "FREE_GB": "0"}
    command = ["bash", str(SCRIPT), *targets]
    return subprocess.run(command, env=path | environment, capture_output=True, text=True, check=False)


def test_a_bad_image_does_not_keep_the_others_from_being_checked(tmp_path):
    """review/containers.md 6."""
    done = check(tmp_path, "gateway", "operator")

    assert done.returncode == 1
    assert "No module named 'croniter'" in done.stdout
    assert done.stdout.rstrip().endswith("==> operator\n    it starts as user 65532")
    assert done.stderr == "make images-check: these images do not build or start: gateway\n"


def test_an_image_with_a_compiler_fails(tmp_path):
    """review/shipping.md 26: `! command` never failed the script."""
    done = check(tmp_path, "operator", compiler=0)

    assert done.returncode == 1
    assert "ships a compiler or an installer" in done.stdout


def test_good_images_are_a_success(tmp_path):
    assert check(tmp_path, "operator").returncode == 0


def test_what_the_machine_lacks_is_one_sentence(tmp_path):
    done = check(tmp_path, FREE_GB="99999999", BASE="")

    assert done.returncode == 1
    assert done.stderr.startswith("make images-check lacks: ")
    assert "99999999 GB of free disk" in done.stderr
    assert done.stderr.count("\n") == 1
