"""Model runner: executes scheduler outputs (updates the input batch, runs the decoder, samples)."""

from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import AttentionPlan, Kernels, LoraPlan, capturable
from slipway_runtime.kernels.upload import Download, Ints
from slipway_runtime.layers.attention import StepContext
from slipway_runtime.messages import SchedulerOutput, StepResult
from slipway_runtime.models.decoder import Decoder
from slipway_runtime.worker.adapter_slots import AdapterSlots
from slipway_runtime.worker.capture import Capture, StepHidden
from slipway_runtime.worker.graphs import StepGraphs
from slipway_runtime.worker.host_arena import HostArena
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.inputs import HostInputs, StepInputs, pack_inputs, upload_inputs
from slipway_runtime.worker.kv_cache import copy_blocks
from slipway_runtime.worker.logprobs import prompt_tiles, score_prompts
from slipway_runtime.worker.out_of_memory import step_out_of_memory
from slipway_runtime.worker.pooling import Pooler
from slipway_runtime.worker.sampler import Masks, Sampler, invalid_rows, kept_logprobs, kept_tokens

PendingStep = Callable[[], StepResult]  # waits for the samples of a launched step


class Runner:
    """One device's share of the engine: the decoder, its caches, and a row per running sequence.

    On a GPU `launch` queues a step and returns; the next step may be launched before the first one's samples are read,
    since their tokens stay on the device. Steps are launched on one thread; any thread may read them, in their order.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: list[Tensor],
        kernels: Kernels,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        num_tokens: int | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """num_tokens: size of the tokenizer's vocabulary. The model's may be padded; logits of padding are cut off."""
        self.decoder = decoder  # decoder and caches are offloaded while the engine sleeps
        self.caches = caches
        self._kernels = kernels
        self._block_size = block_size
        self._device = device
        self._num_tokens = num_tokens
        self.adapters = adapters  # None: adapters are off
        self.host: HostArena | None = None  # None: evicted blocks are not offloaded
        self.graphs: StepGraphs | None = None  # None: every step runs eagerly
        self.pooler: Pooler | None = None  # None: this engine generates text
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._rows = InputBatch(max_num_seqs, max_model_len, -(-max_model_len // block_size), device)
        # Samples that were read and are not in the rows yet: only the thread that launches changes the rows.
        self._read: deque[tuple[Ints, Ints, Ints]] = deque()
        self._sampler = Sampler(self._rows, eos_token_ids, kernels)

    def execute(self, plan: SchedulerOutput, masks: Masks | None = None) -> StepResult:
        """Execute a scheduler output, and wait for its samples. See `launch`."""
        return self.launch(plan, masks)()

    def launch(self, plan: SchedulerOutput, masks: Masks | None = None) -> PendingStep:
        """Launch a scheduler output; what is returned waits for its samples. On a CPU they are computed by then.

        A plan may be launched before the samples of the plan before it are read, if that one had no draft tokens.
        `masks` is called after the logits are computed, so masks can be built meanwhile. None: they are in the plan.
        Raises StepOutOfMemoryError, after which the next plan may be executed: the plan's changes to rows, blocks and
        slots were made. An OOM while these changes are made is not caught.
        """
        self._write_read_samples()
        with torch.inference_mode():
            self._update_states(plan)
            with step_out_of_memory():
                return self._compute(plan, masks)

    def write_tokens(self, row: int, position: int, token_ids: tuple[int, ...]) -> None:
        """Write tokens into a row from a position on, where another model decided them. All samples were read."""
        self._write_read_samples()
        self._rows.write_tokens(row, position, token_ids)

    def _write_read_samples(self) -> None:
        while self._read:
            row_ids, positions, token_ids = self._read.popleft()
            self._rows.tokens[row_ids, positions] = token_ids

    def _compute(self, plan: SchedulerOutput, masks: Masks | None) -> PendingStep:
        if not plan.rows:
            return partial(StepResult, step=plan.step, token_ids=())
        host = pack_inputs(plan, self._rows, self._block_size)
        step = self._compute_hidden(plan, host)
        if self.pooler is not None:
            pooled = self.pooler(plan, host, step, self.decoder.normed)
            return lambda: pooled
        scores = self.logits(step.sampled) if len(host.sampled_rows) else None
        result = self._sample(plan, host, step.rows_on_device, scores, masks)
        tiles = prompt_tiles(plan, host, self._rows, self.decoder.vocab_size)
        if not tiles:
            return result
        scored = score_prompts(tiles, len(plan.rows), step.tokens, self.logits)
        return lambda: msgspec.structs.replace(result(), prompt_logprobs=scored)

    def execute_without_sampling(self, plan: SchedulerOutput) -> None:
        """Compute this rank's share of a plan; rank 0 samples, and `record_sampled` records the tokens.

        Logits are gathered from all ranks, so each computes its share of all that rank 0 asks for.
        """
        with torch.inference_mode():
            self._update_states(plan)
            if not plan.rows:
                return
            host = pack_inputs(plan, self._rows, self._block_size)
            step = self._compute_hidden(plan, host)
            if not self.decoder.scores_tokens:
                return
            if len(host.sampled_rows):
                self.logits(step.sampled)
            for tile in prompt_tiles(plan, host, self._rows, self.decoder.vocab_size):
                self.logits(step.tokens[tile.before])

    def _update_states(self, plan: SchedulerOutput) -> None:
        """Make a plan's changes to rows, adapter slots and blocks."""
        self._rows.update_states(plan)
        if self.adapters is not None:
            self.adapters.update_states(plan)
        self._copy_blocks(plan)
        if self.graphs is not None:
            self.graphs.update_tables(self._rows.new_entries)

    def _compute_hidden(self, plan: SchedulerOutput, host: HostInputs) -> StepHidden:
        """Compute the hidden states of a plan, by a CUDA graph where one fits."""
        token_slots = None if self.adapters is None else self.adapters.slots_of(plan.rows, plan.num_new)
        adapters = None if token_slots is None else self.adapters
        expert_rows = () if adapters is None or token_slots is None else adapters.expert_rows(token_slots)
        if self.graphs is not None and not expert_rows:  # with adapters of experts the host reads which are chosen
            step = self.graphs.replay(host, self._rows, token_slots)
            if step is not None:
                return step
        inputs = upload_inputs(host, self._rows, self._block_size, self._device)
        lora = None if adapters is None or token_slots is None else adapters.plan(token_slots)
        hidden = self.hidden(inputs, lora, expert_rows)
        sampled = hidden if inputs.sampled_tokens is None else hidden.index_select(0, inputs.sampled_tokens)
        return StepHidden(hidden, sampled, inputs.rows_on_device)

    def record_sampled(self, plan: SchedulerOutput, token_ids: tuple[tuple[int, ...], ...]) -> None:
        """Record the tokens that another rank sampled for a plan. Call it before a later plan is computed."""
        self._rows.record_sampled(plan, token_ids)

    def capture_graphs(self, capture: Capture) -> None:
        """Capture steps into `graphs`, if the kernels support capture. Raises RuntimeError if it fails."""
        if (kernels := capturable(self._kernels)) is None:
            return

        def hidden(token_ids: Tensor, positions: Tensor, slots: Tensor, plan: AttentionPlan, lora: LoraPlan) -> Tensor:
            cos, sin = self.decoder.rotary(positions)
            return self.decoder(token_ids, self.caches, StepContext(cos, sin, slots, plan, lora))

        attention = self.decoder.layers[0].attention
        with torch.inference_mode():
            self.graphs = StepGraphs(
                hidden,
                kernels,
                capture,
                max_num_seqs=self._max_num_seqs,
                max_model_len=self._max_model_len,
                block_size=self._block_size,
                num_slots=0 if self.adapters is None else self.adapters.num_slots,
                last_tokens=self._rows.last_tokens,
                cache=self.caches[0],
                query_heads=(attention.num_q_heads, attention.head_dim),
            )

    def hidden(
        self, inputs: StepInputs, lora: LoraPlan | None = None, expert_rows: tuple[tuple[int, Tensor], ...] = ()
    ) -> Tensor:
        """The last layer's output for each new token. (T, H)."""
        cos, sin = self.decoder.rotary(inputs.positions)
        plan = self._kernels.plan_attention(
            inputs.num_computed, inputs.num_new, inputs.block_tables, self._block_size, like=cos
        )
        return self.decoder(inputs.token_ids, self.caches, StepContext(cos, sin, inputs.slots, plan, lora, expert_rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token. (R, H) -> (R, V), float32."""
        return self.decoder.logits(hidden)[:, : self._num_tokens]

    def _sample(
        self,
        plan: SchedulerOutput,
        host: HostInputs,
        rows_on_device: Tensor,
        scores: Tensor | None,
        masks: Masks | None,
    ) -> PendingStep:
        """Sample the step's tokens. scores: (D, V) logits, overwritten; None: no row samples."""
        rows, row_ids, positions = self._rows, host.sampled_rows, host.sampled_positions
        if scores is None:
            nothing = Download((), self._device)  # waited for too, or the host would launch whole prompts ahead

            def wait() -> StepResult:
                nothing.arrays()
                return StepResult(step=plan.step, token_ids=((),) * len(plan.rows))

            return wait
        sampled = self._sampler(scores, row_ids, positions, masks or (lambda: plan.masks))
        if host.has_drafts:  # which of a row's samples is its last token, the host decides
            rows.last_position[row_ids] = -1
        else:
            rows.last_tokens.index_copy_(0, rows_on_device, sampled.token_ids)
            rows.last_position[row_ids] = positions

        def read() -> StepResult:
            samples = sampled.read()
            self._read.append((row_ids, positions, samples.token_ids))
            token_ids = kept_tokens(plan, samples.token_ids.tolist())
            return StepResult(
                step=plan.step,
                token_ids=token_ids,
                logprobs=kept_logprobs(plan, samples.logprobs, token_ids),
                invalid=invalid_rows(plan, samples.valid, token_ids),
            )

        return read

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        if plan.host_moves:
            assert self.host is not None, "a plan moves blocks to host memory that there is not"
            self.host.make(plan.host_moves, self.caches)
        if plan.copies:
            copy_blocks(self.caches, plan.copies)
