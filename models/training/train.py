"""Train the tokenizer and the model on two CPU cores, and save both in the usual layout."""

import argparse
import json
import math
import re
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
SPECIAL = [PAD, BOS, END, *ROLES]
VOCABULARY = 3072
WINDOW = 2048
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(record: dict) -> str:
    """One document as the model sees it; must agree with `TEMPLATE`, and `check.py` tests that."""
    if "text" in record:
        return f"{BOS}{record['text']}{END}"
    return BOS + "".join(f"<|{m['role']}|>{m['content']}{END}" for m in record["messages"])


def read(path: Path) -> list[str]:
    """All documents of a corpus file, rendered."""
    return [render(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is in the vocabulary, so no text is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = re.compile(r"<\|[a-z]+\|>")  # kept out, or BPE would learn pieces of them
    tokenizer.train_from_iterator((marks.sub("\n", t) for t in texts), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=ROLES,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def pack(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """All documents in one row of token ids; documents follow each other without padding."""
    ids: list[int] = []
    for start in range(0, len(texts), 2_000):
        for encoding in tokenizer.backend_tokenizer.encode_batch(
            texts[start : start + 2_000], add_special_tokens=False
        ):
            ids.extend(encoding.ids)
    return np.array(ids, dtype=np.uint16)


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Llama in its smallest useful shape: eight query heads on four key-value heads."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=512,
        max_position_embeddings=2048,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def optimizer_for(model: torch.nn.Module, decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only: norms have nothing to gain from it."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def cosine(done: float, peak: float, warmup: float = 0.03, floor: float = 0.03) -> float:
    """The learning rate after the fraction `done` of the work."""
    if done < warmup:
        return peak * max(done, 1e-4) / warmup
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))))


def loss_of(model: torch.nn.Module, window: torch.Tensor, length: int) -> torch.Tensor:
    """Mean next-token loss of a window, read in rows of `length` tokens."""
    logits = model(input_ids=window[:-1].view(-1, length), use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), window[1:])


def windows(ids: np.ndarray) -> np.ndarray:
    """Where the windows of `WINDOW` tokens start that together cover the ids once."""
    return np.arange(0, len(ids) - WINDOW, WINDOW)


def window_at(ids: np.ndarray, start: int) -> torch.Tensor:
    """A window and, for the last target, one token more."""
    return torch.from_numpy(ids[start : start + WINDOW + 1].astype(np.int64))


def evaluate(model: torch.nn.Module, ids: np.ndarray, limit: int) -> float:
    """Mean loss on held-out windows, each read in one row."""
    model.eval()
    starts = windows(ids)[:limit]
    with torch.no_grad():
        total = sum(loss_of(model, window_at(ids, start), WINDOW).item() for start in starts)
    model.train()
    return total / len(starts)


def train(model: LlamaForCausalLM, ids: np.ndarray, held: np.ndarray, args: argparse.Namespace) -> dict[str, float]:
    """One window a step. Most are cut into short rows, which is cheaper; some stay whole, so that long texts hold."""
    rng = np.random.default_rng(args.seed)
    optimizer = optimizer_for(model, decay=0.1)
    starts = windows(ids)
    rng.shuffle(starts)
    steps = min(args.tokens // WINDOW, len(starts))
    lengths = rng.choice([256, 512, WINDOW], size=steps, p=[0.6, 0.2, 0.2])
    began, losses = time.time(), []
    for step in range(min(steps, (args.stop or args.tokens) // WINDOW)):
        rate = cosine(step / steps, args.rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, window_at(ids, starts[step]), int(lengths[step]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            wall, seen = time.time() - began, (step + 1) * WINDOW
            left = wall / seen * (steps * WINDOW - seen) / 60
            print(
                f"{seen / 1e6:.2f}M tokens, loss {sum(losses[-100:]) / 100:.3f},"
                f" {seen / wall:.0f} tokens/s, {left:.1f} min left",
                flush=True,
            )
        if (step + 1) % 500 == 0:
            print(f"held-out loss {evaluate(model, held, limit=10):.3f}", flush=True)
            save_model(model, args.work / "checkpoint")
    minutes = round((time.time() - began) / 60, 1)
    final = evaluate(model, held, limit=1_000)
    return {
        "tokens_seen": len(losses) * WINDOW,
        "steps": len(losses),
        "train_loss": round(sum(losses[-100:]) / len(losses[-100:]), 4),
        "heldout_loss": round(final, 4),
        "heldout_perplexity": round(math.exp(final), 3),
        "minutes": minutes,
    }


def save_model(model: LlamaForCausalLM, out: Path) -> None:
    """Save as bf16 without touching the fp32 weights that go on training."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.config.use_cache = True
    copy.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
        max_new_tokens=512,
    )
    copy.to(torch.bfloat16).save_pretrained(out)
    model.config.use_cache = False


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; `None` removes one."""
    content = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}) | changes
    content = {key: value for key, value in sorted(content.items()) if value is not None}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save with names that older readers of this layout know too."""
    tokenizer.save_pretrained(out)
    # transformers 5 replaces the post-processor of a wrapped tokenizer, so the rule "BOS first" goes into the file.
    saved = Tokenizer.from_file(str(out / "tokenizer.json"))
    saved.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))])
    saved.save(str(out / "tokenizer.json"))
    edit(
        out / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        additional_special_tokens=ROLES,
        extra_special_tokens=None,
        backend=None,
    )
    edit(out / "special_tokens_map.json", bos_token=BOS, eos_token=END, pad_token=PAD, additional_special_tokens=ROLES)


def save_final(model: LlamaForCausalLM, out: Path) -> None:
    """The model, its config also with the names that older readers expect."""
    save_model(model, out)
    edit(out / "config.json", rope_theta=10_000.0, torch_dtype="bfloat16")


def main() -> None:
    """Tokenizer, model, training, files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build"), help="where corpus.py wrote its files")
    parser.add_argument("--out", type=Path, default=Path("tiny"))
    parser.add_argument("--tokens", type=int, default=5_000_000)
    parser.add_argument("--resume", type=Path, help="go on from this model, with its tokenizer and a fresh optimizer")
    parser.add_argument("--stop", type=int, help="stop after so many tokens, at the learning rate reached")
    parser.add_argument("--corpus", default="train.jsonl")
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    texts = read(args.work / args.corpus)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.resume) if args.resume else train_tokenizer(texts)
    save_tokenizer(tokenizer, args.out)
    ids, held = pack(tokenizer, texts), pack(tokenizer, read(args.work / "heldout.jsonl"))
    model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32) if args.resume else new_model(tokenizer)
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(ids) / 1e6:.2f}M tokens, {len(held) / 1e6:.2f}M held out, {size / 1e6:.2f}M parameters", flush=True)
    figures = train(model, ids, held, args)
    figures |= {"corpus_tokens": len(ids), "parameters": size}
    save_final(model, args.out)
    (args.work / f"figures-{args.out.name}.json").write_text(json.dumps(figures, indent=1))
    print(figures)


if __name__ == "__main__":
    main()
