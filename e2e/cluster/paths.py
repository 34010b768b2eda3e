"""Paths of the local cluster: the checkout, the cache, the folder of each cluster, the system's commands."""

import hashlib
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def cache_folder() -> Path:
    """The folder of builds, Go's caches and running clusters: $SLIPWAY_CACHE, else ~/.cache/slipway."""
    return Path(os.environ.get("SLIPWAY_CACHE") or Path.home() / ".cache" / "slipway").resolve()


def cluster_folder(name: str) -> Path:
    """The folder of this checkout's cluster called `name`; two checkouts never share one."""
    checkout = hashlib.sha256(str(CHECKOUT).encode()).hexdigest()[:6]
    return cache_folder() / "clusters" / f"{name}-{checkout}"
