"""The console: what the admin port gives to whom, and the page in a real browser in front of a real gateway."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest

from slipway_api import names
from slipway_gateway.console import FILES, PATH_CHAT, PATH_CONSOLE, PATH_DATA, _events
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.kinds import (
    CanaryStatus,
    ConditionFacts,
    InferenceService,
    RevisionStatus,
    ServiceStatus,
    TemplateStatus,
)
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from slipway_kube.objects import Metadata, Pod
from tests.gateway.chromium import a_page, needs_chromium
from tests.gateway.doubles import Runtime

pytestmark = pytest.mark.timeout(120)
HOSTILE = "<img src=x onerror=document.title='owned'>"
TOKEN = "the-token-of-this-gateway"
METRIC = {"type": "TTFTP95", "stable": "0.30", "canary": "0.31", "requests": 400, "verdict": "Passed"}
SCREENSHOTS = os.environ.get("SLIPWAY_SCREENSHOTS", "")


class Cached:
    """What the console reads of an informer."""

    def __init__(self, objects: dict) -> None:
        self.cache = objects

    def get(self, namespace: str, name: str):
        return self.cache.get((namespace, name))


class Watched:
    """What the console reads of the watch."""

    def __init__(self, services: dict, pods: dict) -> None:
        self.services = Cached(services)
        self.pods = Cached(pods)


def a_status() -> ServiceStatus:
    moment = datetime(2026, 5, 4, 7, 55, tzinfo=UTC).isoformat()
    return ServiceStatus(
        served_name="tiny",
        desired_replicas=3,
        current_revision="r1",
        update_revision="r2",
        revisions=(RevisionStatus("r1", 90), RevisionStatus("r2", 10)),
        templates=(TemplateStatus("gold", ("drain", "slo")), TemplateStatus("unused")),
        canary=CanaryStatus("Passed", step=1, weight=10, metrics=(METRIC,)),
        conditions=(ConditionFacts("Ready", "False", "Unavailable", f"2 of 3 ready {HOSTILE}", moment),),
        autoscaling={
            "recommendedReplicas": 3,
            "signals": [{"type": "KVCacheUtilization", "value": "0.93", "target": "0.7"}],
            "history": [{"time": moment, "from": 2, "to": 3, "reason": "KVCacheUtilization 0.93 > 0.70"}],
        },
    )


@asynccontextmanager
async def a_console(*runtimes: Runtime, token: str = TOKEN) -> AsyncIterator[Gateway]:
    """A gateway in front of these runtimes, with the objects of a canary rollout, an adapter and a pool."""
    fleet = Fleet()
    fleet.set_service("team/chat", Service(key="team/chat", served_name="tiny", weights={"r1": 90, "r2": 10}))
    for number, runtime in enumerate(runtimes):
        name = f"team/chat-{runtime.revision}-{number}"
        fleet.set_endpoint(name, Endpoint(name=name, service="team/chat", revision=runtime.revision, url=runtime.url))
    fleet.set_adapter("team/sailor", Adapter(key="team/sailor", name=HOSTILE, service="team/chat"))
    pool = Pod(
        metadata=Metadata(name="p", namespace="team", labels={names.LABEL_POOL: "warm", names.LABEL_STATE: "warm"})
    )
    settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, pod_name="gateway-a")
    gateway = Gateway(settings, fleet)
    if token:
        gateway.admin._tokens = lambda: [token]
    chat = InferenceService(metadata=Metadata(name="chat", namespace="team"), status=a_status())
    gateway.admin.console.watch = Watched({("team", "chat"): chat}, {("team", "p"): pool})  # type: ignore[assignment]
    async with gateway:
        yield gateway


@pytest.mark.capability("UX-1", "SE-2")
async def test_data_and_chat_need_the_token_and_the_page_has_no_data():
    async with Runtime() as runtime, a_console(runtime) as gateway, aiohttp.ClientSession() as session:
        admin = f"http://127.0.0.1:{gateway.admin_port}"
        body = {"model": "tiny", "messages": []}

        async with session.get(f"{admin}{PATH_DATA}") as refused:
            assert refused.status == 401
        async with session.post(f"{admin}{PATH_CHAT}", json=body) as refused:
            assert refused.status == 401
        assert runtime.requests == 0
        for path in (PATH_CONSOLE, *(f"{PATH_CONSOLE}/{name}" for name in FILES)):
            async with session.get(f"{admin}{path}") as page:
                text = await page.text()
                assert page.status == 200
                assert "team/chat" not in text
                policy = page.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
                assert "unsafe" not in policy
                assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), "nothing of a third party"


@pytest.mark.capability("UX-1")
async def test_nothing_of_the_console_is_on_the_serving_port():
    async with Runtime() as runtime, a_console(runtime) as gateway, aiohttp.ClientSession() as session:
        for path in (PATH_CONSOLE, PATH_DATA, f"{PATH_CONSOLE}/console.js", names.PATH_REQUESTS):
            async with session.get(f"http://127.0.0.1:{gateway.port}{path}") as answer:
                assert answer.status == 404


@pytest.mark.capability("UX-1", "SE-2")
async def test_another_sites_page_cannot_chat():
    """Without tokens (a gateway on a laptop) a page of another site could spend what anyone may use."""
    async with Runtime() as runtime, a_console(runtime, token="") as gateway, aiohttp.ClientSession() as session:
        admin = f"http://127.0.0.1:{gateway.admin_port}"
        body = json.dumps({"model": "tiny", "messages": []})
        for site in ("cross-site", "same-site"):
            headers = {"Sec-Fetch-Site": site, "Content-Type": "text/plain"}
            async with session.post(f"{admin}{PATH_CHAT}", data=body, headers=headers) as refused:
                assert refused.status == 403
        assert runtime.requests == 0


@pytest.mark.capability("UX-1")
async def test_the_data_has_services_rollout_decisions_adapters_and_pools():
    async with Runtime() as runtime, a_console(runtime) as gateway, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{gateway.admin_port}{PATH_DATA}"
        async with session.get(url, headers={names.HEADER_ADMIN_TOKEN: TOKEN}) as answer:
            data = await answer.json()

        (service,) = data["services"]
        assert (service["desired"], len(service["replicas"])) == (3, 1)
        assert service["rollout"]["isRunning"]
        assert service["rollout"]["metrics"] == [METRIC]
        assert [(one["hash"], one["weight"], one["role"]) for one in service["revisions"]] == [
            ("r1", 90, "stable"), ("r2", 10, "new"),
        ]  # fmt: skip
        assert service["decisions"][0]["to"] == 3
        assert service["templates"][0] == {"name": "gold", "blocks": ["drain", "slo"]}
        assert data["pools"] == [{"pool": "team/warm", "pods": {"warm": 1}}]
        assert data["adapters"][0]["adapter"] == "team/sailor"
        assert {one["event"] for one in data["events"]} == {"Ready=False", "Scaled"}


def test_events_are_the_newest_first_and_bounded():
    moments = [f"2026-05-04T07:{minute:02d}:00Z" for minute in range(60)]
    status = ServiceStatus(conditions=tuple(ConditionFacts("Ready", "True", "", "", one) for one in moments))

    found = _events({"team/chat": InferenceService(status=status)})

    assert [one["time"] for one in found] == moments[:19:-1]


def test_no_script_of_the_page_writes_markup():
    script = (Path(__file__).parents[2] / "gateway/slipway_gateway/console_page/console.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("):
        assert word not in script


@needs_chromium
@pytest.mark.capability("UX-1")
async def test_the_console_in_a_browser(tmp_path):
    """Services, plots, and a chat that shows who answered; hostile names stay text; nothing leaves this machine."""
    async with Runtime(revision="r1") as one, Runtime(revision="r2") as other, a_console(one, other) as gateway:
        admin = f"http://127.0.0.1:{gateway.admin_port}"
        async with a_page(f"{admin}{PATH_CONSOLE}#token={TOKEN}") as page:
            await page.until("document.querySelectorAll('article').length === 1")
            assert TOKEN not in await page.run("location.href")
            services = await page.run("document.getElementById('service-list').textContent")
            assert "team/chat: 2 ready, 3 desired" in services
            assert "Rollout: step 1, 10 % of the traffic" in services
            assert "Inherits drain, slo from gold" in services
            assert "unused" not in services
            assert "TTFTP95 Passed (new 0.31, stable 0.30)" in services
            assert HOSTILE in services
            assert HOSTILE in await page.run("document.getElementById('adapters').textContent")
            assert await page.run("document.querySelectorAll('img').length") == 0
            assert await page.run("document.querySelectorAll('#plots svg[role=img][aria-label]').length") == 4

            await page.run(
                "document.getElementById('prompt').value = 'Hello'; document.getElementById('model').value = 'tiny'"
            )
            await page.run("document.getElementById('chat').requestSubmit()")
            await page.until("document.querySelectorAll('#answered dt').length > 3")
            answer = await page.run("document.getElementById('answer').textContent")
            assert answer == "Once upon a time."
            who = await page.run("document.getElementById('answered').textContent")
            assert "team/chat-r" in who
            assert "of" in who.partition("From the prefix cache")[2]
            await page.until("document.querySelectorAll('#requests tbody tr').length === 1")
            assert "Hello" not in await page.run("document.getElementById('requests').textContent")

            assert await page.run("[...document.querySelectorAll('input,select,textarea')].every(e => e.labels.length)")
            assert await page.run("[...document.querySelectorAll('button')].every(e => e.textContent.trim())")
            folder = Path(SCREENSHOTS or tmp_path)
            await page.screenshot(folder / "console-light.png", dark=False)
            light = await page.run("getComputedStyle(document.body).backgroundColor")
            await page.screenshot(folder / "console-dark.png", dark=True)
            assert await page.run("getComputedStyle(document.body).backgroundColor") != light
            assert page.problems() == []
            assert {
                url.partition("/console")[0].partition("/v1")[0].partition("/debug")[0]
                for url in page.requested()
                if not url.startswith("data:")
            } == {admin}


@needs_chromium
@pytest.mark.capability("UX-1")
async def test_without_a_token_the_page_shows_a_form_and_no_data():
    async with Runtime() as runtime, a_console(runtime) as gateway:
        address = f"http://127.0.0.1:{gateway.admin_port}{PATH_CONSOLE}"
        async with a_page(address) as page:
            await page.until("!document.getElementById('login').hidden")
            assert await page.run("document.activeElement.id") == "token"
            assert "team/chat" not in await page.run("document.body.textContent")

            await page.run(
                "document.getElementById('token').value = 'wrong'; document.getElementById('login').requestSubmit()"
            )
            await page.until("document.getElementById('state').textContent.includes('not valid')")
            await page.run(
                f"document.getElementById('token').value = '{TOKEN}'; document.getElementById('login').requestSubmit()"
            )
            await page.until("document.querySelectorAll('article').length === 1")
