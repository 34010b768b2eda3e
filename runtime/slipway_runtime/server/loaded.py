"""The loaded model: the identity of a replica, and all that it holds once its model is loaded."""

from dataclasses import dataclass
from typing import Protocol

from slipway_runtime.engine.client import Call, OutputStream
from slipway_runtime.engine.step_times import StepTimes
from slipway_runtime.messages import AdapterStatus, EngineFacts, EngineStats, FinishReason, Reply, Request
from slipway_runtime.server.adapters import AdapterRegistry
from slipway_runtime.server.metrics import Metrics
from slipway_runtime.server.prompt import PromptEncoder
from slipway_runtime.server.structured import GrammarValidator
from slipway_runtime.settings import SamplingDefaults


class Engine(Protocol):
    """What the server needs of the engine's client."""

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
        """Whether a request for `name` is for this model; no name means the one that is here."""
        return name in {"", self.model, f"{self.namespace}/{self.model}"}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Everything that answers requests, once it is there."""

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
        """What wrote the prompts."""
        return self.prompts.files.sha256
