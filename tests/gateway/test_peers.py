"""Counting the gateways that share limits, from the EndpointSlices of their Kubernetes Service."""

import asyncio

import msgspec
import pytest

from slipway_gateway.peers import SERVICE_NAME_LABEL, Peers, count_ready
from slipway_kube.client import Client
from slipway_kube.objects import EndpointSlice
from slipway_kube.resources import ENDPOINT_SLICES
from tests.fakes import FakeApiServer
from tests.gateway.doubles import until


def a_slice(name: str, *pods: str, service: str = "slipway-gateway", **conditions: bool) -> dict:
    endpoints = [
        {"addresses": [f"10.0.0.{len(pod)}"], "conditions": conditions, "targetRef": {"kind": "Pod", "uid": pod}}
        for pod in pods
    ]
    labels = {SERVICE_NAME_LABEL: service}
    return {"metadata": {"name": name, "namespace": "slipway-system", "labels": labels}, "endpoints": endpoints}


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([], 0),
        ([a_slice("a", "p", "pp")], 2),
        ([a_slice("a", "p", "pp"), a_slice("b", "ppp")], 3),
        ([a_slice("ipv4", "p", "pp"), a_slice("ipv6", "p", "pp")], 2),
        ([a_slice("a", "p", ready=False), a_slice("b", "pp", ready=True)], 1),
    ],
)
def test_each_ready_pod_counts_once(slices, expected):
    assert count_ready([msgspec.convert(one, EndpointSlice) for one in slices]) == expected


@pytest.mark.capability("MT-1")
async def test_the_count_follows_the_service_of_the_gateways_alone():
    async with FakeApiServer() as server, Client(server.connection) as client:
        server.put(ENDPOINT_SLICES, a_slice("other", "x", "xx", "xxx", service="other"))
        peers = Peers(client, "slipway-system", "slipway-gateway", default=5)
        assert peers.count == 5, "before the first list"
        watching = asyncio.create_task(peers.run())
        server.put(ENDPOINT_SLICES, a_slice("a", "p", "pp"))
        await until(lambda: peers.count == 2)
        server.put(ENDPOINT_SLICES, a_slice("a", "p", "pp", "ppp"))
        await until(lambda: peers.count == 3)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
