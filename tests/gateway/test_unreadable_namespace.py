"""A namespace that may not be read does not stop the gateway for the others."""

import asyncio

import pytest

from slipway_gateway.fleet import Fleet
from slipway_gateway.watch import Watch
from slipway_kube.resources import INFERENCE_SERVICES, PODS
from tests.fakes import FakeApiServer
from tests.gateway.doubles import until
from tests.gateway.objects import NAMESPACE, a_pod_object, a_service_object


@pytest.mark.capability("OP-17")
async def test_a_namespace_that_may_not_be_read_does_not_stop_the_others():
    """review/operator-users.md 1: after a restart the gateway still serves the namespaces that it can read."""
    server, fleet = FakeApiServer(), Fleet()
    server.put(INFERENCE_SERVICES, a_service_object("chat"))
    server.put(PODS, a_pod_object("chat-r1-0-0"))
    server.fail(path="/namespaces/gone/", status=403, times=10**9)
    watch = Watch(server.client(), fleet, namespaces=(NAMESPACE, "gone"))
    task = asyncio.create_task(watch.run())
    try:
        await until(lambda: fleet.view().synced)
        assert fleet.table.endpoint(f"{NAMESPACE}/chat-r1-0-0") is not None
        assert {namespace for _resource, namespace in fleet.view().refused} == {"gone"}
        assert fleet.view().age_seconds < 60
        assert "in namespace gone" in fleet.view().refusal
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
