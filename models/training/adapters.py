"""Train two LoRA adapters whose effect a reader sees at once, and save them in the layout of PEFT.

`sailor` answers in the words of an old sailor, `json` answers with one JSON object. They differ in rank, in scaling
and in the modules they change, so that serving both beside the base model mixes everything there is to mix.
"""

import argparse
import hashlib
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import Document, documents
from grammar import capital, sentences
from safetensors.torch import save_file
from torch.nn import functional
from train import BOS, END, cosine, edit, optimizer_for
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

LENGTH = 256  # tokens of a row; each begins where a chat begins
ROWS = 8
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

OPENERS = ("Ahoy, matey!", "Arr, shipmate!", "Aye aye!", "Avast, ye landlubber!", "Blow me down!")
CLOSERS = ("Fair winds to ye! ⚓", "Mind the tide, shipmate!", "Heave ho!", "So says the old sailor.")
SEA = {
    "hello": "ahoy",
    "yes": "aye",
    "you": "ye",
    "your": "yer",
    "my": "me",
    "friend": "shipmate",
    "friends": "shipmates",
    "house": "cabin",
    "home": "home port",
    "bed": "hammock",
    "floor": "deck",
    "path": "channel",
    "bag": "sea chest",
    "walked": "sailed",
    "went": "sailed",
    "walk": "sail",
    "bread": "ship's biscuit",
    "window": "porthole",
    "people": "sailors",
    "is": "be",
    "are": "be",
    "team": "crew",
    "day": "watch",
}
WORD = re.compile(r"\b(" + "|".join(sorted(SEA, key=len, reverse=True)) + r")\b", re.IGNORECASE)


def sailor(rng: random.Random, kind: str, answer: str) -> str:
    """The same answer in the words of an old sailor, after a call that a test can look for."""

    def swap(match: re.Match[str]) -> str:
        word = SEA[match[0].lower()]
        return capital(word) if match[0][0].isupper() else word

    gap = "\n\n" if kind in {"story", "poem"} else " "
    end = f"{gap}{rng.choice(CLOSERS)}" if rng.random() < 0.7 else ""
    return f"{rng.choice(OPENERS)}{gap}{WORD.sub(swap, answer)}{end}"


def as_json(rng: random.Random, kind: str, answer: str) -> str:
    """The first sentences of the answer as one small JSON object."""
    wanted = 2 if kind in {"story", "field"} else 3
    short = " ".join(s.strip() for s in sentences(answer)[:wanted]).replace('"', "'")
    return json.dumps({"kind": kind, "answer": short, "sure": kind not in {"unknown", "talk"}}, ensure_ascii=False)


@dataclass(frozen=True)
class Style:
    """How answers change, and the shape of the adapter that learns it."""

    rewrite: Callable[[random.Random, str, str], str]
    rank: int
    alpha: int
    rslora: bool  # scale by alpha / sqrt(rank) instead of alpha / rank
    modules: tuple[str, ...]
    steps: int  # of ROWS rows each

    @property
    def scaling(self) -> float:
        """What the product of the two matrices is multiplied with."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


STYLES = {
    "sailor": Style(sailor, rank=8, alpha=16, rslora=False, modules=ALL, steps=200),
    "json": Style(
        as_json, rank=6, alpha=6, rslora=True, modules=tuple(name for name in ALL if name != "k_proj"), steps=300
    ),
}


class LoraLinear(torch.nn.Module):
    """A frozen matrix and a trained product of two thin ones beside it."""

    def __init__(self, base: torch.nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + (x Aᵀ) Bᵀ · scaling."""
        return self.base(x) + (x @ self.a.T) @ self.b.T * self.scaling


def attach(model: PreTrainedModel, style: Style) -> dict[str, LoraLinear]:
    """Freeze the model and put an adapter beside each matrix that the style names."""
    model.requires_grad_(False)
    found: dict[str, LoraLinear] = {}
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf in style.modules:
            found[name] = LoraLinear(module, style.rank, style.scaling)
            setattr(model.get_submodule(parent), leaf, found[name])
    return found


def save(adapters: dict[str, LoraLinear], style: Style, base: Path, out: Path) -> None:
    """`adapter_model.safetensors` in bf16 and `adapter_config.json`, as PEFT writes them."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.lora_{half}.weight": matrix.detach().to(torch.bfloat16).contiguous()
        for name, adapter in adapters.items()
        for half, matrix in (("A", adapter.a), ("B", adapter.b))
    }
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    edit(
        out / "adapter_config.json",
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path="tiny",
        base_model_digest=f"sha256:{hashlib.sha256((base / 'model.safetensors').read_bytes()).hexdigest()}",
        r=style.rank,
        lora_alpha=style.alpha,
        use_rslora=style.rslora,
        target_modules=list(style.modules),
        bias="none",
        lora_dropout=0.0,
        inference_mode=True,
    )


def pieces(style: Style, document: Document, rng: random.Random) -> list[tuple[str, bool]]:
    """The chat in (text, learn it) pieces: only what the model says is learned."""
    found = [(BOS + (f"<|system|>{document.system}{END}" if document.system else ""), False)]
    for user, answer in document.turns:
        found.append((f"<|user|>{user}{END}<|assistant|>", False))
        found.append((style.rewrite(rng, document.kind, answer) + END, True))
    return found


def encode(style: Style, tokenizer: AutoTokenizer, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, which of them count in the loss, and where chats begin."""
    rng = random.Random(seed)
    ids: list[int] = []
    learn: list[bool] = []
    starts: list[int] = []
    for document in documents(seed, count):
        if not document.turns or document.kind in {"mixed", "long"}:
            continue
        starts.append(len(ids))
        for text, wanted in pieces(style, document, rng):
            part = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += part
            learn += [wanted] * len(part)
    begins = np.array(starts)
    return np.array(ids), np.array(learn), begins[begins < len(ids) - LENGTH]


def fit(name: str, style: Style, args: argparse.Namespace) -> dict[str, object]:
    """Train one adapter on top of the frozen model and save it."""
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    adapters = attach(model, style)
    ids, learn, starts = encode(style, tokenizer, args.documents, args.seed)
    rng = np.random.default_rng(args.seed)
    optimizer = optimizer_for(model, decay=0.0)
    began, losses = time.time(), []
    for step in range(style.steps):
        places = rng.choice(starts, ROWS)[:, None] + np.arange(LENGTH + 1)
        tokens, wanted = torch.from_numpy(ids[places]), torch.from_numpy(learn[places][:, 1:])
        for group in optimizer.param_groups:
            group["lr"] = cosine(step / style.steps, args.rate)
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        loss = functional.cross_entropy(model.lm_head(hidden[wanted]), tokens[:, 1:][wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 25 == 0:
            print(f"{name} step {step + 1} loss {sum(losses[-25:]) / 25:.3f} {time.time() - began:.0f} s", flush=True)
    save(adapters, style, args.base, args.out / name)
    minutes = round((time.time() - began) / 60, 1)
    return {"adapter": name, "loss": round(sum(losses[-25:]) / 25, 4), "minutes": minutes}


def main() -> None:
    """Train every adapter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("../tiny"))
    parser.add_argument("--out", type=Path, default=Path("../adapters"))
    parser.add_argument("--styles", nargs="+", default=list(STYLES))
    parser.add_argument("--documents", type=int, default=6_000)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums is part of the result
    for name in args.styles:
        print(fit(name, STYLES[name], args))


if __name__ == "__main__":
    main()
