"""Builds Flux's kustomize-controller from its Go module, once for each state of `go.mod` and `go.sum`, into the cache.

`<cache>/build/flux-<hash>/` holds the program and `crds/`, the definitions of its own
kind and of the sources it watches. It is a module apart from the cluster's binary: both
pin Kubernetes' libraries, and neither must move the other's versions.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from e2e.cluster.build import alone, compile_with_progress, go_environment, version_of
from e2e.cluster.paths import cache_folder
from e2e.cluster.toolchain import find_go

HERE = Path(__file__).resolve().parent
PROGRAM = "kustomize-controller"
CONTROLLER, SOURCES_API = "github.com/fluxcd/kustomize-controller", "github.com/fluxcd/source-controller/api"
SOURCES = SOURCES_API.removesuffix("/api")  # only its CRDs are used; nothing of it is compiled
PACKAGES = 1800  # about as many are compiled, the first time; only for the progress line
EXPLAIN = "building Flux's kustomize-controller {version} into {out}: once, some minutes on 2 cores"


class ModulesNotReachedError(RuntimeError):
    """The Go modules cannot be fetched from here; the message says which, and why."""


def ensure() -> Path:
    """The folder of the build of this checkout's module; made now if needed; raises ModulesNotReachedError."""
    digest = hashlib.sha256((HERE / "go.mod").read_bytes() + b"\0" + (HERE / "go.sum").read_bytes())
    out = cache_folder() / "build" / f"flux-{digest.hexdigest()[:12]}"
    if not (out / PROGRAM).exists():
        out.mkdir(parents=True, exist_ok=True)
        with alone(out):
            if not (out / PROGRAM).exists():
                _build(out)
    return out


def _build(out: Path) -> None:
    go, go_mod = find_go(cache_folder()), (HERE / "go.mod").read_text()
    controller, sources = version_of(CONTROLLER, go_mod), version_of(SOURCES_API, go_mod)
    print(EXPLAIN.format(version=controller, out=out), file=sys.stderr, flush=True)
    began, new = time.monotonic(), out / f"{PROGRAM}.new"
    _go(go, "list", "-deps", CONTROLLER)  # fetches what will be compiled
    crds = [_folder_of(go, module) for module in (f"{CONTROLLER}@{controller}", f"{SOURCES}@{sources}")]
    flags = ["-trimpath", "-buildvcs=false", "-ldflags", "-s -w"]
    compile_with_progress([str(go), "build", "-v", *flags, "-o", str(new), CONTROLLER], HERE, PACKAGES)
    (out / "crds").mkdir(exist_ok=True)
    for crd in (file for folder in crds for file in folder.glob("*.yaml")):
        shutil.copyfile(crd, out / "crds" / crd.name)
    new.rename(out / PROGRAM)  # last: the build is complete when this is there
    print(f"  built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _folder_of(go: Path, module: str) -> Path:
    """The folder with the CRDs of a module, which is fetched when it is not there."""
    return Path(json.loads(_go(go, "mod", "download", "-json", module))["Dir"]) / "config" / "crd" / "bases"


def _go(go: Path, *arguments: str) -> str:
    """What the go command prints; raises ModulesNotReachedError when it fails, as go.mod and go.sum are complete."""
    argv = [str(go), *arguments]
    done = subprocess.run(argv, cwd=HERE, env=go_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModulesNotReachedError(f"go {' '.join(arguments)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
