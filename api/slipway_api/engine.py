"""The Engine kind: an inference server as data, so that a new one, or renamed flags, need no release of Slipway.

Templates are text with the names of fields: `--max-model-len $(runtime.maxModelLen)`. There are no expressions, loops
or functions, so an Engine cannot run code in the operator. `engine_fields` lists the names.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, Field

from slipway_api.dialect import Dialect
from slipway_api.engine_fields import ALIASES, FIELDS, VARIABLES
from slipway_api.names import API_VERSION
from slipway_api.overlay import ResourceMap, resource_rules
from slipway_api.types import ObjectMeta, Rule, Struct, bounded_list, cel_rules

VALUE: Final = "value"
"""In an entry with `field`: the field's value, translated by `values`."""

_NAMES: Final = "|".join(re.escape(name).replace(r"\.", "[.]") for name in (*VARIABLES, *FIELDS, *ALIASES, VALUE))
TEMPLATE_PATTERN: Final = f"^([^$]|[$][$]|[$][(]({_NAMES})[)])*$"
_PLACE: Final = re.compile(r"\$\$|\$\(([^)]*)\)")

TemplateText = Annotated[str, Field(pattern=TEMPLATE_PATTERN, max_length=1024)]


def _known(name: str) -> str:
    if name not in FIELDS:
        raise ValueError(f"{name} is not a field of an InferenceService that an engine may have a flag for")
    return name


FieldName = Annotated[str, AfterValidator(_known), Field(max_length=64, json_schema_extra={"enum": list(FIELDS)})]


def names_in(text: str) -> tuple[str, ...]:
    """The names that a template holds, in their order."""
    return tuple(match[1] for match in _PLACE.finditer(text) if match[1] is not None)


def render(text: str, values: dict[str, str]) -> str | None:
    """The template with each name replaced; None where one of them has no value.

    The kubelet replaces `$(NAME)` too, so dollars of values are doubled, and those of the template stay doubled.
    """
    if not all(values.get(name) for name in names_in(text)):
        return None
    return _PLACE.sub(lambda match: "$$" if match[1] is None else values[match[1]].replace("$", "$$"), text)


class Condition(Struct):
    """When an entry is written, and how a value is translated."""

    field: FieldName | None = None
    """Written only if the service sets this field to another value than its default; $(value) is its value. Absent:
    always written, unless a field that its text names has no value."""
    values: Annotated[dict[str, Annotated[str, Field(max_length=256)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """For field: the engine's word for each value, such as bf16: bfloat16. A value that is not listed is refused.
    Absent: every value is taken as it is."""


class Argument(Condition):
    """One or more arguments of the command line that belong together."""

    text: Annotated[tuple[TemplateText, ...], bounded_list(at_most=8)] = Field(min_length=1)
    """The arguments, with $(name) for fields and variables; $$ is a dollar."""


class Variable(Condition):
    """An environment variable of the engine."""

    name: str = Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)
    """Name of the variable."""
    text: TemplateText = ""
    """Its value, with $(name) for fields and variables; $$ is a dollar."""


class Port(Struct):
    """A port of the engine beside the serving port."""

    name: str = Field(pattern="^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=15)
    """Name of the port."""
    container_port: int = Field(ge=1, le=65535)
    """Its number."""


class Source(StrEnum):
    """A kind of model address."""

    HF = "hf"
    S3 = "s3"
    HTTP = "http"
    HTTPS = "https"
    PVC = "pvc"
    OCI = "oci"
    FILE = "file"


class Policy(StrEnum):
    """The treatment of a field for which the engine has no flag."""

    REFUSE = "Refuse"
    IGNORE = "Ignore"


class FieldPolicy(Struct):
    """The treatment of one field that no template names."""

    name: FieldName
    """The field of the InferenceService, below spec."""
    policy: Policy
    """Refuse: a service that sets it gets no replicas, and Stalled says why. Ignore: the service runs without it, and
    the condition EngineFieldsHonoured says so."""
    why: str = Field(min_length=1, max_length=256)
    """The reason or the remedy, as the end of a sentence."""


class ResourceDefaults(Struct):
    """CPU and memory of a replica where the service names none."""

    model_config = cel_rules(*resource_rules())

    requests: ResourceMap = Field(default_factory=dict)
    """What the scheduler reserves."""
    limits: ResourceMap = Field(default_factory=dict)
    """What the engine may use at most."""


class EngineTLS(Struct):
    """How the engine serves TLS, with the certificate of its namespace."""

    model_config = cel_rules(
        Rule(
            "['tls.certificate', 'tls.key'].all(file, self.args.exists(one, one.contains('$(' + file + ')')))",
            "tls.args must name both files: $(tls.certificate) and $(tls.key)",
            ".args",
        )
    )

    args: Annotated[tuple[TemplateText, ...], bounded_list(at_most=16)] = Field(min_length=1)
    """Arguments with which the engine serves TLS alone on $(ports.serving). They are written while internalTLS of the
    chart is on, between args and spec.runtime.args of the service."""


class EngineSpec(Struct):
    """How a replica of this engine is started, and how slipway-agent talks to it."""

    description: str = Field(default="", max_length=512)
    """For people: the purpose of the engine, and who tests it."""
    built_in: bool = False
    """Only for the engine slipway, Slipway's own runtime: the operator knows its command line, and reads nothing else
    of the object."""
    image: str = Field(default="", pattern=r"^\S*$", max_length=512)
    """Image of the engine; spec.runtime.image of a service wins. It runs as an arbitrary user, with a read-only root
    file system."""
    command: Annotated[tuple[TemplateText, ...], bounded_list(at_most=16)] = ()
    """The program and its first arguments. Empty: the image's entry point."""
    args: Annotated[tuple[Argument, ...], bounded_list(at_most=64)] = ()
    """The arguments after it; spec.runtime.args of a service come last."""
    env: Annotated[tuple[Variable, ...], bounded_list(at_most=64)] = ()
    """Environment variables; a service's spec takes precedence."""
    tls: EngineTLS | None = None
    """How the engine serves TLS. Absent: while internalTLS of the chart is on, services of this engine get no replicas,
    and Stalled has the reason EngineWithoutTLS."""
    ports: Annotated[tuple[Port, ...], bounded_list(at_most=8, key="name")] = ()
    """Ports beside $(ports.serving), on which the engine must listen."""
    stop_command: Annotated[tuple[TemplateText, ...], bounded_list(at_most=8)] = ()
    """A command of the engine's container that ends once the file $(drainedFile) exists. The kubelet runs it before it
    ends the container, so that an eviction waits for running requests. Empty: the engine gets SIGTERM immediately."""
    sources: Annotated[tuple[Source, ...], bounded_list(at_most=7)] = ()
    """The kinds of model addresses that the engine can load: pvc and oci are paths to it. Others are refused."""
    resources: ResourceDefaults = ResourceDefaults()
    """CPU and memory of a replica where the service names none."""
    dialect: Dialect | None = None
    """How the engine speaks: metrics, adapters, sleep and drain. slipway-agent gets it as it is."""
    fields: Annotated[tuple[FieldPolicy, ...], bounded_list(at_most=64, key="name")] = ()
    """Fields of an InferenceService that no template names. A field that is in neither is refused."""


class Engine(Struct):
    """An inference server that services select with spec.runtime.engine; for the platform team."""

    model_config = cel_rules(
        Rule(
            "self.metadata.name.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$') && size(self.metadata.name) <= 63",
            "metadata.name must be at most 63 lower-case letters, digits and '-'",
            ".metadata.name",
        ),
        Rule(
            "(self.metadata.name == 'slipway') == (has(self.spec.builtIn) && self.spec.builtIn)",
            "builtIn is for the engine slipway, and that engine is always built in",
            ".spec.builtIn",
        ),
        Rule(
            "(has(self.spec.builtIn) && self.spec.builtIn) || (has(self.spec.image) && self.spec.image != '')",
            "an engine needs an image",
            ".spec.image",
        ),
        Rule(
            "(has(self.spec.builtIn) && self.spec.builtIn) || (has(self.spec.sources) && size(self.spec.sources) > 0)",
            "an engine needs at least one kind of model address in sources",
            ".spec.sources",
        ),
        Rule(
            "(has(self.spec.builtIn) && self.spec.builtIn) || has(self.spec.dialect)",
            "an engine needs a dialect, by which slipway-agent talks to it",
            ".spec.dialect",
        ),
    )

    KIND: ClassVar[str] = "Engine"
    PLURAL: ClassVar[str] = "engines"

    api_version: str = API_VERSION
    kind: str = "Engine"
    metadata: ObjectMeta
    spec: EngineSpec
    """How a replica of this engine is started, and how slipway-agent talks to it."""


def entries(spec: EngineSpec) -> tuple[tuple[Condition, tuple[str, ...]], ...]:
    """Every entry of the templates with its text."""
    arguments = tuple((one, one.text) for one in spec.args)
    return arguments + tuple((one, (one.text,)) for one in spec.env)


def parse_engine(raw: dict[str, Any]) -> EngineSpec:
    """The spec from what the API server sent; raises pydantic.ValidationError."""
    return EngineSpec.model_validate(raw)
