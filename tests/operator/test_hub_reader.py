"""The sizes of a model are read from its hub before the first pod: a real HTTP server shaped like a hub, real plans."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipway_api.conditions import find_condition
from slipway_api.inference_service import InferenceService
from slipway_operator import hub_reader
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.core.actions import AskHub, CreatePod
from slipway_operator.core.service.model.hub_facts import HOLD
from slipway_operator.core.service.plan import Plan, plan
from slipway_operator.hub_reader import HubReader, NoFacts, shape_of
from tests.builders import T0, a_pod, a_service, edited, minutes, promised, seconds, seen
from tests.runtime.storage.hub import Hub, a_hub

KEY = Key("InferenceService", "demo", "chat")
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
PARAMETERS = 70_553_706_496
ON_ONE_GPU = {"gpu": {"count": 1, "product": "NVIDIA-H100-80GB-HBM3"}}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with a_hub() as hub:
        hub.repositories["org/llama"] = {"main": {"config.json": json.dumps(LLAMA_70B).encode()}}
        hub.parameters["org/llama"] = PARAMETERS
        yield hub


class Operator:
    """Plans one service pass by pass with a real reader; the status of a pass is the input of the next one."""

    def __init__(self, service: InferenceService, *endpoints: str) -> None:
        self.woken = asyncio.Event()
        self.now = T0
        self.service = promised(service, 1)
        self.reader = HubReader(endpoints, now=lambda: self.now, on_done=lambda _key: self.woken.set())

    async def pass_(self, *pods: Any) -> Plan:
        model = self.service.spec.model
        answer = self.reader.answer(model.uri, model.network.hub_endpoint)
        made = plan(replace(seen(self.service, *pods), hub=answer), self.now)
        for action in made.actions:
            if isinstance(action, AskHub):
                await self.reader.performers[AskHub](KEY, StoredObject("uid", 1, {}), action)
        self.service = self.service.model_copy(update={"status": made.status})
        return made

    async def answered(self) -> None:
        async with asyncio.timeout(20):
            await self.woken.wait()


def creates(made: Plan) -> bool:
    return any(isinstance(action, CreatePod) for action in made.actions)


def a_llama(endpoint: str = "", **spec: Any) -> InferenceService:
    network = {"network": {"hubEndpoint": endpoint}} if endpoint else {}
    return a_service(uri="hf://org/llama", **{"resources": ON_ONE_GPU, "model": network, **spec})


@pytest.mark.capability("OP-5")
async def test_a_model_that_cannot_fit_is_refused_by_its_hubs_numbers_before_any_pod(hub: Hub):
    operator = Operator(a_llama(hub.url), hub.url)

    first = await operator.pass_()
    waiting = await operator.pass_()
    await operator.answered()
    told = await operator.pass_()

    assert any(isinstance(action, AskHub) for action in first.actions)
    assert not creates(waiting)
    assert not creates(told)
    stalled = find_condition(told.status.conditions, "Stalled")
    assert stalled is not None
    assert stalled.reason == "DoesNotFit"
    assert told.status.model.shape.parameters == PARAMETERS
    assert told.status.model.shape.kv_heads == 8
    assert hub.tokens == ["", ""], "no credentials go to a hub"


async def test_what_the_hub_said_is_in_status_so_no_later_pass_and_no_other_leader_asks_again(hub: Hub):
    operator = Operator(a_llama(hub.url), hub.url)
    await operator.pass_()
    await operator.answered()
    told = await operator.pass_()

    successor = Operator(operator.service, hub.url)
    successor.service = operator.service
    again = await successor.pass_()

    assert not any(isinstance(action, AskHub) for action in again.actions)
    assert again.status == told.status


async def test_a_hub_that_is_away_delays_the_first_pod_by_its_answer_and_changes_nothing_else(hub: Hub):
    hub.away = True
    operator = Operator(a_llama(hub.url), hub.url)

    await operator.pass_()
    await operator.answered()
    made = await operator.pass_()

    assert creates(made)
    assert made.status.model is None
    assert not any(isinstance(action, AskHub) for action in made.actions), "asked again after an hour, not at once"
    operator.now = T0 + minutes(61)
    assert any(isinstance(action, AskHub) for action in (await operator.pass_()).actions)


async def test_a_hub_that_is_slow_delays_the_first_pod_by_seconds():
    """A listener that never answers."""
    silent = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    operator = Operator(a_llama(url), url)

    await operator.pass_()
    held = await operator.pass_()
    operator.now = T0 + HOLD + seconds(1)
    late = await operator.pass_()
    await operator.reader.stop()
    silent.close()

    assert not creates(held)
    assert held.requeue_after == HOLD.total_seconds()
    assert creates(late)


async def test_running_replicas_wait_for_no_hub(hub: Hub):
    service = a_llama(hub.url, replicas=2)
    operator = Operator(service, hub.url)
    operator.service = promised(service, 2)

    await operator.pass_(a_pod(service=service).ready())
    made = await operator.pass_(a_pod(service=service).ready())

    assert creates(made)


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"shape": {"layers": 2, "hiddenSize": 64, "heads": 4, "kvHeads": 4, "parameters": 1000}}},
        {"resources": {"gpu": {"count": 1}}},
        {"resources": {"gpu": {"count": 0}}},
        {"runtime": {"env": [{"name": "HF_ENDPOINT", "value": "https://hub.internal"}]}},
    ],
    ids=["the spec has the sizes", "the GPU is not known", "no memory limit", "a variable names another hub"],
)
async def test_no_hub_is_asked_where_its_answer_would_decide_nothing_or_a_private_name_would_leave(
    hub: Hub, spec: dict[str, Any]
):
    operator = Operator(a_llama(**spec), hub.url)

    made = await operator.pass_()

    assert not any(isinstance(action, AskHub) for action in made.actions)


async def test_only_hubs_of_the_installation_are_asked(hub: Hub):
    """The address of a hub is the user's; the operator's place in the network is not the user's."""
    stranger = Operator(a_llama("http://169.254.169.254"), hub.url)
    none_at_all = Operator(a_llama(), "off")

    for operator in (stranger, none_at_all):
        made = await operator.pass_()
        assert not any(isinstance(action, AskHub) for action in made.actions)


async def test_the_sizes_of_one_model_are_not_those_of_another(hub: Hub):
    operator = Operator(a_llama(hub.url), hub.url)
    await operator.pass_()
    await operator.answered()
    await operator.pass_()

    model = {"uri": "hf://org/small", "network": {"hubEndpoint": hub.url}}
    operator.service = edited(operator.service, model=model)
    made = await operator.pass_()

    assert made.status.model is None
    assert any(isinstance(action, AskHub) and action.uri == "hf://org/small" for action in made.actions)


@pytest.mark.parametrize("field", ["quantization_config", "kv_lora_rank", "text_config"])
def test_a_model_whose_memory_is_another_one_is_left_to_the_runtime(field: str):
    with pytest.raises(NoFacts, match=field):
        shape_of({**LLAMA_70B, field: {"some": 1}}, PARAMETERS)


@pytest.mark.capability("API-28")
def test_the_latent_of_a_token_and_the_experts_of_deepseek_are_read():
    deepseek = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    }  # fmt: skip
    shape = shape_of(deepseek, 671_000_000_000)
    assert (shape.latent_size, shape.experts, shape.moe_intermediate_size) == (576, 256, 2048)
    with pytest.raises(NoFacts, match="kv_lora_rank"):
        shape_of({**deepseek, "model_type": "deepseek_v32"}, 671_000_000_000)  # it has a second cache
    with pytest.raises(NoFacts, match="latent attention"):
        shape_of({**deepseek, "qk_rope_head_dim": None}, 671_000_000_000)


@pytest.mark.capability("API-21")
def test_the_experts_of_a_mixture_are_read():
    mixtral = {**LLAMA_70B, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14_336}
    shape = shape_of(mixtral, PARAMETERS)
    assert (shape.experts, shape.experts_per_token, shape.moe_intermediate_size) == (8, 2, 14_336)
    qwen = {**mixtral, "num_experts": 128, "moe_intermediate_size": 768}
    assert shape_of(qwen, PARAMETERS).moe_intermediate_size == 768
    with pytest.raises(NoFacts):
        shape_of({**mixtral, "num_experts_per_tok": None}, PARAMETERS)


@pytest.mark.parametrize(
    "config", [{}, {**LLAMA_70B, "num_hidden_layers": "80 or so"}, {**LLAMA_70B, "hidden_size": -1}]
)
def test_a_config_without_the_sizes_of_a_decoder_tells_nothing(config: dict[str, Any]):
    with pytest.raises(NoFacts):
        shape_of(config, PARAMETERS)


async def test_parameters_are_counted_by_the_index_where_the_hub_does_not_say(hub: Hub):
    del hub.parameters["org/llama"]
    index = {"metadata": {"total_size": 2 * PARAMETERS}, "weight_map": {}}
    hub.repositories["org/llama"]["main"]["model.safetensors.index.json"] = json.dumps(index).encode()

    assert (await hub_reader.read_shape(hub.url, "hf://org/llama")).parameters == PARAMETERS


async def test_an_answer_without_end_is_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_reader, "MOST_BYTES", 10)

    with pytest.raises(NoFacts, match="more than 10 bytes"):
        await hub_reader.read_shape(hub.url, "hf://org/llama")
