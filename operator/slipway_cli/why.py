"""Joins what gateways, replicas and the operator recorded about one request into one account: `why REQUEST_ID`.

| part     | what it recorded                                                          | read from its         |
|----------|---------------------------------------------------------------------------|-----------------------|
| gateway  | the tried replicas with their scores, waits, failures, handovers, the end | admin port            |
| replica  | queue, prefill, tokens from the prefix cache, decode                      | admin port            |
| operator | the last change of the number of replicas before it, and those during it  | status of the service |

Processes keep the last few thousand requests in memory. A part that cannot be read is named, with the cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from slipway_api.recent_requests import INVALID_ID, REQUEST_ID
from slipway_api.words import count
from slipway_cli.cluster import Cluster, ClusterError, component_of
from slipway_cli.traces import BadInputError

NOT_FOUND: Final = 404
CLOCK_SECONDS: Final = 2.0  # by which the clocks of two nodes may differ
WAITED_SECONDS: Final = 0.001  # a shorter wait for a replica is not named
UNKNOWN: Final = (
    "no gateway has an account of {id}: no request with this ID arrived, or newer requests have displaced it, "
    "or its gateway has restarted."
)


@dataclass(frozen=True)
class Step:
    """One line of the account."""

    at: float | None  # seconds since the request's first byte; None: not a moment of the request
    part: str
    text: str


@dataclass
class Account:
    """One request, from all parts."""

    summary: str
    steps: list[Step] = field(default_factory=list)
    considered: list[dict[str, Any]] = field(default_factory=list)  # by the last choice of a replica
    missing: list[str] = field(default_factory=list)  # sentences about parts that could not be read

    def to_json(self) -> dict[str, Any]:
        """The account for programs."""
        steps = [{"at": one.at, "part": one.part, "text": one.text} for one in self.steps]
        return {"summary": self.summary, "steps": steps, "considered": self.considered, "missing": self.missing}


def find_accounts(cluster: Cluster, release_namespace: str, request_id: str) -> list[Account]:
    """One account for each request with this id. Raises ClusterError if no part has any."""
    if not REQUEST_ID.fullmatch(request_id):
        raise BadInputError(INVALID_ID)
    pods = cluster.installation_pods(release_namespace)
    gateways = [pod for pod in pods if component_of(pod) == "gateway"]
    operators = [pod for pod in pods if component_of(pod) == "operator"]
    if not gateways:
        raise ClusterError(
            f"the namespace {release_namespace} has no gateway. "
            "Name the namespace of the installation with --release-namespace."
        )
    found: list[tuple[str, dict[str, Any]]] = []
    missing: list[str] = []
    for pod in gateways:
        name = pod["metadata"]["name"]
        try:
            found += [(name, one) for one in cluster.gateway_requests(pod, request_id)]
        except ClusterError as exc:
            missing.append(_unreadable(f"The gateway {name}", exc))
    if not found:
        raise ClusterError(" ".join([UNKNOWN.format(id=request_id), *missing]))
    is_alone = len(found) == 1
    return [_join(cluster, gateway, one, operators, missing, is_alone=is_alone) for gateway, one in found]


def _join(
    cluster: Cluster,
    gateway: str,
    request: Mapping[str, Any],
    operators: Sequence[Mapping[str, Any]],
    missing: Sequence[str],
    *,
    is_alone: bool,
) -> Account:
    """The account of one request that this gateway recorded, with the parts of its replicas and of the operator."""
    replicas: dict[str, list[dict[str, Any]]] = {}
    missing = list(missing)
    for endpoint in dict.fromkeys(attempt["endpoint"] for attempt in request["attempts"]):
        namespace, _, pod = endpoint.rpartition("/")
        try:
            if not operators:
                raise ClusterError("no operator runs, and its pod names the key of the replicas' admin ports")
            accounts = cluster.replica_requests(namespace, pod, request["requestId"], operators[0])
            replicas[endpoint] = accounts if is_alone else [one for one in accounts if _is_during(request, one)]
        except ClusterError as exc:
            missing.append(_unreadable_replica(endpoint, exc))
        else:
            if not replicas[endpoint] and not request["isOpen"]:
                missing.append(f"The replica {endpoint} has no account of it: it never started it, or has restarted.")
    history: Sequence[Mapping[str, Any]] = ()
    namespace, _, service = request["service"].rpartition("/")
    if service:
        try:
            status = cluster.in_namespace(namespace).get("InferenceService", service).get("status") or {}
            history = (status.get("autoscaling") or {}).get("history") or ()
        except ClusterError as exc:
            missing.append(_unreadable(f"The status of {request['service']}", exc))
    return join_account(gateway, request, replicas, history, missing)


def join_account(
    gateway: str,
    request: Mapping[str, Any],
    replicas: Mapping[str, Sequence[Mapping[str, Any]]],
    history: Sequence[Mapping[str, Any]],
    missing: Sequence[str] = (),
) -> Account:
    """Join the recorded parts of one request. Pure. `history`: the scaling decisions of its service, newest first."""
    account = Account(_summary(request), missing=list(missing))
    steps = account.steps
    part = f"gateway {gateway}"
    if request["readAt"] is not None:
        steps.append(Step(request["readAt"], part, f"The whole request was read after {_ms(request['readAt'])}."))
    if request["fallbackFrom"]:
        steps.append(Step(None, part, f"{request['fallbackFrom']} had no answer in time; its fallback did."))
    if request["degraded"]:
        steps.append(Step(None, part, f"The service was overloaded: {request['degraded']}."))
    waited = (request["admittedAt"] or 0) - (request["readAt"] or 0)
    if request["admittedAt"] is not None and waited >= WAITED_SECONDS:
        steps.append(Step(request["admittedAt"], part, f"It waited {_ms(waited)} for a ready replica."))
    used: dict[str, int] = {}
    for attempt in request["attempts"]:
        steps.append(Step(attempt["at"], part, _choice(attempt)))
        endpoint = attempt["endpoint"]
        accounts = sorted(replicas.get(endpoint, ()), key=lambda one: str(one["startedAt"]))
        number = used[endpoint] = used.get(endpoint, -1) + 1
        # Several prompts in one request are several accounts; several attempts at one replica are, too.
        is_single = sum(one["endpoint"] == endpoint for one in request["attempts"]) == 1
        for one in accounts if is_single else accounts[number : number + 1]:
            steps += _steps_of_replica(endpoint, attempt["at"], one)
        if attempt["failure"]:
            steps.append(Step(None, part, f"The attempt at {endpoint} failed: {attempt['failure']}."))
        if attempt["considered"]:
            account.considered = list(attempt["considered"])
    if request["firstByteAt"] is not None:
        steps.append(Step(request["firstByteAt"], part, f"The first byte came after {_ms(request['firstByteAt'])}."))
    steps.append(_end(request, part))
    steps += _decisions(request, history)
    return account


def _is_during(request: Mapping[str, Any], account: Mapping[str, Any]) -> bool:
    """Whether a replica's account began while this request was open, and so is not of another one with the same id."""
    began = datetime.fromisoformat(account["startedAt"]) - datetime.fromisoformat(request["startedAt"])
    return -CLOCK_SECONDS <= began.total_seconds() <= (request["ageSeconds"] or 0) + CLOCK_SECONDS


def _summary(request: Mapping[str, Any]) -> str:
    target = request["service"] or request["model"] or "no service"
    target += f", adapter {request['adapter']}" if request["adapter"] else ""
    target += f", revision {request['revision']}" if request["revision"] else ""
    tenant = f" of tenant {request['tenant']}" if request["tenant"] else ""
    if request["isOpen"]:
        return f"{request['requestId']}{tenant} to {target}: is still open after {_ms(request['ageSeconds'])}"
    return (
        f"{request['requestId']}{tenant} to {target}: status {request['status']} after {_ms(request['endedAt'])}, "
        f"started {request['startedAt']}"
    )


def _choice(attempt: Mapping[str, Any]) -> str:
    endpoint, revision = attempt["endpoint"], attempt["revision"]
    verb = {
        "first": "It was sent to",
        "retry": "It was sent again, to",
        "hedge": "The first replica was late; it was also sent to",
        "handover": f"The stream broke off ({attempt['cause']}) and continued on",
    }[attempt["kind"]]
    match attempt["pickedFor"]:
        case "best_score":
            others = len(attempt["considered"])
            score = next((one["score"] for one in attempt["considered"] if one["endpoint"] == endpoint), None)
            matched = next((one["matchedTokens"] for one in attempt["considered"] if one["endpoint"] == endpoint), 0)
            why = f"its score {score} was the best of {count(others, 'compared replica')}"
            why += f"; about {count(matched, 'token')} of the prompt were sent there before" if matched else ""
        case "turn":
            why = "RoundRobin: it was its turn"
        case _:
            why = "it was the only replica that could take it"
    return f"{verb} {endpoint} (revision {revision}): {why}."


def _steps_of_replica(endpoint: str, sent: float, one: Mapping[str, Any]) -> list[Step]:
    """Queue, prefill and decode. Their moments are sums of durations: the clocks of two nodes may differ."""
    part, at = f"replica {endpoint.rpartition('/')[2]}", sent
    steps = []
    if one["queueSeconds"] is not None:
        at += one["prepareSeconds"] or 0
        text = f"It was tokenized in {_ms(one['prepareSeconds'] or 0)} and queued for {_ms(one['queueSeconds'])}."
        at += one["queueSeconds"]
        steps.append(Step(round(at, 4), part, text))
    if one["prefillSeconds"] is not None:
        at += one["prefillSeconds"]
        text = (
            f"Prefill took {_ms(one['prefillSeconds'])}: {count(one['promptTokens'], 'prompt token')}, "
            f"{one['cachedTokens']} of them from the prefix cache."
        )
        steps.append(Step(round(at, 4), part, text))
    if one["decodeSeconds"] is not None:
        at += one["decodeSeconds"]
        pace = one["decodeSeconds"] / (one["outputTokens"] - 1) if one["outputTokens"] > 1 else 0.0
        text = f"Decode took {_ms(one['decodeSeconds'])}: {count(one['outputTokens'], 'token')}"
        text += f", one every {_ms(pace)}" if pace else ""
        if one["draftTokens"]:
            text += f", {one['acceptedTokens']} of {count(one['draftTokens'], 'draft token')} accepted"
        if one["preemptions"]:
            text += f", preempted {count(one['preemptions'], 'time')}"
        steps.append(Step(round(at, 4), part, f"{text}; it ended with {one['finish']}."))
    if not steps:
        steps.append(Step(None, part, f"It ended with {one['finish']} after {_ms(one['totalSeconds'])}."))
    return steps


def _end(request: Mapping[str, Any], part: str) -> Step:
    if request["isOpen"]:
        return Step(request["ageSeconds"], part, "It has not ended yet.")
    text = f"It ended with status {request['status']}"
    text += f", {request['finish']}" if request["finish"] else ""
    text += f": {request['error']}" if request["error"] else ""
    text += f" (limit of the tenant: {request['tenantLimit']})" if request["tenantLimit"] else ""
    if request["outputTokens"] or request["inputTokens"]:
        about = "about " if request["isEstimated"] else ""
        text += f"; {about}{count(request['inputTokens'], 'token')} in, {request['outputTokens']} out"
    return Step(request["endedAt"], part, f"{text}.")


def _decisions(request: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> list[Step]:
    """The scaling decisions during the request, and the last one before it."""
    started = datetime.fromisoformat(request["startedAt"])
    ended = started + timedelta(seconds=request["ageSeconds"] or 0)
    steps: list[Step] = []
    for one in history:
        at = (datetime.fromisoformat(str(one["time"]).replace("Z", "+00:00")) - started).total_seconds()
        if started + timedelta(seconds=at) > ended:
            continue
        steps.append(Step(round(at, 1), "operator", f"Replicas: {one['from']} → {one['to']}; {one['reason']}"))
        if at < 0:
            break
    if not steps and history:
        steps.append(Step(None, "operator", "All recorded scaling decisions are newer than the request."))
    if not history:
        steps.append(Step(None, "operator", "No change of the number of replicas is recorded."))
    return steps[::-1]


def _unreadable(what: str, error: ClusterError) -> str:
    return f"{what} could not be read: {error}."


def _unreadable_replica(endpoint: str, error: ClusterError) -> str:
    if error.status == NOT_FOUND and str(error).startswith("pod "):
        return f"The replica {endpoint} no longer exists, and its account is gone with it."
    if error.status == NOT_FOUND and str(error).startswith("admin port "):
        return f"The engine of {endpoint} keeps no accounts of requests; only Slipway's runtime does."
    return _unreadable(f"The replica {endpoint}", error)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
