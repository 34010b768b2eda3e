"""Keeps the certificates of TLS between gateway, operator and replicas (ADR 144): makes, renews and publishes them.

    Secret <installation>-internal-ca        authorities with their keys; in the release's namespace
    ConfigMap <installation>-internal-ca     their certificates: what gateways trust
    Secret <installation>-gateway-internal-tls   of the gateways' admin ports
    Secret slipway-internal-tls              of the replicas; one in each namespace with services or pools

Runs on the leader. A Secret that is not ours, or that cannot be read, is never overwritten: it is a fault, which the
services and pools of its namespace report. Nothing is deleted; a Secret that nobody needs any more is not renewed.
"""

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
import structlog

from slipway_api import internal_tls, names
from slipway_api.trust import Trust
from slipway_kube.client import Client
from slipway_kube.errors import KubeError, NotFound
from slipway_kube.resources import CONFIG_MAPS, INFERENCE_SERVICES, SECRETS, WARM_POOLS, Resource
from slipway_kube.writer import Writer
from slipway_operator.authority import (
    CertificateUnreadable,
    Pair,
    authority_of,
    certificate_of,
    issue,
    new_authority,
)
from slipway_operator.clock import Clock
from slipway_operator.controller.kinds import Key
from slipway_operator.controller.store import ObjectStore
from slipway_operator.core.certificates import (
    Certificate,
    Lifetime,
    choose_signer,
    needs_authority,
    still_trusted,
    why_renew,
)
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.settings import OperatorSettings

log = structlog.get_logger()

TICK_SECONDS: Final = 1.0  # between two looks for namespaces that have no certificate yet
LOOK_SECONDS: Final = 600.0  # between two looks at a Secret; renewals take days
RETRY_SECONDS: Final = 15.0  # after a fault
SETTLED_AFTER: Final = timedelta(minutes=5)  # from the first authority to the first replica that is replaced for TLS
LABELS: Final = {"app.kubernetes.io/part-of": "slipway", "app.kubernetes.io/managed-by": names.FIELD_MANAGER}
_TLS_TYPE: Final = "kubernetes.io/tls"


@dataclass(frozen=True, slots=True)
class Target:
    """A Secret that holds one certificate."""

    namespace: str
    secret: str
    names: tuple[str, ...]


@dataclass(slots=True)
class _Seen:
    """What the last look at a Secret found."""

    look_at: float = 0.0  # by the monotonic clock
    fault: str = ""
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an installation keeps its certificates."""

    installation: str  # the value `name` of the chart
    namespace: str  # of the release
    cluster_domain: str = "cluster.local"

    def of_gateways(self) -> Target:
        """The certificate of the gateways' admin ports."""
        secret = internal_tls.gateways_secret(self.installation)
        return Target(self.namespace, secret, (internal_tls.gateways_name(self.namespace),))

    def of_replicas(self, namespace: str) -> Target:
        """The certificate of all replicas of a namespace, by its internal name and by those of their Services."""
        services = (f"*.{namespace}.svc", f"*.{namespace}.svc.{self.cluster_domain}")
        return Target(namespace, internal_tls.REPLICAS_SECRET, (internal_tls.replicas_name(namespace), *services))


@dataclass(slots=True)
class Authorities:
    """The authorities with their keys, by id, and the version of the Secret that holds them."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    lifetimes: dict[str, Lifetime] = field(default_factory=dict)

    def add(self, pair: Pair) -> None:
        """Raises CertificateUnreadable."""
        lifetime = authority_of(pair)
        self.pairs[lifetime.id], self.lifetimes[lifetime.id] = pair, lifetime

    def bundle(self) -> str:
        """All certificates as PEM, the oldest first."""
        ordered = sorted(self.lifetimes.values(), key=lambda one: one.not_before)
        return "".join(self.pairs[one.id].certificate.decode() for one in ordered)


class Certificates:
    """The certificates of one installation. `run` keeps them while this operator leads."""

    def __init__(
        self,
        client: Client,
        writer: Writer,
        trust: Trust,
        place: Place,
        metrics: OperatorMetrics,
        *,
        namespaces: Callable[[], Iterable[str]],
        on_fault: Callable[[str], None],
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        is_enabled: bool,
    ) -> None:
        """`namespaces` are those with services or pools; `on_fault` is called with one whose fault has changed.

        Without `is_enabled` nothing is made: replicas of before are still verified, by the published bundle.
        """
        self._client = client
        self._writer = writer
        self._trust = trust
        self._place = place
        self._metrics = metrics
        self._namespaces = namespaces
        self._on_fault = on_fault
        self._now = now
        self._monotonic = monotonic
        self._is_enabled = is_enabled
        self._authorities = Authorities()
        self._authorities_seen = _Seen()
        self._published = ""
        self._seen: dict[Target, _Seen] = {}
        metrics.watch(metrics.certificate_faults, lambda: len(self.faults()))

    def fault(self, namespace: str) -> str:
        """Why the replicas of this namespace have no certificate, or will soon have none; empty: all is well."""
        if not self._is_enabled:
            return ""
        seen = self._seen.get(self._place.of_replicas(namespace))
        return (seen.fault if seen is not None else "") or self._authorities_seen.fault

    def is_settled(self) -> bool:
        """Whether all gateways trust the authorities by now, so that replicas may be replaced for the sake of TLS."""
        if not self._is_enabled:
            return True
        first = min((one.made_at for one in self._authorities.lifetimes.values()), default=None)
        return bool(self._published) and first is not None and self._now() >= first + SETTLED_AFTER

    def faults(self) -> list[str]:
        """All faults, for the metric and for tests."""
        return [one.fault for one in (self._authorities_seen, *self._seen.values()) if one.fault]

    async def run(self) -> None:
        """Keep them until cancelled."""
        while True:
            if self._is_enabled:
                await self.look()
            else:
                await self._read_bundle()
            await asyncio.sleep(TICK_SECONDS if self._is_enabled else RETRY_SECONDS)

    async def look(self) -> None:
        """One pass over all that is due."""
        if self._monotonic() >= self._authorities_seen.look_at:
            await self._try("authorities", self._authorities_seen, self._keep_authorities)
            if self._authorities_seen.fault:
                self._tell(self._namespaces())
        if not self._published:
            return  # what nobody trusts is not issued
        targets = {self._place.of_gateways(), *map(self._place.of_replicas, set(self._namespaces()))}
        for gone in self._seen.keys() - targets:
            del self._seen[gone]
            self._metrics.forget_certificate(gone.namespace, gone.secret)
        for target in sorted(targets, key=lambda one: (one.namespace, one.secret)):
            seen = self._seen.setdefault(target, _Seen())
            if self._monotonic() < seen.look_at:
                continue
            before = seen.fault
            await self._try(f"{target.namespace}/{target.secret}", seen, lambda one=target: self._keep(one))  # type: ignore[misc]
            if seen.certificate is not None:
                self._metrics.set_certificate(target.namespace, target.secret, seen.certificate.not_after)
            if seen.fault != before:
                self._tell([target.namespace])

    async def _try(self, what: str, seen: _Seen, work: Callable[[], Any]) -> None:
        try:
            seen.certificate = await work() or seen.certificate
        except (KubeError, CertificateUnreadable) as error:
            fault = str(error)
            if fault != seen.fault:
                log.error("an internal certificate cannot be kept", certificate=what, fault=fault)
            seen.fault, seen.look_at = fault, self._monotonic() + RETRY_SECONDS
        else:
            seen.fault, seen.look_at = "", self._monotonic() + LOOK_SECONDS

    def _tell(self, namespaces: Iterable[str]) -> None:
        for namespace in set(namespaces):
            self._on_fault(namespace)

    # --- authorities --------------------------------------------------------------------------------------------------

    async def _keep_authorities(self) -> None:
        """Read the authorities, make one if it is due, and publish them before anything is signed by it."""
        now, name = self._now(), internal_tls.authority_name(self._place.installation)
        stored = await self._read(SECRETS, self._place.namespace, name)
        if stored is not None:
            self._authorities = _read_authorities(stored)
        kept = still_trusted(tuple(self._authorities.lifetimes.values()), now)
        wanted = Authorities()
        for one in kept:
            wanted.add(self._authorities.pairs[one.id])
        if needs_authority(kept, now):
            wanted.add(new_authority(now))
            log.info("made a certificate authority", secret=name, authorities=len(wanted.pairs))
        if stored is None or wanted.pairs.keys() != self._authorities.pairs.keys():
            data: dict[str, str | None] = {
                key: None for one in self._authorities.pairs.keys() - wanted.pairs.keys() for key in _keys(one)
            }
            for one_id, pair in wanted.pairs.items():
                certificate, key = _keys(one_id)
                data |= {certificate: _encode(pair.certificate), key: _encode(pair.key)}
            await self._store(SECRETS, self._place.namespace, name, stored, "Opaque", data)
        self._authorities = wanted
        bundle = wanted.bundle()
        published = await self._read(CONFIG_MAPS, self._place.namespace, name)
        if published is None or (published.get("data") or {}).get(internal_tls.CA_FILE) != bundle:
            await self._store(CONFIG_MAPS, self._place.namespace, name, published, "", {internal_tls.CA_FILE: bundle})
        self._trust.use(bundle)
        if bundle != self._published:
            for seen in self._seen.values():
                seen.look_at = 0.0  # the Secrets carry the bundle too
        self._published = bundle

    async def _read_bundle(self) -> None:
        """Trust what was published while it was enabled: replicas of then speak TLS until they are replaced."""
        name = internal_tls.authority_name(self._place.installation)
        try:
            published = await self._read(CONFIG_MAPS, self._place.namespace, name)
            bundle = ((published or {}).get("data") or {}).get(internal_tls.CA_FILE)
            if bundle:
                self._trust.use(bundle)
        except (KubeError, OSError, ValueError) as error:
            log.warning("the internal certificate authorities cannot be read", error=str(error))

    # --- certificates of servers --------------------------------------------------------------------------------------

    async def _keep(self, target: Target) -> Certificate:
        """Look at one Secret, and renew its certificate if it is due."""
        now = self._now()
        stored = await self._read(SECRETS, target.namespace, target.secret)
        found = _read_pair(stored, target) if stored is not None else None
        certificate = certificate_of(found) if found is not None else None
        trusted = tuple(self._authorities.lifetimes.values())
        why = why_renew(certificate, target.names, trusted, now)
        signer = choose_signer(trusted, now)
        if why:
            if signer is None:
                raise CertificateUnreadable("no certificate authority is valid by the operator's clock")
            found = issue(self._authorities.pairs[signer.id], target.names, now)
            certificate = certificate_of(found)
        assert found is not None
        assert certificate is not None
        data: dict[str, str | None] = {
            internal_tls.CERTIFICATE_FILE: _encode(found.certificate),
            internal_tls.KEY_FILE: _encode(found.key),
            internal_tls.CA_FILE: _encode(self._published.encode()),
        }
        if why or stored is None or (stored.get("data") or {}) != data:
            await self._store(SECRETS, target.namespace, target.secret, stored, _TLS_TYPE, data)
        if why:
            self._metrics.certificates_issued.inc()
            log.info(
                "issued an internal certificate",
                namespace=target.namespace,
                secret=target.secret,
                because=why,
                until=certificate.not_after.isoformat(),
            )
        return certificate

    # --- objects ------------------------------------------------------------------------------------------------------

    async def _read(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        """The object; None: there is none. Raises CertificateUnreadable for one that is not ours."""
        try:
            found: dict[str, Any] = msgspec.json.decode(await self._client.get(resource.path(namespace, name)))
        except NotFound:
            return None
        labels = found["metadata"].get("labels") or {}
        if any(labels.get(key) != value for key, value in LABELS.items()):
            raise CertificateUnreadable(
                f"{resource.kind} {namespace}/{name} exists and is not Slipway's: its labels {', '.join(LABELS)} "
                f"differ. Delete it, or rename it"
            )
        return found

    async def _store(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        stored: dict[str, Any] | None,
        kind: str,
        data: dict[str, str | None],
    ) -> None:
        """Create it, or change the version of it that was read; a conflict is a KubeError, and the next look heals."""
        if stored is None:
            body = {
                "apiVersion": resource.api_version,
                "kind": resource.kind,
                "metadata": {"name": name, "namespace": namespace, "labels": LABELS},
                "data": {key: text for key, text in data.items() if text is not None},
            } | ({"type": kind} if kind else {})
            await self._writer.create(resource, namespace, body, owner=None)
            return
        version = stored["metadata"]["resourceVersion"]
        await self._writer.merge_patch(
            resource, namespace, name, {"metadata": {"resourceVersion": version}, "data": data}
        )


def certificates_of_installation(
    settings: OperatorSettings,
    client: Client,
    writer: Writer,
    trust: Trust,
    metrics: OperatorMetrics,
    stores: Mapping[str, ObjectStore],
    *,
    wake: Callable[[Key], None],
    clock: Clock,
) -> Certificates:
    """The certificates that the settings ask for. A namespace needs one for its services and pools; a changed fault
    wakes both."""

    def keys() -> list[Key]:
        kinds = (INFERENCE_SERVICES.kind, WARM_POOLS.kind)
        return [key for kind in kinds if kind in stores for key in stores[kind].keys()]  # noqa: SIM118  its method

    def namespaces() -> set[str]:
        return {key.namespace for key in keys()}

    def wake_namespace(namespace: str) -> None:
        for key in keys():
            if key.namespace == namespace:
                wake(key)

    return Certificates(
        client,
        writer,
        trust,
        Place(
            installation=settings.installation,
            namespace=settings.namespace,
            cluster_domain=settings.cluster_domain,
        ),
        metrics,
        namespaces=namespaces,
        on_fault=wake_namespace,
        now=clock.now,
        monotonic=clock.monotonic,
        is_enabled=settings.internal_tls,
    )


def _keys(authority: str) -> tuple[str, str]:
    return f"{authority}.crt", f"{authority}.key"


def _read_authorities(stored: dict[str, Any]) -> Authorities:
    """The authorities of a Secret. Raises CertificateUnreadable, with the remedy."""
    found, data = Authorities(), stored.get("data") or {}
    name = f"Secret {stored['metadata']['namespace']}/{stored['metadata']['name']}"
    for key, text in sorted(data.items()):
        if not key.endswith(".crt"):
            continue
        try:
            found.add(Pair(_decode(text), _decode(data.get(key[:-4] + ".key", ""))))
        except CertificateUnreadable as error:
            raise CertificateUnreadable(
                f"{name}: {key}: {error}. Restore it from a backup, or delete the Secret: all certificates are then "
                "issued anew, and calls between gateway and replicas fail for about two minutes"
            ) from error
    return found


def _read_pair(stored: dict[str, Any], target: Target) -> Pair:
    """The certificate of a Secret. Raises CertificateUnreadable, with the remedy."""
    data = stored.get("data") or {}
    pair = Pair(_decode(data.get(internal_tls.CERTIFICATE_FILE, "")), _decode(data.get(internal_tls.KEY_FILE, "")))
    try:
        certificate_of(pair)
    except CertificateUnreadable as error:
        raise CertificateUnreadable(
            f"Secret {target.namespace}/{target.secret}: {error}. Delete the Secret: it is issued anew within seconds"
        ) from error
    return pair


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise CertificateUnreadable("not base64") from error
