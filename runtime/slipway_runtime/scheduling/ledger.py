"""Counters of answers and tokens, which only grow: admitted, finished, aborted, preempted, computed, prefix hits."""

from dataclasses import dataclass

from slipway_runtime.messages import FinishReason


@dataclass(slots=True)
class Ledger:
    """admitted = finished + aborted + handed_over + running + waiting, after any step; a request counts `n` times."""

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
    host_hits: int = 0  # of those, in host memory

    def count_end(self, reason: FinishReason) -> None:
        """Count an ended answer by its finish reason."""
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.finished += 1
        elif reason is FinishReason.HANDED_OVER:
            self.handed_over += 1
        else:
            self.aborted += 1
