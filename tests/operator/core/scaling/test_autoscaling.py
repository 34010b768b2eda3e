"""How many replicas, and why: single decisions, stories in virtual time, and the words in which they are told."""

from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from slipway_api.autoscaling import Autoscaling, Limit, Metric, MetricType
from slipway_api.conditions import Reason
from slipway_api.inference_status import ScalingDecision
from slipway_operator.core.observed import Demand, PastRecommendation, Sample
from slipway_operator.core.scaling.autoscaling import HISTORY_LENGTH, Past, Recommendation, decide, with_change
from slipway_operator.core.scaling.limits import LIMIT_NAMES, bounds_of
from slipway_operator.core.scaling.signals import Readings
from tests.builders import T0, minutes, seconds


def policy(**fields) -> Autoscaling:
    return Autoscaling.model_validate({"maxReplicas": 10, **fields})


def quick(**fields) -> Autoscaling:
    """No windows and no rates to speak of: what the metrics say, at once."""
    rules = {"stabilizationWindowSeconds": 0, "maxPods": 100, "periodSeconds": 1}
    return policy(behavior={"scaleUp": rules, "scaleDown": rules}, **fields)


def pods(count, *, kv=0.0, waiting=0, running=0, at=T0):
    return tuple(Sample(at=at, kv_usage=kv, running=running, waiting=waiting) for _ in range(count))


def ask(rules, readings, *, current, now=T0, capacity_shortage="", within_budget=None, **past) -> Recommendation:
    return decide(
        rules,
        readings,
        Past(current=current, **past),
        max_num_seqs=64,
        capacity_shortage=capacity_shortage,
        now=now,
        bounds=bounds_of(rules, within_budget=within_budget, gpus=within_budget or 0),
    )


@dataclass
class Fleet:
    """A fleet in virtual time: `at(minutes(5)).load(kv=0.2).expect(replicas=4)`. Replicas start at once."""

    rules: Autoscaling
    replicas: int = 1
    now: timedelta = timedelta()
    kv: float = 0.0
    waiting: float = 0.0
    window: tuple[PastRecommendation, ...] = ()
    history: tuple[ScalingDecision, ...] = ()
    last: Recommendation | None = None
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    loading: dict[int, timedelta] = field(default_factory=dict)
    load_seconds: float = 0

    def load(self, *, kv=0.0, waiting=0.0) -> "Fleet":
        """Load in units of one replica: kv=1.6 is two replicas at 0.80."""
        self.kv, self.waiting = kv, waiting
        return self

    def at(self, moment: timedelta) -> "Fleet":
        """Decide every two seconds until then."""
        while self.now < moment:
            self.now += seconds(2)
            self.decide()
        return self

    def decide(self) -> None:
        now = T0 + self.now
        self.loading = {n: until for n, until in self.loading.items() if until > self.now and n <= self.replicas}
        ready = self.replicas - len(self.loading)
        each = Sample(at=now, kv_usage=min(1.0, self.kv / ready), running=1, waiting=round(self.waiting / ready))
        self.last = decide(
            self.rules,
            Readings(metered=(each,) * ready, pending=len(self.loading)),
            Past(current=self.replicas, history=self.history, recommendations=self.window),
            max_num_seqs=64,
            capacity_shortage="",
            now=now,
        )
        self.window = self.last.recommendations
        if self.last.desired != self.replicas:
            self.changes.append((int(self.now.total_seconds()), self.replicas, self.last.desired))
            change = ScalingDecision(time=now, from_=self.replicas, to=self.last.desired, reason=self.last.reason)
            self.history = with_change(self.history, change, self.rules)
            for number in range(self.replicas + 1, self.last.desired + 1):
                self.loading[number] = self.now + seconds(self.load_seconds)
            self.replicas = self.last.desired

    def expect(self, replicas: int) -> "Fleet":
        assert self.replicas == replicas, f"{self.now}: {self.changes}, {self.last}"
        return self


# --- one decision -------------------------------------------------------------------------------------------------


@pytest.mark.capability("AS-1")
@pytest.mark.parametrize(
    ("readings", "current", "expected"),
    [
        (Readings(metered=pods(2, kv=0.93)), 2, 3),
        (Readings(metered=pods(2, kv=0.93, waiting=6)), 2, 6),
        (Readings(metered=pods(3, kv=0.20)), 3, 1),
        (Readings(metered=pods(3, kv=0.20, waiting=2)), 3, 3),
        (Readings(metered=pods(2, kv=0.87)), 2, 2),
        (Readings(metered=pods(2, kv=0.73)), 2, 2),
        (Readings(metered=pods(2, waiting=100)), 2, 10),
        (Readings(metered=pods(4)), 4, 1),
    ],
    ids=[
        "kv above target",
        "the metric that wants most wins",
        "both below target",
        "the queue at its target holds what kv would give up",
        "within tolerance above",
        "within tolerance below",
        "never above maxReplicas",
        "never below minReplicas",
    ],
)
def test_desired_is_the_most_that_any_metric_wants(readings, current, expected):
    assert ask(quick(), readings, current=current).desired == expected


@pytest.mark.capability("AS-1")
def test_same_samples_give_the_same_decision():
    readings = Readings(metered=(*pods(2, kv=0.9), *pods(1, waiting=3)), silent=1, pending=1)
    assert ask(quick(), readings, current=5) == ask(quick(), readings, current=5)


@pytest.mark.capability("AS-1")
def test_limits_hold_at_once_and_without_evidence():
    assert ask(policy(minReplicas=3), Readings(), current=0).desired == 3
    assert ask(policy(maxReplicas=2), Readings(metered=pods(5, kv=0.9)), current=5).desired == 2


@pytest.mark.capability("PF-6", "PF-7")
def test_input_is_requests_only_never_cpu_gpu_or_memory_utilization():
    of_load, of_latency = {"KVCacheUtilization", "QueueDepth", "RunningRequests"}, {"TTFTP95Seconds"}
    assert {metric.value for metric in MetricType} == of_load | of_latency
    of_the_requests = {"at", "boot_id", "kv_usage", "running", "waiting", "draining"}
    for_the_status = {"starting", "not_ready", "capacity", "invalid_logits", "outdated_certificate_ends"}
    assert set(Sample.__dataclass_fields__) == of_the_requests | for_the_status
    of_the_replicas = {"metered", "silent", "unasked", "pending", "broken"}
    of_the_gateways = {"held_by_gateways", "ttft_p95"}
    assert set(Readings.__dataclass_fields__) == of_the_replicas | of_the_gateways
    assert set(Demand.__dataclass_fields__) == {
        *("at", "waiting_requests", "waiting_bytes", "longest_wait"),
        *("refused_requests", "open_requests", "idle_since", "complete"),
    }


@pytest.mark.capability("PF-6")
def test_no_sentence_of_the_api_offers_a_utilization_of_a_device_as_a_metric():
    documented = (Metric.model_fields["type"].description or "").lower()
    assert not [word for word in ("cpu", "gpu", "memory", "average") if word in documented]


@pytest.mark.capability("AS-3")
def test_what_is_loading_counts_as_coming_capacity():
    rules = quick()
    hot = pods(1, kv=0.95)
    assert ask(rules, Readings(metered=hot), current=1).desired == 2
    assert ask(rules, Readings(metered=hot, pending=1), current=2).desired == 2
    assert ask(rules, Readings(metered=pods(1, waiting=6), pending=2), current=3).desired == 3


def test_what_is_broken_blocks_neither_direction():
    assert ask(quick(), Readings(metered=pods(2, kv=0.1), broken=1), current=3).desired == 1
    assert ask(quick(), Readings(metered=pods(1, kv=0.95), broken=1), current=2).desired == 3


def test_a_revision_that_breaks_everywhere_does_not_fill_the_cluster():
    assert ask(quick(), Readings(metered=pods(1, kv=0.95), broken=6), current=7).desired == 7


@pytest.mark.capability("AS-4")
@pytest.mark.parametrize(
    ("readings", "current", "expected"),
    [
        (Readings(metered=pods(2, kv=0.9), silent=2), 4, 4),
        (Readings(metered=pods(2, kv=0.1), silent=2), 4, 3),
        (Readings(metered=pods(1, kv=0.0), silent=3), 4, 3),
        (Readings(metered=pods(1, waiting=9), silent=1), 2, 5),
    ],
    ids=[
        "scaling up they count as idle",
        "scaling down they count at target",
        "only what says that it is idle may go",
        "a queue is a queue, whoever is silent",
    ],
)
def test_silent_replicas_count_against_the_change(readings, current, expected):
    assert ask(quick(), readings, current=current).desired == expected


@pytest.mark.capability("AS-4")
def test_when_all_are_silent_the_number_is_held_and_said():
    answer = ask(quick(), Readings(silent=3), current=3)
    assert (answer.desired, answer.verdict, answer.is_active) == (3, Reason.METRICS_MISSING, False)
    assert answer.reason == "none of 3 ready pods reports its load: holding 3"


@pytest.mark.capability("AS-4")
@pytest.mark.parametrize(("fallback", "expected"), [(None, 3), (2, 3), (5, 5), (50, 10)])
def test_after_a_long_silence_the_fallback_counts_only_if_it_is_more(fallback, expected):
    rules = policy(missingMetrics={"maxHoldSeconds": 600, "fallbackReplicas": fallback})
    silence = Readings(silent=3)
    assert ask(rules, silence, current=3, silent_since=T0 - seconds(599)).desired == 3
    assert ask(rules, silence, current=3, silent_since=T0 - seconds(600)).desired == expected


@pytest.mark.capability("AS-4")
def test_replicas_that_were_not_asked_yet_are_not_silent():
    """C5: after a change of leader no sample exists; that holds the number and says nothing."""
    answer = ask(quick(), Readings(unasked=3), current=3)
    assert (answer.desired, answer.keeps_condition) == (3, True)
    assert answer.again_at == T0 + seconds(10)


@pytest.mark.capability("AS-4")
def test_the_first_answer_after_a_change_of_leader_does_not_decide_for_all():
    """C5: one of three has answered and is idle; the two others may be busy."""
    answer = ask(quick(), Readings(metered=pods(1), unasked=2), current=3)
    assert (answer.desired, answer.verdict) == (2, Reason.METRICS_FRESH), "only the one that is known to be idle"
    hot = ask(quick(), Readings(metered=pods(1, waiting=9), unasked=2), current=3)
    assert hot.desired == 5


def test_while_nothing_is_ready_nothing_is_missing():
    answer = ask(policy(), Readings(pending=1), current=1)
    assert (answer.desired, answer.is_active) == (1, None)


@pytest.mark.capability("AS-6")
def test_never_below_what_the_live_requests_need():
    rules = quick()
    # Short prompts: the cache is nearly empty, but 130 requests need three replicas of 64 places.
    busy = Readings(metered=pods(5, kv=0.02, running=26))
    answer = ask(rules, busy, current=5)
    assert (answer.desired, answer.limited_by) == (3, "LiveDemand")


@pytest.mark.capability("AS-6")
def test_gives_up_a_replica_only_if_the_others_can_carry_its_share():
    assert ask(quick(), Readings(metered=pods(3, kv=0.54)), current=3).desired == 3
    assert ask(quick(), Readings(metered=pods(3, kv=0.53)), current=3).desired == 2


@pytest.mark.capability("AS-4")
def test_without_room_for_the_last_ones_no_more_are_asked_for():
    answer = ask(
        quick(), Readings(metered=pods(2, kv=0.95), pending=0), current=2, capacity_shortage="0/2 nodes are available"
    )
    assert (answer.desired, answer.verdict) == (2, Reason.LIMITED_BY_CAPACITY)
    assert answer.reason.endswith("3 wanted, limited by the cluster's capacity: 0/2 nodes are available")


@pytest.mark.capability("AS-4")
@pytest.mark.parametrize(
    ("limit", "rules", "shortage"),
    [
        (Reason.LIMITED_BY_MAX, quick(maxReplicas=2), ""),
        (Reason.LIMITED_BY_CAPACITY, quick(), "0/2 nodes are available"),
    ],
)
def test_load_that_hovers_around_its_target_does_not_repeat_the_warning_of_a_limit(limit, rules, shortage):
    """Finding 17: LimitedByMax and MetricsFresh alternated with every other sample, each time with a Warning."""
    verdict = ""
    for kv in (0.95, 0.85, 0.95, 0.85):
        readings = Readings(metered=pods(2, kv=kv))
        verdict = ask(rules, readings, current=2, capacity_shortage=shortage, verdict=verdict).verdict
        assert verdict is limit
    calm = ask(rules, Readings(metered=pods(2, kv=0.3)), current=2, capacity_shortage=shortage, verdict=verdict)
    assert calm.verdict is Reason.METRICS_FRESH


@pytest.mark.capability("AS-1")
def test_tells_the_evidence():
    at = T0 - seconds(4)
    rules = policy(behavior={"scaleUp": {"maxPods": 9}})
    up = ask(rules, Readings(metered=pods(3, kv=0.93, at=at)), current=3)
    assert up.reason == "3→4: KVCacheUtilization 0.93 > 0.80 (3/3 pods, 4s old)"

    down = ask(quick(), Readings(metered=pods(3, kv=0.2, at=at), silent=1), current=4)
    assert down.reason == "4→2: KVCacheUtilization 0.20 < 0.80, QueueDepth 0.00 < 2.00 (3/4 pods, 4s old)"

    limited = ask(quick(maxReplicas=4), Readings(metered=pods(2, waiting=9, at=T0)), current=2)
    assert limited.reason == ("2→4: QueueDepth 9.00 > 2.00 (2/2 pods, 0s old); 9 wanted, limited by maxReplicas")
    assert limited.verdict is Reason.LIMITED_BY_MAX


SLOW = {"stabilizationWindowSeconds": 0, "maxPods": 1, "periodSeconds": 60}
HOT, COLD = Readings(metered=pods(2, waiting=9)), Readings(metered=pods(4))


@pytest.mark.capability("AS-1")
@pytest.mark.parametrize(
    ("limit", "rules", "readings", "facts"),
    [
        (Limit.LIMITED_BY_MAX, quick(maxReplicas=3), HOT, {"current": 2}),
        (Limit.MIN_REPLICAS, quick(minReplicas=3), COLD, {"current": 4}),
        (Limit.LIMITED_BY_BUDGET, quick(), HOT, {"current": 2, "within_budget": 3}),
        (Limit.LIMITED_BY_CAPACITY, quick(), HOT, {"current": 2, "capacity_shortage": "0/2 nodes are available"}),
        (Limit.SCALE_UP_RATE, policy(behavior={"scaleUp": SLOW}), HOT, {"current": 2}),
        (Limit.SCALE_DOWN_RATE, policy(behavior={"scaleDown": SLOW}), COLD, {"current": 4}),
        (Limit.STABILIZATION_WINDOW, policy(), COLD, {"current": 4}),
        (Limit.LIVE_DEMAND, quick(), Readings(metered=pods(4, running=48)), {"current": 4}),
    ],
    ids=lambda limit: limit.value if isinstance(limit, Limit) else "",
)
def test_each_limit_is_named_where_it_holds_the_number(limit, rules, readings, facts):
    answer = ask(rules, readings, **facts)

    assert answer.limited_by is limit
    assert answer.desired != answer.recommended
    assert answer.reason.count(f"{answer.recommended} wanted, limited by {LIMIT_NAMES[limit]}") == 1


# --- windows and rates --------------------------------------------------------------------------------------------


@pytest.mark.capability("AS-2")
def test_scales_up_at_once_and_down_only_after_a_quiet_window():
    fleet = Fleet(policy())
    fleet.load(kv=2.3).at(seconds(10)).expect(replicas=3)
    fleet.load(kv=0.4).at(minutes(5)).expect(replicas=3)
    fleet.at(minutes(5.5)).expect(replicas=2)
    fleet.at(minutes(7)).expect(replicas=1)


@pytest.mark.capability("AS-2")
def test_adds_and_removes_no_more_than_asked_within_a_period():
    fleet = Fleet(policy(), replicas=2)
    fleet.load(waiting=60).at(minutes(3)).expect(replicas=10)
    assert [change[2] - change[1] for change in fleet.changes] == [2, 2, 2, 2]
    gaps = [later[0] - earlier[0] for earlier, later in zip(fleet.changes, fleet.changes[1:], strict=False)]
    assert min(gaps) >= 30

    fleet.changes.clear()
    fleet.load().at(minutes(20)).expect(replicas=1)
    assert {change[2] - change[1] for change in fleet.changes} == {-1}
    gaps = [later[0] - earlier[0] for earlier, later in zip(fleet.changes, fleet.changes[1:], strict=False)]
    assert min(gaps) >= 60


@pytest.mark.capability("AS-2")
def test_does_not_flap_on_a_sawtooth():
    fleet = Fleet(policy(behavior={"scaleUp": {"stabilizationWindowSeconds": 30}}), replicas=2)
    for minute in range(60):
        fleet.load(kv=3.0 if minute % 2 else 1.4).at(minutes(minute + 1))
    assert len(fleet.changes) <= 2
    assert fleet.replicas == 4


@pytest.mark.capability("AS-2")
def test_a_spike_shorter_than_the_up_window_adds_nothing():
    fleet = Fleet(policy(behavior={"scaleUp": {"stabilizationWindowSeconds": 30}}))
    fleet.load(kv=0.5).at(minutes(1)).load(kv=3).at(minutes(1) + seconds(20)).load(kv=0.5).at(minutes(3))
    fleet.expect(replicas=1)
    fleet.load(kv=3).at(minutes(3) + seconds(40)).expect(replicas=2)


@pytest.mark.capability("AS-3")
def test_a_slow_cold_start_causes_no_second_overshoot():
    fleet = Fleet(policy(behavior={"scaleUp": {"maxPods": 10}}), replicas=2, load_seconds=180)
    fleet.load(kv=2.0, waiting=8).at(minutes(3)).expect(replicas=4)
    fleet.at(minutes(6)).expect(replicas=4)
    assert fleet.changes == [(2, 2, 4)]


@pytest.mark.capability("AS-2")
def test_after_a_takeover_the_number_decided_last_counts_as_recommended_now():
    fleet = Fleet(policy(), replicas=4)
    fleet.load(kv=0.2).at(minutes(4)).expect(replicas=4)
    fleet.window = ()  # another operator takes over
    fleet.at(minutes(8)).expect(replicas=4)
    fleet.at(minutes(9.5)).expect(replicas=3)


@pytest.mark.capability("AS-2")
def test_rates_look_at_the_history_in_status_so_a_takeover_does_not_double_them():
    done = ScalingDecision(time=T0 - seconds(10), from_=2, to=4)
    answer = ask(policy(), Readings(metered=pods(4, waiting=9)), current=4, history=(done,))
    assert (answer.desired, answer.limited_by) == (4, "ScaleUpRate")
    later = ask(policy(), Readings(metered=pods(4, waiting=9)), current=4, history=(done,), now=T0 + seconds(20))
    assert later.desired == 6


@pytest.mark.capability("AS-2")
def test_five_changes_in_a_long_period_leave_the_rest_of_its_allowance():
    """Finding 18: with five changes in the period nothing was allowed any more, even with maxPods 100 in 1800 s."""
    history = tuple(ScalingDecision(time=T0 - seconds(n), from_=n, to=n + 1) for n in range(1, 6))
    rules = policy(maxReplicas=500, behavior={"scaleUp": {"maxPods": 100, "periodSeconds": 1800}})

    answer = ask(rules, Readings(metered=pods(6, waiting=900)), current=6, history=history)

    assert (answer.desired, answer.limited_by) == (101, "ScaleUpRate")


@pytest.mark.capability("AS-2")
def test_changes_beyond_the_length_of_the_history_still_count_in_their_period():
    """Finding 18: the history has five entries; the sixth change of a period must not make room for more."""
    rules = policy(maxReplicas=500, behavior={"scaleUp": {"maxPods": 20, "periodSeconds": 1800}})
    history = ()
    for number in range(1, 18):
        change = ScalingDecision(time=T0 + seconds(20 * number), from_=number, to=number + 1, reason=f"step {number}")
        history = with_change(history, change, rules)

    answer = ask(rules, Readings(metered=pods(18, waiting=900)), current=18, history=history, now=T0 + seconds(400))

    assert len(history) == HISTORY_LENGTH
    assert history[0].reason == "step 17"
    assert answer.desired == 18 + 20 - 17


@pytest.mark.capability("AS-2")
def test_growth_for_hours_is_limited_by_the_last_period_alone():
    """Finding 18: changes that are older than the period stop counting, also where entries were joined."""
    rules = policy(maxReplicas=500, behavior={"scaleUp": {"maxPods": 100, "periodSeconds": 1800}})
    history = ()
    for number in range(1, 400):
        change = ScalingDecision(time=T0 + minutes(number), from_=number, to=number + 1)
        history = with_change(history, change, rules)

    answer = ask(rules, Readings(metered=pods(400, waiting=900)), current=400, history=history, now=T0 + minutes(400))

    # 30 changes in the period; a joined entry counts for up to a quarter of the period longer.
    assert 400 + 100 - 30 - 8 <= answer.desired <= 400 + 100 - 29


@pytest.mark.parametrize(("ahead", "expected"), [(seconds(5), 4), (minutes(60), 6)], ids=["a little", "an hour"])
def test_a_change_from_the_future_counts_only_if_the_clocks_differ_by_less_than_its_period(ahead, expected):
    """A leader whose clock was an hour ahead must not stop its successor for an hour."""
    change = ScalingDecision(time=T0 + ahead, from_=2, to=4)

    assert ask(policy(), Readings(metered=pods(4, waiting=9)), current=4, history=(change,)).desired == expected


def test_a_clock_that_is_set_back_holds_a_scale_down_for_one_window_at_most():
    fleet = Fleet(policy(), replicas=4)
    fleet.load(kv=3.0).at(minutes(60))
    fleet.now = minutes(10)
    fleet.load(kv=0.2).at(minutes(10) + seconds(298)).expect(replicas=4)
    fleet.at(minutes(16)).expect(replicas=3)


def test_window_stays_small_however_long_nothing_happens():
    fleet = Fleet(policy())
    fleet.load(kv=0.5).at(minutes(30))
    assert len(fleet.window) <= 3


def test_says_when_to_look_again():
    window = (PastRecommendation(T0 - seconds(100), 4), PastRecommendation(T0 - seconds(50), 1))
    answer = ask(policy(), Readings(metered=pods(4)), current=4, recommendations=window)
    assert (answer.desired, answer.limited_by) == (4, "StabilizationWindow")
    assert answer.again_at == T0 + seconds(200)
