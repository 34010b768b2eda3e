"""To whom the operator shows admin tokens: the pods that a service owns, each by its own nonce."""

from collections.abc import Mapping
from typing import Any

import pytest

from slipway_api import names
from slipway_api.admin_token import kernels_key
from slipway_kube.resources import NETWORK_POLICIES, PODS
from slipway_operator.replica_client import Address
from tests.operator.simulated_cluster import MASTER, NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time


def record_calls(cluster: SimulatedCluster) -> list[str]:
    """The pods that are called from now on."""
    called: list[str] = []
    answer = cluster.dial

    async def dial(
        method: str, replica: Address, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        called.append(replica.pod)
        return await answer(method, replica, path, headers, body)

    cluster.dial = dial  # type: ignore[method-assign]
    return called


@pytest.mark.capability("SE-2")
def test_a_pod_that_only_carries_the_services_label_is_never_sent_a_token(tmp_path):
    """Security finding: whoever could create a pod of a predictable name captured the token of the real one."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            called = record_calls(cluster)
            labels = {
                names.LABEL_SERVICE: "chat",
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
                names.LABEL_STATE: "serving",
            }
            container = {"name": "server", "env": [{"name": names.ENV_ADMIN_TOKEN_SHA256, "value": "x"}]}
            cluster.server.put(
                PODS,
                {
                    "metadata": {"name": "chat-trap", "namespace": NAMESPACE, "labels": labels},
                    "spec": {"containers": [container]},
                },
            )
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "the replica and the trap to be ready")
            await cluster.quiet(60)

            (ours,) = [
                one["metadata"]["name"] for one in cluster.pods("chat") if one["metadata"].get("ownerReferences")
            ]
            assert set(called) == {ours}

    run_in_virtual_time(story())


def test_every_pod_has_a_nonce_of_its_own_and_answers_to_its_token(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=3)
            cluster.start_operator()
            await cluster.until(lambda: len(cluster.serving("chat")) == 3, "three replicas")
            nonces = {one["metadata"]["annotations"][names.ANNOTATION_ADMIN_NONCE] for one in cluster.pods("chat")}
            cluster.apply("chat", replicas=0)
            await cluster.until(lambda: not cluster.pods("chat"), "the drained pods to go")

            assert len(nonces) == 3
            assert [runtime.drained_with != [] for runtime in cluster.runtimes.values()] == [True] * 3

    run_in_virtual_time(story())


@pytest.mark.capability("ST-10")
def test_replicas_of_a_service_have_its_key_of_kernels_and_those_of_another_have_another(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            for name in ("chat", "code"):
                model = {"uri": "hf://org/model@1", "cache": {"policy": "Shared", "claimName": "models"}}
                cluster.apply(name, replicas=2, model=model, resources={"gpu": {"count": 1}})
            cluster.start_operator()
            await cluster.until(lambda: len(cluster.pods("chat") + cluster.pods("code")) == 4, "four pods")

            found = {name: {_key_of_kernels(pod) for pod in cluster.pods(name)} for name in ("chat", "code")}
            assert found == {name: {kernels_key(MASTER, NAMESPACE, name)} for name in ("chat", "code")}

    run_in_virtual_time(story())


def _key_of_kernels(pod: Mapping[str, Any]) -> str | None:
    (server,) = pod["spec"]["containers"]
    return next((one["value"] for one in server["env"] if one["name"] == names.ENV_KERNELS_KEY), None)


@pytest.mark.capability("SE-2")
def test_a_network_policy_stands_before_the_replicas(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "a replica")
            await cluster.until(
                lambda: cluster.server.get(NETWORK_POLICIES, NAMESPACE, "chat-replicas") is not None, "its policy"
            )

            cluster.apply("chat", routing={"directAccess": "GatewayOnly"})
            await cluster.until(
                lambda: (
                    "from" in cluster.server.get(NETWORK_POLICIES, NAMESPACE, "chat-replicas")["spec"]["ingress"][0]
                ),
                "the policy to close",
            )

    run_in_virtual_time(story())
