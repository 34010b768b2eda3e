"""Retry-After in whole seconds and in milliseconds, and refusals that close the connection."""

import pytest

from slipway_gateway.errors import set_retry_after
from slipway_gateway.fleet import View
from tests.gateway.doubles import MODEL, Runtime, a_caller, a_gateway


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("1", "1000")),
        ({"Retry-After": "7"}, ("7", "7000")),
        ({"Retry-After": "0.4"}, ("1", "400")),
        ({"Retry-After": "7", "retry-after-ms": "6500"}, ("7", "6500")),
        ({"retry-after-ms": "6500"}, ("7", "6500")),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, ("1", "1000")),
        ({"Retry-After": "nan"}, ("1", "1000")),
        ({"Retry-After": "-5"}, ("1", "1000")),
    ],
)
@pytest.mark.capability("RG-7")
def test_a_refusal_says_when_to_come_back_in_whole_seconds_and_in_milliseconds(given, expected):
    headers = dict(given)
    set_retry_after(headers)

    assert (headers["Retry-After"], headers["retry-after-ms"]) == expected


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
@pytest.mark.capability("RG-2")
async def test_before_it_knows_the_services_a_gateway_closes_the_connection_so_that_a_retry_may_reach_another(path):
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        gateway.fleet.view = lambda: View(synced=False, age_seconds=float("inf"))
        method = "GET" if path == "/v1/models" else "POST"
        async with caller.session.request(method, caller.url + path, json={"model": MODEL}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert response.headers["Connection"] == "close"

        gateway.fleet.view = lambda: View(synced=True, age_seconds=0.0)
        async with caller.session.get(f"{caller.url}/v1/models") as response:
            assert (response.status, response.headers.get("Connection")) == (200, None)
