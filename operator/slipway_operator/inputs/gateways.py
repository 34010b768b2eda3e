"""Polls every gateway for the demand for services and for the outcomes of requests, and keeps their sums.

Gateways are the pods of the release namespace with the gateway's labels. Demand is a long poll: a burst on an idle
service is known within a moment. Outcomes are asked for every 5 s. Runs on the leader only; a gateway that does not
answer delays no other, and `Demand.complete` says so.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final, TypeVar

import structlog

from slipway_api import internal_tls, names
from slipway_api.gateway_api import DemandReport, OutcomesReport
from slipway_api.runtime_api import Body
from slipway_api.types import ServiceKey
from slipway_kube.backoff import Backoff
from slipway_kube.client import Client
from slipway_kube.informer import Change, Informer
from slipway_kube.objects import Pod
from slipway_kube.resources import PODS
from slipway_operator.core.observed import Demand, GatewayCount, OutcomesSince, ServiceOutcomes
from slipway_operator.inputs.demand import FRESH, Changed, DemandTable
from slipway_operator.inputs.outcomes import OutcomeSums
from slipway_operator.replica_client import Address, Dial

log = structlog.get_logger()

WAIT_SECONDS: Final = 5.0  # how long a gateway may keep the poll of demand when nothing changes
PAUSE_SECONDS: Final = 0.25  # between two polls of a gateway whose demand changes all the time
OUTCOMES_SECONDS: Final = 5.0
PRESENCE_SECONDS: Final = 2.0  # how often it is compared whether any gateway answers
ANSWER_SECONDS: Final = 3.0  # beyond the wait that was asked for

BodyT = TypeVar("BodyT", bound=Body)


class Gateways:
    """The sums over all gateways; `watch` and `forget` add and remove them."""

    def __init__(
        self,
        dial: Dial,
        tokens: Callable[[str, str], list[str]],
        *,
        on_change: Callable[[Changed], None],
        now: Callable[[], datetime],
        on_presence: Callable[[], None] = lambda: None,
        namespace: str = "",
        selector: str = "",
    ) -> None:
        """`tokens` are those of the admin port of a gateway's pod (namespace, name), the likeliest first.

        `on_presence` is called when the first gateway answers, or the last one no longer does.
        """
        self._dial = dial
        self._tokens = tokens
        self._began: datetime | None = None  # when this operator began to lead
        self._on_change = on_change
        self._now = now
        self._demand = DemandTable()
        self._outcomes: OutcomeSums | None = None  # from the moment at which this operator begins to lead
        self._required: set[str] = set()
        self._polls: dict[str, tuple[Address, tuple[asyncio.Task[None], ...]]] = {}
        self._targets: dict[str, Address] = {}
        self._versions: dict[str, int] = {}  # of the demand that each gateway reported last
        self._is_running = False
        self._on_presence = on_presence
        self._place = (namespace, selector)

    def demand(self, service: ServiceKey) -> Demand | None:
        """What clients ask of a service; None: no gateway has reported."""
        return self._demand.of(service, self._now(), required=self._required)

    def count(self) -> GatewayCount | None:
        """How many gateways answer; None until this operator has led for long enough to have heard from them."""
        if self._began is None or self._now() - self._began < FRESH:
            return None
        namespace, selector = self._place
        answering = self._demand.answering(self._now())
        return GatewayCount(answering=answering, running=len(self._targets), namespace=namespace, selector=selector)

    def waiting_adapters(self, service: ServiceKey) -> dict[str, int]:
        """By adapter of the service: the requests that wait until a replica has loaded it."""
        return self._demand.adapters_of(service, self._now())

    def outcomes_since(self, service: ServiceKey) -> OutcomesSince | None:
        """The function that sums the outcomes of a service since a moment; None: no gateway has reported."""
        sums = self._outcomes
        if sums is None or not sums.has_reports:
            return None
        return lambda moment: sums.since(service, moment) or {}

    def service_outcomes(self, service: ServiceKey) -> ServiceOutcomes | None:
        """The outcomes of a service as its clients saw them; None: no gateway has counted any."""
        return self._outcomes.of_service(service) if self._outcomes is not None else None

    def watch(self, address: Address, *, is_required: bool) -> None:
        """Poll this gateway from now on. While it is required and has not reported, no service counts as idle."""
        name = address.pod
        (self._required.add if is_required else self._required.discard)(name)
        self._targets[name] = address
        if self._is_running:
            self._start(name, address)

    def forget(self, name: str) -> None:
        """The gateway is gone."""
        self._required.discard(name)
        self._targets.pop(name, None)
        self._versions.pop(name, None)
        _address, tasks = self._polls.pop(name, (None, ()))
        for task in tasks:
            task.cancel()
        if self._outcomes is not None:
            self._outcomes.forget(name)
        for change in self._demand.forget(name):
            self._on_change(change)

    async def run(self) -> None:
        """Poll until cancelled."""
        self._began = self._now()
        self._outcomes = OutcomeSums(self._began)
        self._is_running = True
        for name, address in self._targets.items():
            self._start(name, address)
        try:
            was_present = True  # a leader's first passes do not know it yet
            while True:
                await asyncio.sleep(PRESENCE_SECONDS)
                found = self.count()
                if found is not None and bool(found.answering) != was_present:
                    was_present = bool(found.answering)
                    self._on_presence()
        finally:
            self._is_running = False
            for _address, tasks in self._polls.values():
                for task in tasks:
                    task.cancel()
            self._polls.clear()

    def _start(self, name: str, address: Address) -> None:
        known, tasks = self._polls.get(name, (None, ()))
        if known == address:
            return
        for task in tasks:
            task.cancel()
        polls = {"demand": self._poll_demand, "outcomes": self._poll_outcomes}
        tasks = tuple(asyncio.create_task(_repeat(what, poll, address)) for what, poll in polls.items())
        self._polls[name] = address, tasks

    async def _poll_demand(self, address: Address) -> float:
        """Ask for the demand; returns the pause before the next time."""
        after = self._versions.pop(address.pod, None)  # after a failure it may have restarted: it must not wait then
        query = "" if after is None else f"?after={after}&wait_seconds={WAIT_SECONDS:g}"
        wait = ANSWER_SECONDS + (0.0 if after is None else WAIT_SECONDS)
        report = await self._get(address, names.PATH_DEMAND + query, DemandReport, wait)
        self._versions[address.pod] = report.version
        for change in self._demand.receive(address.pod, report, self._now()):
            self._on_change(change)
        return PAUSE_SECONDS

    async def _poll_outcomes(self, address: Address) -> float:
        """Ask for the outcomes; returns the pause before the next time."""
        report = await self._get(address, names.PATH_OUTCOMES, OutcomesReport, ANSWER_SECONDS)
        if self._outcomes is not None:
            self._outcomes.receive(address.pod, report, self._now())
        return OUTCOMES_SECONDS

    async def _get(self, address: Address, path: str, answer: type[BodyT], seconds: float) -> BodyT:
        """The answer of a gateway's admin port. After a 401 the next token is tried: keys rotate."""
        status, raw = 401, b"there is no token to try"
        async with asyncio.timeout(seconds):
            for token in self._tokens(address.namespace, address.pod):
                status, raw = await self._dial("GET", address, path, {names.HEADER_ADMIN_TOKEN: token}, None)
                if status != 401:
                    break
        if status != 200:
            raise OSError(f"{path}: {status} {raw[:200].decode(errors='replace')}")
        return answer.model_validate_json(raw)


async def _repeat(what: str, poll: Callable[[Address], Awaitable[float]], address: Address) -> None:
    """Call `poll` for ever, with the pauses that it asks for, or a backoff while it fails."""
    backoff = Backoff(first=0.5, cap=5.0, least=0.5)
    while True:
        try:
            pause = await poll(address)
            backoff.reset()
        except Exception as exc:  # noqa: BLE001  one broken gateway must never end the polling of the others
            if backoff.failures in (0, 10):
                error = str(exc) or type(exc).__name__
                log.info("a gateway does not answer", gateway=address.pod, poll=what, error=error)
            pause = backoff.next_delay()
        await asyncio.sleep(pause)


def watch_pods(gateways: Gateways, client: Client, *, namespace: str, selector: str) -> Informer[Pod]:
    """An informer that keeps `gateways` current with the gateway pods of the release namespace; the caller runs it."""

    def saw(change: Change, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        assert pod is not None
        if new is None or change is Change.DELETED or not new.status.pod_ip or not _is_running(new):
            gateways.forget(pod.name)
        else:
            speaks_tls = bool(new.spec.secret_of(internal_tls.VOLUME))
            tls_name = internal_tls.gateways_name(new.namespace) if speaks_tls else ""
            address = Address(new.namespace, new.name, new.status.pod_ip, tls_name=tls_name)
            gateways.watch(address, is_required=not new.is_terminating)

    informer = Informer(client, PODS, Pod, namespaces=(namespace,), label_selector=selector)
    informer.on_change(saw)
    return informer


def _is_running(pod: Pod) -> bool:
    """Whether one of its containers runs; one that crashes again and again serves nobody."""
    return any(container.state.running is not None for container in pod.status.container_statuses)
