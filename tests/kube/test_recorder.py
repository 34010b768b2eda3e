"""Users get one Event per story, with its numbers; the server is never flooded, the reconcile never disturbed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from slipway_kube.lease import NoRivals
from slipway_kube.recorder import Recorder, reference
from slipway_kube.resources import EVENTS
from slipway_kube.writer import Writer
from tests.fakes import FakeApiServer
from tests.operator.virtual_time import run_in_virtual_time

CHAT = reference("slipway.dev/v1alpha1", "InferenceService", "team", "chat", "uid-1")


@asynccontextmanager
async def a_recorder(server: FakeApiServer) -> AsyncIterator[Recorder]:
    clock = asyncio.get_running_loop().time
    recorder = Recorder(Writer(server.client(), NoRivals(), clock=clock), instance="operator-1", clock=clock)
    task = asyncio.create_task(recorder.run())
    yield recorder
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def events(server: FakeApiServer) -> list[dict[str, Any]]:
    return sorted(server.objects(EVENTS), key=lambda event: event["eventTime"])


async def test_an_event_says_what_was_done_to_what_and_why():
    server = FakeApiServer()
    async with a_recorder(server) as recorder:
        recorder.record(CHAT, "ScaledUp", "kv usage 0.91 > 0.80 for 30 s: 3 → 4 replicas", action="Scale")
        await recorder.flush()

    [event] = events(server)
    assert event["regarding"] == CHAT
    assert (event["reason"], event["action"], event["type"]) == ("ScaledUp", "Scale", "Normal")
    assert event["note"] == "kv usage 0.91 > 0.80 for 30 s: 3 → 4 replicas"
    assert (event["reportingController"], event["reportingInstance"]) == ("slipway-operator", "operator-1")
    assert "series" not in event


async def test_the_same_sentence_again_is_counted_not_repeated():
    server = FakeApiServer()
    async with a_recorder(server) as recorder:
        for _ in range(5):
            recorder.record(CHAT, "ImagePullFailed", "cannot pull image x", action="Start", warning=True)
        await recorder.flush()

    [event] = events(server)
    assert event["type"] == "Warning"
    assert event["series"]["count"] == 5


async def test_another_sentence_is_another_event_because_its_numbers_are_the_point():
    server = FakeApiServer()
    async with a_recorder(server) as recorder:
        recorder.record(CHAT, "ScaledUp", "1 → 2 replicas", action="Scale")
        recorder.record(CHAT, "ScaledUp", "2 → 3 replicas", action="Scale")
        await recorder.flush()

    assert {event["note"] for event in events(server)} == {"1 → 2 replicas", "2 → 3 replicas"}


def test_one_object_cannot_flood_the_server_and_does_not_silence_others():
    async def story() -> None:
        server = FakeApiServer()
        other = reference("slipway.dev/v1alpha1", "InferenceService", "team", "other", "uid-2")
        async with a_recorder(server) as recorder:
            for index in range(200):
                recorder.record(CHAT, "ScaledUp", f"decision {index}", action="Scale")
            recorder.record(other, "ScaledUp", "1 → 2 replicas", action="Scale")
            await recorder.flush()
        of_chat = [event for event in events(server) if event["regarding"]["name"] == "chat"]
        assert len(of_chat) == 25
        assert sum(event.get("series", {}).get("count", 1) for event in of_chat) == 200
        assert [event["note"] for event in events(server) if event["regarding"]["name"] == "other"]

    run_in_virtual_time(story())


def test_after_six_quiet_minutes_the_same_story_is_told_anew():
    async def story() -> None:
        server = FakeApiServer()
        async with a_recorder(server) as recorder:
            recorder.record(CHAT, "Drained", "0 streams left", action="Drain")
            await asyncio.sleep(400)
            recorder.record(CHAT, "Drained", "0 streams left", action="Drain")
            await recorder.flush()
        assert len(events(server)) == 2

    run_in_virtual_time(story())


async def test_a_counted_event_that_has_expired_is_told_anew():
    server = FakeApiServer()
    async with a_recorder(server) as recorder:
        recorder.record(CHAT, "Drained", "0 streams left", action="Drain")
        await recorder.flush()
        [event] = events(server)
        server.delete(EVENTS, "team", event["metadata"]["name"])
        recorder.record(CHAT, "Drained", "0 streams left", action="Drain")
        await recorder.flush()
    assert len(events(server)) == 1


async def test_what_cannot_be_sent_is_counted_and_later_events_still_go_out():
    server = FakeApiServer()
    async with a_recorder(server) as recorder:
        server.fail(method="POST", status=500)
        recorder.record(CHAT, "Drained", "one", action="Drain")
        recorder.record(CHAT, "Created", "two", action="Create")
        await recorder.flush()
    assert recorder.dropped == 1
    assert [event["note"] for event in events(server)] == ["two"]


async def test_a_long_note_is_cut_to_what_the_server_takes():
    server = FakeApiServer()
    async with a_recorder(server) as recorder:
        recorder.record(CHAT, "Failed", "é" * 2000, action="Start")
        await recorder.flush()
    [event] = events(server)
    assert len(event["note"].encode()) <= 1024
    assert event["note"].endswith("é…")
