"""The system calls for namespaces and mounts that Python 3.11 does not have."""

import ctypes
import os
import platform
import signal

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP, CLONE_PARENT = 0x20000000, 0x40000000, 0x2000000, 0x8000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
# statvfs tells the flags of a mount; a remount in a user namespace must repeat those that were there.
KEPT_FLAGS = {0x2: MS_NOSUID, 0x4: MS_NODEV, 0x8: MS_NOEXEC, 0x400: 0x400, 0x800: 0x800, 0x1000: 0x200000}
SYS_CLONE = {"x86_64": 56, "aarch64": 220}

# PyDLL keeps the interpreter's lock: after `clone` the child goes on as the only thread, and holds it.
_libc = ctypes.PyDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave some namespaces for new ones."""
    _checked(_libc.unshare(flags), "unshare")


def enter_namespace(path: str, kind: int) -> None:
    """Join the namespace that a file stands for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _checked(_libc.setns(fd, kind), f"enter {path}")
    os.close(fd)


def fork_into(namespaces: int) -> int:
    """Fork a child into new namespaces, and make it a child of *our* parent: 0 in the child, else its pid."""
    flags = ctypes.c_ulong(namespaces | CLONE_PARENT | signal.SIGCHLD)
    return _checked(_libc.syscall(ctypes.c_long(SYS_CLONE[platform.machine()]), flags, 0, 0, 0, 0), "clone")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """mount(2)."""
    names = [text.encode() if text is not None else None for text in (source, target, kind)]
    data = options.encode() if options else None
    _checked(_libc.mount(*names, ctypes.c_ulong(flags), data), f"mount {source} on {target}")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Show `source`, and all that is mounted below it, at `target`, which must exist."""
    mount(source, target, None, MS_BIND | MS_REC)
    if read_only:
        remount_read_only(target)


def remount_read_only(target: str) -> None:
    """Forbid writing through this mount, and leave its other flags as they are."""
    had = os.statvfs(target).f_flag
    kept = sum(flag for bit, flag in KEPT_FLAGS.items() if had & bit)
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)
