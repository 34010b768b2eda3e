"""A platform team turns KV events on: every gateway knows what each replica has cached, also after a restart."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.cluster.launch import Cluster
from e2e.ledger import GATEWAY_ADMIN_PORT
from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]  # two upgrades of the chart

GATEWAYS, REPLICAS = 2, 2
STORY = "Once upon a time there was a bear who lived in a house at the end of the village. " * 8


@pytest.fixture
def following(clean: Slipway) -> Iterator[Slipway]:
    """Slipway whose gateways follow the KV events of the replicas."""
    clean.install("gateway.kvEvents=true")
    yield clean
    clean.install("gateway.kvEvents=false")


@pytest.mark.capability("RG-4", "KV-8")
def test_every_gateway_learns_what_replicas_cache_and_forgets_it_when_one_restarts(
    following: Slipway, cluster: Cluster
) -> None:
    following.apply(as_yaml(static("chat", REPLICAS)))
    following.wait_ready("chat", replicas=REPLICAS)
    wait_for("both gateways follow both replicas", lambda: feeds(following) == [REPLICAS] * GATEWAYS)

    assert ask(following) == 0, "nobody has cached it yet"
    wait_for("both gateways hear of it, though one has sent it", lambda: min(events(following, "stored")) > 0)
    cached = [ask(following) for _ in range(8)]  # each on a connection of its own, so through either gateway
    assert min(cached) > 0, f"a request went to a replica that does not have its prefix: {cached}"

    resets = events(following, "reset")
    for pod in following.pods("chat"):
        assert cluster.kill_container(USER_NAMESPACE, pod.metadata.name)
    wait_for(
        "both gateways empty their index of both restarted replicas",
        lambda: all(now >= then + REPLICAS for now, then in zip(events(following, "reset"), resets, strict=True)),
        timeout=120,
    )
    following.wait_ready("chat", replicas=REPLICAS)
    assert ask(following) == 0, "a new process has nothing cached"


def ask(slipway: Slipway) -> int:
    """Complete the story by one token; how much of it the replica had cached."""
    with slipway.openai() as client:
        answer = client.completions.create(model="chat", prompt=STORY, max_tokens=1, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def feeds(slipway: Slipway) -> list[float]:
    """How many replicas each gateway follows."""
    return [page.get(("slipway_gateway_kv_feeds", ""), 0.0) for page in metrics(slipway)]


def events(slipway: Slipway, event: str) -> list[float]:
    """How many blocks were stored, or feeds reset, as each gateway was told."""
    return [page.get(("slipway_gateway_kv_events_total", event), 0.0) for page in metrics(slipway)]


def metrics(slipway: Slipway) -> list[dict[tuple[str, str], float]]:
    """The metrics of each gateway, by name and label `event`."""
    found = slipway.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector="app.kubernetes.io/component=gateway")
    pages = []
    for pod in sorted(one.metadata.name for one in found.items if one.metadata.deletion_timestamp is None):
        path = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/pods/{pod}:{GATEWAY_ADMIN_PORT}/proxy{names.PATH_METRICS}"
        families = text_string_to_metric_families(slipway.access.kubectl("get", "--raw", path))
        pages.append(
            {(one.name, one.labels.get("event", "")): one.value for family in families for one in family.samples}
        )
    return pages
