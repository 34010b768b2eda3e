"""Where every request and token went: counters that only grow, and the snapshot made of them."""

from dataclasses import dataclass

from slipway_runtime.messages import EngineStats, FinishReason
from slipway_runtime.scheduling.block_pool import BlockPool


@dataclass(slots=True)
class Ledger:
    """admitted = finished + aborted + handed_over + running + waiting, after any step."""

    admitted: int = 0
    started: int = 0
    finished: int = 0
    aborted: int = 0
    handed_over: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def count_end(self, reason: FinishReason) -> None:
        """A request ended."""
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.finished += 1
        else:
            self.aborted += 1

    def stats(
        self, *, running: int, waiting: int, waiting_tokens: int, pool: BlockPool, steps: int, now: float
    ) -> EngineStats:
        """The snapshot."""
        return EngineStats(
            running=running,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            blocks_total=pool.total,
            blocks_live=pool.live,
            blocks_cached=pool.cached,
            steps=steps,
            preemptions=self.preemptions,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            admitted=self.admitted,
            finished=self.finished,
            aborted=self.aborted,
            handed_over=self.handed_over,
            last_step_at=now,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            computed_tokens=self.computed_tokens,
            started=self.started,
        )
