"""The process of a node beside the kubelet: the container runtime and the GPUs' device plugin.

    python -m e2e.cluster.node --index N --gpus N --binary FILE --checkout FOLDER

State is in memory only: when this program ends, the node is as good as rebooted.
"""

import argparse
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cri_pb2_grpc as rpc
import grpc

from e2e.cluster import device_plugin
from e2e.cluster.catalogue import Catalogue, Environment
from e2e.cluster.container import Forker
from e2e.cluster.cri import RuntimeService
from e2e.cluster.image_service import ImageService
from e2e.cluster.paths import HERE
from e2e.cluster.streams import Streams

SOCKET = "/run/cri.sock"
CONTAINERS = Path("/run/containers")
# Each container that is being stopped holds a thread for its grace period; a thread is made only when needed.
MOST_CALLS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    forker = Forker()  # first: it is forked off while this process is small
    CONTAINERS.mkdir(parents=True, exist_ok=True)
    prefixes = tuple(sorted({Path(sys.prefix), Path(sys.base_prefix)}))
    environment = Environment(options.checkout, Path(sys.executable), prefixes, options.cache)
    catalogue = Catalogue.load(HERE / "images.yaml", environment)
    server = grpc.server(ThreadPoolExecutor(MOST_CALLS))
    runtime = RuntimeService(options.index, catalogue, CONTAINERS, forker, Streams(options.binary))
    rpc.add_RuntimeServiceServicer_to_server(runtime, server)
    rpc.add_ImageServiceServicer_to_server(ImageService(catalogue, CONTAINERS), server)
    server.add_insecure_port(f"unix://{SOCKET}")
    server.start()
    threading.Thread(target=device_plugin.run, args=(options.gpus,), daemon=True).start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
