"""Benchmark of routing in front of four replicas of vLLM: prefix affinity against round robin, at vLLM's own rates.

Prefill and decoding of the CPU build of vLLM are measured on this machine, alone and with eight requests at once. Four
replicas with these rates are then simulated behind the gateway's own picker (`bench.routing`): four processes of vLLM
on one machine would compete for its cores.

python -m bench.peers.environments       # once: installs vLLM
"""

from collections.abc import Mapping
from typing import Any

from bench.engine import drive_peer
from bench.figures import Figure, Section
from bench.plan import Percentiles
from bench.routing import MIXES, Outcome, Rates, simulate
from slipway_api.inference_service import RoutingStrategy

PEER = "vLLM CPU, eager"
REPLICAS = 4
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 32
FEW, MANY = 1, 8  # requests at once
AIM = 2.0  # for TTFT p50
SHARED = "shared prefixes"  # the mix of `bench.routing` that the aim is for
SESSIONS = "conversations"


def measure() -> Section:
    """All figures; raises RuntimeError if vLLM cannot be measured here."""
    few, many = (drive_peer(PEER, "fp32", PROMPT_TOKENS, OUTPUT_TOKENS, users, 1, 1) for users in (FEW, MANY))
    for result in (few, many):
        if "error" in result:
            raise RuntimeError(f"{PEER}: {result['error']}")
    return section(rates_of(few, many), str(few["settings"]))


def rates_of(few: Mapping[str, Any], many: Mapping[str, Any]) -> Rates:
    """The rates of a replica, from its results with `FEW` and with `MANY` requests at once."""
    alone, together = (Percentiles.of(result["gaps"]).p50 for result in (few, many))
    slope = max(0.0, (together - alone) / (MANY - FEW))
    return Rates(float(few["prefill_tokens_per_second"]), max(alone - FEW * slope, 0.0), slope)


def section(rates: Rates, source: str, **size: int) -> Section:
    """The figures of both strategies at these rates; `size` makes the runs of a test shorter."""
    figures = [
        Figure("vLLM: prefill", rates.prefill_tokens_per_second, "tok/s", source),
        Figure("vLLM: time between tokens", rates.itl_seconds * 1e3, "ms", "without other requests"),
        Figure("vLLM: and for each request", rates.itl_seconds_per_request * 1e3, "ms", f"from {MANY} at once"),
    ]
    for mix in MIXES:
        peer = simulate(mix, RoutingStrategy.ROUND_ROBIN, REPLICAS, rates=rates, **size)
        for with_sessions in (False, True) if mix == SESSIONS else (False,):
            ours = simulate(
                mix, RoutingStrategy.PREFIX_CACHE, REPLICAS, rates=rates, with_sessions=with_sessions, **size
            )
            figures += _figures(f"{mix} with session ids" if with_sessions else mix, ours, peer)
    return Section(f"Routing: {REPLICAS} simulated replicas with the rates of vLLM", tuple(figures))


def _figures(mix: str, ours: Outcome, peer: Outcome) -> list[Figure]:
    own, other = Percentiles.of(ours.ttft), Percentiles.of(peer.ttft)
    hits = f"hit rate {ours.hit_rate:.0%}, {peer.hit_rate:.0%} round robin"
    aim = AIM if mix == SHARED else None
    return [
        Figure(f"{mix}: TTFT p50", own.p50 * 1e3, "ms", f"{other.p50 * 1e3:,.0f} ms round robin"),
        Figure(f"{mix}: round robin ÷ Slipway, TTFT p50", other.p50 / own.p50, "×", hits, at_least=aim),
        Figure(f"{mix}: round robin ÷ Slipway, TTFT p99", other.p99 / own.p99, "×", "above 1: Slipway is faster"),
    ]
