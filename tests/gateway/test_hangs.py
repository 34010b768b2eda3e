"""Which replicas hang: by their pace, and by what their peers answered while they sent nothing."""

import asyncio

import pytest

from slipway_gateway.fleet import HANG_CHECK_SECONDS, static_fleet
from slipway_gateway.hangs import LONGEST_SECONDS, SHORT_PROMPT, FirstByte, Pace, Waiting, find_hung
from slipway_gateway.picker.endpoints import Endpoint
from tests.gateway.doubles import MODEL, Runtime, a_caller, a_gateway, events_of, text_of, until

pytestmark = pytest.mark.capability("RD-9")

SECONDS = 5.0
SERVICE = f"static/{MODEL}"


def paced(*pauses: float, streams: int = 1) -> Pace:
    """The pace of a replica after these pauses; each ends with a piece of every stream."""
    pace, now = Pace(), 100.0
    pace.last_at = now
    for pause in pauses:
        since, now = now, now + pause
        for _ in range(streams):
            pace.observe(since, now, SECONDS)
    return pace


@pytest.mark.parametrize("streams", [1, 8])
def test_a_hang_that_ended_does_not_raise_the_limit_for_the_next(streams):
    """Measured: after a hang of 20 s the limit was 200 s, so nobody noticed the next one for 69 s."""
    pace = paced(0.1, 20, 0.1, 75, 0.1, streams=streams)

    assert pace.hang_seconds(SECONDS) == SECONDS


def test_pauses_that_are_usual_raise_the_limit_though_the_first_exceeded_it():
    assert paced(12, 11, 12).hang_seconds(SECONDS) > 12


@pytest.mark.parametrize("pause", [0.01, 0.6, 0.9, 2.0, 4.0])
def test_a_hang_is_found_within_eight_seconds_at_any_usual_pace(pause):
    limit = paced(*[pause] * 20).hang_seconds(SECONDS)

    assert max(SECONDS, pause) <= limit <= LONGEST_SECONDS


def test_a_stream_that_waits_for_its_turn_is_no_pause_of_the_replica():
    pace = Pace()
    pace.last_at = 100.0
    for number in range(1, 100):
        pace.observe(100.0 + (number - 1) * 0.2, 100.0 + number * 0.2, SECONDS)
    pace.observe(100.0, 120.0, SECONDS)  # another stream of the same replica was preempted for 20 s

    assert pace.longest_pause < 1


def hung(
    *answers: tuple[str, float],
    now: float = 105.0,
    waiting: Waiting | None = None,
    last_sign: float = 99.0,
    awake_since: float = 0.0,
) -> bool:
    """Whether the replica p0 hangs, with one stream sent at 100, and streams that began, each sent at its time."""
    first_bytes = [FirstByte(endpoint, sent) for endpoint, sent in answers]
    found = find_hung(
        now, {"p0": [waiting or Waiting(100.0)]}, {"p0": last_sign}, first_bytes,
        seconds=SECONDS, awake_since=awake_since,
    )  # fmt: skip
    return found == ["p0"]


PEERS = (("p1", 101.0), ("p2", 102.0))


def test_a_replica_that_sent_nothing_while_its_peers_began_streams_hangs():
    """Measured: requests without a first byte waited up to 37 s beside two healthy replicas."""
    assert hung(*PEERS)
    assert not hung(*PEERS, now=104.9), "it may only be slow"
    assert not hung(PEERS[0]), "one may be chance"
    assert not hung(("p0", 101.0), *PEERS[:1]), "its own answers are no peers'"


def test_peers_that_answered_only_what_was_sent_earlier_prove_nothing():
    """All replicas are slow, or hang together: nobody is better."""
    assert not hung(("p1", 99.0), ("p2", 98.0), now=160.0)


def test_any_byte_of_the_replica_shows_that_it_runs():
    assert not hung(*PEERS, last_sign=103.0)
    assert hung(("p1", 103.5), ("p2", 104.0), last_sign=103.0, now=108.0)


def test_a_long_prompt_has_more_time_in_proportion():
    long = Waiting(100.0, prompt_tokens=4 * SHORT_PROMPT)

    assert not hung(*PEERS, waiting=long, now=119.0)
    assert hung(*PEERS, waiting=long, now=120.0)


def test_a_gateway_that_was_late_itself_judges_nobody():
    """review/control-plane.md 2: a stall of the event loop made healthy replicas look hung."""
    assert not hung(*PEERS, now=130.0, awake_since=129.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_fleet_ejects_the_silent_replica_and_moves_its_streams_once():
    fleet, clock = static_fleet([(MODEL, f"http://r{number}") for number in range(3)]), Clock()
    fleet._clock = clock
    silent, *peers = fleet.table.route(SERVICE).endpoints
    moved: list[str] = []

    def lease(endpoint: Endpoint, name: str = "", **facts: bool):
        return fleet.lease(endpoint, 10, lambda: moved.append(name), **{"is_stream": True, "may_move": True} | facts)

    fleet.check_hangs(SECONDS)
    for name, facts in (("stream", {}), ("whole", {"is_stream": False}), ("moved before", {"may_move": False})):
        lease(silent, name, **facts).__enter__()
    for _ in range(9):
        clock.now += HANG_CHECK_SECONDS
        for peer in peers:
            with lease(peer) as answered:
                answered.answered(has_begun=True)
        fleet.check_hangs(SECONDS)
    assert (moved, fleet.is_ejected(silent)) == ([], False)
    clock.now += HANG_CHECK_SECONDS
    fleet.check_hangs(SECONDS)

    assert moved == ["stream"]
    assert fleet.is_ejected(silent)
    assert not any(fleet.is_ejected(peer) for peer in peers)


def test_refusals_of_peers_are_no_first_bytes():
    fleet, clock = static_fleet([(MODEL, f"http://r{number}") for number in range(3)]), Clock()
    fleet._clock = clock
    silent, *peers = fleet.table.route(SERVICE).endpoints
    fleet.check_hangs(SECONDS)
    fleet.lease(silent, 10, lambda: None, is_stream=True, may_move=True).__enter__()
    for _ in range(20):
        clock.now += HANG_CHECK_SECONDS
        for peer in peers:
            with fleet.lease(peer, 10, lambda: None, is_stream=True) as refused:
                refused.answered()
        fleet.check_hangs(SECONDS)

    assert not fleet.is_ejected(silent)


async def test_a_request_without_a_first_byte_moves_from_a_hung_replica_to_one_that_answers():
    async with Runtime().hold() as silent, Runtime() as one, Runtime() as two:  # noqa: SIM117  it would not fit
        async with a_gateway(silent, one, two, hang_seconds=0.5) as gateway, a_caller(gateway) as caller:

            async def ask() -> str:
                async with caller.chat(stream=True) as response:
                    assert response.status == 200
                    return text_of(await events_of(response))

            running: list[asyncio.Task[str]] = []
            while not silent.requests:
                running.append(asyncio.create_task(ask()))
                await asyncio.sleep(0.01)
            stuck = [one for one in running if not one.done()]
            await until(lambda: silent.requests)
            while not all(one.done() for one in running):
                await ask()
                await asyncio.sleep(0.02)
            answers = [one.result() for one in running]

    assert stuck
    assert set(answers) == {"Once upon a time."}
    assert silent.cancelled.is_set()
