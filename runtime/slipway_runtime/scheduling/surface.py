"""What the engine may ask of the scheduler, until the scheduler itself says it all."""

from typing import Protocol

from slipway_runtime.messages import (
    AdapterStatus,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineStats,
    FinishReason,
    Output,
    Request,
    StepPlan,
    StepResult,
)

# Scheduler(pool, *, max_num_seqs, max_num_batched_tokens, max_model_len, eos_token_ids=frozenset(), watermark=0.01,
#     model="",                      # the root of every block key: model + quantization + KV dtype
#     tenant_weights={},             # tenant -> share; 1.0 when not named
#     speculation_max_tokens=0,      # drafts a row and step at most; 0: prompt lookup is off
#     residency=None,                # residency.Residency(pool, max_adapters=…, max_cpu_adapters=…); None: no adapters
#     kv_events=False)               # collect BlockStored, BlockRemoved, AllBlocksCleared
# Residency(pool, *, max_adapters, max_cpu_adapters, block_bytes=0, dependency_aware=True)


class SchedulerSurface(Protocol):
    """All calls come from the step loop's thread."""

    def add(self, request: Request, now: float) -> None:
        """Put a request into the queue. An unknown or draining adapter ends it with FinishReason.ERROR."""

    def abort(self, request_id: str, reason: FinishReason, now: float, index: int | None = None) -> None:
        """End a request, or one of its answers; unknown ids are ignored."""

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or tell anything, or a plan is in flight."""

    @property
    def can_overlap(self) -> bool:
        """Whether `schedule` may be called now. Always with nothing in flight; with one plan in flight unless a
        running sequence has a grammar or speculation is active; never with two.
        """

    def schedule(self, now: float) -> StepPlan:
        """The next plan. May be empty (no rows): it still wants its `update`."""

    def update(self, result: StepResult, now: float) -> list[Output]:
        """Results come back in the order of the plans."""

    def stats(self, now: float) -> EngineStats:
        """The numbers; `schedule_seconds` is the shell's to fill in."""

    def check(self) -> None:
        """The books; with nothing in flight."""

    def forget_prefixes(self) -> None:
        """ResetPrefixCache, and after sleeping: no prefix can be found any more."""

    # --- adapters: the shell reads files and keeps the host copies, the scheduler decides

    def adapter_loading(self, digest: str, now: float, *, pinned: bool = False) -> bool:
        """LoadAdapter came in. True: read it, then say adapter_loaded or adapter_failed. False: it is there already."""

    def adapter_loaded(self, digest: str, now: float, *, num_bytes: int, rank: int) -> None:
        """It is in host memory (unless `take_dropped_adapters` names it at once: no room now, read again on demand)."""

    def adapter_failed(self, digest: str, error: str, now: float) -> None:
        """It could not be read: the requests that wait for it end with FinishReason.ERROR."""

    def unload_adapter(self, digest: str, now: float) -> bool:
        """Refuse new requests for it; it goes when its last request has ended. False: not known."""

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """All that are known, by digest."""

    @property
    def adapters_version(self) -> int:
        """Grows whenever `adapters` says something new about states (not about counts of requests)."""

    def take_wanted_adapters(self) -> tuple[str, ...]:
        """Digests that requests wait for and that are on disk: read each, then adapter_loaded or adapter_failed."""

    def take_dropped_adapters(self) -> tuple[str, ...]:
        """Digests whose host copy may be forgotten. Those unloaded are no longer in `adapters`."""

    def take_kv_events(self) -> tuple[BlockStored | BlockRemoved | AllBlocksCleared, ...]:
        """What happened to the prefixes since the last call; empty unless switched on."""
