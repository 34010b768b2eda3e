"""Builds containerd, CNI plugins, kube-proxy and kube-router from their Go modules, once, into the cache.

`<cache>/build/containerd-<hash>/bin` holds the programs, by their own names, and `pod`: the only program of the image
that is the sandbox of every pod (`pod/main.go`). The requirements of `go.mod` are those of the local cluster's, so what
both builds compile is compiled once.
"""

import hashlib
import sys
import time
from pathlib import Path

from e2e.cluster import build as cluster_build
from e2e.cluster.build import alone, compile_with_progress, version_of
from e2e.cluster.paths import cache_folder
from e2e.cluster.toolchain import find_go
from e2e.containerd import preflight, tools

HERE = Path(__file__).resolve().parent
SOURCES = ("go.mod", "go.sum", "pod/main.go")
CONTAINERD = "github.com/containerd/containerd/v2"
PLUGINS = "github.com/containernetworking/plugins/plugins"
PROGRAMS = (
    *(f"{CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")),
    *(f"{PLUGINS}/{name}" for name in ("main/bridge", "main/loopback", "ipam/host-local", "meta/portmap")),
    "k8s.io/kubernetes/cmd/kube-proxy",
    "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router",
    "./pod",
)
PACKAGES = 700  # about as many are compiled after the local cluster's binary; only for the progress line
EXPLAIN = "building containerd {version}, kube-proxy, kube-router and CNI plugins into {out}: once, minutes on 2 cores"


def ensure() -> Path:
    """The folder of the build of this checkout's module; made now if it is not there yet."""
    out = cache_folder() / "build" / f"containerd-{fingerprint()}"
    if not (out / "bin").exists():
        out.mkdir(parents=True, exist_ok=True)
        with alone(out):
            if not (out / "bin").exists():
                _build(out)
    return out


def ensure_all() -> None:
    """Make all that a node needs, if this machine can run one: the local cluster's binary too, and the tools."""
    if not preflight.missing(preflight.this_machine()):
        cluster_build.ensure()
        ensure()
        tools.ensure(tools.NODE)


def fingerprint() -> str:
    """The hash that names a build: of everything that decides what is built."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(b"\0" + name.encode() + b"\0" + (HERE / name).read_bytes())
    return digest.hexdigest()[:12]


def _build(out: Path) -> None:
    go, began = find_go(cache_folder()), time.monotonic()
    version = version_of(CONTAINERD, (HERE / "go.mod").read_text())
    print(EXPLAIN.format(version=version, out=out), file=sys.stderr, flush=True)
    new = out / "bin.new"
    new.mkdir(exist_ok=True)
    # The compiler's flags are those of the local cluster's build: other flags would compile everything again.
    flags = ["-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags", "-s -w"]
    compile_with_progress([str(go), "build", "-v", *flags, "-o", f"{new}/", *PROGRAMS], HERE, PACKAGES)
    new.rename(out / "bin")  # last: the build is complete when this is there
    print(f"  built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
