"""A hostile tenant beside a calm one: in any order of its acts, the calm one is answered as if it were alone."""

import asyncio
import contextlib
import random
from pathlib import Path

import aiohttp
import pytest
import yaml

from slipway_gateway.tenants import digest_of
from tests.gateway.doubles import Runtime, until
from tests.gateway.test_tenancy import a_tenanted_gateway

CALM, HOSTILE = "sk-calm", "sk-hostile"
CONCURRENCY = 3
ACTS = ("abandoned", "big body", "encoding", "held", "long prompt", "not JSON", "wrong model")


def two_tenants(directory: Path) -> dict[str, Path]:
    """The settings that name files with a calm tenant, and a hostile one with limits."""
    keys = directory / "keys"
    keys.mkdir()
    for name, key in (("calm", CALM), ("hostile", HOSTILE)):
        (keys / name).write_text(digest_of(key))
    hostile = {"maxBodyBytes": 20_000, "concurrency": CONCURRENCY, "tokensPerMinute": 100_000}
    tenants = [
        {"name": "calm", "keys": ["calm"], "models": ["chat"]},
        {"name": "hostile", "keys": ["hostile"], "models": ["chat"]} | hostile,
    ]
    (directory / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    return {"tenants_file": directory / "tenants.yaml", "keys_directory": keys}


def a_body(text: str = "Hello", model: str = "chat") -> dict[str, object]:
    return {"model": model, "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": text}]}


class Hostile:
    """Commits one act at a time; streams that it holds stay open until the end."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url
        self.statuses: list[int] = []
        self.held: list[asyncio.Task[None]] = []

    async def commit(self, act: str) -> None:
        if act == "held":
            self.held.append(asyncio.create_task(self.hold()))
            return
        sent = {
            "abandoned": {"json": a_body()},
            "big body": {"json": a_body("x" * 100_000)},
            "encoding": {"data": b"x" * 1000, "headers": {"Content-Encoding": "gzip"}},
            "long prompt": {"json": a_body("word " * 3000)},
            "not JSON": {"data": b"{" * 1000},
            "wrong model": {"json": a_body(model="forecast")},
        }[act]
        async with self.session.post(self.url, **sent) as response:
            self.statuses.append(response.status)
            if act == "abandoned":
                response.close()

    async def hold(self) -> None:
        async with self.session.post(self.url, json=a_body("held")) as response:
            self.statuses.append(response.status)
            await asyncio.Event().wait()


@pytest.mark.capability("RD-12", "MT-1")
@pytest.mark.parametrize("seed", range(3))
async def test_a_calm_tenant_is_answered_as_if_no_hostile_one_were_there(tmp_path, seed):
    """No calm request fails or waits behind a hostile one, which has at most its own number of streams upstream."""
    draw = random.Random(seed)
    async with (
        Runtime() as runtime,
        a_tenanted_gateway(runtime, two_tenants(tmp_path)) as gateway,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {CALM}"}) as calm,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {HOSTILE}"}) as session,
    ):
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        hostile = Hostile(session, url)
        alone = await ask(calm, url)
        beside = []
        for act in draw.sample(ACTS * 4, k=4 * len(ACTS)):
            await hostile.commit(act)
            beside.append(await ask(calm, url))
            assert gateway.tenancy.open_requests("hostile") <= CONCURRENCY
        await until(lambda: len(hostile.statuses) == 4 * len(ACTS))
        for task in hostile.held:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    assert alone[0] == 200
    assert beside == [alone] * len(beside)
    assert {200, 400, 404, 413, 415} <= set(hostile.statuses) <= {200, 400, 404, 413, 415, 429}


async def ask(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    """The status, and the text of the whole answer."""
    async with session.post(url, json=a_body() | {"stream": False}) as response:
        return response.status, await response.read()
