"""A client process that opens idle connections, prints how many are open, and holds them until its input ends.

python -m bench.idler --host 127.0.0.1 --port 8000 --connections 2500 --source 127.0.1.1 --path /v1/models
"""

import argparse
import asyncio
import resource
import sys

import uvloop

AT_ONCE = 100


async def hold(host: str, port: int, connections: int, source: str, path: str) -> None:
    """Open the connections, use each for one request, and hold them."""
    held: list[asyncio.StreamWriter] = []
    slots = asyncio.Semaphore(AT_ONCE)

    async def connect() -> None:
        async with slots:
            reader, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            held.append(writer)

    answers = await asyncio.gather(*(connect() for _ in range(connections)), return_exceptions=True)
    failures = [repr(one) for one in answers if isinstance(one, BaseException)]
    print(len(held), *failures[:1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    still_open = sum(not writer.transport.is_closing() for writer in held)
    print(still_open, flush=True)
    for writer in held:
        writer.transport.abort()


def main() -> None:
    """`python -m bench.idler`."""
    parser = argparse.ArgumentParser(prog="python -m bench.idler", description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--source", required=True, help="local address, because one has ports for some 28,000")
    parser.add_argument("--path", required=True)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvloop.run(hold(options.host, options.port, options.connections, options.source, options.path))


if __name__ == "__main__":
    main()
