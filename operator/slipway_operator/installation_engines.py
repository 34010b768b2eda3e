"""Applies the Engines that the chart ships: `slipway-operator apply-engines FOLDER`.

They are not manifests of the chart, because helm looks every manifest up before it installs any: the kind Engine would
not exist yet. What somebody else has changed in one of them is kept: a server-side apply without force reports it.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from slipway_api.names import FIELD_MANAGER_ENGINES
from slipway_kube.client import Client
from slipway_kube.errors import Conflict, KubeError
from slipway_kube.resources import ENGINES

log = structlog.get_logger()

TRIES: Final = 30
RETRY_AFTER: Final = 1.0


def read_engines(folder: Path) -> list[dict[str, Any]]:
    """The Engines of the folder, one in each `*.json`, by name of the file."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


async def apply_engines(
    client: Client, engines: Sequence[dict[str, Any]], *, sleep: Callable[[float], Awaitable[None]]
) -> None:
    """Apply each Engine.

    In the first seconds of an installation the CRD or the rights may be missing: a failed call is repeated. Raises the
    KubeError of the last call.
    """
    for body in engines:
        name = body["metadata"]["name"]
        for retries_left in reversed(range(TRIES)):
            try:
                await client.apply(ENGINES.path(name=name), body, field_manager=FIELD_MANAGER_ENGINES, force=False)
            except Conflict as exc:
                log.warning(
                    "the Engine was changed by somebody else, and is kept as it is", engine=name, error=str(exc)
                )
                break
            except KubeError as exc:
                if not retries_left:
                    raise
                log.warning("the Engine could not be applied yet", engine=name, error=str(exc))
                await sleep(RETRY_AFTER)
            else:
                log.info("applied an Engine", engine=name)
                break
