"""An operator process in the simulated cluster, which can be killed at a write of the test's choice."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from slipway_kube.errors import KubeError, Unreachable
from slipway_operator.controller.kinds import Kind
from slipway_operator.manager import Manager
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.settings import OperatorSettings
from tests.fakes import FakeApiServer, InProcessClient

if TYPE_CHECKING:
    from tests.operator.simulated_cluster import SimulatedCluster


class SeverableClient(InProcessClient):
    """A client whose process can be killed, at a write of the test's choice."""

    def __init__(self, server: FakeApiServer, process: "OperatorProcess") -> None:
        super().__init__(server)
        self._process = process

    async def _exchange(self, method: str, path: str, **options: Any) -> tuple[int, bytes, str | None]:
        is_write = method != "GET" and "/leases" not in path and "/events" not in path
        self._process.check()
        if is_write:
            await self._process.before_write(f"{method} {path}")
        reply = await super()._exchange(method, path, **options)
        self._process.check()
        if is_write:
            await self._process.after_write(f"{method} {path}")
        return reply


class OperatorProcess:
    """One operator process."""

    def __init__(
        self,
        cluster: "SimulatedCluster",
        identity: str,
        *,
        pod_uid: str = "",
        dies_after_writes: int | None = None,
        watch_namespaces: tuple[str, ...] = (),
    ) -> None:
        self._cluster = cluster
        self._left = dies_after_writes
        self.writes: list[str] = []
        self.is_dead = False
        self.died = asyncio.Event()
        self.lost: list[str] = []
        self.metrics = OperatorMetrics()
        self._stop = asyncio.Event()
        client, lease_client = SeverableClient(cluster.server, self), SeverableClient(cluster.server, self)
        self.manager = Manager(
            OperatorSettings(
                namespace="slipway-system",
                identity=identity,
                pod_uid=pod_uid,
                master_directory=cluster.master_directory,
                gateway_key_directory=cluster.gateway_key_directory,
                gateway_url="http://gateway",
                agent_image="slipway/agent:test",
                watch_namespaces=watch_namespaces,
                **cluster.settings,
            ),
            client,
            lease_client,
            cluster.dial,
            self.metrics,
            serving_dial=cluster.serving_dial,
            on_lost=self._lose,
            clock=cluster.clock,
            kinds=cluster.kinds,
        )
        # The cluster simulates no gateway; RouteReady is about those that answer, as one does here.
        self.manager._gateways.count = lambda: cluster.gateways
        self._tasks = [
            asyncio.create_task(self._live()),
            *(
                asyncio.create_task(self._watch(client, kind, namespace))
                for kind in self.manager.kinds.values()
                for namespace in watch_namespaces or ("",)
            ),
        ]

    @property
    def is_leader(self) -> bool:
        return self.manager.elector.is_leader()

    def check(self) -> None:
        if self.is_dead:
            raise Unreachable("this process is dead")

    async def before_write(self, what: str) -> None:
        self._cluster.on_write(what)
        if self._left == 0:
            self.kill()
            await asyncio.Event().wait()
        self.writes.append(what)

    async def after_write(self, what: str) -> None:
        await asyncio.sleep(self._cluster.write_seconds)
        self._cluster.on_written(what)
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.kill()
                await asyncio.Event().wait()

    def kill(self) -> None:
        """kill -9."""
        self.is_dead = True
        self.died.set()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """SIGTERM."""
        self._stop.set()
        await self._tasks[0]
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _lose(self, reason: str) -> None:
        self.lost.append(reason)
        self.kill()

    async def _live(self) -> None:
        """As `handlers` has it: start, be asked to stop, stop."""
        try:
            await self.manager.start()
            await self._stop.wait()
        finally:
            await self.manager.stop()

    async def _watch(self, client: SeverableClient, kind: Kind, namespace: str) -> None:
        """As kopf does: list, watch, list again after a gap, and never say what vanished in it."""
        path = kind.resource.path(namespace)
        while True:
            with contextlib.suppress(KubeError):
                version = ""
                async for page in client.list_pages(path):
                    version = page.metadata.resource_version
                    for item in page.items or ():
                        self.manager.heard(kind.name, None, msgspec.json.decode(item))
                async for line in client.watch(path, resource_version=version):
                    event = msgspec.json.decode(line)
                    if event["type"] in ("ADDED", "MODIFIED", "DELETED") and not self.is_dead:
                        self.manager.heard(kind.name, event["type"], event["object"])
            await asyncio.sleep(1.0)
