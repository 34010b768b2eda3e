"""Builds images of a release for the real node, as archives in the cache: the images that `images/check.sh` builds.

    python -m e2e.containerd.images [TARGET...]        default: operator gateway

buildah and debootstrap come from Debian packages if the machine lacks them. An archive is kept for each state of the
sources. BASE, TORCH_INDEX and BUILD_OPTIONS have the meaning that images/check.sh gives them.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import slipway_api
from e2e.cluster.build import alone
from e2e.cluster.paths import CHECKOUT, SYSTEM_PATH, cache_folder
from e2e.containerd import tools

PARTS = ("operator", "gateway")
SOURCES = ("pyproject.toml", "constraints.txt", "hatch_build.py", "README.md", "LICENSE", "images", "models")
CODE = ("api", "kube", "operator", "runtime", "gateway", "agent")
GIGABYTES = {"operator": 4, "gateway": 4, "agent": 4, "runtime": 28, "runtime-cpu": 28}  # free disk that a build needs


def name_of(target: str) -> str:
    """The name by which the chart asks for the image: `docker.io/slipway/operator:0.1.0`."""
    part = target.removesuffix("-cpu")
    return f"docker.io/slipway/{part}:{slipway_api.__version__}"


def ensure(targets: Sequence[str] = PARTS) -> dict[str, Path]:
    """The archive of each image; those that are not in the cache are built."""
    folder = cache_folder() / "images"
    archives = {target: folder / fingerprint() / f"{target}.tar" for target in targets}
    if missing := [target for target, archive in archives.items() if not archive.exists()]:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            _build([target for target in missing if not archives[target].exists()], folder, archives)
    return archives


def fingerprint() -> str:
    """The hash of everything that an image is made from."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *SOURCES, *CODE],
        cwd=CHECKOUT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    digest = hashlib.sha256()
    for name in sorted(filter(None, listed.split("\0"))):
        path = CHECKOUT / name
        if path.is_file():
            digest.update(b"\0" + name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _build(targets: Sequence[str], folder: Path, archives: dict[str, Path]) -> None:
    root = tools.ensure(tools.IMAGES, tools.WITH_BUILDAH)
    print(f"building {', '.join(targets)} into {folder}: minutes the first time", file=sys.stderr, flush=True)
    free = str(max(GIGABYTES[target] for target in targets))
    own = {"PATH": SYSTEM_PATH, "STORE": str(folder / "store"), "FREE_GB": free, "BUILDAH_ISOLATION": "chroot"}
    with tempfile.TemporaryDirectory(prefix="slipway-images-") as scratch:

        def run(*argv: str) -> None:
            script = f'{_overlays(root, scratch)}exec "$@"'
            command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", *argv]
            if code := subprocess.run(command, cwd=CHECKOUT, env=os.environ | own, check=False).returncode:
                raise SystemExit(f"the images {', '.join(targets)} could not be built: {argv[0]} ended with {code}")

        run("images/check.sh", *targets)
        for target in targets:
            archive = archives[target]
            archive.parent.mkdir(exist_ok=True)
            new = archive.with_suffix(".new")
            new.unlink(missing_ok=True)
            to = f"docker-archive:{new}:{name_of(target)}"
            buildah = ("buildah", "--root", own["STORE"], "--runroot", f"{scratch}/run")
            run(*buildah, "push", "--quiet", f"localhost/slipway/{target}:check", to)
            new.rename(archive)


def _overlays(root: Path | None, scratch: str) -> str:
    """A script that lays the tools over /usr and /etc of a private mount namespace."""
    if root is None:
        return ""
    upper = f"mkdir -p {scratch}/upper {scratch}/work\n"
    usr = f"mount -t overlay -o ro,lowerdir={root}/usr:/usr overlay /usr\n"
    etc = f"mount -t overlay -o lowerdir={root}/etc:/etc,upperdir={scratch}/upper,workdir={scratch}/work overlay /etc\n"
    return upper + usr + etc


if __name__ == "__main__":
    for archive in ensure(sys.argv[1:] or PARTS).values():
        print(archive)
