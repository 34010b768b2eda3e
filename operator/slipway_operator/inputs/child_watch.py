"""Watches Services, PodDisruptionBudgets and NetworkPolicies of our objects for changes that other clients make.

Only metadata is kept. A deletion, and a change that no apply of ours made, report the owner and the child; the next
pass then compares this child with the API server. A report too many costs a GET and no write, so the watch need not be
exact: a Service has no generation, so any new version of it is reported.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial

from slipway_api import names
from slipway_kube.access import ReadAccess
from slipway_kube.client import Client
from slipway_kube.informer import Change, Informer
from slipway_kube.objects import Object
from slipway_kube.resources import DISRUPTION_BUDGETS, NETWORK_POLICIES, SERVICES, Resource
from slipway_operator.controller.kinds import Key
from slipway_operator.inputs.labels import controller_of


class ChildWatch:
    """Reports children that other clients change or delete."""

    def __init__(
        self,
        client: Client,
        *,
        namespaces: tuple[str, ...],
        has_policies: bool,
        recheck: Callable[[Key, str], bool],
        wake: Callable[[Key], None],
        applied: Callable[[], Iterable[tuple[Key, str]]],
        access: ReadAccess,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`recheck` lets the next pass of an owner compare a child such as `Service/chat`; False: it need not.

        `applied` lists owner and key of each child that this process has applied.

        has_policies: NetworkPolicies are made; otherwise the operator has no right to watch them.
        """
        self._recheck = recheck
        self._wake = wake
        self._applied = applied
        self._informers: dict[Resource, Informer[Object]] = {}
        for resource in (SERVICES, DISRUPTION_BUDGETS, *((NETWORK_POLICIES,) if has_policies else ())):
            informer = Informer(
                client,
                resource,
                Object,
                namespaces=namespaces,
                label_selector=names.MANAGED_SELECTOR,
                clock=monotonic,
                access=access,
            )
            informer.on_change(partial(self._saw, resource.kind))
            self._informers[resource] = informer

    async def run(self) -> None:
        """Watch until cancelled. The first list finds children that were deleted since they were applied."""
        async with asyncio.TaskGroup() as group:
            for resource, informer in self._informers.items():
                group.create_task(informer.run())
                group.create_task(self._find_missing(resource.kind, informer))

    async def _find_missing(self, kind: str, informer: Informer[Object]) -> None:
        await informer.synced.wait()
        for key, child in list(self._applied()):
            of_kind, _, name = child.partition("/")
            if of_kind == kind and informer.get(key.namespace, name) is None:
                self._disturbed(key, child)

    def _saw(self, kind: str, change: Change, old: Object | None, new: Object | None) -> None:
        if old is None or (change is not Change.DELETED and new is not None and not _is_foreign(old, new)):
            return
        if (owner := controller_of(old)) is not None:
            self._disturbed(Key(owner.kind, old.namespace, owner.name), f"{kind}/{old.name}")

    def _disturbed(self, key: Key, child: str) -> None:
        if self._recheck(key, child):
            self._wake(key)


def _is_foreign(old: Object, new: Object) -> bool:
    """Whether this change may be another client's: an apply of ours writes another digest."""
    was, now = old.metadata, new.metadata
    if was.annotations.get(names.ANNOTATION_APPLIED) != now.annotations.get(names.ANNOTATION_APPLIED):
        return False
    # The status of a disruption budget changes all the time, and its generation does not.
    has_no_generation = not now.generation
    return has_no_generation or (was.labels, was.owner_references, was.generation) != (
        now.labels,
        now.owner_references,
        now.generation,
    )
