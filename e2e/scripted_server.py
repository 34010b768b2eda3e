"""Serves the scripted model for published agents: a runtime, and a gateway in front of it, without a cluster."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.servers import MODEL_NAME, a_gateway, a_runtime
from tests.scripted_model import write_checkpoint

ServedScripts = dict[str, str]  # `runtime` and `gateway` -> URL


@contextmanager
def served_scripts(folder: Path) -> Iterator[ServedScripts]:
    """The addresses of a runtime whose model follows the scripts, and of a gateway in front of it."""
    with a_runtime(model=write_checkpoint(folder)) as runtime, a_gateway((MODEL_NAME, runtime.url)) as gateway:
        yield {"runtime": runtime.url, "gateway": gateway.url}


def loopback_only(home: Path) -> dict[str, str]:
    """An environment without the user's accounts, whose HTTP proxy is a closed port except for 127.0.0.1."""
    closed = "http://127.0.0.1:9"
    proxies = {name: closed for each in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for name in (each, each.lower())}
    folders = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
    return (
        {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        | proxies
        | folders
    )
