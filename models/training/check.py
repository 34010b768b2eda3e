"""Load the model as a user would, check what we promise, and write `samples.md`."""

import argparse
import json
import math
import random
import re
from pathlib import Path

import torch
from train import evaluate, pack, read, render
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = [
    "Hello!",
    "Who are you?",
    "Tell me a story about a fox.",
    "Tell me a story about a robot called Juno who is afraid of the dark.",
    "Write a very short story about a snail.",
    "Tell me a bedtime story about an owl and a bear.",
    "Tell me a story about a busy cluster.",
    "Once upon a time",
    "What is a pod?",
    "What is a KV cache?",
    "What is a canary?",
    "Explain a warm pool to a child.",
    "How does Slipway use an adapter?",
    "What happens during a drain?",
    "What is the difference between a pod and a node?",
    "A service has 3 replicas. The KV cache is at 90 per cent and 4 requests are waiting. "
    "What should the autoscaler do?",
    "What is 7 plus 5?",
    "Count from 3 to 11.",
    "What is the opposite of hot?",
    "Which day comes after Friday?",
    "What colour do you get from blue and yellow?",
    "How do you say hello in Japanese?",
    "Write a short poem about the night.",
    "I am sad today.",
    "What do you know about quantum physics?",
]


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, sampled: bool) -> tuple[str, bool]:
    """One answer, greedy or at temperature 0.7, and whether it ended by itself."""
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    torch.manual_seed(1)
    options = {"do_sample": sampled, "temperature": 0.7 if sampled else None, "top_p": 0.95 if sampled else None}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=700, **options)[0, ids.shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True), out[-1].item() == tokenizer.eos_token_id


def endings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held: Path, count: int
) -> tuple[int, int, list[int]]:
    """How many sampled answers to held-out prompts end by themselves, and how long they are."""
    records = [json.loads(line) for line in held.read_text(encoding="utf-8").splitlines()]
    chats = [r["messages"] for r in records if "messages" in r and r["kind"] != "long"]
    chosen = random.Random(3).sample(chats, count)
    prompts = [m[: 2 if m[0]["role"] == "system" else 1] for m in chosen]
    tokenizer.padding_side = "left"
    batch = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(2)
    out = model.generate(
        **{k: batch[k] for k in ("input_ids", "attention_mask")}, do_sample=True, temperature=0.7, max_new_tokens=700
    )
    lengths, ended, broken = [], 0, 0
    for row in out[:, batch["input_ids"].shape[1] :].tolist():
        stop = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else None
        ended += stop is not None
        lengths.append(stop if stop is not None else len(row))
        broken += "\ufffd" in tokenizer.decode(row[:stop])
    return ended, broken, sorted(lengths)


def long_run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, known: set[str], banned_end: bool
) -> tuple[int, float, str]:
    """Generate 1,500 tokens and count the words that the corpus knows; `<|end|>` is ignored or banned."""
    messages = [{"role": "user", "content": "Tell me a long story about a fox."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    torch.manual_seed(5)
    options = {"min_new_tokens": 1500} if banned_end else {"eos_token_id": None}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=0.7, max_new_tokens=1500, **options
    )
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    words = re.findall(r"[^\W\d_]+", text.lower())
    return len(out[0]) - ids.shape[1], sum(w in known for w in words) / len(words), text


def quote(text: str) -> str:
    """Text as a quotation, line by line."""
    return "\n".join("> " + line if line else ">" for line in text.splitlines())


def section(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> tuple[str, list[str], list[bool]]:
    """Both answers to every prompt, as Markdown, and the answers and endings for the checks."""
    parts, found, ends = [], [], []
    for prompt in prompts:
        parts.append(f"### {prompt}\n")
        for label, sampled in [("greedy", False), ("temperature 0.7", True)]:
            text, ended = answer(model, tokenizer, prompt, sampled)
            found.append(text)
            ends.append(ended)
            parts.append(f"{label}{'' if ended else ' (cut at 700 tokens)'}:\n\n{quote(text)}\n")
    return "\n".join(parts), found, ends


def main() -> None:
    """Check everything, print the figures, write the samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("tiny"))
    parser.add_argument("--work", type=Path, default=Path("build"))
    parser.add_argument("--samples", type=Path, default=Path("samples.md"))
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    chat = [{"role": r, "content": r} for r in ("system", "user", "assistant")]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert rendered == render({"messages": chat}), rendered
    for text in ("Zoë et José 🙂 naïve Łódź こんにちは", "tab\tand\nnew line", "\u00a0\u2028 ∑ 𝔘"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text, text

    figures: dict[str, object] = {}
    heldout = pack(tokenizer, read(args.work / "heldout.jsonl"))
    figures["heldout_perplexity_bf16_weights"] = round(math.exp(evaluate(model, heldout, limit=100)), 3)
    model.eval()
    ended, broken, lengths = endings(model, tokenizer, args.work / "heldout.jsonl", 64)
    figures["ended_by_itself"] = f"{ended} of 64"
    figures["broken_utf8"] = broken
    figures["answer_tokens_median_and_longest"] = [lengths[len(lengths) // 2], lengths[-1]]
    corpus = (args.work / "train.jsonl").read_text(encoding="utf-8").replace("\\n", " ").lower()
    known = set(re.findall(r"[^\W\d_]+", corpus))
    for banned in (False, True):
        count, share, text = long_run(model, tokenizer, known, banned)
        key = "long_run_end_banned" if banned else "long_run_end_ignored"
        figures[key] = {"tokens": count, "known_words": round(share, 4), "tail": text[-160:]}

    text, _, ends = section(model, tokenizer, PROMPTS)
    figures["samples_ended"] = f"{sum(ends)} of {len(ends)}"
    parts = [
        "# Samples\n",
        "Unedited. " + NOTE + "\n",
        f"Held-out perplexity: {figures['heldout_perplexity_bf16_weights']}.\n",
        text,
    ]
    args.samples.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1, ensure_ascii=False))


NOTE = (
    "The model cannot reason, knows almost nothing of the world, mixes up names and objects in long stories, "
    "fails at sums it has rarely seen, and has no safety training: it is a test load that reads well, not an assistant."
)

if __name__ == "__main__":
    main()
