"""The driver of llama.cpp: its Python binding, with batches of several sequences through `llama_decode`.

Runs inside its own environment. The checkpoint becomes GGUF once: F32, BF16 or Q8_0. Random weights need no care about
how heads are permuted; speed is the same.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gguf
import llama_cpp
import numpy as np

from bench.peers.waves import Wave, main

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}
BATCH = 512


def open_engine(task: dict[str, Any]) -> Wave:
    """Load the GGUF and hand out a function that runs one wave."""
    weights = "int8" if task["weights"] == "int8" else task.get("dtype", "f32").replace("fp32", "f32")
    path = _gguf(Path(task["checkpoint"]), weights)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model, "the GGUF did not load"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = (task["prompt_tokens"] + task["max_tokens"] + 32) * task["concurrency"]
    params.n_batch = params.n_ubatch = BATCH
    params.n_seq_max = task["concurrency"]
    params.n_threads = params.n_threads_batch = task["threads"]
    params.kv_unified = False  # llama.h: the better choice for sequences that share no long prefix, as here
    task["settings"] = f"llama-cpp-python {llama_cpp.__version__}, {weights}, kv_unified off, n_batch {BATCH}"
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, "no context"
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def decode(entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, wants logits) …; the drawn tokens of those that want one, in order."""
        batch.n_tokens = len(entries)
        for place, (token, position, sequence, wants) in enumerate(entries):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = wants
        code = llama_cpp.llama_decode(context, batch)
        assert code == 0, f"llama_decode said {code}"
        drawn = []
        for place, (_, _, _, wants) in enumerate(entries):
            if wants:
                logits = llama_cpp.llama_get_logits_ith(context, place)
                drawn.append(int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax()))
        return drawn

    def wave(prompts: Sequence[list[int]], max_tokens: int, tick: Callable[[int], None]) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        pending = [
            (token, position, index, position == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for start in range(0, len(pending), BATCH):
            entries = pending[start : start + BATCH]
            for sequence, token in zip([e[2] for e in entries if e[3]], decode(entries), strict=True):
                last[sequence] = token
                tick(sequence)
        for step in range(max_tokens - 1):
            tokens = decode([(last[i], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)])
            for index, token in enumerate(tokens):
                last[index] = token
                tick(index)

    return wave


def _gguf(checkpoint: Path, weights: str) -> Path:
    path = checkpoint / f"{weights}.gguf"
    if path.exists():
        return path
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(checkpoint / "unfinished.gguf", architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for name, values in _tensors(checkpoint / "model.safetensors"):
        kind = TYPES[weights] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        stem, _, suffix = name.rpartition(".")
        packed = values if kind == TYPES["f32"] else gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (checkpoint / "unfinished.gguf").rename(path)
    return path


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Name and float32 values of each bfloat16 tensor: numpy has no bfloat16, but it is the upper half of a float32."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            halves = np.frombuffer(data[start + first : start + last], np.uint16)
            yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(tensor["shape"])


if __name__ == "__main__":
    main(open_engine)
