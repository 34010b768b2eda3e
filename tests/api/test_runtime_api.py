"""The bodies of the admin port keep their size and their words."""

import pytest
from pydantic import ValidationError

from slipway_api.runtime_api import (
    AdapterInfo,
    Body,
    DrainRequest,
    DrainStatus,
    LastStep,
    Ready,
    ReadyReason,
    Signals,
    State,
)


def test_signals_stay_below_300_bytes_even_after_a_very_long_life():
    signals = Signals(
        boot_id="0123456789abcdef",
        kv_usage=0.123456789012345,
        running=4096,
        waiting=1_000_000,
        waiting_tokens=10**9,
        draining=False,
        admitted=10**11,
        finished=10**11,
        aborted=10**9,
        handed_over=10**9,
        generated_tokens=10**14,
        prompt_tokens=10**14,
    )

    assert len(signals.wire()) < 300


def test_bodies_travel_in_camel_case_and_come_back_the_same():
    signals = Signals(boot_id="a", kv_usage=0.5, running=1, waiting=2, waiting_tokens=30)

    assert b'"bootId":"a"' in signals.wire()
    assert b'"waitingTokens":30' in signals.wire()
    assert Signals.model_validate_json(signals.wire()) == signals


def test_a_newer_replica_may_say_more_than_we_know():
    raw = b'{"bootId":"a","kvUsage":0.1,"running":0,"waiting":0,"adapters":["x"]}'

    assert Signals.model_validate_json(raw).kv_usage == 0.1


@pytest.mark.parametrize("usage", [-0.1, 1.1])
def test_kv_usage_is_a_share(usage: float):
    with pytest.raises(ValidationError):
        Signals(boot_id="a", kv_usage=usage, running=0, waiting=0)


def test_an_empty_drain_request_means_the_pods_own_deadline():
    assert DrainRequest.model_validate_json(b"{}").timeout_seconds is None


@pytest.mark.parametrize(
    ("draining", "running", "waiting", "drained"),
    [(True, 0, 0, True), (True, 1, 0, False), (True, 0, 1, False), (False, 0, 0, False)],
)
def test_a_replica_is_drained_when_it_refuses_work_and_has_none(draining, running, waiting, drained):
    assert DrainStatus(draining=draining, running=running, waiting=waiting).is_drained is drained


def test_readiness_names_its_reason():
    assert Ready.model_validate_json(b'{"ready":false,"reason":"WarmingUp"}').reason is ReadyReason.WARMING_UP


def test_the_tokenizer_hash_keeps_the_spelling_of_the_contract():
    state = State.model_validate(
        {
            "modelName": "tiny",
            "tokenizerSha256": "ab",
            "uptimeSeconds": 1,
            "blocks": {"total": 4, "live": 1, "cached": 1, "free": 2},
            "queue": {"running": 1, "waiting": 0},
            "draining": False,
        }
    )

    assert state.tokenizer_sha256 == "ab"
    assert b'"tokenizerSha256":"ab"' in state.wire()


STATE = {
    "modelName": "tiny",
    "uptimeSeconds": 1,
    "blocks": {"total": 4, "live": 1, "cached": 1, "free": 2},
    "queue": {"running": 1, "waiting": 0},
    "draining": False,
}


class QueueOfAnOlderOperator(Body):
    running: int
    waiting: int


class StateOfAnOlderOperator(Body):
    """The fields that it reads, of the first version."""

    model_name: str
    queue: QueueOfAnOlderOperator


def test_an_older_side_reads_a_newer_state_and_a_newer_side_an_older_one():
    older = State.model_validate(STATE)
    newer = State.model_validate(
        STATE
        | {
            "queue": {"running": 1, "waiting": 3, "waitingByTenant": {"a": 3}},
            "kvTiers": {"device": STATE["blocks"]},
            "lastStep": {"rows": 2, "tokens": 40, "seconds": 0.01, "secondsAgo": 0.5},
            "adapters": [{"name": "one", "digest": "sha256:00", "state": "slot", "bytes": 7, "idleSeconds": 1.5}],
        }
    )

    assert (older.adapters, older.last_step, older.kv_tiers, older.queue.waiting_by_tenant) == ((), None, {}, {})
    assert newer.adapters == (AdapterInfo(name="one", digest="sha256:00", state="slot", bytes=7, idle_seconds=1.5),)
    assert newer.last_step == LastStep(rows=2, tokens=40, seconds=0.01, seconds_ago=0.5)
    assert State.model_validate_json(newer.wire()) == newer
    assert StateOfAnOlderOperator.model_validate_json(newer.wire()).queue.waiting == 3
