"""A real Prometheus for tests: the installed one, or Debian's package, unpacked into the cache and not installed."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slipway" / "prometheus"


def find_binary(name: str = "prometheus") -> Path:
    """`prometheus` or `promtool`; skips the test where there is none, and none can be downloaded."""
    if (installed := shutil.which(name)) is not None:
        return Path(installed)
    binary = CACHE / "usr" / "bin" / name
    if not binary.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            pytest.skip("no prometheus, and no apt-get to download one")
        CACHE.mkdir(parents=True, exist_ok=True)
        got = subprocess.run(["apt-get", "download", "prometheus"], cwd=CACHE, capture_output=True, check=False)
        packages = sorted(CACHE.glob("prometheus_*.deb"))
        if got.returncode or not packages:
            pytest.skip(f"no prometheus, and apt-get cannot download one: {got.stderr.decode()[-200:]}")
        subprocess.run(["dpkg-deb", "-x", packages[-1], CACHE], check=True)
    return binary


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
