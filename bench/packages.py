"""Programs from Debian packages, unpacked into the cache and not installed: peers of benchmarks and tests."""

import os
import re
import shutil
import subprocess
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slipway" / "packages"


class NoProgramError(Exception):
    """The program is not installed, and its package cannot be downloaded; the message says why."""


def program(package: str, path: str) -> Path:
    """The program of a Debian package: the installed one, or the package's file `path`, unpacked into the cache."""
    if (installed := shutil.which(Path(path).name)) is not None:
        return Path(installed)
    folder = CACHE / package
    unpacked = folder / path
    if not unpacked.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise NoProgramError(f"no {package}, and no apt-get to download it")
        folder.mkdir(parents=True, exist_ok=True)
        got = subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True, check=False)
        archives = sorted(folder.glob(f"{package}_*.deb"))
        if got.returncode or not archives:
            raise NoProgramError(f"no {package}, and apt-get cannot download it: {got.stderr.decode()[-200:]}")
        subprocess.run(["dpkg-deb", "-x", archives[-1], folder], check=True)
    if (broken := _missing_libraries(unpacked)) != "":
        raise NoProgramError(f"{package} needs libraries that this machine lacks: {broken}")
    return unpacked


def version_of(*command: str | Path) -> str:
    """The first version number that a program prints when it is asked for it; empty when it prints none."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+[\w.+-]*", done.stdout + done.stderr)
    return found[0] if found else ""


def _missing_libraries(binary: Path) -> str:
    found = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
    return ", ".join(line.split()[0] for line in found.splitlines() if "not found" in line)
