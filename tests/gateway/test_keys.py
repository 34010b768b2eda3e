"""The gateway's own key: what it proves to replicas, what it opens, and what it does while the file is away."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from slipway_api.admin_token import admin_token, serving_token, token_digest
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.keys import REMEMBERED_KEYS, GatewayKeys
from slipway_gateway.picker.endpoints import Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.watch import endpoint_of
from slipway_kube.objects import Pod
from tests.gateway.doubles import Runtime, a_caller
from tests.gateway.objects import SERVICE_UID, a_pod_object

NEW, OLD = b"a new key", b"an old key"
HEADER = "x-slipway-serving-token"


def a_pod(*keys: bytes, service: str = "chat") -> Pod:
    """A pod whose replica accepts the tokens of these keys; none: it takes every request."""
    body = a_pod_object("p1", service=service)
    if keys:
        digests = [token_digest(serving_token(key, "team", service)) for key in keys]
        body["metadata"]["annotations"] = {"slipway.dev/serving-token-sha256": ",".join(digests)}
    return msgspec.convert(body, Pod)


def keys_in(directory: Path, current: bytes, previous: bytes = b"") -> GatewayKeys:
    (directory / "current").write_bytes(current)
    if previous:
        (directory / "previous").write_bytes(previous)
    return GatewayKeys(directory)


@pytest.mark.capability("SE-2")
async def test_a_replica_that_wants_a_token_gets_it_with_each_request(tmp_path):
    keys_in(tmp_path, NEW)
    async with Runtime() as runtime:
        endpoint = endpoint_of(a_pod(NEW), runtime.port)
        assert endpoint is not None
        fleet = Fleet()
        fleet.set_service("team/chat", Service(key="team/chat", served_name="tiny", uid=SERVICE_UID))
        fleet.set_endpoint(endpoint.name, replace(endpoint, url=runtime.url))
        settings = GatewaySettings(port=0, admin_port=0, propagation_seconds=0, key_directory=tmp_path)
        async with (
            Gateway(settings, fleet) as gateway,
            a_caller(gateway) as caller,
            caller.chat(headers={HEADER: "forged"}) as response,
        ):
            assert response.status == 200

        assert runtime.headers[0][HEADER] == serving_token(NEW, "team", "chat")


def test_a_replica_that_takes_every_request_is_shown_no_token(tmp_path):
    endpoint = endpoint_of(a_pod())

    assert endpoint is not None
    assert keys_in(tmp_path, NEW).serving_headers(endpoint) == {}


@pytest.mark.parametrize(("accepted", "shown"), [((OLD,), OLD), ((NEW, OLD), NEW), ((NEW,), NEW)])
def test_during_a_rotation_each_replica_is_shown_a_token_that_it_accepts(tmp_path, accepted, shown):
    endpoint = endpoint_of(a_pod(*accepted))

    assert endpoint is not None
    assert keys_in(tmp_path, NEW, OLD).serving_headers(endpoint) == {HEADER: serving_token(shown, "team", "chat")}


def test_a_pod_that_copies_another_services_digests_is_shown_nothing(tmp_path):
    """A token is of one service: a pod cannot make the gateway show it the token of another."""
    body = a_pod_object("p1", service="mine")
    digest = token_digest(serving_token(NEW, "team", "chat"))
    body["metadata"]["annotations"] = {"slipway.dev/serving-token-sha256": digest}
    endpoint = endpoint_of(msgspec.convert(body, Pod))

    assert endpoint is not None
    assert keys_in(tmp_path, NEW).serving_headers(endpoint) == {}


def test_the_key_outlives_its_file(tmp_path):
    """Security finding: the gateway forgot its key while the file was away."""
    keys = keys_in(tmp_path, NEW)
    expected = [admin_token(NEW, "slipway-system", "gateway-1")]
    assert keys.admin_tokens("slipway-system", "gateway-1") == expected
    (tmp_path / "current").unlink()

    assert keys.admin_tokens("slipway-system", "gateway-1") == expected


@pytest.mark.capability("RD-12", "SE-2")
def test_running_replicas_outlive_a_key_that_is_replaced_without_its_previous_one(tmp_path):
    """A replica accepts the key of its start alone; the gateway's own admin port accepts the mounted key alone."""
    keys, names = keys_in(tmp_path, OLD), [b"key %d" % number for number in range(REMEMBERED_KEYS)]
    of_old = endpoint_of(a_pod(OLD))
    assert of_old is not None
    for key in names[:-1]:
        (tmp_path / "current").write_bytes(key)
        assert keys.serving_headers(of_old) == {HEADER: serving_token(OLD, "team", "chat")}
        assert keys.admin_tokens("slipway-system", "gateway-1") == [admin_token(key, "slipway-system", "gateway-1")]

    (tmp_path / "current").write_bytes(names[-1])
    assert keys.serving_headers(of_old) == {}, "only so many are remembered"


def test_without_a_key_nothing_opens_and_nothing_breaks(tmp_path):
    endpoint = endpoint_of(a_pod(NEW))

    assert endpoint is not None
    assert GatewayKeys(tmp_path).admin_tokens("slipway-system", "gateway-1") == []
    assert GatewayKeys(tmp_path).serving_headers(endpoint) == {}


async def refuse_gateway(_runtime: Runtime, _request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": f"the header {HEADER} is missing or wrong"}}, status=401)


@pytest.mark.capability("RD-12")
@pytest.mark.parametrize("other_replica_accepts", [True, False])
async def test_a_replica_that_refuses_the_gateway_is_never_the_clients_fault(tmp_path, other_replica_accepts):
    """ADR 172, seen in `make chaos`: clients with a valid key got the 401 that a replica sent to its gateway."""
    keys_in(tmp_path, NEW)
    behaviours = [refuse_gateway, None if other_replica_accepts else refuse_gateway]
    async with Runtime(behaviours[0]) as shut, Runtime(behaviours[1]) as other:
        fleet = Fleet()
        fleet.set_service("team/chat", Service(key="team/chat", served_name="tiny", uid=SERVICE_UID))
        for number, runtime in enumerate((shut, other)):
            endpoint = endpoint_of(a_pod(OLD), runtime.port)
            assert endpoint is not None
            fleet.set_endpoint(f"team/p{number}", replace(endpoint, name=f"team/p{number}", url=runtime.url))
        settings = GatewaySettings(port=0, admin_port=0, propagation_seconds=0, key_directory=tmp_path)
        async with Gateway(settings, fleet) as gateway, a_caller(gateway) as caller:
            answers = []
            for _ in range(4):
                async with caller.chat() as response:
                    answers.append((response.status, await response.text()))

        if other_replica_accepts:
            assert [status for status, _ in answers] == [200] * 4
        else:
            assert {status for status, _ in answers} == {503}
            assert all("another key of the gateway" in text and HEADER not in text for _, text in answers)
