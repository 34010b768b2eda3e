"""Certificates as the operator keeps them in the cluster: a simulated API server, real keys, and virtual time."""

import base64
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from slipway_api.internal_tls import REPLICAS_SECRET, VOLUME, replicas_name
from slipway_api.trust import Trust
from slipway_kube.resources import CONFIG_MAPS, EVENTS, SECRETS
from slipway_kube.writer import Writer
from slipway_operator.authority import Pair, certificate_of
from slipway_operator.certificates import LOOK_SECONDS, RETRY_SECONDS, SETTLED_AFTER, Certificates, Place
from slipway_operator.core.certificates import CERTIFICATE_LIFE
from slipway_operator.metrics import OperatorMetrics
from tests.fakes import FakeApiServer
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time
from tests.operator.warm_pool_views import apply_pool, pool_condition, warmed

pytestmark = pytest.mark.capability("SE-10")

SYSTEM = "slipway-system"
CA = "slipway-internal-ca"
START = datetime(2026, 11, 27, 12, tzinfo=UTC)


class Leader:
    """A fence that is always passed."""

    def is_leader(self) -> bool:
        return True

    def seconds_left(self) -> float:
        return 60.0


@dataclass
class Installation:
    """One leader, and the API server that it writes to."""

    server: FakeApiServer = field(default_factory=FakeApiServer)
    now: datetime = START
    namespaces: set[str] = field(default_factory=lambda: {"team"})
    told: list[str] = field(default_factory=list)
    trust: Trust = field(default_factory=Trust)
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)

    def __post_init__(self) -> None:
        self.operator = self.leader()

    def leader(self, *, is_enabled: bool = True) -> Certificates:
        """Another process that leads from now on."""
        client = self.server.client()
        return Certificates(
            client,
            Writer(client, Leader()),
            self.trust,
            Place(installation="slipway", namespace=SYSTEM),
            self.metrics,
            namespaces=lambda: self.namespaces,
            on_fault=self.told.append,
            now=lambda: self.now,
            monotonic=lambda: (self.now - START).total_seconds() + LOOK_SECONDS,
            is_enabled=is_enabled,
        )

    async def pass_time(self, time: timedelta, *, step: timedelta = timedelta(seconds=LOOK_SECONDS)) -> None:
        end = self.now + time
        while self.now < end:
            self.now = min(end, self.now + step)
            await self.operator.look()

    def secret(self, namespace: str = "team", name: str = REPLICAS_SECRET) -> dict[str, bytes]:
        found = self.server.get(SECRETS, namespace, name)
        return {key: base64.b64decode(text) for key, text in ((found or {}).get("data") or {}).items()}

    def pair(self) -> Pair:
        data = self.secret()
        return Pair(data["tls.crt"], data["tls.key"])

    def writes(self) -> list[str]:
        return [f"{one.method} {one.path}" for one in self.server.writes()]


async def test_a_namespace_gets_its_certificate_and_every_gateway_its_authorities():
    world = Installation()
    await world.operator.look()

    names = (replicas_name("team"), "*.team.svc", "*.team.svc.cluster.local")
    assert certificate_of(world.pair()).names == names
    bundle = world.server.get(CONFIG_MAPS, SYSTEM, CA)["data"]["ca.crt"]
    assert world.secret()["ca.crt"].decode() == bundle
    assert "PRIVATE" not in bundle
    assert "PRIVATE" not in world.secret()["tls.crt"].decode()
    assert world.trust.is_known
    assert set(world.secret(SYSTEM, "slipway-gateway-internal-tls")) == {"tls.crt", "tls.key", "ca.crt"}
    # Nothing but the authorities' own Secret has their keys.
    assert all(key.endswith((".crt", ".key")) for key in world.secret(SYSTEM, CA))
    assert world.operator.faults() == []

    before = world.writes()
    await world.pass_time(timedelta(days=1))
    assert world.writes() == before, "a day later nothing is due"

    world.namespaces.add("other")
    await world.operator.look()
    assert world.secret("other")


async def test_a_year_of_renewals_overlaps_and_another_leader_goes_on_with_the_same_authorities():
    world = Installation()
    await world.operator.look()
    issued = {world.pair().certificate}
    trusted_before = world.secret()["ca.crt"]
    for _ in range(70):
        await world.pass_time(timedelta(days=5), step=timedelta(days=2.5))
        world.operator = world.leader()
        await world.operator.look()
        certificate = certificate_of(world.pair())
        assert world.now + timedelta(days=5) < certificate.not_after
        if world.secret()["ca.crt"] != trusted_before:
            assert trusted_before in world.secret()["ca.crt"], "old authorities stay trusted"
            trusted_before = world.secret()["ca.crt"]
        issued.add(world.pair().certificate)
    assert len(issued) == pytest.approx(350 / 20, abs=2)
    assert world.secret()["ca.crt"].count(b"BEGIN CERTIFICATE") == 2
    assert world.operator.faults() == []


async def test_a_deleted_secret_comes_back_within_one_look():
    world = Installation()
    await world.operator.look()
    authorities, old = world.secret(SYSTEM, CA), world.pair()
    world.server.delete(SECRETS, "team", REPLICAS_SECRET)
    world.server.delete(SECRETS, SYSTEM, CA)
    await world.pass_time(timedelta(seconds=LOOK_SECONDS))

    assert world.secret(SYSTEM, CA) == authorities, "the leader has them in memory: nobody loses trust"
    assert world.pair() != old
    assert certificate_of(world.pair()).id == certificate_of(old).id


async def test_what_is_not_ours_or_unreadable_is_a_fault_with_its_remedy_and_never_overwritten():
    world = Installation()
    foreign = {"metadata": {"name": REPLICAS_SECRET, "namespace": "team"}, "data": {"theirs": "eA=="}}
    world.server.put(SECRETS, foreign)
    await world.operator.look()

    assert world.secret() == {"theirs": b"x"}
    assert "exists and is not Slipway's" in world.operator.fault("team")
    assert world.told == ["team"]
    assert "slipway_operator_certificate_faults 1.0" in world.metrics.exposition().decode()

    world.server.delete(SECRETS, "team", REPLICAS_SECRET)
    await world.pass_time(timedelta(seconds=RETRY_SECONDS))
    assert (world.operator.fault("team"), world.told) == ("", ["team", "team"])

    stored = world.server.get(SECRETS, "team", REPLICAS_SECRET)
    world.server.put(SECRETS, stored | {"data": stored["data"] | {"tls.key": "eA=="}})
    await world.pass_time(timedelta(seconds=LOOK_SECONDS))
    assert "a private key is not PEM. Delete the Secret" in world.operator.fault("team")


async def test_an_authority_that_cannot_be_read_stops_all_renewals_and_says_so():
    world = Installation()
    await world.operator.look()
    stored = world.server.get(SECRETS, SYSTEM, CA)
    world.server.put(SECRETS, stored | {"data": dict.fromkeys(stored["data"], "eA==")})
    world.operator = world.leader()
    before = world.writes()
    await world.operator.look()

    assert "Restore it from a backup, or delete the Secret" in world.operator.fault("team")
    assert world.writes() == before


@pytest.mark.parametrize("lost", ["secrets", "configmaps"])
async def test_a_write_that_fails_or_loses_its_reply_is_healed_by_a_later_look(lost: str):
    world = Installation()
    world.server.fail(method="POST", path=f"/{lost}", lose_reply=True)
    world.server.fail(method="POST", path=f"/{lost}", status=403, skip=1)
    for _ in range(5):
        await world.pass_time(timedelta(seconds=RETRY_SECONDS))

    assert world.operator.faults() == []
    ca = world.secret(SYSTEM, CA)
    assert len(ca) == 2, "one authority, although its first write seemed to be lost"
    context = ssl.create_default_context(cadata=world.secret()["ca.crt"].decode())
    assert [one["subjectKeyId" if False else "serialNumber"] for one in context.get_ca_certs()]


async def test_what_ends_without_a_leader_is_told_by_the_metric():
    world = Installation()
    await world.operator.look()
    end = certificate_of(world.pair()).not_after
    page = world.metrics.exposition().decode()
    line = next(one for one in page.splitlines() if 'namespace="team"' in one and "certificate_expiry" in one)
    assert float(line.split()[-1]) == end.timestamp()
    assert end == START + CERTIFICATE_LIFE

    world.namespaces.clear()
    await world.operator.look()
    assert 'namespace="team"' not in world.metrics.exposition().decode()


async def test_while_it_is_off_nothing_is_made_and_what_was_published_is_still_trusted():
    world = Installation()
    off = world.leader(is_enabled=False)
    await off._read_bundle()
    assert not world.trust.is_known
    await world.operator.look()
    before = world.writes()

    world.trust = Trust()
    off = world.leader(is_enabled=False)
    await off._read_bundle()
    assert world.trust.is_known
    assert world.writes() == before
    assert off.is_settled()
    assert off.fault("team") == ""


# --- whole operators --------------------------------------------------------------------------------------------------


def spoken(cluster: SimulatedCluster) -> list[bool]:
    return [any(one["name"] == VOLUME for one in pod["spec"]["volumes"]) for pod in cluster.live("chat")]


def test_enabling_and_disabling_replaces_replicas_and_each_is_called_as_it_speaks(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=3)
            operator = cluster.start_operator()
            await ready(cluster, replicas=3)
            assert spoken(cluster) == [False] * 3
            await operator.end()

            cluster.settings = {"internal_tls": True}
            operator = cluster.start_operator()
            await cluster.quiet(SETTLED_AFTER.total_seconds() - 30)
            assert spoken(cluster) == [False] * 3, "gateways need time to trust the authorities"
            fewest = 3
            while spoken(cluster) != [True] * 3:
                fewest = min(fewest, len(cluster.serving("chat")))
                await cluster.quiet(1)
            assert fewest >= 3, "no replica leaves before another one serves"
            await ready(cluster, replicas=3)
            assert cluster.server.get(SECRETS, NAMESPACE, REPLICAS_SECRET) is not None
            (server,) = cluster.live("chat")[0]["spec"]["containers"]
            assert server["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
            assert cluster.condition("chat", "Ready")["status"] == "True"
            await operator.end()

            cluster.settings = {}
            cluster.start_operator()
            await cluster.until(lambda: spoken(cluster) == [False] * 3, "replicas in plain text")
            await ready(cluster, replicas=3)

    run_in_virtual_time(story())


def test_a_pool_reports_the_certificate_too_and_is_woken_when_it_is_well_again(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.settings = {"internal_tls": True}
            apply_pool(cluster, size=1)
            cluster.start_operator()
            await warmed(cluster, 1)
            stored: Any = cluster.server.get(SECRETS, NAMESPACE, REPLICAS_SECRET)
            assert stored is not None, "a namespace with a pool alone has a certificate"
            cluster.server.put(SECRETS, stored | {"data": stored["data"] | {"tls.crt": "eA=="}})

            await cluster.until(lambda: pool_condition(cluster, "Stalled").get("status") == "True", "Stalled")
            assert pool_condition(cluster, "Stalled")["reason"] == "CertificateUnavailable"
            assert pool_condition(cluster, "Ready")["status"] == "True", "its pod can be claimed"
            cluster.server.delete(SECRETS, NAMESPACE, REPLICAS_SECRET)
            await cluster.until(lambda: not pool_condition(cluster, "Stalled"), "health")

    run_in_virtual_time(story())


def test_a_certificate_that_cannot_be_kept_is_a_condition_and_an_event_while_replicas_serve(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.settings = {"internal_tls": True}
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await ready(cluster, replicas=1)
            stored: Any = cluster.server.get(SECRETS, NAMESPACE, REPLICAS_SECRET)
            cluster.server.put(SECRETS, stored | {"data": stored["data"] | {"tls.crt": "eA=="}})

            await cluster.until(lambda: cluster.condition("chat", "Stalled").get("status") == "True", "Stalled")
            stalled = cluster.condition("chat", "Stalled")
            assert stalled["reason"] == "CertificateUnavailable"
            assert "Delete the Secret" in stalled["message"]
            assert cluster.condition("chat", "Ready")["status"] == "True", "it serves with what it has"
            reasons = {one["reason"] for one in cluster.server.objects(EVENTS, NAMESPACE)}
            await cluster.quiet(5)
            assert "CertificateUnavailable" in reasons | {
                one["reason"] for one in cluster.server.objects(EVENTS, NAMESPACE)
            }

            cluster.server.delete(SECRETS, NAMESPACE, REPLICAS_SECRET)
            await cluster.until(lambda: cluster.condition("chat", "Stalled").get("status") != "True", "health")

    run_in_virtual_time(story())
