"""The roofline of a step on paper: `python -m bench.gpu --plan MODEL CARD [--weights int8] [--kv fp8]`.

Bytes, operations, launches and copies are those that the runtime's own code asks of a GPU (`bench.gpu_steps`); nothing
is timed. The time of a launch is the longest of its bytes over the bandwidth, its operations over the peak, and a
launch; bandwidth and peak are reduced to what kernels of that kind are assumed to reach, by the table below. The last
column of the table says where most of a step's time goes. A model that one card does not hold is planned as a rank of
several (`RANKS`). Rows of a mixture of experts are taken to choose experts by chance. The roofline is what the
step cannot avoid (weights and KV once, its products; no activations) at the full bandwidth and peak of the card.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.fake_gpu import Operation, Record
from bench.figures import Figure, Section
from bench.gpu_models import CONFIGS, PUBLISHED, RANKS
from bench.gpu_steps import GREEDY, SAMPLED, a_machine
from slipway_runtime.kernels.attention_plan import MAX_SPLITS, SPLIT, num_splits
from slipway_runtime.models.config import parse_config


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: without sparsity, SXM."""

    bandwidth: float  # bytes a second
    peak: float  # operations a second in bf16
    multiprocessors: int
    memory: float  # bytes
    link: float = 0.0  # bytes a second to the other cards of a machine, in one direction; 0: not known


CARDS = {
    "A100": Card(2.04e12, 312e12, 108, 80e9, 300e9),
    "H100": Card(3.35e12, 989e12, 132, 80e9, 450e9),
    "H200": Card(4.8e12, 989e12, 132, 141e9, 450e9),
    "B200": Card(8.0e12, 2250e12, 148, 180e9, 900e9),
}
REPORTED, AIM = ("H100", "H200", "B200"), 0.75  # of the roofline
CONTEXTS, BATCHES, PROMPTS = (1024, 8192, 32_768), (1, 32, 256), (2048, 8192)
# Shares of the data sheet's bandwidth and peak that kernels reach when they fill the card. Measured on an H100 SXM on
# 2026-11-27 (torch 2.11, Triton 3.6), where a copy reaches 0.90 of the bandwidth; for other cards they are assumed.
PRODUCTS, DECODE, EXTEND, ELEMENTWISE = (0.80, 0.80), (0.79, 0.47), (0.79, 0.47), (0.80, 1.0)
CODES = (0.38, 0.50)  # products that take their weights' codes apart: int8, 32 rows; the peak is assumed
SHARES = {
    "linear": PRODUCTS, "mm": PRODUCTS, "addmm": PRODUCTS, "_scaled_mm": PRODUCTS, "_times_codes": CODES,
    "_times_int4": CODES, "_decode": DECODE, "_extend": EXTEND, "_extend_in_order": EXTEND, "_grouped": CODES,
}  # fmt: skip
PROGRAM_SHARE = 2.5  # of the card's bandwidth by its multiprocessors, that one of them can draw alone
# Seconds of a launch: the gap between two kernels, and the host's call. A prompt of 2,048 tokens of Qwen3-0.6B took
# 12 ms with 6.9 ms of work on the device, for 260 launches.
IN_GRAPH, OUTSIDE = 1.8e-6, 45e-6
COLLECTIVES = frozenset({"all_reduce", "all_gather"})
COLLECTIVE, LINK_SHARE = 10e-6, 0.70  # seconds that a collective takes at least; of the link, by those of many bytes
COPY = 8e-6  # seconds of a small copy; for the last one the host waits


@dataclass(frozen=True)
class Forms:
    """How weights and KV are held: as for `--quantization` and `--kv-cache-dtype`."""

    weights: str = "none"
    kv: str = "auto"

    @property
    def bytes_of_weight(self) -> int:
        return 2 if self.weights == "none" else 1

    @property
    def bytes_of_kv(self) -> int:
        return 2 if self.kv == "auto" else 1

    def __str__(self) -> str:
        weights, kv = ("bf16" if form in ("none", "auto") else form for form in (self.weights, self.kv))
        return f"weights {weights}, KV {kv}"


BF16 = Forms()


@dataclass(frozen=True)
class Planned:
    """A step on paper."""

    model: str
    case: str
    launches: int  # of the host: kernels outside of graphs, and graphs
    kernels: int  # all of them
    copies: int
    nbytes: int
    flops: int
    seconds: float
    roofline_seconds: float
    bound: str  # what most of the time goes to, and its share of it

    @property
    def share(self) -> float:
        """Of the roofline."""
        return self.roofline_seconds / self.seconds


def decode(model: str, card: Card, rows: int, context: int, forms: Forms = BF16) -> Planned:
    """A recorded step of so many rows."""
    settings = _settings(model, forms)
    with a_machine(model, layers=layers_of(model), rows=rows, longest=context, graphs=True, **settings) as machine:
        record = machine.step([1] * rows, [context - 1] * rows, SAMPLED)
        config = machine.config
    splits = int(num_splits(np.array(context), SPLIT, MAX_SPLITS))
    heads = config.num_kv_heads // RANKS.get(model, 1)
    return _planned(model, f"decode {rows} × {context}", record, card, rows * heads * splits)


def _settings(model: str, forms: Forms) -> dict[str, Any]:
    return {"quantization": forms.weights, "kv_dtype": forms.kv, "ranks": RANKS.get(model, 1), "rank": 0}


def prefill(model: str, card: Card, tokens: int, forms: Forms = BF16) -> Planned:
    """A prompt of so many tokens, alone."""
    settings = _settings(model, forms)
    with a_machine(model, layers=layers_of(model), rows=1, longest=tokens, **settings) as machine:
        record = machine.step([tokens], [0], GREEDY)
    return _planned(model, f"prefill {tokens}", record, card, 0)


def plan(model: str, card: Card, forms: Forms = BF16) -> Iterator[Planned]:
    """All cases that the card's memory holds."""
    for rows, context in _cases(model, card, forms):
        yield decode(model, card, rows, context, forms)
    for tokens in PROMPTS:
        yield prefill(model, card, tokens, forms)


def _cases(model: str, card: Card, forms: Forms = BF16) -> Iterator[tuple[int, int]]:
    """Rows and context of the decode steps that the card's memory holds."""
    config, ranks = parse_config(PUBLISHED[model]), RANKS.get(model, 1)
    weights = forms.bytes_of_weight * config.num_parameters
    for context in CONTEXTS:
        for rows in BATCHES:
            if weights + rows * context * config.kv_bytes_per_token(forms.bytes_of_kv) < 0.9 * card.memory * ranks:
                yield rows, context


def seconds(one: Operation, card: Card, gap: float) -> float:
    """Of one launch. Few programs cannot draw the whole bandwidth."""
    if one.name in COLLECTIVES and card.link:
        return max(COLLECTIVE, one.nbytes / (card.link * LINK_SHARE)) + gap
    bandwidth_share, peak_share = SHARES.get(one.name, ELEMENTWISE)
    if one.programs:
        bandwidth_share = min(bandwidth_share, one.programs * PROGRAM_SHARE / card.multiprocessors)
    return max(one.nbytes / (card.bandwidth * bandwidth_share), one.flops / (card.peak * peak_share)) + gap


def _planned(model: str, case: str, record: Record, card: Card, decode_programs: int) -> Planned:
    def busy(one: Operation) -> Operation:  # a recorded grid has programs that find nothing to do
        return replace(one, programs=min(one.programs, decode_programs)) if one.name == "_decode" else one

    outside = [one for one in record.operations if one.kind == "kernel"]
    copies = record.count("upload") + record.count("download")
    total = sum(seconds(busy(one), card, IN_GRAPH) for one in record.inside)
    # The host queues what is outside of a graph while the device computes: it pays for what is left of that.
    eager = sum(seconds(busy(one), card, IN_GRAPH) for one in outside)
    total += max(eager, len(outside) * OUTSIDE) if not record.inside else eager
    total += COPY * copies
    needed = (*outside, *record.inside)
    times: dict[str, float] = defaultdict(float)
    for one in needed:
        times[_limit(busy(one), card)] += seconds(busy(one), card, 0.0)
    times["launches and copies"] = total - sum(times.values())
    bound, most = max(times.items(), key=lambda pair: pair[1])
    floor = max(sum(one.needed for one in needed) / card.bandwidth, sum(one.flops for one in needed) / card.peak)
    return Planned(
        model, case, len(outside) + record.count("graph"), len(outside) + len(record.inside), copies, record.nbytes,
        record.flops, total, floor, f"{bound}, {most / total:.0%}",
    )  # fmt: skip


def _limit(one: Operation, card: Card) -> str:
    """What bounds a launch: the bytes or the operations of products, of attention, of the rest; or a collective."""
    if one.name in COLLECTIVES:
        return "collectives"
    bandwidth_share, peak_share = SHARES.get(one.name, ELEMENTWISE)
    by_bytes = one.nbytes / (card.bandwidth * bandwidth_share) >= one.flops / (card.peak * peak_share)
    if one.name in ("_decode", "_extend", "_extend_in_order", "_merge", "_merge_chunks"):
        return "keys and values" if by_bytes else "attention"
    if one.name in SHARES:
        return "weights" if by_bytes else "products"
    return "activations and sampling"


def layers_of(model: str) -> int:
    """As published."""
    return parse_config(PUBLISHED[model]).num_layers


QUANTIZED = (Forms(kv="fp8"), Forms(kv="int8"), Forms(weights="int8"), Forms(weights="fp8", kv="fp8"))


def measure() -> Section:
    """Every model on every newer card, as figures; the aim is three quarters of the roofline."""
    figures = [
        Figure(
            f"{model}, {name}, {one.case}: share", one.share, "×", f"{one.seconds * 1e3:.2f} ms expected", at_least=AIM
        )
        for model in CONFIGS
        for name in REPORTED
        for one in plan(model, CARDS[name])
    ]  # fmt: skip
    for forms in QUANTIZED:
        for rows, context in ((1, 1024), (32, 8192), (256, 1024)):
            one = decode("Llama-3.1-8B", CARDS["H100"], rows, context, forms)
            note = f"{one.seconds * 1e3:.2f} ms expected"
            figures.append(
                Figure(f"Llama-3.1-8B, H100, {forms}, {one.case}: share", one.share, "×", note, at_least=AIM)
            )
    return Section("GPU steps on paper, their share of the roofline: nothing was timed", tuple(figures))


def table(model: str, card_name: str, forms: Forms = BF16) -> str:
    """As Markdown."""
    weights = str(forms)
    if "quantization_config" in PUBLISHED[model] and forms.weights == "none":
        weights = weights.replace("weights bf16", "weights as published")
    lines = [
        f"{model} on {card_name}{f', a rank of {RANKS[model]}' if model in RANKS else ''}, {weights}, on paper",
        "",
        "| step | launches of the host | kernels | copies | GB moved | TFLOP | expected ms | share of the roofline | "
        "bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.case} | {one.launches} | {one.kernels} | {one.copies} | {one.nbytes / 1e9:.2f} | "
        f"{one.flops / 1e12:.3f} | {one.seconds * 1e3:.2f} | {one.share:.0%} | {one.bound} |"
        for one in plan(model, CARDS[card_name], forms)
    ]
    return "\n".join(lines)
