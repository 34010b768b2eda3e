"""Grammar matchers: the state of each answer in its grammar, and the masks of its next tokens. No torch.

    grammars.start(request)                             # when it arrives: compiles beside the steps
    grammars.take_compiled()                            # requests whose grammars are compiled: not planned before
    result = runner.execute(plan, grammars.masks(plan))   # of every plan; made while the model computes
    for output in update(result): grammars.accept(output)
    grammars.follow(plan.step)                          # all of its outputs were accepted

Two plans may be in flight. The masks of the second are made when the outputs of the first were accepted: its forward
pass needs no masks, and is computed meanwhile. So rows with a grammar do not keep others from overlapping.

It fails closed. A matcher that breaks, for whatever reason, allows only end-of-sequence tokens, and `accept` returns
the error that the answer must end with; no answer goes on unconstrained.

A matcher advances by the tokens that `accept` is given and by nothing else. Draft tokens are tried and rolled back; a
preemption does not touch it; output that came with the request is replayed. After the last token that the grammar
allows, only end-of-sequence tokens come.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from slipway_runtime.engine.grammar import GrammarCompiler, GrammarRefusedError
from slipway_runtime.messages import Output, Request, SchedulerOutput, TokenMasks

SOON_SECONDS: Final = 0.002  # most grammars compile within this time; no step waits for a slower one
Key = tuple[str, int]  # a request's id, and which of its answers
Words = npt.NDArray[np.uint32]
_NO_ANSWER: Key = ("", 0)


class Grammars:
    """One matcher per answer with a grammar.

    One thread calls `masks` in the order of the plans; another one, or the same, all other methods.
    """

    def __init__(self, compiler: GrammarCompiler, *, threads: int = 1) -> None:
        """threads: that fill the masks of one step."""
        self._executor = LLExecutor(threads) if threads > 1 else None
        self._following = threading.Lock()  # of the next two
        self._followed = 0  # the last step whose outputs were accepted
        self._waiting: tuple[int, Callable[[], object]] | None = None  # masks after a step: begin them
        self._compiler = compiler
        # llguidance releases the GIL. Two threads: the masks of a step do not wait for a new grammar to compile.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self.mask_seconds = 0.0  # spent on masks so far
        self.wake: Callable[[], None] | None = None  # called on another thread when `has_results` turns true
        self._compiled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._unreported = 0  # requests that compile, or that `take_compiled` has not named yet
        self._answers: dict[Key, _Answer] = {}
        self._rows: dict[int, Key] = {}  # row of the worker -> its answer
        self._ends = np.zeros(compiler.words, dtype=np.uint32)
        for token in compiler.eos_token_ids:
            self._ends[token // 32] |= np.uint32(1 << (token % 32))

    @classmethod
    def beside(cls, folder: Path, eos_token_ids: tuple[int, ...], *, threads: int = 1) -> "Grammars | None":
        """Grammars over the vocabulary of the `tokenizer.json` in a folder; None where that file is missing."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        return cls(GrammarCompiler(path.read_text("utf-8"), eos_token_ids=eos_token_ids), threads=threads)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the tokenizer; a model's vocabulary may be padded beyond."""
        return self._compiler.vocabulary.vocab_size

    def __len__(self) -> int:
        return len(self._answers)

    def start(self, request: Request) -> bool:
        """Begin to compile a request's grammar. True: it is compiled; False: `take_compiled` will name the request.

        Masks wait for the grammar: a request that is planned before delays its whole step. Without `wake`, this waits.
        Requests without a grammar need no call.
        """
        if request.grammar is None:
            return True
        compiling = self._compiling.submit(self._compiler.matcher, request.grammar)
        for index in range(request.n):
            self._answers[request.id, index] = _Answer(
                compiling, request.output_token_ids, self._compiler.eos_token_ids
            )
        soon = 0.0 if self._unreported else SOON_SECONDS  # behind a slow grammar none compiles soon
        wait((compiling,), timeout=None if self.wake is None else soon)
        if compiling.done():
            return True
        self._unreported += 1
        compiling.add_done_callback(lambda _: self._report_compiled(request.id))
        return False

    def _report_compiled(self, request_id: str) -> None:
        self._compiled.put(request_id)
        if self.wake is not None:
            self.wake()

    @property
    def has_results(self) -> bool:
        """Whether `take_compiled` would name a request."""
        return not self._compiled.empty()

    def take_compiled(self) -> list[str]:
        """The requests whose grammars have been compiled, or failed to compile, since the last call."""
        compiled = [self._compiled.get() for _ in range(self._compiled.qsize())]
        self._unreported -= len(compiled)
        return compiled

    def masks(self, plan: SchedulerOutput) -> Callable[[], TokenMasks | None]:
        """Make the masks of a plan's samples, once the plan before was followed; the returned function waits for them.

        Every plan must be given: its new rows say which answer has which row. Samples after a draft token that the
        grammar refuses get no mask: they are never accepted.
        """
        for new in plan.new_rows:
            self._rows[new.row] = new.request_id, new.index
        sampled: list[tuple[int, Key, tuple[int, ...]]] = []
        first = 0  # the row's first place among all samples
        if self._answers:
            for place in np.flatnonzero(plan.samples).tolist():
                drafted = plan.drafts[place] if plan.drafts else ()
                if (key := self._rows.get(plan.rows[place], _NO_ANSWER)) in self._answers:
                    sampled.append((first, key, drafted))
                first += 1 + len(drafted)
        if not sampled:
            return _no_masks
        masks: Future[TokenMasks] = Future()

        def begin() -> None:
            self._masking.submit(self._make_masks_for, masks, sampled)

        with self._following:
            if self._followed >= plan.step - 1:
                begin()
            else:
                assert self._waiting is None, "one plan is launched at a time"
                self._waiting = plan.step - 1, begin
        return masks.result

    def follow(self, step: int) -> None:
        """Note that the outputs of the plans up to this step were accepted, or that the plans were given up."""
        with self._following:
            self._followed = step
            if self._waiting is not None and self._waiting[0] <= step:
                self._waiting[1]()
                self._waiting = None

    def accept(self, output: Output) -> str:
        """Advance by the tokens of an output, of any request. Empty, or why the answer must end with an error."""
        key = output.request_id, output.index
        answer = self._answers.get(key)
        if answer is None:
            return ""
        answer.advance(output.token_ids)
        if output.finish_reason is not None or answer.error:
            del self._answers[key]
        return answer.error

    def _make_masks_for(self, waiting: "Future[TokenMasks]", sampled: list[tuple[int, Key, tuple[int, ...]]]) -> None:
        try:
            waiting.set_result(self._make_masks(sampled))
        except BaseException as error:  # noqa: BLE001  the step that waits for the masks must get it
            waiting.set_exception(error)

    def _make_masks(self, sampled: list[tuple[int, Key, tuple[int, ...]]]) -> TokenMasks:
        began = time.perf_counter()
        samples: list[int] = []
        masks: list[Words] = []
        alone: list[tuple[int, _Answer]] = []  # answers without draft tokens, and the places of their masks
        for first, key, drafted in sampled:
            if (answer := self._answers.get(key)) is None:
                continue  # it has ended since: its sample is dropped
            if not drafted:
                alone.append((len(masks), answer))
            of_answer = self._masks_of(answer, drafted) if drafted else [self._ends]
            samples.extend(range(first, first + len(of_answer)))
            masks.extend(of_answer)
        words = np.array(masks, dtype="<u4").reshape(len(masks), self._compiler.words)
        self._fill(words.view(np.int32), alone)
        self.mask_seconds += time.perf_counter() - began
        return TokenMasks(tuple(samples), words.tobytes())

    def _fill(self, words: npt.NDArray[np.int32], answers: "list[tuple[int, _Answer]]") -> None:
        """Write the next mask of each answer to its place, unless only ends are allowed, which is there already."""
        matchers = [
            (matcher, place)
            for place, answer in answers
            if (matcher := answer.ready()) is not None and not matcher.is_stopped()
        ]
        words[[place for _, place in matchers]] = 0
        if self._executor is not None and len(matchers) > 1:
            fill_next_token_bitmask_par(self._executor, matchers, words)
        else:
            for matcher, place in matchers:
                fill_next_token_bitmask(matcher, words, place)
        for place, answer in answers:
            if answer.ready() is None:
                words[place] = self._ends.view(np.int32)

    def _masks_of(self, answer: "_Answer", drafted: tuple[int, ...]) -> list[Words]:
        """One mask for the next token, and one after each drafted token as far as the grammar takes them."""
        masks = [self._mask(answer)]
        taken = 0
        for token in drafted:
            if (matcher := answer.ready()) is None:
                break
            if not matcher.is_stopped():
                if matcher.try_consume_tokens([token]) != 1:
                    break
                taken += 1
            elif token not in answer.eos_token_ids:
                break
            masks.append(self._mask(answer))
        if taken and (matcher := answer.ready()) is not None and not matcher.rollback(taken):
            answer.error = "the grammar could not take back a draft"
        return masks

    def _mask(self, answer: "_Answer") -> Words:
        if (matcher := answer.ready()) is None or matcher.is_stopped():
            return self._ends
        words = np.zeros((1, self._compiler.words), dtype=np.int32)
        fill_next_token_bitmask(matcher, words)
        return self._ends if answer.ready() is None else words[0].view(np.uint32)


def _no_masks() -> None:
    return None


@dataclass(slots=True)
class _Answer:
    """The grammar of one answer: compiling at first, then a matcher advanced by the emitted tokens."""

    compiling: "Future[LLMatcher]"
    replay: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    matcher: LLMatcher | None = None
    error: str = ""

    def ready(self) -> LLMatcher | None:
        """Wait for the matcher; None when it is broken: `error` says how."""
        if self.matcher is None and not self.error:
            try:
                self.matcher = self.compiling.result().deep_copy()
            except GrammarRefusedError as refusal:
                self.error = str(refusal)
            except Exception as error:  # noqa: BLE001  whatever broke, it broke for this answer only
                self.error = f"the grammar could not be compiled: {type(error).__name__}"
            else:
                self.advance(self.replay)
        if self.matcher is not None and not self.error and self.matcher.is_error():
            self.error = f"the grammar could not be followed: {self.matcher.stop_reason()}"
        return None if self.error else self.matcher

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Advance the matcher by tokens; one that the grammar does not allow is an error."""
        for token in token_ids:
            if (matcher := self.ready()) is None:
                return
            if matcher.is_stopped() and token in self.eos_token_ids:
                continue  # the grammar is complete, and this token ends the answer
            if not matcher.consume_token(token):
                self.error = "a token was sampled that the grammar does not allow"
