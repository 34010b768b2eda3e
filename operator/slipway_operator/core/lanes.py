"""Independent lanes of a plan: which actions a refused one stops. Pure.

Actions of one lane are carried out in the plan's order, and the first refused one ends the lane for this pass. Lanes
know nothing of each other, except that some wait until others have succeeded:

| lane                           | actions                        | waits for                                         |
|--------------------------------|--------------------------------|---------------------------------------------------|
| finalizer                      | AddFinalizer, RemoveFinalizer  |                                                   |
| replicas of one revision       | CreatePod, ClaimPod            | the finalizer, and the record of their revision   |
| pods that pull; pods of a pool | CreatePod                      | the finalizer                                     |
| each child alone               | ApplyChild                     | the finalizer                                     |
| each record of a revision      | CreateRevision                 | the finalizer                                     |
| each other action alone        | drains, deletions, annotations | nothing; an annotation may name a child (`after`) |

So a full quota stops new pods, and neither a drain nor a disruption budget; and a refused pod of the new revision does
not stop the replacement of a lost one of the stable revision.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from slipway_api import names
from slipway_operator.core.actions import (
    Action,
    AddFinalizer,
    AnnotatePod,
    ApplyChild,
    ClaimPod,
    CreatePod,
    CreateRevision,
    DeleteChild,
    RemoveFinalizer,
    describe,
)

FINALIZER: Final = "finalizer"
_LAST: Final = 100  # deeper than any lane that waits


def lane_of(action: Action) -> str:
    """The lane of an action."""
    match action:
        case AddFinalizer() | RemoveFinalizer():
            return FINALIZER
        case CreatePod(manifest={"metadata": {"labels": labels}}) if names.LABEL_REVISION in labels:
            return f"replicas of {labels[names.LABEL_REVISION]}"
        case ClaimPod(labels=labels):
            return f"replicas of {labels.get(names.LABEL_REVISION, '')}"
        case CreatePod(manifest={"metadata": {"labels": labels}}) if names.LABEL_PRE_PULL in labels:
            return "pods that pull"
        case CreatePod():
            return "pods of a pool"
        case ApplyChild(key=key) | DeleteChild(key=key):
            return _child(key)
        case CreateRevision(manifest=manifest):
            return _record(_revision_of(manifest))
        case _:
            return describe(action)


def waits_for(action: Action) -> frozenset[str]:
    """The lanes that have to succeed before this action; a lane without an action in the plan holds up nothing."""
    match action:
        case CreatePod(manifest=manifest):
            return frozenset({FINALIZER, _record(_revision_of(manifest))})
        case ClaimPod(labels=labels):
            return frozenset({FINALIZER, _record(labels.get(names.LABEL_REVISION, ""))})
        case ApplyChild() | CreateRevision():
            return frozenset({FINALIZER})
        case AnnotatePod(after=after) if after:
            return frozenset({_child(after)})
        case _:
            return frozenset()


def in_order(actions: Iterable[Action], last: AbstractSet[str] = frozenset()) -> Sequence[Action]:
    """The actions, each after the lanes that it waits for, otherwise in the plan's order; lanes in `last` at the end.

    Drains and deletions wait for nothing, so they come before new pods, which may need their GPUs.
    """
    ordered = list(actions)
    waits: dict[str, set[str]] = {}
    for action in ordered:
        waits.setdefault(lane_of(action), set()).update(waits_for(action))

    def depth(lane: str) -> int:
        before = max((depth(other) for other in waits.get(lane, ()) if other in waits), default=-1)
        return before + 1 + (_LAST if lane in last else 0)

    return sorted(ordered, key=lambda action: (depth(lane_of(action)), len(waits_for(action))))


def _child(key: str) -> str:
    return f"child {key}"


def _record(revision: str) -> str:
    return f"record of {revision}"


def _revision_of(manifest: dict[str, dict[str, dict[str, str]]]) -> str:
    return manifest["metadata"].get("labels", {}).get(names.LABEL_REVISION, "")
