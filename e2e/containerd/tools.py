"""The programs of the distribution that a node needs: those of the machine, else Debian packages unpacked in the cache.

Nothing is installed: apt-get only downloads, with lists and archives of its own, and the folder is laid over /usr in
the private mount namespace of the node.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster.build import alone
from e2e.cluster.paths import SYSTEM_PATH, cache_folder

# Debian's package of each program that a node starts.
NODE = {"runc": "runc", "nft": "nftables", "iptables": "iptables", "ipset": "ipset", "conntrack": "conntrack"}
# The same for building images. The two last packages are configuration that buildah reads from /etc/containers.
IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap", "curl": "curl"}
WITH_BUILDAH = ("golang-github-containers-common", "golang-github-containers-image")
VARIANTS = ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore")


class ToolsMissingError(RuntimeError):
    """Programs are missing, and their packages cannot be fetched; the message is one sentence."""


def missing(programs: Sequence[str]) -> list[str]:
    """The programs that this machine does not have."""
    return [program for program in programs if shutil.which(program, path=SYSTEM_PATH) is None]


def ensure(packages: dict[str, str], extra: Sequence[str] = ()) -> Path | None:
    """A folder with `usr` and perhaps `etc` to lay over the machine's; None if the machine has all of the programs."""
    wanted = [packages[program] for program in missing(list(packages))]
    if not wanted:
        return None
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ToolsMissingError(f"The programs {', '.join(missing(list(packages)))} are missing: install them.")
    wanted += extra
    out = cache_folder() / "tools" / hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:12]
    if not (out / "root").exists():
        out.mkdir(parents=True, exist_ok=True)
        with alone(out):
            if not (out / "root").exists():
                _fetch(out, wanted)
    return out / "root"


def _fetch(out: Path, packages: Sequence[str]) -> None:
    options = ["-qq", "-o", f"Dir::State::lists={out}/lists", "-o", f"Dir::Cache={out}/cache"]
    options += ["-o", f"Dir::Cache::archives={out}/archives", "-o", "APT::Sandbox::User=root"]
    for folder in ("lists/partial", "cache", "archives/partial"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    _run(["apt-get", *options, "update"], packages)
    # Downloads the packages, and those of their dependencies that the machine lacks.
    download = ["install", "--yes", "--download-only", "--no-install-recommends", "-o", "Debug::NoLocking=1"]
    _run(["apt-get", *options, *download, *packages], packages)
    new = out / "root.new"
    shutil.rmtree(new, ignore_errors=True)
    for package in sorted((out / "archives").glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(new)], packages)
    _link_iptables(new)
    for folder in ("lists", "cache", "archives"):
        shutil.rmtree(out / folder)
    new.rename(out / "root")  # last: complete when this is there


def _link_iptables(root: Path) -> None:
    """The names that the package's installation script would have linked by way of /etc/alternatives."""
    if (root / "usr/sbin/xtables-nft-multi").exists():
        for name in VARIANTS:
            (root / "usr/sbin" / name).unlink(missing_ok=True)
            (root / "usr/sbin" / name).symlink_to("xtables-nft-multi")


def _run(argv: list[str], packages: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise ToolsMissingError(f"{argv[0]} could not fetch {', '.join(packages)}: {reason[0]}")
