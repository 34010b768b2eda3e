"""The controller knows no kind: a second one, made of ConfigMaps, is registered and reconciled beside the first."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from slipway_api import names
from slipway_kube.resources import CONFIG_MAPS, SERVICES, Resource
from slipway_operator.controller.kinds import Decision, Key, Memory, StoredObject
from slipway_operator.core.actions import AddFinalizer, ApplyChild, RemoveFinalizer
from slipway_operator.inputs.caches import Inputs
from slipway_operator.manager import KINDS, Registration
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time


@dataclass(frozen=True)
class Seen:
    body: Mapping[str, Any]
    applied: Mapping[str, str]


class PortLists:
    """A ConfigMap with `data.port` becomes a Service of the same name, and its status says which port."""

    name: str = CONFIG_MAPS.kind
    resource: Resource = CONFIG_MAPS

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def observe(self, key: Key, stored: StoredObject, memory: Memory) -> Seen:
        return Seen(stored.body, dict(memory.applied))

    def with_memory(self, observed: Seen, memory: Memory) -> Seen:
        return observed

    def plan(self, observed: Seen, now: datetime) -> Decision:
        metadata, port = observed.body["metadata"], observed.body["data"]["port"]
        if metadata.get("deletionTimestamp"):
            return Decision(actions=(RemoveFinalizer(finalizer=names.FINALIZER, reason="nothing is left"),))
        manifest = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "labels": {names.LABEL_MANAGED_BY: names.MANAGED_BY},
            },
            "spec": {"ports": [{"port": int(port)}]},
        }
        child = ApplyChild(key=f"Service/{metadata['name']}", manifest=manifest, digest=port, reason="so it should be")
        claim = AddFinalizer(finalizer=names.FINALIZER, reason="first")
        return Decision(
            actions=(claim,) if not metadata.get("finalizers") else (child,) * (observed.applied != {child.key: port}),
            status={"port": port},
            status_before=observed.body.get("status"),
        )


@pytest.mark.capability("OP-1")
def test_two_kinds_share_one_controller(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.kinds = (*KINDS, Registration(CONFIG_MAPS, PortLists))
            body = {"metadata": {"name": "ports", "namespace": NAMESPACE}, "data": {"port": "80"}}
            cluster.server.put(CONFIG_MAPS, body)
            cluster.apply("chat", replicas=1)
            operator = cluster.start_operator()
            await ready(cluster, replicas=1)

            def port() -> int:
                service = cluster.server.get(SERVICES, NAMESPACE, "ports")
                return service["spec"]["ports"][0]["port"] if service else 0

            await cluster.until(lambda: port() == 80, "the second kind's child")
            written = cluster.server.get(CONFIG_MAPS, NAMESPACE, "ports")
            assert written["status"] == {"port": "80"}
            assert written["metadata"]["finalizers"] == [names.FINALIZER]
            assert operator.manager.caches.known() == {
                Key("ConfigMap", NAMESPACE, "ports"),
                Key("InferenceService", NAMESPACE, "chat"),
            }
            assert await cluster.quiet(700) == [], "a resync of both kinds writes nothing"

            cluster.server.put(CONFIG_MAPS, written | {"data": {"port": "81"}})
            await cluster.until(lambda: port() == 81, "the changed child")
            cluster.server.delete(CONFIG_MAPS, NAMESPACE, "ports")
            await cluster.until(lambda: cluster.server.get(CONFIG_MAPS, NAMESPACE, "ports") is None, "its end")
            assert operator.manager.caches.known() == {Key("InferenceService", NAMESPACE, "chat")}
            assert len(cluster.serving("chat")) == 1

    run_in_virtual_time(story())
