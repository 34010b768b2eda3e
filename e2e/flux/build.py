"""Builds controllers of Flux from their Go modules, once for each state of `go.mod` and `go.sum`, into the cache.

`<cache>/build/<program>-<hash>/` holds the program and `crds/`, the definitions of its own
kind and of the sources it watches. Each is a module apart from the other's and from the
cluster's binary: all of them pin Kubernetes' libraries, and none must move another's versions.
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
SOURCES_API = "github.com/fluxcd/source-controller/api"
SOURCES = SOURCES_API.removesuffix("/api")  # only its CRDs are used; nothing of it is compiled
EXPLAIN = "building Flux's {name} {version} into {out}: once, some minutes on 2 cores"


@dataclass(frozen=True)
class Program:
    """A controller of Flux, and the folder with the go.mod and go.sum that it is built with."""

    name: str
    folder: Path
    packages: int  # about as many are compiled, the first time; only for the progress line

    @property
    def module(self) -> str:
        """Its Go module, whose main package is the program."""
        return f"github.com/fluxcd/{self.name}"


KUSTOMIZE = Program("kustomize-controller", HERE, 1800)
HELM = Program("helm-controller", HERE / "helm", 1500)


class ModulesNotReachedError(RuntimeError):
    """The Go modules cannot be fetched from here; the message says which, and why."""


def ensure(program: Program) -> Path:
    """The folder of its build; made now if needed; raises ModulesNotReachedError."""
    files = [(program.folder / name).read_bytes() for name in ("go.mod", "go.sum")]
    out = cache_folder() / "build" / f"{program.name}-{hashlib.sha256(bytes(1).join(files)).hexdigest()[:12]}"
    if not (out / program.name).exists():
        out.mkdir(parents=True, exist_ok=True)
        with alone(out):
            if not (out / program.name).exists():
                _build(program, out)
    return out


def _build(program: Program, out: Path) -> None:
    go, go_mod = find_go(cache_folder()), (program.folder / "go.mod").read_text()
    controller, sources = version_of(program.module, go_mod), version_of(SOURCES_API, go_mod)
    print(EXPLAIN.format(name=program.name, version=controller, out=out), file=sys.stderr, flush=True)
    began, new = time.monotonic(), out / f"{program.name}.new"
    _go(go, program.folder, "list", "-deps", program.module)  # fetches what will be compiled
    modules = (f"{program.module}@{controller}", f"{SOURCES}@{sources}")
    crds = [_folder_of(go, program.folder, module) for module in modules]
    flags = ["-trimpath", "-buildvcs=false", "-ldflags", "-s -w"]
    argv = [str(go), "build", "-v", *flags, "-o", str(new), program.module]
    compile_with_progress(argv, program.folder, program.packages)
    (out / "crds").mkdir(exist_ok=True)
    for crd in (file for folder in crds for file in folder.glob("*.yaml")):
        shutil.copyfile(crd, out / "crds" / crd.name)
    new.rename(out / program.name)  # last: the build is complete when this is there
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
