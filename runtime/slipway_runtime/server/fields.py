"""The three lists of request fields: which are honoured, which are refused, and which are ignored and named. Pure.

| list     | a field is on it if                                   | where it is written                             |
|----------|-------------------------------------------------------|-------------------------------------------------|
| honoured | it does what its API says                             | the fields of the classes in the `*_types` files |
| refused  | without it the answer would be a different answer     | `refused` below: a 400 that names it            |
| ignored  | anything else, a field that nobody here has heard of  | `ignored` below, and all unknown names          |

An ignored field never fails a request. It is named in the header `x-slipway-ignored`, in a log line, and in the metric
`slipway:ignored_fields_total` (ADR 117). `null` is "not set", for every optional field of every object.

Beside each field of the two tables are its neutral values: they ask for what happens anyway, and are not worth a word.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

Names = dict[str, tuple[Any, ...]]  # of fields, each with its neutral values

LONGEST_HEADER: Final = 512  # characters
_SHOWN: Final = re.compile(r"[A-Za-z0-9_\[\]-]{1,64}")  # a key may be any text of a client, a prompt included
HIDDEN: Final = "*"  # a key that does not look like the name of a field
OTHER: Final = "other"  # the label of all names that are in no table: a client cannot make new series


@dataclass(frozen=True)
class Lists:
    """The refused and the ignored fields of one kind of object; its honoured fields are those of its class."""

    refused: Names = field(default_factory=dict)
    ignored: Names = field(default_factory=dict)

    def refuses(self, value: Mapping[str, Any]) -> str:
        """The first field of an object that has to be refused; empty: none."""
        return next((name for name, neutral in self.refused.items() if _says(value.get(name), neutral)), "")


class Whole(Lists):
    """The lists of an object that is ignored as a whole: none of its fields is named."""


class Listed(Protocol):
    """An object of a request, as `bodies.RequestBody`."""

    @property
    def lists(self) -> Lists:
        """Its refused and ignored fields."""

    @classmethod
    def honoured(cls) -> Mapping[str, str]:
        """The names of its fields in JSON, each with the name of the attribute that holds it."""

    def dropped(self) -> Iterator[tuple[str, bool]]:
        """Values that are ignored although their field is honoured; and whether the name is one of a fixed few."""


def ignored_fields(body: Listed, raw: Mapping[str, Any]) -> dict[str, bool]:
    """The ignored fields of a body that was read from `raw`, in order; and whether each is in a table.

    Names are paths without indices: `tools.defer_loading`, however many tools have it.
    """
    found: dict[str, bool] = {}
    _collect(body, raw, "", found)
    return found


def shown(name: str) -> str:
    """The name, if it looks like one: any other text of a client stays out of headers and logs."""
    return name if _SHOWN.fullmatch(name) else HIDDEN


def header_of(names: Mapping[str, bool]) -> str:
    """The value of the response header: as many names as fit, then how many more there are."""
    shown: list[str] = []
    room = LONGEST_HEADER - len(", +99999 more")
    for name in names:
        room -= len(name) + 2
        if room < 0:
            return ", ".join([*shown, f"+{len(names) - len(shown)} more"])
        shown.append(name)
    return ", ".join(shown)


def _collect(body: Listed, raw: Mapping[str, Any], path: str, found: dict[str, bool]) -> None:
    honoured, lists = body.honoured(), body.lists
    for key, value in raw.items():
        if key in honoured:
            _descend(getattr(body, honoured[key]), value, f"{path}{key}.", found)
        elif key in lists.ignored:
            if _says(value, lists.ignored[key]):
                found[path + key] = True
        elif key not in lists.refused and value is not None and not isinstance(lists, Whole):
            found.setdefault(path + shown(key), False)
    for name, is_known in body.dropped():
        found[path + name] = is_known


def _descend(value: Any, raw: Any, path: str, found: dict[str, bool]) -> None:
    if isinstance(value, list) and isinstance(raw, list):
        for each, each_raw in zip(value, raw, strict=False):
            _descend(each, each_raw, path, found)
    elif isinstance(raw, dict) and hasattr(value, "lists"):
        _collect(value, raw, path, found)


def _says(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is not None and not any(value == one and isinstance(value, bool) == isinstance(one, bool)
                                         for one in neutral)  # fmt: skip


# --- what all generating endpoints refuse: other ways to sample, to bind and to end an answer

_SAMPLING: Final[Names] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "kv_transfer_params": ({},),
    "prompt_embeds": (),
    "thinking_token_budget": (),
    "logprob_token_ids": ([],),
    "min_new_tokens": (0,),
    "max_new_tokens": (),
    "n_predict": (-1,),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    "stop_regex": ([],),
    "do_sample": (True,),
    "typical_p": (1,),
    "top_a": (0,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "repeat_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "chat_template": (),
    "documents": ([],),
    "data_sources": ([],),
}
# Of the caller, of a provider's account, or of a cache that works without them.
_OF_THE_ACCOUNT: Final[Names] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "safety_identifier": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_cache_options": ({},),
    "moderation": (),
    "session_id": (),
}
_OF_HOSTED_TOOLS: Final[Names] = {
    "allowed_callers": ([], ["direct"]),
    "async": (False,),
    "defer_loading": (False,),
    "input_examples": ([],),
    "output_schema": (),
}
# What other servers, proxies and client libraries leave in a message.
_OF_OTHER_SERVERS: Final[Names] = {
    "id": (),
    "annotations": ([],),
    "provider_specific_fields": ({},),
    "thinking_blocks": ([],),
    "reasoning_details": ([],),
    "reasoning_items": ([],),
    "images": ([],),
    "parsed": (),
    "citations": ([],),
    "token_ids": ([],),
}

# --- /v1/chat/completions and /v1/completions

GENERATION: Final = Lists(
    refused=_SAMPLING,
    ignored=_OF_THE_ACCOUNT | {"length_penalty": (1,), "spaces_between_special_tokens": (True,)},
)
CHAT: Final = Lists(
    refused=GENERATION.refused
    | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "best_of": (1,),
    },
    ignored=GENERATION.ignored
    | {"verbosity": ("medium",), "prediction": (), "thinking": (), "enable_thinking": (), "reasoning": ()},
)
COMPLETION: Final = Lists(
    refused=GENERATION.refused | {"suffix": ("",), "tools": ([],), "messages": ()}, ignored=GENERATION.ignored
)
MESSAGE: Final = Lists(refused={"audio": ()}, ignored=_OF_OTHER_SERVERS)
TEXT_PART: Final = Lists(ignored={"annotations": ([],), "citations": ([],), "id": ()})
TOOL_CALL: Final = Lists(ignored={"provider_specific_fields": ({},), "extra_content": ({},)})
FUNCTION_CALL: Final = Lists(ignored={"parsed_arguments": ()})
TOOL: Final = Lists(ignored=_OF_HOSTED_TOOLS)
STREAM_OPTIONS: Final = Lists(ignored={"include_obfuscation": (False,)})
STRUCTURED: Final = Lists(refused={"whitespace_pattern": (), "disable_additional_properties": (False,)})
TOKENIZE: Final = Lists(refused={"chat_template": ()})
EMBEDDING: Final = Lists(
    refused={
        "messages": (),
        "input_type": (),
        "task": (),
        "prompt_name": (),
        "instruction": (),
        "chat_template": (),
        "late_chunking": (False,),
        "normalize": (True,),
    },
    ignored=_OF_THE_ACCOUNT,
)
SCORING: Final = Lists(
    refused={
        "instruction": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "truncate_prompt_tokens": (),
        "rank_fields": (["text"],),
        "use_activation": (True,),
        "activation": (True,),
        "softmax": (True,),
        "normalize": (True,),
    },
    # A document that does not fit is an error: none is cut, and none is cut into chunks.
    ignored=_OF_THE_ACCOUNT | {"max_chunks_per_doc": (), "max_tokens_per_doc": (), "encoding_format": ("float",)},
)

# --- /v1/responses

RESPONSES: Final = Lists(
    refused=GENERATION.refused
    | {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
    },
    ignored={
        "access_programs": ({},),
        "background_options": ({},),
        "client_metadata": ({},),
        "context_management": ([],),
        "image": (),
        "moderation": (),
        "personality": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "service_tier": ("auto", "default"),
        "session_id": (),
        "store": (False,),
        "truncation": ("disabled",),  # a conversation beyond the context is a 400 either way
    },
)
RESPONSES_TEXT: Final = Lists(ignored={"verbosity": ("medium",)})
REASONING: Final = Lists(ignored={"context": (), "generate_summary": (), "mode": (), "summary": ("none",)})
RESPONSES_TOOL: Final = Lists(ignored=_OF_HOSTED_TOOLS)
NAMESPACE: Final = Lists(ignored={"description": ()})
ITEM: Final = Lists(ignored={"caller": (), "async": (False,)})
ITEM_PART: Final = Lists(ignored={"annotations": ([],), "logprobs": ([],), "parsed": ()})
REASONING_ITEM: Final = Lists(ignored={"summary": ([],), "encrypted_content": ("",), **ITEM.ignored})

# --- /v1/messages

MESSAGES: Final = Lists(
    refused=_SAMPLING | {"thread": ()},
    ignored={
        "service_tier": ("auto", "standard_only"),
        "betas": ([],),
        "billing_policy": (),
        "compaction": (),
        "container": (),
        "context_management": ({"edits": []}, {}),
        "diagnostics": ({},),
        "fallback_credit_token": (),
        "fallbacks": ([],),
        "inference_geo": (),
        "mcp_servers": ([],),
        "metadata": ({},),
        "session_id": (),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    },
)
OUTPUT_CONFIG: Final = Lists(ignored={"task_budget": ()})
THINKING: Final = Lists(ignored={"budget_tokens": (), "block_binding": ()})
BLOCK: Final = Lists(ignored={"citations": ([],), "caller": (), "toolset_name": ()})
SYSTEM_MESSAGE: Final = Lists(ignored={"clear_at": (), "output_config": ()})
