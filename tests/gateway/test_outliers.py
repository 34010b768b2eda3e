"""A replica that is alive and slow is left out, and comes back when it is as fast as its peers. Virtual time."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.outliers import LatencyOutliers, OutlierPolicy

POLICY = OutlierPolicy()
EJECTED = POLICY.min_samples + POLICY.judgements  # seconds until a slow replica is ejected


class Story:
    """Replicas that answer one stream a second each."""

    def __init__(self, *replicas: str) -> None:
        self.outliers = LatencyOutliers()
        self.now = 1000.0
        self.itl = dict.fromkeys(replicas, 0.02)
        self.ttft = dict.fromkeys(replicas, 0.2)
        self.reasons: list[str] = []

    def seconds(self, count: int) -> "Story":
        """Every second each replica that is not left out answers one stream."""
        for _ in range(count):
            self.now += 1.0
            left_out = self.outliers.ejected(self.now)
            for name in self.itl:
                if name not in left_out:
                    self.outliers.record_pick(name, self.now)
                    self.reasons += filter(None, [self.outliers.record(name, self.now, ttft=self.ttft[name])])
                    self.reasons += filter(None, [self.outliers.record(name, self.now, itl=self.itl[name])])
        return self

    @property
    def left_out(self) -> list[str]:
        return sorted(self.outliers.ejected(self.now))


@pytest.mark.capability("PF-17", "RG-5")
def test_a_replica_with_slow_tokens_is_ejected_with_its_numbers_as_the_reason():
    story = Story("a", "b", "c").seconds(20)
    story.itl["b"] = 0.2
    story.seconds(60)

    assert story.left_out == ["b"]
    assert story.reasons[0] == "itl 200 ms > 60 ms; the median of 2 peers is 20 ms"


@pytest.mark.capability("PF-17")
def test_a_replica_with_late_first_tokens_is_ejected_also_among_two():
    story = Story("a", "b")
    story.ttft["a"] = 3.0
    story.seconds(POLICY.min_samples + POLICY.judgements)

    assert story.left_out == ["a"]


@pytest.mark.capability("PF-17")
def test_one_request_at_a_time_tries_an_ejected_replica_and_a_slow_one_doubles_the_ejection():
    story = Story("a", "b", "c")
    story.itl["b"] = 0.2
    story.seconds(EJECTED)
    assert story.left_out == ["b"]
    begin = story.now
    tries = []
    for _ in range(100):
        before = story.outliers.ejected(story.now + 1.0)
        story.seconds(1)
        if "b" not in before:
            tries.append(story.now - begin)

    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps[:2] == [20.0, 40.0]
    assert len(story.reasons) == 1 + len(tries)


@pytest.mark.capability("PF-17")
def test_while_a_probe_is_on_its_way_no_other_request_is_sent_and_a_lost_probe_is_given_up():
    story = Story("a", "b", "c")
    story.itl["b"] = 0.2
    story.seconds(EJECTED)
    now = story.now + POLICY.first_seconds
    outliers = story.outliers

    assert outliers.ejected(now) == []
    outliers.record_pick("b", now)
    assert outliers.ejected(now) == ["b"]
    assert outliers.ejected(now + POLICY.first_seconds - 0.1) == ["b"]
    assert outliers.ejected(now + POLICY.first_seconds) == []


@pytest.mark.capability("PF-17")
def test_a_replica_that_is_fast_again_is_trusted_after_three_streams():
    story = Story("a", "b", "c")
    story.itl["b"] = 0.2
    story.seconds(EJECTED)
    story.itl["b"] = 0.02
    story.seconds(int(POLICY.first_seconds) + POLICY.fast_probes)

    assert story.left_out == []
    story.itl["b"] = 0.2
    story.seconds(5)
    assert story.left_out == [], "it is judged by new samples, and by enough of them"
    story.seconds(EJECTED)
    assert story.left_out == ["b"]


def test_all_replicas_under_load_are_slow_together_and_none_is_ejected():
    story = Story("a", "b", "c", "d").seconds(20)
    story.itl = dict.fromkeys(story.itl, 0.5)
    story.ttft = dict.fromkeys(story.ttft, 20.0)
    story.seconds(60)

    assert story.reasons == []


def test_a_difference_that_hurts_nobody_ejects_nobody():
    story = Story("a", "b", "c")
    story.itl = {"a": 0.001, "b": 0.025, "c": 0.001}
    story.ttft = {"a": 0.01, "b": 0.4, "c": 0.01}
    story.seconds(60)

    assert story.reasons == []


def test_a_replica_without_peers_is_never_ejected():
    story = Story("a")
    story.itl["a"] = 9.0

    assert story.seconds(60).reasons == []


latencies = st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.001, 50)), max_size=300)


@given(latencies)
def test_never_more_than_a_share_is_left_out(samples):
    outliers = LatencyOutliers(OutlierPolicy(min_samples=1, judgements=1))
    seen = set()
    for number, (name, seconds) in enumerate(samples):
        seen.add(name)
        outliers.record(name, float(number), ttft=seconds)

        assert len(outliers.ejected(float(number))) <= max(1, int(len(seen) * POLICY.max_share))
        assert len(outliers.ejected(float(number))) < max(2, len(seen))


def test_a_replica_that_left_is_forgotten():
    story = Story("a", "b", "c")
    story.itl["b"] = 0.2
    story.seconds(EJECTED).outliers.remove("b")

    assert story.left_out == []
