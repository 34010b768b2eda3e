"""One service uses all engine features: int8 weights, speculation, adapters, warm prompts, structured output."""

import json
from typing import Any

import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ADAPTERS = "file:///opt/slipway/models/adapters"
SYSTEM = {
    "role": "system",
    "content": "You are the careful assistant of a village library. Answer every question in one or two friendly "
    "sentences, and never speak of anything else.",
}
VERDICT = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def everything() -> dict[str, Any]:
    """One replica on CPUs with every feature switched on."""
    return static(
        "features",
        1,
        model={"uri": "file:///opt/slipway/models/tiny", "warmPrompts": [{"messages": [SYSTEM]}]},
        runtime={
            "quantization": "int8",
            "speculation": {"method": "promptLookup", "maxTokens": 4},
            "lora": {"maxAdapters": 2, "maxCPUAdapters": 2, "maxRank": 16},
            "args": [f"--adapter={name}={ADAPTERS}/{name}" for name in ("sailor", "json")],
            "maxModelLen": 1024,
            "kvCache": {"bytes": "16Mi"},
        },
        resources={"gpu": {"count": 0}, "requests": {"cpu": "50m"}},
    )


def answer_of(slipway: Slipway, model: str) -> str:
    """The replica's own answer to a request for this model name, past the gateway."""
    (pod,) = slipway.pods("features")
    path = f"/api/v1/namespaces/default/pods/{pod.metadata.name}:8000/proxy/v1/chat/completions"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 0,
        "max_tokens": 64,
    }
    return str(slipway.access.api("POST", path, body, timeout=60)["choices"][0]["message"]["content"])


@pytest.mark.capability("KV-10", "ML-1", "OP-5")
def test_a_service_with_every_feature_answers_as_its_users_expect(clean: Slipway) -> None:
    clean.apply(as_yaml(everything()))
    clean.wait_ready("features", replicas=1)
    chats = clean.openai().chat.completions

    question = {"role": "user", "content": "Which books do you have?"}
    first = chats.create(model="features", messages=[SYSTEM, question], temperature=0, max_tokens=48)  # type: ignore[list-item]
    bound = chats.create(
        model="features",
        messages=[{"role": "user", "content": "Is a fox an animal?"}],
        temperature=0,
        max_tokens=300,
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}},
    )

    assert first.choices[0].message.content
    assert first.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert (first.usage.prompt_tokens_details.cached_tokens or 0) >= 16, "the warm prompt was not there"
    assert json.loads(bound.choices[0].message.content or "")["answer"] in ("yes", "no")

    answers = {model: answer_of(clean, model) for model in ("features", "sailor", "json")}
    assert len(set(answers.values())) == 3, answers
    assert answers["json"].lstrip().startswith("{"), answers

    capacity = wait_for("status says what fits", lambda: clean.service("features")["status"].get("capacity"))
    assert capacity["maxSequences"] >= 1
    assert capacity["kvBlocks"] * 16 * capacity["bytesPerToken"] <= 16 * 2**20
