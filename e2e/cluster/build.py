"""Builds the cluster's one binary, once for each state of its sources, into the cache.

`<cache>/build/<hash of the sources>/` holds `controlplane`, `kubectl` and `helm` in
`bin/` as names of it, and the two `.proto` files the kubelet's protocols are written in.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.paths import HERE, cache_folder
from e2e.cluster.toolchain import find_go

SOURCES = ("go.mod", "go.sum", "kstatus.go", "main.go", "stream.go")
RECIPE = "1"  # part of the hash: raise it when the way of building changes what comes out
PACKAGES = 2250  # about as many are compiled, the first time; only for the progress line
EXPLAIN = (
    "building the control plane (etcd, Kubernetes {kubernetes}, kubectl, helm {helm}) as one binary into {out}\n"
    "  once for each version: about 10 minutes and 4 GB of disk on 2 cores the first time, seconds after small edits"
)
PROTOCOLS = {
    "cri.proto": ("k8s.io/cri-api", "pkg/apis/runtime/v1/api.proto"),
    "deviceplugin.proto": ("k8s.io/kubelet", "pkg/apis/deviceplugin/v1beta1/api.proto"),
}


def ensure() -> Path:
    """The folder of the build of this checkout's sources; made now when it is not there yet."""
    out = cache_folder() / "build" / fingerprint(HERE)
    if not (out / "controlplane").exists():
        out.mkdir(parents=True, exist_ok=True)
        with alone(out):
            if not (out / "controlplane").exists():
                _build(out)
    return out


def fingerprint(folder: Path) -> str:
    """The hash that names a build: of everything that decides what comes out."""
    digest = hashlib.sha256(RECIPE.encode())
    for name in SOURCES:
        digest.update(b"\0" + name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()[:12]


def version_of(module: str, go_mod: str) -> str:
    """The version of a directly required module, as go.mod pins it: `v1.36.3`."""
    match = re.search(rf"^\s*{re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    if match is None:
        raise ValueError(f"go.mod does not require {module}")
    return match[1]


def link_flags(go_mod: str) -> str:
    """The linker's flags: stripped, and stamped with the versions that clients and users will see."""
    kubernetes, helm = version_of("k8s.io/kubernetes", go_mod), version_of("helm.sh/helm/v4", go_mod)
    major, minor, _ = kubernetes.removeprefix("v").split(".", 2)
    stamps = {"helm.sh/helm/v4/internal/version.version": helm}
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
        # Without these the version reads v0.0.0-master+$Format:%H$.
        stamps |= {f"{package}.gitVersion": kubernetes, f"{package}.gitTreeState": "clean"}
        stamps |= {f"{package}.gitMajor": major, f"{package}.gitMinor": minor}
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])


def _build(out: Path) -> None:
    go, go_mod = find_go(cache_folder()), (HERE / "go.mod").read_text()
    kubernetes, helm = version_of("k8s.io/kubernetes", go_mod), version_of("helm.sh/helm/v4", go_mod)
    print(EXPLAIN.format(kubernetes=kubernetes, helm=helm, out=out), file=sys.stderr, flush=True)
    began = time.monotonic()
    new = out / "controlplane.new"
    # The linker strips the debugging tables (-s -w): not making them saves a sixth of the compiler's time.
    flags = ["-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags", link_flags(go_mod)]
    compile_with_progress([str(go), "build", "-v", *flags, "-o", str(new), "."], HERE, PACKAGES)
    for name, (module, path) in PROTOCOLS.items():
        found = subprocess.run(
            [str(go), "list", "-m", "-f", "{{.Dir}}", module],
            cwd=HERE, env=go_environment(), check=True, capture_output=True, text=True,
        )  # fmt: skip
        shutil.copyfile(Path(found.stdout.strip()) / path, out / name)
    (out / "bin").mkdir(exist_ok=True)
    for tool in ("kubectl", "helm"):
        with contextlib.suppress(FileExistsError):
            (out / "bin" / tool).symlink_to("../controlplane")
    new.rename(out / "controlplane")  # last: the build is complete when this is there
    print(f"  built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def compile_with_progress(argv: list[str], folder: Path, packages: int) -> None:
    """Run `go build -v` in `folder`; one line says how far it is, rewritten on a terminal, else every 30 seconds."""
    on_terminal = sys.stderr.isatty()
    began, told, downloaded, compiled, others = time.monotonic(), 0.0, 0, 0, []
    with subprocess.Popen(argv, cwd=folder, env=go_environment(), stderr=subprocess.PIPE, text=True) as compiler:
        assert compiler.stderr is not None
        for line in compiler.stderr:
            if line.startswith("go: downloading"):
                downloaded += 1
            elif re.fullmatch(r"[\w.~/-]+", line.strip()):  # -v names each package when it is done
                compiled += 1
            else:
                others.append(line)
            now = time.monotonic() - began
            if now - told > (0.5 if on_terminal else 30):
                told = now
                report = (
                    f"  {now:4.0f} s: {downloaded} modules fetched, {compiled} of about {packages} packages compiled"
                )
                print(f"\r{report}" if on_terminal else report, end="" if on_terminal else "\n", file=sys.stderr)
                sys.stderr.flush()
    if on_terminal and told:
        print(file=sys.stderr)
    if compiler.returncode:
        raise SystemExit("".join(others) + f"{folder} could not be built; the compiler's words are above")


def go_environment() -> dict[str, str]:
    """The variables with which Go builds here: caches of our own, no cgo, no other toolchain than the one found."""
    cache = cache_folder()
    # GOGC: the compiler collects its garbage less often, which saves another sixth for some 100 MB more memory.
    own = {"GOCACHE": str(cache / "go-build"), "GOMODCACHE": str(cache / "go-mod"), "GOGC": "400"}
    # GOTOOLCHAIN=local: the Go that was found builds, none is fetched instead.
    fixed = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    return own | dict(os.environ) | fixed


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Lock of the build: a second build waits for the first and finds its result."""
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another build into {out} is running; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
