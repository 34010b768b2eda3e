"""Engine plan: device, dtypes and limits, decided from a checkpoint's config and the options before loading."""

from dataclasses import dataclass
from pathlib import Path

import torch

from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.kernels.dispatch import refusal, refusal_of_latents
from slipway_runtime.models.adapter_weights import slot_bytes
from slipway_runtime.models.checkpoint import checkpoint_digest
from slipway_runtime.models.config import DoesNotFitError, ModelConfig, ModelRefusedError, read_config
from slipway_runtime.models.quantize import activation_dtype, choose_dtype, choose_kv_dtype, refusal_of_format
from slipway_runtime.models.sharding import part_of
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.residency import Residency
from slipway_runtime.worker.kv_cache import default_budget_bytes

_DRAFT_TOKENS = 4  # that a row may draft in a step, when speculation is on without speculation_max_tokens
_RANK = 16  # of adapters, when they are on without max_rank
_NVIDIA_DEVICE = Path("/dev/nvidiactl")  # in a container that got a GPU, whatever torch makes of it


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The device, dtypes and limits of an engine that is not built yet."""

    model_path: Path
    config: ModelConfig
    own: ModelConfig  # the part of it that this rank computes
    options: EngineOptions
    device: torch.device
    dtype: torch.dtype  # of activations
    weight_dtype: torch.dtype  # of matrices that are not quantized
    kv_dtype: torch.dtype
    max_model_len: int  # before the size of the KV cache is known
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    max_adapters: int
    max_cpu_adapters: int
    max_rank: int
    draft_tokens: int
    overlap: bool

    @property
    def max_samples(self) -> int:
        """Most samples of a step: each row's own and those that verify its drafts, of which each is a token."""
        return min(self.max_num_seqs * (1 + self.draft_tokens), self.max_num_batched_tokens)

    def residency(self, pool: BlockPool, block_bytes: int) -> Residency | None:
        """The residency of adapters, which share one budget with KV where both are in the same memory: on a CPU."""
        if not self.max_adapters:
            return None
        shared = block_bytes if self.device.type == "cpu" else 0
        largest = slot_bytes(self.own, self.max_rank, self.dtype.itemsize, of_experts=self.options.lora_experts)
        # Each adapter occupies whole blocks: max_cpu_adapters must fit, however little of its last block one fills.
        most = min(pool.total // 2, self.max_cpu_adapters * -(-largest // block_bytes))
        return Residency(
            pool,
            max_adapters=self.max_adapters,
            max_cpu_adapters=self.max_cpu_adapters,
            block_bytes=shared,
            most_blocks=most if shared else None,
        )

    def content_key(self) -> str:
        """A key of all that changes the KV of equal tokens, beside adapter and salt: equal on all replicas of a model.

        The digest is of a sample of the weights (checkpoint.py says which); `model_digest`, if pinned, is of all
        weights, and is part of the key too. Reads files: milliseconds.
        """
        options = self.options
        formats = f"{self.weight_dtype}/{options.quantization}/{options.kv_cache_dtype}/{options.deterministic}"
        ranks = f"/{options.tensor_parallel_size}" if options.tensor_parallel_size > 1 else ""  # ranks sum in parts
        return f"{checkpoint_digest(self.model_path)}/{options.model_digest}/{formats}{ranks}"

    def fit_pool(self, length: int, pool_tokens: int) -> int:
        """The context that a pool of so many tokens can hold: a sequence must fit alone, or it could never finish."""
        if (asked := self.options.max_model_len) > pool_tokens:
            raise DoesNotFitError(
                f"max_model_len is {asked}, and the KV cache holds {pool_tokens} tokens: give it more memory or a "
                "shorter context"
            )
        return min(length, pool_tokens)


def decide(model_path: Path, options: EngineOptions, rank: int = 0) -> EnginePlan:
    """Decide all settings that the options leave open. Raises ModelRefusedError for those that cannot be honoured.

    rank: of the ranks that share the model; each has a GPU of its own.
    """
    config = read_config(model_path)
    on = choose_device(options.device, rank)
    num_seqs = options.max_num_seqs or (32 if on.type == "cpu" else 256)
    num_batched_tokens = options.max_num_batched_tokens or max(num_seqs, 512 if on.type == "cpu" else 8192)
    if num_batched_tokens < num_seqs:
        raise ModelRefusedError(
            f"max_num_batched_tokens ({num_batched_tokens}) is smaller than max_num_seqs ({num_seqs}): "
            "a step must hold a token of each running sequence"
        )
    dtype = choose_dtype(options.dtype, config, on)
    _check_ranks(options, on)
    if why_not := refusal_of_format(config, options.quantization, on):
        raise ModelRefusedError(why_not)
    if options.max_adapters and not config.takes_adapters:
        raise ModelRefusedError(f"adapters for {config.model_type} models are not supported: set max_adapters to 0")
    own = part_of(config, options.tensor_parallel_size, rank)
    plan = EnginePlan(
        model_path=model_path,
        config=config,
        own=own,
        options=options,
        device=on,
        dtype=activation_dtype(dtype, on),
        weight_dtype=dtype,
        kv_dtype=choose_kv_dtype(options.kv_cache_dtype, dtype),
        max_model_len=_longest(config, options.max_model_len, _affordable_tokens(own, options, on)),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched_tokens,
        eos_token_ids=tuple(sorted({*config.eos_token_ids, *options.extra_eos_token_ids})),
        max_adapters=options.max_adapters,
        max_cpu_adapters=max(options.max_cpu_adapters, options.max_adapters),
        max_rank=(options.max_rank or _RANK) if options.max_adapters else 0,
        draft_tokens=(options.speculation_max_tokens or _DRAFT_TOKENS) if options.speculation != "none" else 0,
        overlap=options.overlap if options.overlap is not None else on.type == "cuda",
    )
    _check_device(plan)
    return plan


def choose_device(asked: str, rank: int = 0) -> torch.device:
    """The device: auto is a GPU wherever there is one. Raises ModelRefusedError for a GPU that torch cannot use.

    Serving on a CPU beside a GPU whose driver is too old would look healthy, and be a hundred times slower.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available() and not _has_unusable_gpu()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelRefusedError(
            f"the device is {asked}, and torch {torch.__version__} can use no GPU here: {_why_no_gpu()}; "
            "install a newer driver on the node, or set --device cpu"
        )
    # Never without a number: `cuda` alone is the current device of a thread, and several threads read weights.
    return torch.device("cuda", rank)


def _has_unusable_gpu() -> bool:
    return torch.version.cuda is not None and _NVIDIA_DEVICE.exists()


def _why_no_gpu() -> str:
    """What CUDA says of this machine, in one line."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())[:300]
    return f"CUDA finds {torch.cuda.device_count()} devices"


def _check_ranks(options: EngineOptions, device: torch.device) -> None:
    """Raise ModelRefusedError for a number of ranks that is not possible, alone or with the other options."""
    ranks = options.tensor_parallel_size
    if ranks < 1:
        raise ModelRefusedError(f"tensor_parallel_size is {ranks}: at least 1 rank has to compute")
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise ModelRefusedError(f"tensor_parallel_size is {ranks}, and there are {torch.cuda.device_count()} GPUs here")
    if ranks > 2 and options.deterministic:
        raise ModelRefusedError(
            f"deterministic is not possible with {ranks} ranks: more than two add up in an order that the batch decides"
        )


def _check_device(plan: EnginePlan) -> None:
    latents = plan.config.latent is not None
    if latents and (why_not := refusal_of_latents(plan.device, deterministic=plan.options.deterministic)):
        raise ModelRefusedError(why_not)
    if plan.device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(plan.device)
    types = {"dtype": plan.dtype, "kv_dtype": plan.kv_dtype}
    if why_not := refusal(plan.device, capability, head_dim=plan.config.head_dim, **types):
        raise ModelRefusedError(why_not)


def _longest(config: ModelConfig, asked: int, affordable: int) -> int:
    """The context length: as asked for, or what the model takes and a pool of all memory could hold."""
    if asked > config.max_position:
        raise ModelRefusedError(
            f"max_model_len is {asked}; this model takes at most {config.max_position}: its max_position_embeddings"
        )
    # Tables of positions are built for the whole length, and a config may claim sixteen million.
    return asked or max(1, min(config.default_position or config.max_position, affordable))


def _affordable_tokens(config: ModelConfig, options: EngineOptions, device: torch.device) -> int:
    """An upper bound of the tokens that the KV cache can hold: all memory, at a byte a value."""
    memory = options.kv_cache_bytes or default_budget_bytes(device, 1.0)
    return memory // config.kv_bytes_per_token(1)
