"""Restores labels that people edited, and says so in an event. Pure.

Whose an object is, is said by its controlling owner reference, and what it is by its name and annotations; labels only
show that to selectors. So an edited label hides no replica and makes no second one: until the label is back, the
replica holds its slot and counts as not ready, as gateway and Service see it.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_api.warm_pool_conditions import PoolEvent
from slipway_operator.core.actions import Event, RestoreLabels, Steps


class EditedLabel(NamedTuple):
    """A label of one of our objects that a person or another program has edited."""

    label: str
    right: str | None
    """None: the object should not have it."""
    found: str | None
    """None: it was removed."""

    def __str__(self) -> str:
        if self.right is None:
            return f"{self.label}={self.found} (added)"
        return f"{self.label}={self.right} ({'removed' if self.found is None else f'changed to {self.found!r}'})"


class Labelled(Protocol):
    """An object whose labels were compared."""

    @property
    def name(self) -> str:
        """metadata.name."""

    @property
    def uid(self) -> str:
        """metadata.uid."""

    @property
    def edited_labels(self) -> tuple[EditedLabel, ...]:
        """The labels that are not as they should be."""


def restore_labels(
    objects: Iterable[Labelled],
    *,
    kind: Literal["Pod", "ControllerRevision"] = "Pod",
    reason: EventReason | PoolEvent = EventReason.LABELS_RESTORED,
    but_state_of: frozenset[str] = frozenset(),
) -> Steps:
    """Writes back every edited label; not the state of the pods with the uids `but_state_of`: their runtime drains."""
    steps = Steps()
    for one in objects:
        edited = [
            label for label in one.edited_labels if label.label != names.LABEL_STATE or one.uid not in but_state_of
        ]
        if not edited:
            continue
        noun = "label" if len(edited) == 1 else "labels"
        message = f"restored the {noun} {', '.join(map(str, edited))} of {kind} {one.name}"
        event = Event(reason=reason, action="Restore", message=message, pod=one.name if kind == "Pod" else "")
        action = RestoreLabels(
            kind=kind,
            name=one.name,
            uid=one.uid,
            labels={label.label: label.right for label in edited},
            reason=message,
            events=(event,),
        )
        steps += Steps(actions=(action,))
    return steps
