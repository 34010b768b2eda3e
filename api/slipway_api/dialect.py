"""How an engine speaks: what `slipway-agent` must know of a foreign engine to answer the admin protocol for it.

| part     | says                                                                      | without it               |
|----------|---------------------------------------------------------------------------|--------------------------|
| probe    | where the engine reports its health, and for how long it may be silent | GET /health, 30 s        |
| metrics  | which Prometheus series mean what                                         | it is required           |
| models   | where the engine lists its models and adapters                            | as OpenAI's API has it   |
| drain    | how requests that the metrics do not show yet are counted                 | the metrics count        |
| adapters | how a LoRA adapter is loaded and unloaded, and from where                 | adapters are refused     |
| sleep    | how the engine gives the device's memory back, and says that it has       | sleep is refused         |

A dialect is one JSON document, camelCase. Unlike the other structs of the API it refuses unknown fields: an agent that
overlooked one would translate wrongly. Engines of the chart have theirs in `dialects/`, the one copy: the chart, the
tests and the documentation read it there.
"""

from enum import StrEnum
from importlib import resources
from typing import Annotated, Final

from pydantic import ConfigDict, Field, ValidationError

from slipway_api.types import Struct, bounded_list

ENV_DIALECT: Final = "SLIPWAY_DIALECT"  # the document, in the agent's container
BUILT_IN: Final = ("vllm", "sglang")  # names of documents in `dialects/`
MOST_BYTES: Final = 65_536  # of a document

# Of metrics, labels and fields of JSON bodies.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]{0,127}$", max_length=128)]
# A path on the engine's serving port, without a query.
Path = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._~/-]{0,127}$", max_length=128)]


class _Strict(Struct):
    """A part of a dialect: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class EngineProbe(_Strict):
    """Whether the engine is well. An engine that compiles while it serves is silent for longer than a network."""

    path: Path = "/health"
    """Answers 200 while the engine is well."""
    timeout_seconds: int = Field(default=5, ge=1, le=60)
    """Of one call to the engine."""
    start_seconds: int = Field(default=1800, ge=10, le=86400)
    """How long a start may take, with the download of the model and all compilation."""
    unready_after_seconds: int = Field(default=30, ge=1, le=3600)
    """After this time of silence an engine gets no new requests."""
    restart_after_seconds: int = Field(default=600, ge=10, le=86400)
    """After this time of silence an engine is restarted."""


class Metric(_Strict):
    """One Prometheus metric. Series with other labels than these are left out; the rest are added up."""

    name: Name
    """As on the page, with `_total` where it has it."""
    labels: dict[str, Annotated[str, Field(max_length=128)]] = Field(default={}, max_length=8)
    """Labels that a series must have to count."""


Metrics = Annotated[tuple[Metric, ...], bounded_list(at_most=8)]


class EngineCapacity(_Strict):
    """Where the engine says how large its KV cache is: in labels of an info metric, or as a number of tokens."""

    metric: Name
    """An info metric whose labels have the numbers, or a gauge of tokens."""
    blocks_label: str = Field(default="", max_length=128)
    """Label with the number of blocks; empty: the metric is a gauge of tokens."""
    block_size_label: str = Field(default="", max_length=128)
    """Label with the tokens of a block; empty: a block is one token."""


class EngineMetrics(_Strict):
    """Which metrics mean what. Every list is summed.

    A gauge that is named here and is not on the page is an error, which makes `/signals` fail: it is never read as
    zero. A counter that is absent has counted nothing yet.
    """

    path: Path = "/metrics"
    """Page in the text format of Prometheus."""
    running: Metrics = Field(min_length=1)
    """Gauges of requests that compute."""
    waiting: Metrics = Field(min_length=1)
    """Gauges of requests that wait for their first step."""
    kv_usage: Metric
    """Gauge of the share of the KV cache in use, between 0 and 1; the mean where there are several series."""
    capacity: EngineCapacity | None = None
    """Size of the KV cache; absent: unknown."""
    start_time: Metric | None = None
    """Gauge that another start of the engine changes; absent: a restart is seen by a pause or by counters that fall."""
    prompt_tokens: Metrics = ()
    """Counters of prompt tokens."""
    generation_tokens: Metrics = ()
    """Counters of generated tokens."""
    finished: Metrics = ()
    """Counters of requests that ended as asked."""
    aborted: Metrics = ()
    """Counters of requests that ended otherwise."""
    preemptions: Metrics = ()
    """Counters of requests that gave their place in the KV cache up."""
    prefix_queries: Metrics = ()
    """Counters of prompt tokens that were looked up in the prefix cache."""
    prefix_hits: Metrics = ()
    """Counters of prompt tokens that were found there."""
    time_to_first_token: Metric | None = None
    """Histogram in seconds, by its name without `_bucket`."""
    inter_token_latency: Metric | None = None
    """Histogram in seconds, by its name without `_bucket`."""


class EngineModels(_Strict):
    """The list of models and adapters, in the form of OpenAI's API: `{"data": [{"id": …}]}`."""

    path: Path = "/v1/models"
    """Answers the list."""
    parent_field: Name = "parent"
    """Field of an entry that is set for an adapter and not for a model."""
    source_field: Name = "root"
    """Field of an adapter's entry with the address it was loaded from."""
    max_model_len_field: Name = "max_model_len"
    """Field of a model's entry with the tokens of its longest request."""


class InFlight(_Strict):
    """An endpoint that counts the requests which the engine's server holds, those that no metric shows included."""

    path: Path
    """Answers a JSON object."""
    field: Name
    """Its field with the number of requests."""


class EngineDrain(_Strict):
    """How a drain is known to be over.

    A foreign engine refuses nothing while it drains: the replica is not ready, gateways send it nothing, and what it
    has is counted.
    """

    in_flight: InFlight | None = None
    """Counts beside the metrics; the larger number counts."""
    quiet_seconds: int = Field(default=2, ge=0, le=60)
    """A drain is over after this time without requests: metrics are late by a step, and by the prompt's
    tokenization."""


class AdapterSource(StrEnum):
    """Where an engine can read adapters from by itself."""

    FILE = "file"  # a path that the engine's container has
    HF = "hf"  # a repository of the Hugging Face hub, without a revision


class AdapterCall(_Strict):
    """A POST with a JSON object."""

    path: Path
    """The endpoint."""
    name_field: Name = "lora_name"
    """Field with the adapter's name."""
    source_field: str = Field(default="", max_length=128)
    """Field with the path or repository; empty for calls without one, such as unload."""
    replace_field: str = Field(default="", max_length=128)
    """Field that is true when the adapter takes the place of another content of that name; empty: the agent unloads the
    old one first."""
    pinned_field: str = Field(default="", max_length=128)
    """Field that is true for an adapter that must stay in memory; empty: the engine pins none."""


class EngineAdapters(_Strict):
    """How LoRA adapters are loaded into the running engine; they are listed with the models."""

    load: AdapterCall
    """Loads one; answers when it is loaded."""
    unload: AdapterCall
    """Unloads one."""
    sources: Annotated[tuple[AdapterSource, ...], bounded_list(at_most=4)] = Field(min_length=1)
    """Where the engine can read them from."""
    load_seconds: int = Field(default=600, ge=1, le=3600)
    """How long a load may take."""
    max_adapters: int = Field(default=0, ge=0, le=1024)
    """Adapters that compute at the same time; 0: as many as SLIPWAY_MAX_ADAPTERS says."""


class EngineSleep(_Strict):
    """How the engine gives the device's memory back. All three calls are needed: an agent that has restarted asks."""

    sleep_path: Path = "/sleep"
    """POST; answers when the memory is free."""
    level_parameter: Name = "level"
    """Parameter of the query with the level."""
    levels: Annotated[tuple[Annotated[int, Field(ge=1, le=2)], ...], bounded_list(at_most=2)] = Field(min_length=1)
    """Levels from which the engine wakes up with its weights."""
    wake_path: Path = "/wake_up"
    """POST; answers when the engine can serve."""
    state_path: Path = "/is_sleeping"
    """GET; answers a JSON object."""
    state_field: Name = "is_sleeping"
    """Its field that is true while the engine sleeps."""
    seconds: int = Field(default=120, ge=1, le=3600)
    """How long each call may take."""


class Dialect(_Strict):
    """How an agent talks to its engine."""

    engine: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """The engine's name, for messages."""
    probe: EngineProbe = EngineProbe()
    """Whether the engine is well."""
    metrics: EngineMetrics
    """Which metrics mean what."""
    models: EngineModels = EngineModels()
    """The list of models and adapters."""
    drain: EngineDrain = EngineDrain()
    """How a drain is known to be over."""
    adapters: EngineAdapters | None = None
    """How adapters are loaded; absent: they are refused."""
    sleep: EngineSleep | None = None
    """How the engine sleeps; absent: it is refused."""


class DialectError(ValueError):
    """The document is not a dialect; the message names the first field that is wrong."""


def parse(document: str | bytes) -> Dialect:
    """The dialect of a JSON document; raises DialectError."""
    raw = document.encode() if isinstance(document, str) else document
    if len(raw) > MOST_BYTES:
        raise DialectError(f"the dialect has {len(raw)} bytes, the limit is {MOST_BYTES}")
    try:
        return Dialect.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise DialectError(f"the dialect is invalid: {place}: {first['msg']}") from None


def built_in(name: str) -> Dialect:
    """A dialect that is shipped with the chart, by its engine's name; raises DialectError where there is none."""
    if name not in BUILT_IN:
        raise DialectError(f"no dialect {name!r} is built in; there are {', '.join(BUILT_IN)}")
    return parse((resources.files("slipway_api") / "dialects" / f"{name}.json").read_bytes())
