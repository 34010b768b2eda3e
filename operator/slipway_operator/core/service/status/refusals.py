"""Which writes the API server refused, and who can help.

A cause is chosen by the person who can change it, not by the HTTP code: the same mistake is 403 from one admission
plugin and 422 from another.

| the API server's sentence                                  | reason            | who can help                     |
|------------------------------------------------------------|-------------------|----------------------------------|
| `exceeded quota`, `failed quota`                           | QuotaExceeded     | who sets the quota, or the spec  |
| PodSecurity refuses the folder of a model cache            | CacheNotPermitted | who labels the namespace         |
| reason Invalid or BadRequest, a limit of a LimitRange,     | InvalidSpec       | who writes the spec              |
| a priority class, ServiceAccount or RuntimeClass that does |                   |                                  |
| not exist                                                  |                   |                                  |
| an object of another owner has the name                    | NameConflict      | who owns one of the two objects  |
| no answer, 5xx, a timeout, 429, a version that has changed | none: transient   | it is tried again                |
| any other answer: RBAC, a policy, a webhook, PodSecurity,  | Refused           | who administers the cluster      |
| a namespace that is being deleted                          |                   |                                  |

All of them are tried again with a growing pause, so every cause ends by itself once it is removed.
"""

import re
from typing import Final

from slipway_api.conditions import Reason
from slipway_operator.core.actions import NO_ANSWER
from slipway_operator.core.observed import Failure, Observed
from slipway_operator.core.service.model.model_cache import describe_forbidden
from slipway_operator.core.service.model.pulls import is_pull

_TRANSIENT: Final = frozenset(
    {NO_ANSWER, "InternalError", "ServerTimeout", "Timeout", "ServiceUnavailable", "TooManyRequests"}
    | {"Conflict", "AlreadyExists", "Expired", "Gone"}
)
_QUOTA: Final = re.compile(r"\b(exceeded|failed) quota\b")
_MUST_SPECIFY: Final = re.compile(r"must specify ([a-z0-9.,/ -]+?)(?: for:|;|$)")
_LIMIT_RANGE: Final = re.compile(r"(usage|ratio) per (Container|Pod|PersistentVolumeClaim) is ")
# What the API server says of a missing object that the pod names -> its kind, and the fields that may name it.
_MISSING: Final = (
    (
        re.compile(r"no PriorityClass with name (\S+)"),
        "PriorityClass",
        "spec.availability.priorityClassName or spec.template.spec.priorityClassName",
    ),
    (
        re.compile(r'error looking up service account \S+?: serviceaccount "([^"]+)" not found'),
        "ServiceAccount",
        "spec.template.spec.serviceAccountName",
    ),
    (
        re.compile(r'RuntimeClass(?:\.node\.k8s\.io)? "([^"]+)" not found'),
        "RuntimeClass",
        "spec.template.spec.runtimeClassName",
    ),
)


def find_refusal_cause(observed: Observed, num_ready: int) -> tuple[Reason, str] | None:
    """The first refused write that a person has to help with, as reason and sentence of the condition Stalled.

    A refused quota of an autoscaled service with a ready replica is not such a case: ScalingActive then has the reason
    LimitedByCapacity. Neither is one that forbids no replica of a fixed number.
    """
    for failure in observed.failures:
        if is_pull(failure.action):
            continue  # the condition ModelCached reports it: replicas may start all the same
        if is_quota_refusal(failure) and num_ready:
            fixed = observed.service.fixed_replicas
            if fixed is None or num_ready >= fixed:
                continue
        if (cause := judge_refusal(failure)) is not None:
            return cause
    return None


def judge_refusal(failure: Failure) -> tuple[Reason, str] | None:
    """Reason and sentence of a refused write, by the table above; None if it is transient."""
    message = failure.message
    if is_transient(failure):
        return None
    if _QUOTA.search(message):
        return Reason.QUOTA_EXCEEDED, f"{message}; {_quota_remedy(message)}"
    if forbidden := describe_forbidden(failure):
        return Reason.CACHE_NOT_PERMITTED, forbidden
    if failure.reason == Reason.NAME_CONFLICT:
        return Reason.NAME_CONFLICT, message
    if remedy := _remedy_of_missing(message):
        return Reason.INVALID_SPEC, f"{_what(failure)}: {message}; {remedy}"
    if _LIMIT_RANGE.search(message):
        remedy = "change spec.resources, or the LimitRange of the namespace (kubectl get limitrange -n {} -o yaml)"
        return Reason.INVALID_SPEC, f"{_what(failure)}: {message}; {remedy.format(_namespace(message))}"
    if failure.reason in ("Invalid", "BadRequest"):
        return Reason.INVALID_SPEC, f"{_what(failure)}: {message}"
    return Reason.REFUSED, f"{_what(failure)}: {message}; {_remedy(message)}"


def is_transient(failure: Failure) -> bool:
    """Whether nobody has to act: the API server, or a webhook behind it, could not answer this time."""
    if failure.action.startswith("CreateRevision") and failure.reason == Reason.NAME_CONFLICT:
        return True  # the garbage collector is about to remove the other one
    return failure.reason in _TRANSIENT or (failure.reason.isdecimal() and int(failure.reason) >= 500)


def is_quota_refusal(failure: Failure) -> bool:
    """Whether the API server refused a replica because of a quota."""
    is_replica = failure.action.startswith("CreatePod") and not is_pull(failure.action)
    return is_replica and _QUOTA.search(failure.message) is not None


def describe_refusal(failure: Failure) -> str:
    """One sentence about a refused write, also if it is transient."""
    if failure.reason == Reason.NAME_CONFLICT:
        return failure.message  # of the operator itself, and a whole sentence
    if failure.reason == NO_ANSWER:
        return f"the API server does not answer {failure.action or 'a write'}: {failure.message}; it is tried again"
    again = "; it is tried again" if is_transient(failure) else ""
    return f"the API server refused {failure.action}: {failure.message}{again}"


def _what(failure: Failure) -> str:
    if failure.action.startswith(("CreatePod", "ClaimPod")):
        return "the API server refuses the pods of this spec"
    return f"the API server refuses {failure.action}"


def _quota_remedy(message: str) -> str:
    if needed := _MUST_SPECIFY.search(message):
        return f"set {_fields(needed[1])}, which the quota requires"
    return "raise the quota or lower the number of replicas"


def _remedy_of_missing(message: str) -> str:
    """What to do if the API server says that an object that the pod names does not exist; empty: it says nothing so."""
    for pattern, kind, fields in _MISSING:
        if missing := pattern.search(message):
            return f"create the {kind} {missing[1]}, or change {fields}"
    return ""


def _fields(resources: str) -> str:
    """`limits.cpu,limits.memory` -> `spec.resources.limits.cpu and spec.resources.limits.memory`."""
    return " and ".join(f"spec.resources.{name.strip()}" for name in resources.split(","))


def _remedy(message: str) -> str:
    if "is being terminated" in message:
        return "the namespace is being deleted"
    if "violates PodSecurity" in message:
        return "the namespace's label pod-security.kubernetes.io/enforce forbids a part of the spec"
    if 'User "system:serviceaccount:' in message:
        return "grant the operator's ServiceAccount this right; the chart does"
    if "admission webhook" in message or "ValidatingAdmissionPolicy" in message:
        return "change the spec as the policy requires, or the policy"
    return "a person has to change the cause that the API server names"


def _namespace(message: str) -> str:
    found = re.search(r'namespace[: ]+"?([a-z0-9-]+)', message)
    return found[1] if found else "NAMESPACE"
