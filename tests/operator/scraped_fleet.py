"""Replicas that a scraper asks for their signals, in virtual time: their load and their faults are set by the test."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta

from slipway_api.runtime_api import AdapterInfo, BlockCounts, QueueCounts, Signals, State
from slipway_operator.inputs.scraper import Scraper, Target

HANGS_SECONDS = 2.0  # the timeout of a call
T0 = datetime(2026, 1, 1, tzinfo=UTC)


def a_state(**facts: object) -> State:
    """Room for 1,000 blocks of 16 tokens; a request takes up to 4,096 tokens."""
    known = {"model_name": "chat", "uptime_seconds": 1.0, "draining": False, "queue": QueueCounts(running=0, waiting=0)}
    known |= {"block_size": 16, "bytes_per_token": 8192, "max_model_len": 4096, "max_num_seqs": 64}
    blocks = BlockCounts(total=1000, live=0, cached=0, free=1000)
    return State.model_validate(known | {"blocks": blocks} | facts)


class Fleet:
    """Replicas whose load the test sets, and who remember when they were asked."""

    def __init__(self) -> None:
        self.load: dict[str, int] = {}
        self.services: dict[str, str] = {}  # by replica; "chat" where it is not named
        self.broken: set[str] = set()
        self.hanging: set[str] = set()
        self.draining: set[str] = set()
        self.starting: dict[str, str] = {}
        self.mute: set[str] = set()  # answer for their load, and not for their state
        self.described: list[str] = []
        self.boot_id = "boot"
        self.adapters: tuple[AdapterInfo, ...] = ()  # of every replica
        self.asked: list[tuple[float, str]] = []
        self.news: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self.scraper: Scraper[str, str] = Scraper(
            self.ask,
            self.describe,
            on_news=lambda key, _is_load: self.news.update([key]),
            on_error=self.errors.append,
            now=lambda: T0 + timedelta(seconds=asyncio.get_running_loop().time()),
        )

    async def run(self) -> None:
        """The scraper, and what the informer would tell it of the replicas."""
        task = asyncio.create_task(self.scraper.run())
        told: dict[str, Target[str, str]] = {}
        try:
            while True:
                now = {
                    uid: Target(
                        uid,
                        uid,
                        self.services.get(uid, "chat"),
                        is_draining=uid in self.draining,
                        is_starting=uid in self.starting,
                    )
                    for uid in self.load
                }
                for uid in told.keys() - now.keys():
                    self.scraper.forget(uid)
                for uid, target in now.items():
                    if told.get(uid) != target:
                        self.scraper.watch(target)
                told = now
                await asyncio.sleep(0.1)
        finally:
            task.cancel()

    async def ask(self, uid: str) -> Signals:
        self.asked.append((asyncio.get_running_loop().time(), uid))
        if uid in self.hanging:
            await asyncio.sleep(HANGS_SECONDS)
            raise TimeoutError
        if uid in self.broken:
            raise ConnectionError("no route to host")
        return Signals(
            boot_id=self.boot_id,
            kv_usage=0.5,
            running=self.load[uid],
            waiting=0,
            draining=uid in self.draining,
            starting=self.starting.get(uid, ""),
        )

    async def describe(self, uid: str) -> State:
        self.described.append(uid)
        if uid in self.mute:
            raise ConnectionError("reset by peer")
        return a_state(adapters=self.adapters)

    def calls_of(self, uid: str) -> int:
        return sum(1 for _, who in self.asked if who == uid)

    async def watch_for(self, seconds: float) -> None:
        task = asyncio.create_task(self.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
