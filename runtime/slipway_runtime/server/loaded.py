"""The identity of a replica's model, and the objects that serve requests once the model is loaded."""

from dataclasses import dataclass
from typing import Protocol

from slipway_runtime.engine.client import Call, OutputStream, StepTimes
from slipway_runtime.messages import AdapterStatus, EngineFacts, EngineStats, FinishReason, Reply, Request
from slipway_runtime.server.adapters import AdapterRegistry
from slipway_runtime.server.metrics import Metrics
from slipway_runtime.server.prompt import PromptEncoder
from slipway_runtime.server.structured import GrammarValidator
from slipway_runtime.settings import SamplingDefaults


class Engine(Protocol):
    """The part of EngineClient that the server uses."""

    facts: EngineFacts
    error: str
    adapters: tuple[AdapterStatus, ...]
    times: StepTimes

    @property
    def alive(self) -> bool: ...  # noqa: D102  see EngineClient
    @property
    def draining(self) -> bool: ...  # noqa: D102
    def generate(self, request: Request) -> OutputStream: ...  # noqa: D102
    def abort(self, request_id: str, reason: FinishReason) -> None: ...  # noqa: D102
    async def call(self, message: Call) -> Reply: ...  # noqa: D102
    def stats(self) -> EngineStats: ...  # noqa: D102
    def drain(self) -> None: ...  # noqa: D102
    def undrain(self) -> None: ...  # noqa: D102
    async def wait_drained(self) -> None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The names of a replica's model, the same in headers, bodies and metrics."""

    model: str
    revision: str = ""
    namespace: str = ""
    uri: str = ""

    def answers_to(self, name: str) -> bool:
        """Whether `name` names this model; an empty name does."""
        return name in {"", self.model, f"{self.namespace}/{self.model}"}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The objects that serve requests for a loaded model: engine, prompt encoder, metrics, grammars, adapters."""

    engine: Engine
    prompts: PromptEncoder
    metrics: Metrics
    grammars: GrammarValidator
    adapters: AdapterRegistry
    defaults: SamplingDefaults
    max_output_tokens: int = 0
    created: int = 0

    @property
    def tokenizer_sha256(self) -> str:
        """The digest of the tokenizer and chat template that encode the prompts."""
        return self.prompts.files.sha256
