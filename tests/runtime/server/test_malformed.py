"""Whatever arrives, the answer is a 4xx in OpenAI's shape, small, without a word of what came; and the server lives."""

import json
import resource
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipway_runtime.server.bodies import MAX_CONTAINERS, parse_json
from slipway_runtime.server.errors import ApiError
from tests.runtime.server.serving import Running, a_replica

in_the_loop = pytest.mark.asyncio(loop_scope="module")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORD = "SECRETWORD"
MESSAGES = [{"role": "user", "content": WORD}]
HUGE = "9" * 4000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica(max_body_bytes=12 * 2**20, adapter_endpoints=True) as running:
        yield running


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES} | fields).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": WORD} | fields).encode()


def with_message(**message: Any) -> bytes:
    return chat(messages=[message])


def with_tool(**function: Any) -> bytes:
    return chat(tools=[{"type": "function", "function": function}], tool_choice="required")


KINDS: dict[str, tuple[str, bytes]] = {
    # what is no JSON, or no request
    "nothing": (CHAT, b""),
    "white space": (CHAT, b"  \n "),
    "no json": (CHAT, f"{{not {WORD}".encode()),
    "truncated": (CHAT, chat()[:-7]),
    "truncated in a string": (CHAT, b'{"messages": [{"role": "user", "content": "' + WORD.encode()),
    "two values": (CHAT, chat() + chat()),
    "a list": (CHAT, b"[" + chat() + b"]"),
    "a string": (CHAT, json.dumps(WORD).encode()),
    "null": (CHAT, b"null"),
    "a number": (CHAT, b"17"),
    "invalid utf-8": (CHAT, chat().replace(b"SECRETWORD", b"\xff\xfe\xfd")),
    "utf-16": (CHAT, chat().decode().encode("utf-16")),
    "a byte order mark": (CHAT, b"\xef\xbb\xbf" + chat()),
    "deep lists": (CHAT, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": (CHAT, b'{"metadata": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}"),
    "deep and open": (CHAT, b'{"messages": ' + b"[" * 1_000_000),
    "many small things": (CHAT, b'{"messages": [' + b"[]," * (MAX_CONTAINERS + 1) + b"[]]}"),
    "a key twice": (CHAT, b'{"model": "tiny", "model": "other", "messages": []}'),
    "a key twice inside": (CHAT, b'{"messages": [{"role": "user", "role": "system", "content": "x"}]}'),
    "nan": (CHAT, chat(temperature=0.5).replace(b"0.5", b"NaN")),
    "infinity": (CHAT, chat(temperature=0.5).replace(b"0.5", b"-Infinity")),
    "a huge float": (CHAT, chat(temperature=0.5).replace(b"0.5", b"1e999")),
    "a huge integer": (CHAT, chat(max_tokens=7).replace(b"7", HUGE.encode())),
    "an unspeakable integer": (CHAT, chat(max_tokens=7).replace(b"7", HUGE.encode() * 10)),
    "a huge id": (CHAT, chat(stop_token_ids=[7]).replace(b"7", HUGE.encode())),
    "control characters": (CHAT, chat().replace(b"SECRETWORD", b"SECRET\x00\x01WORD")),
    "half a surrogate": (TEXT, b'{"prompt": "\\ud83d"}'),
    "ten megabytes of prompt": (TEXT, text(prompt="word " * 2_000_000)),
    "ten megabytes of nothing": (TEXT, b" " * 10 * 2**20),
    "a million ids": (TEXT, text(prompt=[5] * 1_000_000)),
    "beyond the limit": (TEXT, text(prompt="w" * 13 * 2**20)),
    # fields
    "a temperature too high": (CHAT, chat(temperature=2.5)),
    "a temperature that is text": (CHAT, chat(temperature=WORD)),
    "a temperature that is a list": (CHAT, chat(temperature=[1])),
    "a top_p of none": (CHAT, chat(top_p=0)),
    "no tokens": (CHAT, chat(max_tokens=0)),
    "negative tokens": (CHAT, chat(max_tokens=-1)),
    "tokens that are true": (CHAT, chat(max_tokens=True)),
    "half a token": (CHAT, chat(max_tokens=1.5)),
    "tokens beyond the context": (CHAT, chat(max_tokens=10**6)),
    "no answers": (CHAT, chat(n=0)),
    "too many answers": (CHAT, chat(n=10**9)),
    "a seed of 65 bits": (CHAT, chat(seed=2**64)),
    "seventeen stops": (CHAT, chat(stop=[WORD] * 17)),
    "an empty stop": (CHAT, chat(stop=[""])),
    "a bias that is nan": (CHAT, chat(logit_bias={"5": 0.5}).replace(b"0.5", b"NaN")),
    "a bias that is too large": (CHAT, chat(logit_bias={"5": 1000})),
    "a bias for no token": (CHAT, chat(logit_bias={WORD: 1})),
    "a bias beyond the vocabulary": (CHAT, chat(logit_bias={"99999": 1})),
    "a bias for half a digit": (CHAT, chat(logit_bias={"\u0665": 1})),
    "logprobs without their switch": (CHAT, chat(top_logprobs=2)),
    "too many logprobs": (TEXT, text(logprobs=21)),
    "scoring without an echo": (TEXT, text(max_tokens=0)),
    "stream options without a stream": (CHAT, chat(stream_options={"include_usage": True})),
    "a forged continuation": (CHAT, chat(slipway_resume={"answers": [{"output_token_ids": [1]}]})),
    # messages
    "no messages": (CHAT, chat(messages=[])),
    "messages that are text": (CHAT, chat(messages=WORD)),
    "an unknown role": (CHAT, with_message(role="wizard", content=WORD)),
    "no role": (CHAT, with_message(content=WORD)),
    "content of an unknown kind": (CHAT, with_message(role="user", content=[{"type": "image_url", "image_url": WORD}])),
    "content that is a number": (CHAT, with_message(role="user", content=5)),
    "a user who calls": (CHAT, with_message(role="user", content="x", tool_calls=[{"function": {"name": "f"}}])),
    # prompts
    "no prompt": (TEXT, b"{}"),
    "an empty list of prompts": (TEXT, text(prompt=[])),
    "mixed prompts": (TEXT, text(prompt=["a", 5])),
    "an id beyond the vocabulary": (TEXT, text(prompt=[99999])),
    "a negative id": (TEXT, text(prompt=[-1])),
    "too many prompts": (TEXT, text(prompt=["a"] * 1000)),
    # tools and grammars
    "a tool without a name": (CHAT, with_tool(description=WORD)),
    "a tool with a strange name": (CHAT, with_tool(name="../x")),
    "a tool with bad parameters": (CHAT, with_tool(name="f", parameters={"type": "object", "properties": WORD})),
    "a tool of another type": (CHAT, chat(tools=[{"type": "browser"}])),
    "a choice without tools": (CHAT, chat(tool_choice="required")),
    "a bad regex": (CHAT, chat(structured_outputs={"regex": "(unclosed"})),
    "a bad grammar": (CHAT, chat(structured_outputs={"grammar": "start: nobody"})),
    "a schema that is no schema": (CHAT, chat(structured_outputs={"json": {"type": "wizard"}})),
    "a schema too large": (CHAT, chat(structured_outputs={"json": {"enum": [WORD + str(i) for i in range(9999)]}})),
    # the other endpoints
    "tokenize nothing": ("/tokenize", b"{}"),
    "detokenize text": ("/detokenize", json.dumps({"tokens": WORD}).encode()),
    "detokenize beyond": ("/detokenize", b'{"tokens": [123456789]}'),
    "an adapter without a name": ("/v1/load_lora_adapter", b'{"lora_path": "/x"}'),
    "an adapter that climbs": ("/v1/load_lora_adapter", b'{"lora_name": "../x", "lora_path": "/x"}'),
    "an adapter from anywhere": ("/v1/load_lora_adapter", b'{"lora_name": "x", "lora_path": "/etc/passwd"}'),
    "an adapter that is not there": ("/v1/unload_lora_adapter", b'{"lora_name": "x"}'),
    "an unknown path": ("/v1/nothing", chat()),
    "an unknown path with a secret": (f"/v1/{WORD}", chat()),
}


def new_peak() -> int:
    """The most memory this process had, in KiB, from now on: what earlier tests had is forgotten."""
    Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize("kind", KINDS)
@in_the_loop
async def test_a_malformed_request_is_answered_and_survived(replica: Running, kind: str):
    path, body = KINDS[kind]
    before = replica.client.stats().admitted
    memory = new_peak()

    response = await replica.http.post(
        f"{replica.url}{path}", content=body, headers={"content-type": "application/json"}
    )

    assert 400 <= response.status_code < 500, response.text[:300]
    error = response.json()["error"]
    assert set(error) - {"reason"} == {"message", "type", "param", "code"}  # reason: of adapters alone
    assert error["code"] == response.status_code
    assert len(response.content) < 1000
    assert WORD.lower() not in response.text.lower()
    assert replica.client.stats().admitted == before, "nothing reaches the engine"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 400 * 1024, f"{grown} KiB for a body of {len(body)} bytes"


@in_the_loop
async def test_wrong_content_types_and_methods_are_answered_alike(replica: Running):
    url = f"{replica.url}{CHAT}"
    for kind in ("text/plain", "application/xml", "multipart/form-data; boundary=x", ""):
        response = await replica.http.post(url, content=chat(), headers={"content-type": kind})
        assert response.status_code == 400
        assert "application/json" in response.json()["error"]["message"]
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        response = await replica.http.request(method, url)
        assert response.status_code == 405
        assert response.json()["error"]["code"] == 405


@in_the_loop
async def test_after_all_of_that_a_good_request_is_answered(replica: Running):
    answer = await replica.chat("Hello!", max_tokens=4)

    assert answer.status_code == 200
    assert len(KINDS) >= 60


@pytest.mark.capability("API-11")
@in_the_loop
async def test_a_small_prompt_does_not_wait_for_large_ones(replica: Running):
    """The threads for large prompts are all taken, and a small one is tokenized beside them."""
    large = replica.models[0].prompts._large

    resume_steps = threading.Event()
    held = [large.submit(resume_steps.wait, 30) for _ in range(8)]
    try:
        small = await replica.chat("Hello!", max_tokens=2)
    finally:
        resume_steps.set()

    assert small.status_code == 200
    assert not any(future.done() and future.exception() for future in held)


def test_numbers_and_text_that_are_json_are_read_exactly():
    body = '{"a": [1, -2.5e3, true, null], "b": "\\u00e9\\"[{", "c": {"d": {}}}'

    assert parse_json(body.encode()) == json.loads(body)


@pytest.mark.parametrize("body", ['{"a": 1, "a": 1}', "[NaN]", "[" * 65 + "]" * 65, '"\\', "", "{'a': 1}", "[1,]"])
def test_what_python_takes_and_json_does_not_is_refused(body: str):
    with pytest.raises(ApiError) as refusal:
        parse_json(body.encode())

    assert refusal.value.status == 400
