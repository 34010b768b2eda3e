"""A platform team gives two teams their own keys: the example as it is, through the chart."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]  # two upgrades of the chart

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gateway" / "tenants.yaml"
RESEARCH, SHOP = "sk-example-research", "sk-example-shop"
CLIENTS = 80  # of research, at the same time; the example admits 32
QUESTIONS = 20  # of shop, one after the other
PAUSE_SECONDS = 0.5  # of a client of research that was refused: it does not heed Retry-After


@pytest.fixture
def tenanted(clean: Slipway) -> Iterator[Slipway]:
    """Slipway with the example's tenants; open again afterwards, because the other stories have no keys."""
    clean.access.kubectl("apply", "-f", EXAMPLE)
    clean.install("gateway.tenants.configMap=slipway-tenants", "gateway.tenants.keysSecret=slipway-api-keys")
    yield clean
    clean.install("gateway.tenants.configMap=", "gateway.tenants.keysSecret=")
    clean.access.kubectl("delete", "-f", EXAMPLE)


@pytest.mark.capability("SE-1", "MT-1", "RG-12")
def test_each_team_calls_with_its_own_key_and_sees_its_own_models(tenanted: Slipway) -> None:
    for name in ("chat", "notes"):
        tenanted.apply(as_yaml(static(name, 1)))
    for name in ("chat", "notes"):
        tenanted.wait_ready(name, replicas=1)

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=tenanted.base_url, api_key=key, max_retries=0)

    def models(key: str) -> list[str]:
        return sorted(model.id for model in client(key).models.list())

    wait_for("both gateways know both models", lambda: all(models(RESEARCH) == ["chat", "notes"] for _ in range(6)))
    assert models(SHOP) == ["chat"]
    answer = client(SHOP).completions.create(model="chat", prompt="Once upon a time", max_tokens=4)
    assert answer.choices[0].text
    with pytest.raises(openai.NotFoundError):
        client(SHOP).completions.create(model="notes", prompt="Once", max_tokens=4)
    with pytest.raises(openai.AuthenticationError):
        client("sk-guessed").models.list()
    with pytest.raises(openai.BadRequestError, match="at most 1024"):
        client(SHOP).completions.create(model="chat", prompt="Once", max_tokens=2000)
    logs = tenanted.logs("app.kubernetes.io/component=gateway", RELEASE_NAMESPACE)
    assert SHOP not in logs
    assert any(json.loads(line).get("tenant") == "shop" for line in logs.splitlines() if line.startswith("{"))


@dataclass
class Flood:
    """Clients of one tenant that ask as often as they can, until they are stopped."""

    client: openai.OpenAI
    answered: int = 0
    refused: int = 0
    others: list[str] = field(default_factory=list)  # failures that are no refusals
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, number: int) -> None:
        """One client."""
        while not self.stop.is_set():
            try:
                stream = self.client.completions.create(
                    model="chat", prompt=f"Client {number}", max_tokens=64, stream=True, extra_body={"ignore_eos": True}
                )
                for _ in stream:
                    pass
                self._count(answered=1)
            except openai.RateLimitError:
                self._count(refused=1)
                self.stop.wait(PAUSE_SECONDS)
            except openai.OpenAIError as error:
                self.others.append(f"{type(error).__name__}: {error}")

    def _count(self, answered: int = 0, refused: int = 0) -> None:
        with self.lock:
            self.answered += answered
            self.refused += refused


def outcomes(slipway: Slipway) -> Counter[tuple[str, int]]:
    """Number of inference requests by tenant and status, in the logs of the gateways.

    Of a tenant's refusals within a second the first has its own line, and the others are one line with their number.
    """
    found: Counter[tuple[str, int]] = Counter()
    for line in slipway.logs("app.kubernetes.io/component=gateway", RELEASE_NAMESPACE).splitlines():
        record = json.loads(line) if line.startswith("{") else {}
        if record.get("message") == "request" and record["path"] == "/v1/completions":
            found[record["tenant"], record["status"]] += 1
        elif record.get("message") == "more requests refused":
            found[record["tenant"], record["status"]] += record["requests"]
    return found


@pytest.mark.capability("MT-1", "RG-6", "OP-14")
def test_a_flooding_tenants_excess_is_refused_and_every_request_of_another_one_is_answered(tenanted: Slipway) -> None:
    tenanted.apply(as_yaml(static("chat", 1)))
    tenanted.wait_ready("chat", replicas=1)
    shop = openai.OpenAI(base_url=tenanted.base_url, api_key=SHOP, max_retries=0, timeout=120)
    wait_for("both gateways know the model", lambda: all([m.id for m in shop.models.list()] for _ in range(6)))
    flood = Flood(openai.OpenAI(base_url=tenanted.base_url, api_key=RESEARCH, max_retries=0, timeout=120))
    during: list[str] = []
    with ThreadPoolExecutor(CLIENTS) as clients:
        try:
            running = [clients.submit(flood.ask, number) for number in range(CLIENTS)]
            wait_for("the flood is refused", lambda: flood.refused > CLIENTS, timeout=60)
            for number in range(QUESTIONS):
                refused = flood.refused
                answer = shop.completions.create(model="chat", prompt=f"Order {number}", max_tokens=8)
                wait_for("the flood goes on", lambda refused=refused: flood.refused > refused, every=0.05)  # type: ignore[misc]
                during.append(answer.choices[0].finish_reason)
        finally:
            flood.stop.set()
        for one in running:
            one.result(timeout=120)

    assert len(during) == QUESTIONS, "each at its first attempt, while the other tenant was refused"
    assert set(during) <= {"stop", "length"}
    assert flood.others == [], "429 and nothing else"
    assert flood.answered > 0, "what is within its limits is answered"
    seen = {("shop", 200): QUESTIONS, ("research", 200): flood.answered, ("research", 429): flood.refused}
    wait_for("the gateways have logged it", lambda: outcomes(tenanted).total() >= sum(seen.values()), timeout=30)
    assert outcomes(tenanted) == seen, "the gateways have refused what the clients saw refused, and no more"
