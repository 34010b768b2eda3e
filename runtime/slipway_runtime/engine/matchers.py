"""Where each answer stands in its grammar, and which tokens it may draw next. No torch: the engine process asks.

    grammars.start(request)                            # when it comes in: compiles beside the steps
    result = execute(plan, lambda: grammars.masks(plan))    # every plan; another thread may, while the model computes
    for output in update(result): grammars.accept(output)

It fails closed. A matcher that breaks, for whatever reason, allows nothing but an end, and `accept` answers with the
sentence the request must end with; no answer goes on unbound.

A matcher advances by what `accept` is told was emitted and by nothing else. Drafts are tried and rolled back; a
preemption does not touch it; output that came with the request is replayed. After the last token that the grammar
allows only end-of-sequence tokens come.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from slipway_runtime.engine.grammar import GrammarCompiler, GrammarRefusedError
from slipway_runtime.messages import Output, Request, StepPlan, TokenMasks

Key = tuple[str, int]  # a request's id, and which of its answers
Words = npt.NDArray[np.uint32]


class Grammars:
    """One matcher per answer that a grammar binds. Not thread-safe: its owner calls one method at a time."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # llguidance lets go of the GIL
        self._answers: dict[Key, _Answer] = {}
        self._rows: dict[int, Key] = {}  # who has which row of the worker
        self._ends = np.zeros(compiler.words, dtype=np.uint32)
        for token in compiler.eos_token_ids:
            self._ends[token // 32] |= np.uint32(1 << (token % 32))

    def __len__(self) -> int:
        return len(self._answers)

    def start(self, request: Request) -> None:
        """Begin to compile a request's grammar; masks wait for it. Requests without one need no call."""
        if request.grammar is not None:
            compiling = self._pool.submit(self._compiler.matcher, request.grammar)
            for index in range(request.n):
                self._answers[request.id, index] = _Answer(
                    compiling, request.output_token_ids, self._compiler.eos_token_ids
                )

    def masks(self, plan: StepPlan) -> TokenMasks | None:
        """The masks of a plan's draws. Every plan must be given: they say who has which row.

        Draws after a draft that the grammar refuses get no mask: they can never be kept.
        """
        for new in plan.new_rows:
            self._rows[new.row] = new.request_id, new.index
        if not self._answers:
            return None
        draws: list[int] = []
        masks: list[Words] = []
        first = 0  # the row's first place among all draws
        for place in np.flatnonzero(plan.samples).tolist():
            guessed = plan.drafts[place] if plan.drafts else ()
            if (answer := self._answers.get(self._rows[plan.rows[place]])) is not None:
                made = self._masks_of(answer, guessed)
                draws.extend(range(first, first + len(made)))
                masks.extend(made)
            first += 1 + len(guessed)
        return TokenMasks(tuple(draws), np.stack(masks).astype("<u4").tobytes()) if draws else None

    def accept(self, output: Output) -> str:
        """Follow what was emitted; every Output may be given. Empty, or why the answer must end with an error."""
        key = output.request_id, output.index
        answer = self._answers.get(key)
        if answer is None:
            return ""
        answer.advance(output.token_ids)
        if output.finish_reason is not None or answer.error:
            del self._answers[key]
        return answer.error

    def forget(self, request_id: str) -> None:
        """Drop what is left of a request that no Output will end."""
        for key in [key for key in self._answers if key[0] == request_id]:
            del self._answers[key]

    def close(self) -> None:
        """End the thread that compiles."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _masks_of(self, answer: "_Answer", guessed: tuple[int, ...]) -> list[Words]:
        """One mask for the next token, and one after each drafted token as far as the grammar takes them."""
        made = [self._mask(answer)]
        taken = 0
        for token in guessed:
            if (matcher := answer.ready()) is None:
                break
            if not matcher.is_stopped():
                if matcher.try_consume_tokens([token]) != 1:
                    break
                taken += 1
            elif token not in answer.eos_token_ids:
                break
            made.append(self._mask(answer))
        if taken and (matcher := answer.ready()) is not None and not matcher.rollback(taken):
            answer.error = "the grammar could not take back a draft"
        return made

    def _mask(self, answer: "_Answer") -> Words:
        if (matcher := answer.ready()) is None or matcher.is_stopped():
            return self._ends
        words = np.zeros((1, self._compiler.words), dtype=np.int32)
        fill_next_token_bitmask(matcher, words)
        return self._ends if answer.ready() is None else words[0].view(np.uint32)


@dataclass(slots=True)
class _Answer:
    """One answer: its grammar compiles at first; then a matcher stands after the tokens that were emitted."""

    compiling: "Future[LLMatcher]"
    replay: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    matcher: LLMatcher | None = None
    error: str = ""

    def ready(self) -> LLMatcher | None:
        """The matcher, waited for; None when it is broken, and `error` says how."""
        if self.matcher is None and not self.error:
            try:
                self.matcher = self.compiling.result().deep_copy()
            except GrammarRefusedError as refusal:
                self.error = str(refusal)
            else:
                self.advance(self.replay)
        if self.matcher is not None and not self.error and self.matcher.is_error():
            self.error = f"the grammar could not be followed: {self.matcher.stop_reason()}"
        return None if self.error else self.matcher

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Follow tokens; one that the grammar does not allow is an error."""
        for token in token_ids:
            if (matcher := self.ready()) is None:
                return
            if matcher.is_stopped() and token in self.eos_token_ids:
                continue  # the end was said already: min_tokens or ignore_eos want more tokens than the grammar has
            if not matcher.consume_token(token):
                self.error = "a token was drawn that the grammar does not allow"
