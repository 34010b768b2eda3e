"""A container's root file system: a tmpfs with the machine's programs, a /dev of its own, and the pod's volumes.

Runs in the container's own mount and pid namespace, before the program does.
"""

import os
import shutil
from dataclasses import dataclass

from e2e.cluster.syscalls import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, bind, mount
from e2e.cluster.syscalls import remount_read_only as read_only

PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64")  # links into /usr on today's systems, folders on older ones
SHARED_FILES = ("ssl", "pki", "ca-certificates", "alternatives", "ld.so.cache", "nsswitch.conf", "localtime")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
USERS = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\nnonroot:x:65532:65532::/tmp:/bin/sh\n"
GROUPS = "root:x:0:\nnogroup:x:65534:\nnonroot:x:65532:\n"
SEALED = MS_NOSUID | MS_NODEV | MS_NOEXEC


@dataclass(frozen=True)
class Volume:
    """A path of the node, mounted at a path of the container."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class RootFileSystem:
    """The root file system of one container."""

    folder: str  # on the node: where it is put together
    hostname: str
    resolv_conf: str
    volumes: list[Volume]
    read_only: bool
    working_folder: str


def build(wanted: RootFileSystem) -> None:
    """Put it together, make it our root, and go to the working folder."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("rootfs", wanted.folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.chdir(wanted.folder)
    os.umask(0o022)
    for name in ("dev", "etc", "proc", "run", "sys", "tmp", "var/tmp", "root"):
        os.makedirs(name)
    for name in ("tmp", "var/tmp"):
        os.chmod(name, 0o1777)
    os.symlink("../run", "var/run")
    _add_programs()
    _add_files(wanted.hostname, wanted.resolv_conf)
    mount("proc", "proc", "proc", SEALED)
    try:
        mount("sysfs", "sys", "sysfs", SEALED | MS_RDONLY)
    except OSError:  # refused where parts of the machine's own are hidden
        bind("/sys", "sys", read_only=True)
    _add_devices()
    for volume in sorted(wanted.volumes, key=lambda volume: volume.target):
        _show(volume)
    os.makedirs(wanted.working_folder.lstrip("/") or ".", exist_ok=True)
    if wanted.read_only:
        read_only(".")
    os.chroot(".")
    os.chdir(wanted.working_folder or "/")


def _add_programs() -> None:
    _show(Volume("/usr", "/usr", read_only=True))
    for name in PROGRAMS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), name)
        elif os.path.isdir(f"/{name}"):
            _show(Volume(f"/{name}", f"/{name}", read_only=True))


def _add_files(hostname: str, resolv_conf: str) -> None:
    for name in SHARED_FILES:
        if os.path.exists(f"/etc/{name}"):
            _show(Volume(f"/etc/{name}", f"/etc/{name}", read_only=True))
    written = {"hostname": hostname + "\n", "resolv.conf": resolv_conf, "passwd": USERS, "group": GROUPS}
    for name, text in written.items():
        with open(f"etc/{name}", "w") as file:
            file.write(text)


def _add_devices() -> None:
    mount("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755")
    for name in DEVICES:
        _show(Volume(f"/dev/{name}", f"/dev/{name}", read_only=False))
    os.mkdir("dev/pts")
    mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    os.mkdir("dev/shm")
    mount("shm", "dev/shm", "tmpfs", SEALED, "mode=1777")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        os.symlink(target, f"dev/{name}")


def _show(volume: Volume) -> None:
    """Bind it below the current folder; a missing mount point is made, as a folder or as a file."""
    target = os.path.normpath(volume.target).lstrip("/")
    if os.path.isdir(volume.source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "x"):
            pass
    bind(volume.source, target, read_only=volume.read_only)


def find_program(name: str, search: str) -> str:
    """Path of a program in the container; raise FileNotFoundError in the words other runtimes use."""
    if found := shutil.which(name, path=search):
        return found
    if "/" in name:
        raise FileNotFoundError(f'exec: "{name}": no such file or not executable')
    raise FileNotFoundError(f'exec: "{name}": executable file not found in $PATH')
