"""Whatever the samples and the clock do: limits, rates and windows of autoscaling hold at every decision.

Each example is a random life of one autoscaled service: load that flaps, replicas that answer late or not at all,
clocks that jump in both directions, leaders that change.
"""

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slipway_api.autoscaling import Autoscaling
from slipway_api.inference_status import ScalingDecision
from slipway_operator.core.observed import PastRecommendation, Sample
from slipway_operator.core.scaling.autoscaling import HISTORY_LENGTH, Past, Recommendation, decide, with_change
from slipway_operator.core.scaling.latency import Latency
from slipway_operator.core.scaling.signals import Readings
from tests.builders import T0, seconds

QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

RULES = st.fixed_dictionaries(
    {
        "stabilizationWindowSeconds": st.sampled_from([0, 30, 300]),
        "maxPods": st.sampled_from([1, 2, 7, 100]),
        "periodSeconds": st.sampled_from([1, 30, 600, 1800]),
    }
)
LIMITS = st.tuples(st.integers(1, 4), st.integers(0, 40)).map(
    lambda pair: {"minReplicas": pair[0], "maxReplicas": pair[0] + pair[1]}
)
SAMPLES = st.builds(
    Sample,
    at=st.integers(-7200, 7200).map(lambda age: T0 - seconds(age)),
    kv_usage=st.floats(0, 1),
    running=st.integers(0, 10_000),
    waiting=st.integers(0, 10_000),
)
READINGS = st.builds(
    Readings,
    metered=st.lists(SAMPLES, max_size=6).map(tuple),
    silent=st.integers(0, 6),
    unasked=st.integers(0, 6),
    pending=st.integers(0, 6),
    broken=st.integers(0, 6),
)


@pytest.mark.capability("AS-2")
@QUICK
@given(
    limits=LIMITS,
    up=RULES,
    down=RULES,
    readings=READINGS,
    current=st.integers(0, 60),
    past=st.lists(st.tuples(st.integers(-7200, 7200), st.integers(1, 60)), max_size=8),
    shortage=st.sampled_from(["", "0/2 nodes are available"]),
)
def test_one_decision_is_within_limits_and_says_why(limits, up, down, readings, current, past, shortage):
    policy = Autoscaling.model_validate({**limits, "behavior": {"scaleUp": up, "scaleDown": down}})
    window = tuple(PastRecommendation(T0 - seconds(age), desired) for age, desired in past)

    answer = decide(
        policy,
        readings,
        Past(current=current, recommendations=window),
        max_num_seqs=64,
        capacity_shortage=shortage,
        now=T0,
    )

    assert policy.min_replicas <= answer.desired <= policy.max_replicas
    assert answer.reason
    assert answer.again_at is None or answer.again_at > T0
    assert all(one.at <= T0 for one in answer.recommendations), "a time ahead of the clock would hold for too long"
    if shortage and policy.min_replicas <= current <= policy.max_replicas:
        assert answer.desired <= current


class AutoscaledService(RuleBasedStateMachine):
    """One service under a leader that may be replaced, with the true time beside the clock that the leader reads."""

    @initialize(limits=LIMITS, up=RULES, down=RULES)
    def start(self, limits, up, down):
        self.policy = Autoscaling.model_validate({**limits, "behavior": {"scaleUp": up, "scaleDown": down}})
        self.replicas = self.policy.min_replicas
        self.elapsed = timedelta()
        self.window: tuple[PastRecommendation, ...] = ()
        self.history: tuple[ScalingDecision, ...] = ()
        self.changes: list[tuple[timedelta, int, int]] = []
        self.kv, self.waiting, self.silent = 0.0, 0, 0
        self.last: Recommendation | None = None
        self.took_over = timedelta(days=-1)

    @rule(kv=st.floats(0, 12), waiting=st.integers(0, 300))
    def change_the_load(self, kv, waiting):
        self.kv, self.waiting = kv, waiting

    @rule(silent=st.integers(0, 4))
    def silence_some_replicas(self, silent):
        self.silent = silent

    @rule()
    def change_the_leader(self):
        self.window = ()
        self.took_over = self.elapsed

    @rule(times=st.integers(1, 20))
    def flap(self, times):
        for _ in range(times):
            self.kv, self.waiting = (0.0, 0) if self.waiting else (5.0, 200)
            self.wait(2)

    @rule(steps=st.integers(4, 12))
    def grow_step_by_step(self, steps):
        self.silent = 0
        for _ in range(steps):
            self.kv, self.waiting = 0.93 * self.replicas, 0
            self.wait(15)

    @rule(pause=st.sampled_from([1, 2, 15, 31, 120, 400, 1801]))
    def wait(self, pause):
        self.elapsed += seconds(pause)
        now = T0 + self.elapsed
        silent = min(self.silent, self.replicas)
        answering = self.replicas - silent
        sample = Sample(
            at=now - seconds(4),
            kv_usage=min(1.0, self.kv / self.replicas),
            running=1,
            waiting=self.waiting // self.replicas,
        )
        past = Past(current=self.replicas, history=self.history, recommendations=self.window)
        readings = Readings(metered=(sample,) * answering, silent=silent)
        self.last = decide(self.policy, readings, past, max_num_seqs=64, capacity_shortage="", now=now)
        self.window = self.last.recommendations
        if self.last.desired != self.replicas:
            change = ScalingDecision(time=now, from_=self.replicas, to=self.last.desired, reason=self.last.reason)
            self.history = with_change(self.history, change, self.policy)
            self.changes.append((self.elapsed, self.replicas, self.last.desired))
            self.replicas = self.last.desired

    @invariant()
    def the_number_is_within_its_limits(self):
        if hasattr(self, "policy"):
            assert self.policy.min_replicas <= self.replicas <= self.policy.max_replicas

    @invariant()
    def the_history_stays_short_and_ends_with_the_number_of_now(self):
        if getattr(self, "history", ()):
            assert len(self.history) <= HISTORY_LENGTH
            assert self.history[0].to == self.replicas

    @invariant()
    def no_period_has_more_net_change_than_its_rule_allows(self):
        for rules, direction in self._directions():
            period = seconds(rules.period_seconds)
            for position, (at, _, after) in enumerate(self.changes):
                within = [was for moment, was, _ in self.changes[: position + 1] if at - moment < period]
                assert direction * (after - within[0]) <= rules.max_pods, self.changes

    @invariant()
    def after_a_takeover_nothing_is_removed_for_one_window(self):
        for at, was, after in getattr(self, "changes", ()):
            window = seconds(self.policy.behavior.scale_down.stabilization_window_seconds)
            if after < was and at > self.took_over:
                assert at - self.took_over >= window, (self.changes, self.took_over)

    def _directions(self):
        if not hasattr(self, "policy"):
            return []
        return [(self.policy.behavior.scale_up, 1), (self.policy.behavior.scale_down, -1)]


AutoscaledService.TestCase.settings = QUICK
TestAutoscaledService = pytest.mark.capability("AS-2")(AutoscaledService.TestCase)


@QUICK
@given(jumps=st.lists(st.integers(-7200, 7200), min_size=1, max_size=6))
def test_however_the_clock_jumps_a_high_load_gets_its_replicas_soon_after(jumps):
    """No time of the past may hold growth for longer than one period of a clock that runs evenly again."""
    policy = Autoscaling.model_validate({"maxReplicas": 5})
    now, replicas, window, history = T0, 1, (), ()
    for position in [*jumps, *([2] * 120)]:
        now += seconds(position)
        hot = Sample(at=now, kv_usage=1.0, running=64, waiting=50)
        past = Past(current=replicas, history=history, recommendations=window)
        answer = decide(
            policy, Readings(metered=(hot,) * replicas), past, max_num_seqs=64, capacity_shortage="", now=now
        )
        if answer.desired != replicas:
            change = ScalingDecision(time=now, from_=replicas, to=answer.desired, reason=answer.reason)
            history = with_change(history, change, policy)
        window, replicas = answer.recommendations, answer.desired
    assert replicas == 5


METRICS = [
    {"type": "KVCacheUtilization", "target": "0.80"},
    {"type": "QueueDepth", "target": "2"},
    {"type": "RunningRequests", "target": "20"},
    {"type": "TTFTP95Seconds", "target": "1.0"},
]
LOADS = st.tuples(st.floats(0, 1), st.integers(0, 64), st.integers(0, 100), st.floats(0, 20), st.integers(0, 200))


@pytest.mark.capability("AS-1", "AS-8")
@QUICK
@given(
    loads=st.tuples(LOADS, LOADS),
    ready=st.integers(1, 12),
    silent=st.integers(0, 3),
    pending=st.integers(0, 3),
    broken=st.integers(0, 2),
)
def test_more_load_never_gets_fewer_replicas(loads, ready, silent, pending, broken):
    """Monotone in every metric at once: each value of the second load is at least that of the first."""
    rules = {"stabilizationWindowSeconds": 0, "maxPods": 1000, "periodSeconds": 1}
    policy = Autoscaling.model_validate(
        {"maxReplicas": 1000, "metrics": METRICS, "behavior": {"scaleUp": rules, "scaleDown": rules}}
    )
    current = ready + silent + pending + broken

    def desired(load):
        kv, running, waiting, ttft, held = load
        sample = Sample(at=T0, kv_usage=kv, running=running, waiting=waiting)
        readings = Readings(
            metered=(sample,) * ready,
            silent=silent,
            pending=pending,
            broken=broken,
            held_by_gateways=held,
            ttft_p95=Latency(ttft, 100),
        )
        return decide(policy, readings, Past(current=current), max_num_seqs=64, capacity_shortage="", now=T0).desired

    less = tuple(min(pair) for pair in zip(*loads, strict=True))
    more = tuple(max(pair) for pair in zip(*loads, strict=True))
    assert desired(less) <= desired(more)


@pytest.mark.capability("AS-4")
@QUICK
@given(silent=st.integers(1, 9), held=st.integers(0, 500), ttft=st.floats(0, 600), current=st.integers(1, 9))
def test_silence_of_all_replicas_holds_whatever_the_gateways_say(silent, held, ttft, current):
    policy = Autoscaling.model_validate({"maxReplicas": 9, "metrics": METRICS})
    readings = Readings(silent=silent, held_by_gateways=held, ttft_p95=Latency(ttft, 100))

    answer = decide(policy, readings, Past(current=current), max_num_seqs=64, capacity_shortage="", now=T0)

    assert (answer.desired, answer.is_active) == (current, False)
