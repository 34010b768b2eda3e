"""The draft model of an engine: checked against the model, loaded beside it, with a KV cache of as many blocks.

With several ranks it computes on rank 0 alone: its draft tokens are part of the plans that the other ranks execute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import structlog
from tokenizers import Tokenizer
from torch import Tensor

from slipway_api import names
from slipway_runtime.engine.decide import EnginePlan, decide
from slipway_runtime.engine.parts import Beside, load_weights, step_bytes
from slipway_runtime.engine.sleep import Sleeper
from slipway_runtime.engine.warmup import capture_steps, warm_up
from slipway_runtime.kernels.dispatch import Kernels, kernels_for
from slipway_runtime.messages import SchedulerOutput, StepResult
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.models.decoder import Decoder
from slipway_runtime.models.quantize import DTYPE_NAMES
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.draft_model import DraftModel, KnownTokens
from slipway_runtime.scheduling.scheduler import Scheduler
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.out_of_memory import StepOutOfMemoryError
from slipway_runtime.worker.runner import Runner

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """A loaded draft model without its KV cache."""

    plan: EnginePlan
    kernels: Kernels
    decoder: Decoder

    @property
    def bytes_per_token(self) -> int:
        """Its KV of a token, all layers."""
        return self.plan.config.shape.kv_bytes_per_token(DTYPE_NAMES[self.plan.kv_dtype])

    def measure(self) -> Beside:
        """The memory that the pool of the model has to leave to it."""
        return Beside(self.bytes_per_token, step_bytes(self.plan, self.decoder, self.kernels))


@dataclass(frozen=True, kw_only=True)
class LoadedDraft:
    """A draft model with its KV cache."""

    plan: EnginePlan
    runner: Runner
    size: CacheSize
    weight_bytes: int
    load_weights: Callable[[], Decoder]  # again, after a sleep
    allocate_cache: Callable[[], list[Tensor]]
    shares_prefixes: bool

    def model(self) -> DraftModel:
        """What proposes draft tokens to a scheduler. Its rows and blocks belong to that scheduler."""
        return DraftModel(
            DraftPasses(self.runner, self.plan.config.vocab_size),
            self._pool(),
            max_num_batched_tokens=self.plan.max_num_batched_tokens,
            max_model_len=self.plan.max_model_len,
        )

    def warm_up(self) -> None:
        """Run all kinds of steps, on the thread that calls."""
        plan = self.plan
        scheduler = Scheduler(
            self._pool(),
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
        )
        warm_up(scheduler, self.runner.execute, vocab_size=plan.config.vocab_size)

    def capture(self) -> str:
        """Capture its steps as CUDA graphs; why that failed, or an empty string."""
        return capture_steps(self.runner, self.plan.device)

    def sleeper(self) -> Sleeper:
        """What frees and restores its memory."""
        return Sleeper(
            self.runner,
            self.plan.device,
            load_weights=self.load_weights,
            allocate_cache=self.allocate_cache,
            capture=self.capture,
        )

    def _pool(self) -> BlockPool:
        return BlockPool(self.size.num_blocks, self.size.block_size, shares_prefixes=self.shares_prefixes)


def decide_draft(plan: EnginePlan) -> EnginePlan | None:
    """The plan of the draft model; None: the options name none. Raises ModelRefusedError if it does not suit."""
    options = plan.options
    if options.speculation != "draft":
        return None
    if not options.draft_model:
        raise _refused("speculation draft needs a draft model: set --draft-model-uri")
    path = Path(options.draft_model)
    own = msgspec.structs.replace(
        options,
        speculation="none",
        draft_model="",
        tensor_parallel_size=1,
        quantization="none",
        kv_cache_dtype="auto",
        kv_cache_bytes=0,
        kv_cache_host_bytes=0,
        max_adapters=0,
        lora_experts=False,
        max_model_len=0,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
    )
    try:
        draft = decide(path, own)
    except ModelRefusedError as error:
        raise _refused(f"the draft model cannot be used: {error}") from error
    _check_vocabularies(plan, draft)
    return replace(draft, max_model_len=min(draft.max_model_len, plan.max_model_len))


def load_draft(plan: EnginePlan | None) -> DraftWeights | None:
    """Load the weights of the draft model, if there is one."""
    if plan is None:
        return None
    kernels = kernels_for(
        plan.device, plan.dtype, deterministic=plan.options.deterministic, latent=plan.config.latent is not None
    )
    return DraftWeights(plan=plan, kernels=kernels, decoder=load_weights(plan, kernels))


def finish_draft(weights: DraftWeights, size: CacheSize, *, num_tokens: int, shares_prefixes: bool) -> LoadedDraft:
    """Allocate the KV cache of a draft model, with a block for each of the model. size: the model's pool.

    num_tokens: tokens of the model's vocabulary; it drafts no other.
    """
    plan = weights.plan
    size = replace(size, bytes_per_token=weights.bytes_per_token)
    allocate = partial(allocate_cache, plan.config, size, plan.kv_dtype, plan.device)
    runner = Runner(
        weights.decoder,
        allocate(),
        weights.kernels,
        block_size=size.block_size,
        max_num_seqs=plan.max_num_seqs,
        max_model_len=min(plan.max_model_len, size.num_blocks * size.block_size),
        eos_token_ids=plan.eos_token_ids,
        device=plan.device,
        num_tokens=min(num_tokens, plan.config.vocab_size),
    )
    return LoadedDraft(
        plan=replace(plan, max_model_len=min(plan.max_model_len, size.num_blocks * size.block_size)),
        runner=runner,
        size=size,
        weight_bytes=weights.decoder.nbytes,
        load_weights=partial(load_weights, plan, weights.kernels),
        allocate_cache=allocate,
        shares_prefixes=shares_prefixes,
    )


class DraftPasses:
    """Executes the passes of a draft model on its runner."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size

    def __call__(self, passes: Sequence[SchedulerOutput], known: Sequence[KnownTokens]) -> list[StepResult] | None:
        """Write the known tokens into their rows, then compute the passes. None: the device ran out of memory.

        All passes are launched before the first result is read: on a GPU the host waits once.
        """
        for row, position, token_ids in known:
            self._runner.write_tokens(row, position, self._embeddable(token_ids))
        try:
            pending = [self._runner.launch(self._with_embeddable_rows(plan)) for plan in passes]
            return [result() for result in pending]
        except StepOutOfMemoryError as error:
            log.error("out of memory in the draft model: it pauses", reason=str(error))
            return None

    def _embeddable(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens with ids of a padded vocabulary replaced: the draft model may have fewer rows of padding."""
        if max(token_ids, default=0) < self._vocab_size:
            return token_ids
        return tuple([token if token < self._vocab_size else 0 for token in token_ids])

    def _with_embeddable_rows(self, plan: SchedulerOutput) -> SchedulerOutput:
        if not plan.new_rows:
            return plan
        rows = [msgspec.structs.replace(row, token_ids=self._embeddable(row.token_ids)) for row in plan.new_rows]
        return msgspec.structs.replace(plan, new_rows=tuple(rows))


def _check_vocabularies(plan: EnginePlan, draft: EnginePlan) -> None:
    """Raise ModelRefusedError unless both models give each token the same id."""
    tokenizers = Path(plan.options.tokenizer_path or plan.model_path) / "tokenizer.json"
    of_draft = draft.model_path / "tokenizer.json"
    if not tokenizers.is_file():
        if draft.config.vocab_size != plan.config.vocab_size:
            raise _refused(
                f"the draft model has a vocabulary of {draft.config.vocab_size} tokens, and the model one of "
                f"{plan.config.vocab_size}: choose a draft model with the tokenizer of the model"
            )
        return
    if not of_draft.is_file():
        raise _refused(
            "the draft model has no tokenizer.json, so its vocabulary cannot be compared with that of the model: "
            "add the file beside its weights"
        )
    if tokenizers.read_bytes() == of_draft.read_bytes():
        tokens = None
    else:
        tokens, others = (Tokenizer.from_file(str(path)).get_vocab() for path in (tokenizers, of_draft))
        if tokens != others:
            differing = sorted(dict(tokens.items() ^ others.items()))
            raise _refused(
                f"the draft model has another tokenizer: {len(differing)} tokens have other ids or are missing, the "
                f"first is {differing[0]!r}: choose a draft model with the tokenizer of the model"
            )
    highest = max((tokens or Tokenizer.from_file(str(tokenizers)).get_vocab()).values(), default=0)
    if highest >= draft.config.vocab_size:
        raise _refused(
            f"the draft model embeds {draft.config.vocab_size} tokens, and its tokenizer has ids up to {highest}: "
            "choose another draft model"
        )


def _refused(sentence: str) -> ModelRefusedError:
    """The error, beginning with the word and the field from which the operator makes a condition."""
    return ModelRefusedError(f"{names.WORD_INVALID_SPEC}{names.DRAFT_MODEL_FIELD}: {sentence}")
