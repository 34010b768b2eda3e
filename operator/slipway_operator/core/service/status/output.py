"""Condition OutputValid: replicas whose model computed NaN or infinite logits, with the likely cause and the remedy.

The runtime ends such answers with an error and counts them since its start (ADR 0145). A count is rounded down to 1,
10, 100 …, so that the status is not written for each answer.
"""

from collections.abc import Sequence

from slipway_api.conditions import Reason
from slipway_operator.core.health import Member

_ALL = (
    "All ready replicas are affected: check the weights in spec.model.uri, and set spec.runtime.dtype to bf16 or fp32 "
    "if it is fp16, whose numbers end at 65,504"
)
_SOME = (
    "Other replicas with the same weights are not affected: the GPU or its driver may be faulty; delete the pod, and "
    "cordon its node if it happens there again"
)


def output_condition(members: Sequence[Member]) -> tuple[bool, Reason, str] | None:
    """False with the affected replicas; None: no replica reports invalid logits."""
    counts = {
        member.replica.name: member.replica.sample.invalid_logits
        for member in members
        if member.is_ready and member.replica.sample is not None and member.replica.sample.invalid_logits
    }
    if not counts:
        return None
    affected = {member.replica.revision for member in members if member.replica.name in counts}
    others = [
        member
        for member in members
        if member.is_ready and member.replica.name not in counts and member.replica.revision in affected
    ]
    replicas = ", ".join(f"{name} (at least {_rounded(number)})" for name, number in sorted(counts.items()))
    return (
        False,
        Reason.INVALID_LOGITS,
        f"answers ended with an error because the model computed NaN or infinite logits: {replicas}. "
        f"{_SOME if others else _ALL}",
    )


def _rounded(number: int) -> int:
    return int(10 ** (len(str(number)) - 1))
