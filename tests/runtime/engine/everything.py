"""A random model with a tokenizer and two adapters, and an engine of it with every feature there is."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.grammar import GrammarCompiler
from slipway_runtime.messages import Grammar, LoadAdapter, Output
from slipway_runtime.models.adapter_weights import adapter_digest
from tests.runtime.adapter_folders import an_adapter
from tests.runtime.checkpoints import a_checkpoint

TINY = Path(__file__).parents[3] / "models" / "tiny"
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"glad": {"type": "boolean"}, "kind": {"enum": ["cat", "dog", "fox"]}},
    "required": ["glad", "kind"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
COMPILER = GrammarCompiler((TINY / "tokenizer.json").read_text(), eos_token_ids=(EOS,))
# JSON has room for spaces, and a random model would fill it.
NO_SPACES = tuple((t, -100.0) for t in range(3, 3072) if not COMPILER.vocabulary.decode_str([t]).strip())


class Model(NamedTuple):
    path: Path
    adapters: tuple[Path, ...]


def a_model(folder: Path) -> Model:
    """Write all of it into the folder."""
    oracle = a_checkpoint(folder / "model", vocab_size=3072)
    shutil.copy(TINY / "tokenizer.json", folder / "model")
    adapters = (
        an_adapter(folder / "a", oracle, rank=8, alpha=12, seed=1),
        an_adapter(folder / "b", oracle, rank=3, alpha=4, modules=("q_proj", "v_proj", "up_proj"), seed=2),
    )
    return Model(folder / "model", adapters)


class Served:
    """An engine with its adapters, and what came out of it."""

    def __init__(self, model: Model, **settings: object) -> None:
        sizes = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 96}
        self.engine: Engine = build_engine(model.path, **(sizes | settings))
        self.digests = [""]
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        if self.engine.facts.max_adapters:
            for folder in model.adapters:
                self.digests.append(adapter_digest(folder))
                self.engine.control(LoadAdapter(call=1, digest=self.digests[-1], path=str(folder)), 0.0)
                while not any(reply.call == 1 and not reply.error for reply in self.engine.step(0.0).replies):
                    pass

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                self.engine.idle()
                return
            for output in self.engine.step(0.0).outputs:
                told = self.outputs.setdefault((output.request_id, output.index), [])
                assert not told or told[-1].finish_reason is None, "nothing comes after the end"
                told.append(output)
        raise AssertionError("still at work")

    def tokens(self, id: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs[id, index] for token in output.token_ids]
