"""The benchmarks of vLLM: rates from measured waves, the ratio of two routings, and an agent that no token passes."""

import pytest

from bench.routing import Rates
from bench.vllm_agent import tokens_figures
from bench.vllm_pods import agent_environment
from bench.vllm_routing import AIM, SHARED, rates_of, section


def values(figures) -> dict[str, float]:
    return {one.name: one.value for one in figures}


def test_rates_come_from_one_request_alone_and_from_eight_at_once():
    alone = {"gaps": [0.010, 0.011, 0.030], "prefill_tokens_per_second": 700.0}
    together = {"gaps": [0.018, 0.018, 0.018], "prefill_tokens_per_second": 900.0}
    rates = rates_of(alone, together)

    assert rates == Rates(700.0, pytest.approx(0.010), pytest.approx(0.001))
    assert rates_of(together | {"prefill_tokens_per_second": 1.0}, alone).itl_seconds_per_request == 0.0


@pytest.mark.capability("OP-11", "RG-4", "DD-5")
@pytest.mark.parametrize(
    ("rates", "least"), [(Rates(), 1.5), (Rates(383.0, 0.050, 0.0043), AIM)], ids=["assumed", "measured on a CPU"]
)
def test_the_first_token_of_prompts_with_shared_prefixes_comes_sooner_than_by_round_robin(rates: Rates, least: float):
    found = values(section(rates, "measured", requests=1500, warm_up=500).figures)

    assert found[f"{SHARED}: round robin ÷ Slipway, TTFT p50"] >= least
    assert found["conversations: round robin ÷ Slipway, TTFT p50"] > 1.4


@pytest.mark.capability("OP-11")
async def test_no_token_passes_the_agent():
    found = values(await tokens_figures(streams=2, tokens=5, rounds=1, calls=2))

    assert found["requests of clients through the agent"] == 0
    assert found["the agent's memory"] < 64
    assert min(found.values()) >= 0


def test_the_agent_of_a_pod_gets_its_environment_and_the_addresses_of_this_machine():
    variables = [
        {"name": "SLIPWAY_DIALECT", "value": '{"engine":"$$x"}'},
        {"name": "SLIPWAY_ENGINE_URL", "value": "http://127.0.0.1:8000"},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    pod = {"spec": {"containers": [{"name": "server"}, {"name": "slipway-agent", "env": variables}]}}
    found = agent_environment(pod, "http://127.0.0.1:9", "/tmp/run", "127.20.0.1")

    assert found["SLIPWAY_DIALECT"] == '{"engine":"$x"}'
    assert (found["SLIPWAY_ENGINE_URL"], found["SLIPWAY_HOST"]) == ("http://127.0.0.1:9", "127.20.0.1")
    assert "POD_NAME" not in found
