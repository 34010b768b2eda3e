"""Transport protocol between the API side and the step loop, which runs in a thread or in a process of its own."""

from collections.abc import Callable
from typing import Protocol

from slipway_runtime.messages import EngineFacts, EngineStats, Message, StepReport


class Transport(Protocol):
    """A loaded engine, wherever it runs. All methods are called on the event loop, and call back on it."""

    @property
    def facts(self) -> EngineFacts:
        """What was loaded."""

    @property
    def first_stats(self) -> EngineStats:
        """The statistics before the first step."""

    def start(self, on_report: Callable[[StepReport], None], on_death: Callable[[str], None]) -> None:
        """Begin to step. `on_death` is called once, with a sentence, when the loop ends without being asked to."""

    def send(self, message: Message) -> None:
        """Hand over a message; the engine takes it before its next step. Never blocks, keeps the order."""

    async def stop(self) -> None:
        """End the step loop, whatever runs. Idempotent."""
