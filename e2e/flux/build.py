"""Builds Flux's controllers from their Go modules, once for each state of `go.mod` and `go.sum`, into the cache.

`<cache>/build/flux-<hash>/` holds the program and `crds/`, the definitions of its own kind and of the sources it
watches. Each is a module apart from the cluster's binary and from the other one: all pin Kubernetes' libraries, and
none must move the others' versions.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.build import alone, compile_with_progress, go_environment, version_of
from e2e.cluster.paths import cache_folder
from e2e.cluster.toolchain import find_go

HERE = Path(__file__).resolve().parent
SOURCES = "github.com/fluxcd/source-controller"  # only its CRDs are used; nothing of it is compiled
EXPLAIN = "building Flux's {program} {version} into {out}: once, some minutes on 2 cores"


@dataclass(frozen=True, slots=True)
class Controller:
    """A controller of Flux, and the folder with the `go.mod` and `go.sum` it is built by."""

    program: str
    folder: Path
    packages: int
    """About as many are compiled, the first time; only for the progress line."""

    @property
    def module(self) -> str:
        """The path of its Go module."""
        return f"github.com/fluxcd/{self.program}"


KUSTOMIZE = Controller("kustomize-controller", HERE, 1800)
HELM = Controller("helm-controller", HERE / "helm", 1700)


class ModulesNotReachedError(RuntimeError):
    """The Go modules cannot be fetched from here; the message says which, and why."""


def ensure(controller: Controller) -> Path:
    """The folder of the build of this checkout's module; made now if needed; raises ModulesNotReachedError."""
    folder = controller.folder
    digest = hashlib.sha256((folder / "go.mod").read_bytes() + b"\0" + (folder / "go.sum").read_bytes())
    out = cache_folder() / "build" / f"flux-{digest.hexdigest()[:12]}"
    if not (out / controller.program).exists():
        out.mkdir(parents=True, exist_ok=True)
        with alone(out):
            if not (out / controller.program).exists():
                _build(controller, out)
    return out


def _build(controller: Controller, out: Path) -> None:
    folder, module, program = controller.folder, controller.module, controller.program
    go, go_mod = find_go(cache_folder()), (folder / "go.mod").read_text()
    version, sources = version_of(module, go_mod), version_of(f"{SOURCES}/api", go_mod)
    print(EXPLAIN.format(program=program, version=version, out=out), file=sys.stderr, flush=True)
    began, new = time.monotonic(), out / f"{program}.new"
    _go(go, folder, "list", "-deps", module)  # fetches what will be compiled
    crds = [_folder_of(go, folder, one) for one in (f"{module}@{version}", f"{SOURCES}@{sources}")]
    flags = ["-trimpath", "-buildvcs=false", "-ldflags", "-s -w"]
    compile_with_progress([str(go), "build", "-v", *flags, "-o", str(new), module], folder, controller.packages)
    (out / "crds").mkdir(exist_ok=True)
    for crd in (file for one in crds for file in one.glob("*.yaml")):
        shutil.copyfile(crd, out / "crds" / crd.name)
    new.rename(out / program)  # last: the build is complete when this is there
    print(f"  built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _folder_of(go: Path, folder: Path, module: str) -> Path:
    """The folder with the CRDs of a module, which is fetched when it is not there."""
    return Path(json.loads(_go(go, folder, "mod", "download", "-json", module))["Dir"]) / "config" / "crd" / "bases"


def _go(go: Path, folder: Path, *arguments: str) -> str:
    """What the go command prints; raises ModulesNotReachedError when it fails, as go.mod and go.sum are complete."""
    argv = [str(go), *arguments]
    done = subprocess.run(argv, cwd=folder, env=go_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModulesNotReachedError(f"go {' '.join(arguments)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
