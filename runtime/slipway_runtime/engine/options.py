"""Options of an engine: one frozen value, the same in a thread and in a process of its own. No torch.

Zero and the empty string mean that the model or the machine decides.
"""

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one engine; the names are those of the command line."""

    model_digest: str = ""  # of all weights, where it is pinned: part of the key of every prefix
    dtype: str = "auto"  # auto, bf16, fp16, fp32
    quantization: str = "none"  # of the weights, at load: none, int8, fp8
    kv_cache_dtype: str = "auto"  # auto (that of the weights), fp8, int8
    deterministic: bool = False  # results that do not depend on the other requests of a batch
    device: str = "auto"  # auto, cpu, cuda
    tensor_parallel_size: int = 1  # ranks that share the model: this process, and those that it starts
    threads: int = 0  # of torch, all ranks together
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 16
    kv_cache_bytes: int = 0
    kv_cache_host_bytes: int = 0  # of host memory, for prefixes that the pool evicts; 0: they are dropped
    gpu_memory_utilization: float = 0.85
    extra_eos_token_ids: tuple[int, ...] = ()  # the tokenizer's, beside the checkpoint's
    tokenizer_path: str = ""  # a folder with tokenizer.json, for grammars; empty: beside the weights
    speculation: str = "none"  # none, promptLookup, draft (both, prompt lookup first)
    draft_model: str = ""  # a folder with a draft model, whose tokenizer is that of the model; with speculation draft
    speculation_max_tokens: int = 0
    max_adapters: int = 0  # that compute at the same time; 0: adapters are off
    max_cpu_adapters: int = 0  # that wait in host memory
    max_rank: int = 0
    lora_experts: bool = False  # slots of adapters have room for experts
    score_tokens: str = ""  # "no,yes": a generator's two tokens whose logits are a reranker's score; with pooling auto
    pooling: str = ""  # compute embeddings and nothing else: last, mean, or auto (as the checkpoint says)
    overlap: bool | None = None  # plan a step while the one before it runs; None: the device decides
    tenant_weights: dict[str, float] = {}
    prefix_caching: bool = True
    kv_events_endpoint: str = ""  # tcp://…: publish KV events there; empty: off
    kv_events_topic: str = ""  # the first part of each of their messages
    kernels_directory: str = ""  # a folder in which the replicas of a node share compiled kernels
    kernels_key: str = ""  # by which their files are sealed; empty: nothing is shared
