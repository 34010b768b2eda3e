"""Model families: the keys of config.json that each family adds, and how its layers differ from Llama's.

| model_type  | published as                      | differs from Llama by                                             |
|-------------|-----------------------------------|-------------------------------------------------------------------|
| llama       | Llama 2, 3.x, SmolLM2             |                                                                   |
| smollm3     | SmolLM3                           | layers without rotary positions                                   |
| mistral     | Mistral, Mistral Nemo             | a sliding window on all layers                                    |
| qwen2       | Qwen2, Qwen2.5                    | biases of q, k and v, a sliding window on some layers             |
| qwen3       | Qwen3                             | norms of heads, a sliding window on some layers                   |
| phi3        | Phi-3, Phi-3.5, Phi-4, Phi-4-mini | merged projections, longrope, positions for a part of a head      |
| gemma2      | Gemma 2                           | (1 + w) norms before and after, GELU, soft caps, scaled embedding |
| gemma3_text | Gemma 3, text only                | the same without caps; norms of heads, two rotary bases           |
| mixtral     | Mixtral                           | experts                                                           |
| qwen3_moe   | Qwen3 mixture of experts          | norms of heads, experts in some layers                            |
| gpt_oss     | gpt-oss                           | experts with biases and a clamped SwiGLU, attention sinks         |
| gemma       | Gemma 1, CodeGemma                | as gemma2, without norms after, caps and windows                  |
| ministral   | Ministral                         | a sliding window on some layers                                   |
| ministral3  | Ministral 3                       | as mistral; queries scaled beyond the trained context             |
| cwm         | Code World Model                  | the same                                                          |
| seed_oss    | Seed-OSS                          | biases of q, k and v, and a key for that of o                     |
| granite     | Granite 3 and 4, dense            | factors of embedding, scores, residual stream and logits          |
| olmo2       | OLMo 2                            | norms only after attention and MLP; norms of all heads as one     |
| olmo3       | OLMo 3                            | the same, a sliding window on some layers                         |
| exaone4     | EXAONE 4                          | norms only after; norms of heads; layers without positions        |
| ernie4_5    | ERNIE 4.5, dense                  | neighbouring dimensions are rotated together                      |
| helium      | Helium                            | the same                                                          |
| glm         | GLM-4, GLM-Edge                   | the same for half a head; gate and up merged                      |
| glm4        | GLM-4-0414, GLM-Z1                | the same, norms before and after                                  |
| cohere      | Command R, R+, Aya                | LayerNorm; attention and MLP read one norm; scaled logits         |
| cohere2     | Command R7B, Command A            | the same; windows, and full layers without positions              |
| starcoder2  | StarCoder2                        | LayerNorm with biases, an MLP without a gate                      |
| arcee       | AFM                               | an MLP without a gate, squared ReLU                               |
| hyperclovax | HyperCLOVA X SEED Think           | as granite, norms before and after, logits multiplied             |
| internlm3   | InternLM3                         |                                                                   |
| iquestcoder | IQuest-Coder                      |                                                                   |
| granitemoe  | Granite 3 with experts            | as granite                                                        |
| granitemoeshared | the same, shared expert      | as granitemoe, and an expert of all tokens                        |
| qwen2_moe   | Qwen1.5-MoE, Qwen2-57B-A14B       | experts, and a weighed expert of all tokens                       |
| olmoe       | OLMoE                             | norms of all heads as one, experts                                |
| flex_olmo   | FlexOlmo                          | as olmo2, experts                                                 |
| glm4_moe    | GLM-4.5, 4.6, 4.7                 | half of a head rotated, experts by sigmoid and in groups          |
| dots1       | dots.llm1                         | norms of heads, the same experts                                  |
| solar_open  | Solar Open                        | the same experts in all layers                                    |
| minimax_m2  | MiniMax-M2                        | half of a head rotated, norms of all heads as one, the same       |
| ernie4_5_moe | ERNIE 4.5 with experts           | as ernie4_5, experts chosen by corrected scores                   |
| llama4_text | Llama 4, text only                | norms of heads without weights, layers without positions, experts |
| deepseek_v2 | DeepSeek-V2, V2-Lite              | latent attention; experts by softmax, in groups                   |
| deepseek_v3 | DeepSeek-V3, R1, V3.1             | latent attention; experts as glm4_moe                             |
| kimi_k2     | Kimi K2                           | the same                                                          |
| glm4_moe_lite | GLM-4.7-Flash                   | the same                                                          |
| youtu       | Youtu-LLM                         | latent attention                                                  |
| hunyuan_v1_dense | Hunyuan dense, Hunyuan-MT    | norms of heads after rotation; RoPE base scaled by alpha          |

The text part of a multimodal model is one of these, too (`wrappers`).
"""

from dataclasses import dataclass
from typing import Any, Final

from slipway_runtime.models.config_values import ModelRefusedError


def words(text: str) -> frozenset[str]:
    """The words of a text: keys of config.json."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms in the checkpoint; "": there is none."""

    attention: str
    mlp: str
    attention_out: str = ""
    mlp_out: str = ""


BEFORE: Final = Norms("input_layernorm", "post_attention_layernorm")
AFTER: Final = Norms("", "", "post_attention_layernorm", "post_feedforward_layernorm")
GEMMA: Final = Norms(
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)
GLM4: Final = Norms("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
CLOVA: Final = Norms("input_layernorm", "post_attention_layernorm", "post_norm1", "post_norm2")
ONE: Final = Norms("input_layernorm", "")  # attention and MLP read the same norm
HEAD_NORMS: Final = ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names of a dense MLP in a layer, and of its matrices. gate "": it has none."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


GATED: Final = MlpNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeKeys:
    """How a family chooses experts: keys of config.json, and the names of the tensors of a sparse layer."""

    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    inner: str = "moe_intermediate_size"
    sparse: str = "all"  # see `config_experts`
    dense_layers: int = 0  # default of first_k_dense_replace
    scoring: str = "softmax"  # of the router's scores: softmax or sigmoid
    normalizes: bool | None = True  # the weights of a token's experts sum to one; None: by norm_topk_prob
    normalizes_by_default: bool = False
    scaled: bool = False  # routed_scaling_factor, n_group and topk_group are used
    scales_input: bool = False  # the weight multiplies the expert's input, not its output
    shared: str = ""  # the key of the size of the shared expert; "": it has the size of the others
    shared_counts: bool = True  # that key is a number of experts, not of features
    shared_name: str = ""  # of the shared expert in the block; "": there is none
    shared_fused: tuple[str, str] | None = None  # names of its gate_up and down, beside the block; None: as a dense MLP
    shared_gate: str = ""  # of the matrix that weighs its output
    block: str = "mlp"
    router: str = "gate"
    correction: str = ""  # of the numbers that are added to the scores for the choice alone
    correction_is_matrix: bool = False  # of one row
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[str, str] | None = None  # gate_up and down of all experts: (E, 2I, H) and (E, H, I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Keys and defaults that a model_type adds to Llama's."""

    keys: frozenset[str] = frozenset()  # used
    inert: frozenset[str] = frozenset()  # without effect on the output tokens
    neutral: tuple[tuple[str, object], ...] = ()  # keys with the one supported value, which has no effect
    activation: str = "silu"
    ties_by_default: bool = False  # default of tie_word_embeddings
    head_dim: int | None = None  # default of head_dim; None: hidden_size / heads
    qk_norm: bool = False
    gemma: bool = False
    fused: bool = False  # q, k, v are one matrix in the checkpoint, and so are gate and up
    fused_mlp: bool = False  # gate and up are one matrix
    norms: Norms = BEFORE
    wide_qk_norm: bool = False  # one norm over all heads of q, and one over those of k
    interleaved: bool = False  # neighbouring dimensions of a head are rotated together, not those of its halves
    epsilon: float = 1e-6  # default of the norms' epsilon
    epsilon_key: str = "rms_norm_eps"
    layer_norm: bool = False  # norms subtract the mean (LayerNorm)
    norm_bias: bool = False
    parallel: bool = False  # attention and MLP read the same norm, and their outputs are added together
    mlp: MlpNames = GATED
    head_norms: tuple[str, str] = HEAD_NORMS  # names of the norms of q and k
    norms_after_rotation: bool = False  # of q and k
    moe: MoeKeys | None = None
    unit_head_norms: bool = False  # q and k have norms without weights, in layers with positions
    latent: bool = False  # attention over one compressed vector for each token (MLA)
    draft_layers: bool = False  # the checkpoint has further layers that draft tokens; they are not loaded


_MOE_TRAINING: Final = words("router_aux_loss_coef output_router_logits router_jitter_noise")
_GEMMA_KEYS: Final = words(
    "hidden_activation query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping "
    "sliding_window_pattern _sliding_window_pattern rope_local_base_freq"
)
_GRANITE_KEYS: Final = words("embedding_multiplier attention_multiplier residual_multiplier logits_scaling")
_GRANITE_MOE: Final[dict[str, Any]] = {
    "count": "num_local_experts",
    "inner": "intermediate_size",
    "block": "block_sparse_moe",
    "router": "router.layer",
    "fused": ("input_linear", "output_linear"),
}
_DEEPSEEK_KEYS: Final = words(
    "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts routed_scaling_factor n_group "
    "topk_group topk_method scoring_func first_k_dense_replace norm_topk_prob moe_layer_freq"
)
_DEEPSEEK_MOE: Final[dict[str, Any]] = {
    "count": "n_routed_experts",
    "scoring": "sigmoid",
    "normalizes": None,
    "scaled": True,
    "shared": "n_shared_experts",
    "shared_name": "shared_experts",
    "correction": "gate.e_score_correction_bias",
}
_LATENT_KEYS: Final = words(
    "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim rope_interleave"
)
_DEEPSEEK_V3: Final = Family(
    keys=_DEEPSEEK_KEYS | _LATENT_KEYS,
    inert=_MOE_TRAINING | words("num_nextn_predict_layers ep_size aux_loss_alpha seq_aux"),
    interleaved=True,
    latent=True,
    moe=MoeKeys(**_DEEPSEEK_MOE, sparse="after dense", dense_layers=3, normalizes_by_default=True),
    draft_layers=True,
)
_COHERE: Final[dict[str, Any]] = {
    "norms": ONE,
    "parallel": True,
    "layer_norm": True,
    "epsilon": 1e-5,
    "epsilon_key": "layer_norm_eps",
}
FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(),
    "smollm3": Family(
        keys=words("no_rope_layers no_rope_layer_interval"), inert=words("pretraining_tp"), ties_by_default=True
    ),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_dim=128, qk_norm=True),
    "phi3": Family(
        keys=words("original_max_position_embeddings partial_rotary_factor"),
        neutral=(("full_attn_mod", 1), ("interpolate_factor", 1)),
        fused=True,
    ),
    "gemma2": Family(
        keys=_GEMMA_KEYS,
        inert=words("sliding_window_size"),
        activation="gelu_pytorch_tanh",
        ties_by_default=True,
        head_dim=256,
        gemma=True,
        norms=GEMMA,
    ),
    "gemma3_text": Family(
        keys=_GEMMA_KEYS,
        activation="gelu_pytorch_tanh",
        ties_by_default=True,
        head_dim=256,
        qk_norm=True,
        gemma=True,
        norms=GEMMA,
    ),
    "mixtral": Family(
        keys=words("num_local_experts num_experts_per_tok"),
        inert=_MOE_TRAINING,
        moe=MoeKeys(
            count="num_local_experts",
            inner="intermediate_size",
            block="block_sparse_moe",
            names=("w1", "w3", "w2"),
        ),
    ),
    "qwen3_moe": Family(
        keys=words(
            "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
            "decoder_sparse_step mlp_only_layers"
        ),
        inert=_MOE_TRAINING,
        qk_norm=True,
        moe=MoeKeys(sparse="by step", normalizes=None),
    ),
    "gpt_oss": Family(
        keys=words("num_local_experts num_experts_per_tok swiglu_limit swiglu_alpha"),
        inert=_MOE_TRAINING | words("experts_per_token initial_context_length"),
        head_dim=64,
        moe=MoeKeys(count="num_local_experts", inner="intermediate_size", router="router"),
    ),
    "gemma": Family(
        keys=words("hidden_activation"),
        activation="gelu_pytorch_tanh",
        ties_by_default=True,
        head_dim=256,
        gemma=True,
    ),
    "ministral": Family(),
    "ministral3": Family(head_dim=128, epsilon=1e-5),
    "cwm": Family(head_dim=128, epsilon=1e-5),
    "seed_oss": Family(keys=words("attention_out_bias"), inert=words("residual_dropout"), head_dim=128),
    "granite": Family(keys=_GRANITE_KEYS),
    "olmo2": Family(norms=AFTER, wide_qk_norm=True, epsilon=1e-5),
    "olmo3": Family(norms=AFTER, wide_qk_norm=True, epsilon=1e-5),
    "exaone4": Family(keys=words("sliding_window_pattern"), norms=AFTER, qk_norm=True, epsilon=1e-5),
    "ernie4_5": Family(keys=words("use_bias"), ties_by_default=True, head_dim=128, interleaved=True, epsilon=1e-5),
    "helium": Family(head_dim=128, interleaved=True, epsilon=1e-8),
    "glm": Family(head_dim=128, fused_mlp=True, interleaved=True, epsilon=1.5625e-07),
    "glm4": Family(head_dim=128, fused_mlp=True, interleaved=True, norms=GLM4, epsilon=1.5625e-07),
    "cohere": Family(
        keys=words("layer_norm_eps logit_scale use_qk_norm model_max_length"),
        ties_by_default=True,
        interleaved=True,
        **_COHERE,
    ),
    "cohere2": Family(
        keys=words("layer_norm_eps logit_scale sliding_window_pattern"),
        inert=words("layer_switch use_parallel_embedding"),
        neutral=(
            ("order_of_interleaved_layers", "local_attn_first"),
            ("position_embedding_type", "rope_gptj"),
            ("rotary_pct", 1.0),
            ("use_embedding_sharing", True),
            ("use_gated_activation", True),
            ("use_parallel_block", True),
            ("use_qk_norm", False),
        ),
        ties_by_default=True,
        interleaved=True,
        **_COHERE,
    ),
    "starcoder2": Family(
        keys=words("norm_epsilon use_bias"),
        inert=words("residual_dropout embedding_dropout"),
        neutral=(("mlp_type", "default"), ("norm_type", "layer_norm")),
        activation="gelu_pytorch_tanh",
        ties_by_default=True,
        layer_norm=True,
        norm_bias=True,
        epsilon=1e-5,
        epsilon_key="norm_epsilon",
        mlp=MlpNames(gate="", up="c_fc", down="c_proj"),
    ),
    "arcee": Family(activation="relu2", epsilon=1e-5, mlp=MlpNames(gate="")),
    "hyperclovax": Family(
        keys=_GRANITE_KEYS | words("use_post_norm"),
        norms=CLOVA,
    ),
    "internlm3": Family(keys=words("qkv_bias bias"), head_dim=128, epsilon=1e-5),
    "iquestcoder": Family(neutral=(("clip_qkv", None),), head_dim=128, epsilon=1e-5),
    "hunyuan_v1_dense": Family(
        neutral=(("use_qk_norm", True), ("use_cla", False), ("norm_type", "rms"), ("use_rotary_pos_emb", True)),
        inert=words("attention_head_dim cla_share_factor add_classification_head org_vocab_size"),
        qk_norm=True,
        epsilon=1e-5,
        head_norms=("query_layernorm", "key_layernorm"),
        norms_after_rotation=True,
    ),
    "granitemoe": Family(
        keys=_GRANITE_KEYS | words("num_local_experts num_experts_per_tok"),
        inert=_MOE_TRAINING,
        moe=MoeKeys(**_GRANITE_MOE),
    ),
    "granitemoeshared": Family(
        keys=_GRANITE_KEYS | words("num_local_experts num_experts_per_tok shared_intermediate_size"),
        inert=_MOE_TRAINING,
        moe=MoeKeys(
            **_GRANITE_MOE,
            shared="shared_intermediate_size",
            shared_counts=False,
            shared_name="shared_mlp",
            shared_fused=("input_linear", "output_linear"),
        ),
    ),
    "qwen2_moe": Family(
        keys=words(
            "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
            "decoder_sparse_step mlp_only_layers shared_expert_intermediate_size qkv_bias"
        ),
        inert=_MOE_TRAINING,
        moe=MoeKeys(
            sparse="by step",
            normalizes=None,
            shared="shared_expert_intermediate_size",
            shared_counts=False,
            shared_name="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    ),
    "olmoe": Family(
        keys=words("num_experts num_local_experts num_experts_per_tok norm_topk_prob"),
        inert=_MOE_TRAINING,
        neutral=(("clip_qkv", None),),
        wide_qk_norm=True,
        epsilon=1e-5,
        moe=MoeKeys(inner="intermediate_size", normalizes=None),
    ),
    "flex_olmo": Family(
        keys=words("num_experts num_local_experts num_experts_per_tok norm_topk_prob"),
        inert=_MOE_TRAINING,
        norms=AFTER,
        wide_qk_norm=True,
        moe=MoeKeys(inner="intermediate_size", normalizes=None),
    ),
    "glm4_moe": Family(
        keys=_DEEPSEEK_KEYS | words("use_qk_norm"),
        inert=_MOE_TRAINING | words("num_nextn_predict_layers"),
        epsilon=1e-5,
        moe=MoeKeys(**_DEEPSEEK_MOE, sparse="after dense", dense_layers=1, normalizes_by_default=True),
        draft_layers=True,
    ),
    "dots1": Family(
        keys=_DEEPSEEK_KEYS,
        inert=_MOE_TRAINING,
        qk_norm=True,
        moe=MoeKeys(**_DEEPSEEK_MOE, sparse="after dense"),
    ),
    "solar_open": Family(
        keys=_DEEPSEEK_KEYS,
        inert=_MOE_TRAINING,
        head_dim=128,
        epsilon=1e-5,
        moe=MoeKeys(**_DEEPSEEK_MOE, normalizes_by_default=True),
    ),
    "minimax_m2": Family(
        keys=words("num_local_experts num_experts num_experts_per_tok rotary_dim attn_type_list"),
        inert=_MOE_TRAINING
        | words("mtp_transformer_layers num_mtp_modules use_mtp shared_moe_mode mlp_intermediate_size"),
        neutral=(
            ("use_qk_norm", True),
            ("qk_norm_type", "per_layer"),
            ("use_routing_bias", True),
            ("scoring_func", "sigmoid"),
            ("shared_intermediate_size", 0),
            ("layernorm_full_attention_beta", 1.0),
            ("layernorm_linear_attention_beta", 1.0),
            ("layernorm_mlp_beta", 1.0),
        ),
        head_dim=128,
        wide_qk_norm=True,
        moe=MoeKeys(
            count="num_local_experts",
            inner="intermediate_size",
            scoring="sigmoid",
            block="block_sparse_moe",
            names=("w1", "w3", "w2"),
            correction="e_score_correction_bias",
        ),
    ),
    "ernie4_5_moe": Family(
        keys=words(
            "moe_num_experts moe_k moe_intermediate_size moe_num_shared_experts moe_layer_start_index "
            "moe_layer_end_index moe_layer_interval moe_norm_min"
        ),
        inert=_MOE_TRAINING | words("moe_capacity moe_use_aux_free num_nextn_predict_layers"),
        neutral=(("use_bias", False),),
        ties_by_default=True,
        interleaved=True,
        epsilon=1e-5,
        moe=MoeKeys(
            count="moe_num_experts",
            chosen="moe_k",
            sparse="interval",
            shared="moe_num_shared_experts",
            shared_name="shared_experts",
            correction="moe_statics.e_score_correction_bias",
            correction_is_matrix=True,
        ),
        draft_layers=True,
    ),
    "llama4_text": Family(
        keys=words(
            "num_local_experts num_experts_per_tok intermediate_size_mlp moe_layers interleave_moe_layer_step "
            "no_rope_layers no_rope_layer_interval attention_chunk_size attn_temperature_tuning floor_scale attn_scale "
            "use_qk_norm"
        ),
        inert=_MOE_TRAINING | words("for_llm_compressor"),
        head_dim=128,
        interleaved=True,
        epsilon=1e-5,
        mlp=MlpNames(block="feed_forward"),
        moe=MoeKeys(
            count="num_local_experts",
            inner="intermediate_size",
            sparse="listed",
            scoring="sigmoid",
            normalizes=False,
            scales_input=True,
            shared_name="shared_expert",
            block="feed_forward",
            router="router",
        ),
        unit_head_norms=True,
    ),
    "deepseek_v2": Family(
        keys=_DEEPSEEK_KEYS | _LATENT_KEYS,
        inert=_MOE_TRAINING | words("ep_size aux_loss_alpha seq_aux"),
        neutral=(("norm_topk_prob", False), ("scoring_func", "softmax")),
        interleaved=True,
        latent=True,
        moe=MoeKeys(
            **_DEEPSEEK_MOE | {"scoring": "softmax", "normalizes": False, "correction": ""}, sparse="after dense"
        ),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": Family(
        keys=_DEEPSEEK_KEYS | _LATENT_KEYS | words("mlp_layer_types"),
        inert=_MOE_TRAINING | words("num_nextn_predict_layers"),
        interleaved=True,
        epsilon=1e-5,
        latent=True,
        moe=MoeKeys(**_DEEPSEEK_MOE, sparse="after dense", dense_layers=1, normalizes_by_default=True),
        draft_layers=True,
    ),
    "youtu": Family(keys=_LATENT_KEYS, ties_by_default=True, interleaved=True, latent=True),
}


def check_activation(family: Family, raw: dict[str, Any]) -> None:
    """Raise ModelRefusedError for an activation that the family's published models do not have."""
    for key in ("hidden_activation", "hidden_act"):
        if key == "hidden_activation" and not family.gemma:
            continue
        said = raw.get(key)
        # Gemma's first config files have "gelu", while its authors' code computes the tanh form.
        if said is not None and said != family.activation and not (family.gemma and said == "gelu"):
            raise ModelRefusedError(f"config.json: {key} is {said!r}; only {family.activation!r} is supported")
