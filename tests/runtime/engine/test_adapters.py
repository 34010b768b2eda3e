"""Adapters through the whole engine: read, queued for, given a slot, computed beside others, and gone again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.decide import decide
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.messages import FinishReason, LoadAdapter, Output, Reply, Request, SamplingParams, UnloadAdapter
from slipway_runtime.models.adapter_weights import adapter_digest, slot_bytes
from slipway_runtime.scheduling.block_pool import BlockPool
from tests.runtime.adapter_folders import ATTENTION, an_adapter, merged
from tests.runtime.checkpoints import a_checkpoint, greedy

REPOSITORY = Path(__file__).parents[3]
TINY, ADAPTERS = REPOSITORY / "models" / "tiny", REPOSITORY / "models" / "adapters"
SHARED = [11, 30, 7, 60, 22, 9, 41, 5] * 5  # two blocks that everybody's prompt begins with


class Served:
    """An engine and what came out of it."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.engine: Engine = build_engine(path, **{"kv_cache_bytes": 4 << 20, "max_num_seqs": 6, **settings})
        self.texts: dict[str, list[int]] = {}
        self.last: dict[str, Output] = {}
        self.replies: list[Reply] = []

    def load(self, folder: Path) -> str:
        digest = adapter_digest(folder)
        self.engine.control(LoadAdapter(call=1, digest=digest, path=str(folder)), 0.0)
        self.until(lambda: bool(self.replies))
        assert self.replies.pop().error == ""
        return digest

    def ask(self, id: str, prompt: list[int], adapter: str = "", max_tokens: int = 16, **params: object) -> None:
        chosen = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})
        self.engine.add(
            Request(id=id, prompt_token_ids=tuple(prompt), params=chosen, arrived=0.0, adapter=adapter), 0.0
        )

    def until(self, done: object) -> None:
        for _ in range(200_000):  # a file is read on a thread of its own: meanwhile steps are empty
            report = self.engine.step(0.0)
            self.replies += report.replies
            for output in report.outputs:
                self.texts.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.last[output.request_id] = output
            if done():
                return
        raise AssertionError("it never came")

    def finish(self, count: int) -> None:
        self.until(lambda: len(self.last) == count)
        self.engine.idle()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel, dict[str, Path]]:
    path = tmp_path_factory.mktemp("base")
    model = a_checkpoint(path / "model")
    folders = {
        "a": an_adapter(path / "a", model, rank=4, alpha=6, seed=1),
        "b": an_adapter(
            path / "b", model, rank=8, alpha=3, rslora=True, modules=("q_proj", "v_proj", "up_proj"), seed=2
        ),
        "c": an_adapter(path / "c", model, rank=1, alpha=2, modules=ATTENTION[1:], seed=3),
    }
    return path / "model", model, folders


@pytest.mark.capability("ML-1", "ML-5", "KV-3")
@pytest.mark.parametrize("max_adapters", [1, 2, 3])
def test_each_request_gets_the_text_of_its_merged_model_whatever_shares_the_batch(max_adapters, base):
    path, model, folders = base
    served = Served(path, max_adapters=max_adapters, max_cpu_adapters=4, max_rank=8, max_num_batched_tokens=48)
    digests = {"": ""} | {name: served.load(folder) for name, folder in folders.items()}
    models = {"": model} | {name: merged(model, folder) for name, folder in folders.items()}
    prompts = {f"{turn}{name}": (name, [*SHARED, 3 + turn]) for turn in range(3) for name in ("a", "", "b", "c")}
    for id, (name, prompt) in prompts.items():
        served.ask(id, prompt, digests[name])
    served.finish(len(prompts))
    assert served.texts == {id: greedy(models[name], prompt, 16) for id, (name, prompt) in prompts.items()}
    assert served.engine.stats(0.0).prefix_hits > 0  # the same prompt under the same adapter, and only there
    assert served.engine.stats(0.0).invalid_kv_blocks == 0


@pytest.mark.capability("ML-9")
def test_a_new_version_serves_beside_the_old_one_until_that_one_is_unloaded(base, tmp_path):
    path, model, folders = base
    served = Served(path, max_adapters=2, max_cpu_adapters=2, max_rank=8)
    newer = an_adapter(tmp_path / "newer", model, rank=4, alpha=6, seed=9)
    old, new = served.load(folders["a"]), served.load(newer)
    served.ask("old", SHARED, old, max_tokens=30)
    served.until(lambda: "old" in served.texts)
    served.engine.control(UnloadAdapter(call=7, digest=old), 0.0)
    served.ask("new", SHARED, new)
    served.ask("late", SHARED, old)
    served.finish(3)
    served.until(lambda: bool(served.replies))
    assert served.replies == [Reply(call=7)]
    assert served.texts["old"] == greedy(merged(model, folders["a"]), SHARED, 30)
    assert served.texts["new"] == greedy(merged(model, newer), SHARED, 16)
    assert served.last["late"].finish_reason is FinishReason.ERROR


@pytest.mark.capability("ML-4")
def test_an_adapter_that_cannot_be_read_harms_nobody(base, tmp_path):
    path, model, folders = base
    served = Served(path, max_adapters=2, max_cpu_adapters=2, max_rank=8)
    good = served.load(folders["a"])
    broken = an_adapter(tmp_path / "broken", model, rank=16)
    served.ask("running", SHARED, good)
    served.engine.control(LoadAdapter(call=3, digest=adapter_digest(broken), path=str(broken)), 0.0)
    served.ask("waiting", SHARED, adapter_digest(broken))
    served.finish(2)
    served.until(lambda: bool(served.replies))
    assert served.replies == [Reply(call=3, error="the adapter's rank is 16; this engine takes adapters up to 8")]
    assert served.texts["running"] == greedy(merged(model, folders["a"]), SHARED, 16)
    assert served.last["waiting"].finish_reason is FinishReason.ERROR


@pytest.fixture(scope="module")
def sailor_and_json() -> tuple[Served, dict[str, str]]:
    served = Served(TINY, max_adapters=2, max_cpu_adapters=2, max_rank=8)
    return served, {"": ""} | {name: served.load(ADAPTERS / name) for name in ("sailor", "json")}


@pytest.mark.capability("ML-1")
@pytest.mark.parametrize(
    "question", ["What is a pod?", "Tell me a story about a fox.", "Hello! How are you?", "What is a canary?"]
)
def test_the_embedded_adapters_change_what_a_reader_sees(question, sailor_and_json):
    from tokenizers import Tokenizer

    served, digests = sailor_and_json
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    prompt = tokenizer.encode(f"<|bos|><|user|>{question}<|end|><|assistant|>", add_special_tokens=False).ids
    served.texts, served.last = {}, {}
    for name, digest in digests.items():
        served.ask(name, prompt, digest, max_tokens=160, ignore_eos=False)
    served.finish(3)
    text = {name: tokenizer.decode(tokens) for name, tokens in served.texts.items()}
    assert text["sailor"].startswith(("Ahoy, matey!", "Arr, shipmate!", "Aye aye!", "Avast, ye", "Blow me down!"))
    answer = json.loads(text["json"])
    assert list(answer) == ["kind", "answer", "sure"]
    assert answer["answer"]
    assert text[""]
    assert not text[""].startswith(("{", text["sailor"].split("!")[0]))


def test_the_embedded_adapters_name_the_model_they_were_made_for():
    from slipway_runtime.models.adapter_files import read_adapter_config
    from slipway_runtime.storage.fetch import weights_digest

    for name in ("sailor", "json"):
        assert read_adapter_config(ADAPTERS / name).base_digest == weights_digest(TINY)


@pytest.mark.capability("ML-1")
@pytest.mark.parametrize("rank", [3, 8, 13])
def test_as_many_adapters_as_were_asked_for_stay_in_memory_at_the_largest_rank(rank):
    plan = decide(TINY, EngineOptions(max_adapters=2, max_cpu_adapters=9, max_rank=rank, device="cpu"))
    size = slot_bytes(plan.config, rank, plan.dtype.itemsize)
    for block_bytes in (size - 1, size // 3, size // 2 + 7, size * 2):  # the last block that one pays for is not full
        residency = plan.residency(BlockPool(200, 16), block_bytes)
        assert residency is not None
        for number in range(9):
            residency.register(f"adapter-{number}")
            residency.note_loaded(f"adapter-{number}", num_bytes=size, rank=rank)
        assert residency.take_dropped() == ()


def test_the_thread_that_reads_adapters_does_not_end_while_the_interpreter_does(base):
    """It holds the model: were it to free tensors then, the process would abort instead of ending with its status."""
    path, _, folders = base
    code = """
import atexit, sys, threading, time

def tell():  # registered first, so it runs last
    time.sleep(0.5)
    print([one.name for one in threading.enumerate()])

atexit.register(tell)
from pathlib import Path
from tests.runtime.engine.test_adapters import Served

served = Served(Path(sys.argv[1]), max_adapters=1, max_rank=8)
served.load(Path(sys.argv[2]))
sys.exit(3)
"""
    command = [sys.executable, "-c", code, path, folders["a"]]
    ended = subprocess.run(command, cwd=REPOSITORY, timeout=120, capture_output=True, text=True)

    assert ended.returncode == 3, ended.stderr
    assert "adapters" in ended.stdout
