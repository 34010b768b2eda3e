"""A process that was started without a model serves the one that POST /model brings."""

import httpx

from slipway_api.runtime_api import ModelInfo, ModelSpec
from tests.runtime.processes import TINY, serving_here

SPEC = ModelSpec(
    uri=f"file://{TINY}",
    served_name="chat",
    revision="rev7",
    kv_cache_bytes="16Mi",
    max_num_seqs=4,
    max_model_len=512,
    sampling_defaults={"temperature": 0.0, "max_tokens": 3},
)


async def test_a_process_without_a_model_loads_the_one_that_is_asked_for_and_no_other():
    async with serving_here(model=None) as replica, httpx.AsyncClient(timeout=120) as http:
        ready = await http.get(f"{replica.admin_url}/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "NoModel")
        assert (await http.get(f"{replica.admin_url}/health")).status_code == 200
        assert (await http.get(f"{replica.url}/v1/models")).status_code == 503
        for senseless in ({}, {"uri": "file:///x", "dtype": "int4"}, {"uri": "file:///x", "kvCacheBytes": "x"}):
            refused = await http.post(f"{replica.admin_url}/model", json=senseless)
            assert refused.status_code == 400, "and it still waits for a model"

        asked = await http.post(f"{replica.admin_url}/model", content=SPEC.wire())
        assert asked.status_code == 202
        assert ModelInfo.model_validate_json(asked.content).served_name == "chat"
        await replica.ready()

        again = await http.post(f"{replica.admin_url}/model", content=SPEC.wire())
        assert (again.status_code, again.json()["loaded"]) == (200, True)
        other = SPEC.model_copy(update={"max_model_len": 1024, "chat_template": "secret"})
        refused = await http.post(f"{replica.admin_url}/model", content=other.wire())
        assert refused.status_code == 409
        assert "it differs in chat_template, max_model_len" in refused.text
        assert "secret" not in refused.text

        (card, *_) = (await http.get(f"{replica.url}/v1/models")).json()["data"]
        assert (card["id"], card["revision"], card["max_model_len"]) == ("chat", "rev7", 512)
        answer = await http.post(f"{replica.url}/v1/completions", json={"model": "chat", "prompt": "The sea"})
        assert answer.status_code == 200
        assert answer.headers["x-slipway-revision"] == "rev7"


async def test_a_process_that_never_gets_a_model_ends_on_sigterm():
    async with serving_here(model=None) as replica:
        replica.terminate()
        assert await replica.ended() == 0
