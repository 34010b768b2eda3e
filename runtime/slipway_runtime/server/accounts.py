"""Keeps the account of a request that has ended in this replica, and exports its spans."""

from starlette.requests import Request as HttpRequest

from slipway_runtime.server.generation import Record, describe_record
from slipway_runtime.server.replica import Replica


def keep_account(
    replica: Replica, http: HttpRequest, record: Record, *, id: str, route: str, model: str, is_streamed: bool
) -> None:
    """Add the account of the engine's request `id`, a part of the request `http`, to the recent ones."""
    request_id = http.state.request_id
    replica.recent.add(request_id, describe_record(record, requestId=request_id, id=id, route=route, model=model))
    if replica.tracing is not None:
        replica.tracing.export(
            record,
            http.headers,
            now=replica.clock(),
            request_id=request_id,
            route=route,
            model=model,
            is_streamed=is_streamed,
        )
