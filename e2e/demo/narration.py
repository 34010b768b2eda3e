"""Prints the demo: numbered steps, and what the operator says about the objects that a step is about."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from e2e.slipway import Json, Slipway

STEPS = 12
PRINTED_CONDITIONS = ("Ready", "Stalled", "CanaryHealthy", "RolloutHealthy")

console = Console(highlight=False)


class Subject(NamedTuple):
    """An object of Slipway's that a step is about."""

    kind: str
    name: str


class StepFailedError(Exception):
    """A step ended with an exception; the message names the step."""


@contextmanager
def step(number: int, title: str) -> Iterator[None]:
    """One numbered step, with the time it took; an exception inside becomes one that names the step."""
    console.print(f"\n[bold cyan]{number}/{STEPS}[/] [bold]{title}[/]", soft_wrap=True)
    started = time.monotonic()
    try:
        yield
    except Exception as exc:
        raise StepFailedError(f"step {number}/{STEPS}, {title}: {type(exc).__name__}: {exc}") from exc
    console.print(f"    [dim]{time.monotonic() - started:.1f} s[/]")


def print_note(sentence: str) -> None:
    """Print one line of explanation."""
    console.print(f"    [dim]{escape(sentence)}[/]", soft_wrap=True)


def print_result(sentence: str) -> None:
    """Print the result of a step."""
    console.print(f"    [bold green]→[/] {escape(sentence)}", soft_wrap=True)


class Watcher:
    """Prints each event and each change of a condition of some objects once, while a block of `watching` runs."""

    def __init__(self, slipway: Slipway, on_service: Callable[[str, Json], None] = lambda name, status: None) -> None:
        self.slipway, self.on_service = slipway, on_service
        self.printed: set[tuple[str, str, str]] = set()
        self.conditions: dict[tuple[Subject, str], tuple[str, str]] = {}

    @contextmanager
    def watching(self, *subjects: Subject) -> Iterator[None]:
        """Print what happens to the objects until the block ends, its end included."""
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(subjects, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=10)

    def _run(self, subjects: Sequence[Subject], over: threading.Event) -> None:
        last = False
        while not last:
            last = over.wait(0.5)
            for subject in subjects:
                try:
                    self.print_changes(subject)
                except Exception as exc:  # noqa: BLE001  narration must not end the demo; the object may not exist yet
                    if last:
                        print_note(f"({type(exc).__name__} while looking at {subject.name})")

    def print_changes(self, subject: Subject) -> None:
        """Print what is new about one object."""
        for event in self.slipway.events(subject.name, kind=subject.kind):
            identity = (event.uid, event.reason, event.note)
            if identity not in self.printed:
                self.printed.add(identity)
                colour = "yellow" if event.type == "Warning" else "green"
                at = event.at.astimezone().strftime("%H:%M:%S")
                console.print(
                    f"    [dim]{at} {subject.name:<8}[/][{colour}]{event.reason:<20}[/] {escape(event.note)}",
                    soft_wrap=True,
                )
        status = self.slipway.custom(subject.kind, subject.name).get("status", {})
        if subject.kind == "InferenceService":
            self.on_service(subject.name, status)
        for condition in status.get("conditions", []):
            now = (condition["status"], condition["reason"])
            if condition["type"] in PRINTED_CONDITIONS and self.conditions.get((subject, condition["type"])) != now:
                self.conditions[subject, condition["type"]] = now
                mark = f"{condition['type']}={condition['status']}"
                sentence = escape(f"{condition['reason']}: {condition.get('message', '')}")
                console.print(f"             [dim]{subject.name:<8}[/][blue]{mark:<20}[/] {sentence}", soft_wrap=True)
