"""A platform team gives two teams their own keys: the example as it is, through the chart."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]  # two upgrades of the chart

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gateway" / "tenants.yaml"
RESEARCH, SHOP = "sk-example-research", "sk-example-shop"


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
    assert '"tenant": "shop"' in logs
