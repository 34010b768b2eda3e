"""One request inside the scheduler: its tokens, how far it is computed, the blocks it holds."""

from dataclasses import dataclass, field
from enum import Enum, auto

from slipway_runtime.messages import FinishReason, Request
from slipway_runtime.scheduling.block_pool import block_key

NO_ROW = -1


class State(Enum):
    """Where a sequence is; preempted ones wait again."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """There is no prefill and no decode: `num_computed` chases `num_tokens`, and the last known token draws the next.

    A preemption sets `num_computed` to zero and keeps the tokens, so resuming is the same as starting.
    """

    request: Request
    serial: int  # order of arrival
    max_tokens: int  # length at which it must end, prompt included
    keys: list[bytes]  # of the parent, then of each full block
    queued_at: float
    token_ids: list[int] = field(default_factory=list)
    state: State = State.WAITING
    row: int = NO_ROW
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0  # full blocks that others can find
    preemptions: int = 0
    cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids.extend(self.request.prompt_token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first: by priority, then by arrival."""
        return (-self.request.priority, self.serial)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what was drawn."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that came with the request; stays the same over preemptions."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def block_keys(self, count: int, block_size: int) -> list[bytes]:
        """The keys of its first `count` full blocks; each is computed once."""
        for index in range(len(self.keys) - 1, count):
            start = index * block_size
            self.keys.append(block_key(self.keys[index], self.token_ids[start : start + block_size]))
        return self.keys[1 : count + 1]
