"""The command `python -m e2e.cluster`: starts, stops and uses the local cluster.

python -m e2e.cluster up [--detach]   run a cluster until Ctrl-C, or in the background until `stop`
python -m e2e.cluster stop            end it, or what is left of it
python -m e2e.cluster kubectl ARGS    kubectl, as its administrator; `helm ARGS` too
python -m e2e.cluster env             variables for your shell: eval "$(python -m e2e.cluster env)"
python -m e2e.cluster build           build the binary, unless it is there already
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from e2e.cluster import detached, launcher_lock
from e2e.cluster.access import Access
from e2e.cluster.paths import cluster_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="default", help="which cluster; several may run at once")
    parser.add_argument("--folder", type=Path, help="its folder, instead of one in the cache")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up")
    up.add_argument("--detach", action="store_true", help="return when it is ready, and leave it running")
    up.add_argument(
        "--port", type=_port, action="append", default=[], metavar="NAME=PORT", help="api=6443 gateway=8000"
    )
    up.add_argument("--emulated-version", help="behave like this release of Kubernetes: 1.34")
    verbs.add_parser("stop").add_argument("--all", action="store_true", help="every cluster of this checkout")
    for verb in ("env", "build"):
        verbs.add_parser(verb)
    for tool in ("kubectl", "helm"):
        verbs.add_parser(tool, add_help=False, prefix_chars="\0").add_argument("args", nargs="*")
    options = parser.parse_args()
    folder = options.folder or cluster_folder(options.name)
    if options.verb == "up":
        up_until_stopped(folder, options)
    elif options.verb == "stop":
        found = [launcher_lock.stop(each) for each in (all_folders() if options.all else [folder])]
        print("stopped" if any(found) else "nothing was running")
    elif options.verb == "build":
        from e2e.cluster import build, preflight

        preflight.require()
        print(build.ensure())
    elif options.verb == "env":
        access = Access.attach(folder)
        print(f"export KUBECONFIG={access.kubeconfig}\nexport PATH={access.tools}:$PATH")
    else:
        access = Access.attach(folder)
        os.execve(access.tools / options.verb, [options.verb, *options.args], os.environ | access.environment())


def up_until_stopped(folder: Path, options: argparse.Namespace) -> None:
    """Run a cluster here, or start a process that does."""
    ports = dict(options.port)
    if options.detach:
        access = detached.start(folder, ports=ports, emulated_version=options.emulated_version)
        print_access(access)
        print(f"stop it with: python -m e2e.cluster --folder {folder} stop")
        return
    from e2e.cluster.launch import GATEWAY, Cluster

    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda *_: sys.exit(0))  # a shell's background jobs ignore SIGINT by default
    began = time.monotonic()
    try:
        with Cluster(folder=folder, publish=GATEWAY, ports=ports, emulated_version=options.emulated_version) as cluster:
            cluster.wait_for_nodes()
            print(f"ready after {time.monotonic() - began:.1f} s; stop with Ctrl-C")
            print_access(cluster)
            while not cluster.ended:
                time.sleep(1)
            raise SystemExit(f"{', '.join(cluster.ended)} ended; see {cluster.logs}")
    except launcher_lock.BusyError as busy:
        raise SystemExit(str(busy)) from None


def all_folders() -> list[Path]:
    """The folders of all clusters that this checkout has created."""
    pattern = cluster_folder("*")
    return [pid.with_suffix("") for pid in pattern.parent.glob(f"{pattern.name}.pid")]


def print_access(access: Access) -> None:
    """Print how to reach the cluster."""
    print(f"export KUBECONFIG={access.kubeconfig}")
    print(f"export PATH={access.tools}:$PATH  # kubectl and helm")
    print(f"gateway, once installed: http://127.0.0.1:{access.port('gateway')}", flush=True)


def _port(text: str) -> tuple[str, int]:
    name, _, port = text.partition("=")
    return name, int(port)


if __name__ == "__main__":
    main()
