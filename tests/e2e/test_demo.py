"""The demo ends with exit code 1 unless every promise was kept, and says which one was not, and what to look at."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from bench.plan import LoadReport
from e2e.demo import __main__ as demo
from e2e.demo import narration
from e2e.demo.__main__ import summarize
from e2e.demo.narration import StepFailedError, Subject, Watcher, step
from e2e.demo.summary import Figures, figure_rows, promise_lines, promises
from e2e.slipway import Event

LOAD = LoadReport(sent=90, finished=90, failed=0, retries_429=4, retried=3)
KEPT = Figures(
    ttft_seconds=0.1,
    most_replicas=3,
    replicas_after=1,
    load=LOAD,
    loads=[("chat", LOAD), ("canary", LOAD)],
    promoted_seconds=20.0,
    rolled_back_seconds=15.0,
    rolled_back_because="rolled back: TTFTP95 1.5 s against 0.2 s",
    adapter_answers=(" sails home.", " be a fine one, aye."),
    cold_seconds=8.0,
    warm_seconds=1.0,
    claimed_pod="standby-warm-0",
    zero_pods=0,
    zero_ttft_seconds=7.0,
)
BROKEN = {
    "One request": {"ttft_seconds": 0.0},
    "Load brings 3": {"most_replicas": 2},
    "Load brings": {"replicas_after": 3},
    "A canary as good": {"promoted_seconds": 0.0},
    "A slow canary": {"rolled_back_because": "rolled back: ErrorRate"},
    "An adapter": {"adapter_answers": (" the same", " the same")},
    "An adapter is": {"adapter_restarts": 1},
    "A claim": {"warm_seconds": 9.0},
    "A claim from": {"claimed_pod": ""},
    "An idle": {"zero_pods": 1},
    "No request": {"loads": [("chat", LOAD), ("canary", replace(LOAD, failed=1, finished=89))]},
}


def test_a_run_in_which_everything_happened_ends_with_0(capsys):
    assert all(one.kept for one in promises(KEPT))
    assert summarize(KEPT, "") == 0
    assert "✗" not in capsys.readouterr().out


@pytest.mark.parametrize("beginning", BROKEN)
def test_one_broken_promise_ends_with_1_and_names_a_command(beginning, capsys):
    figures = replace(KEPT, **BROKEN[beginning])

    (broken,) = [one for one in promises(figures) if not one.kept]

    assert broken.sentence.startswith(beginning)
    assert summarize(figures, "") == 1
    printed = capsys.readouterr().out
    assert printed.count("✗") == 1
    assert broken.look_at in printed
    assert "Logs:" in printed


def test_a_run_that_ended_early_keeps_no_promise_and_says_where_it_ended(capsys):
    assert not any(one.kept for one in promises(Figures()))
    assert summarize(Figures(), "step 5/12, Load: not within 60 s [x]") == 1
    assert "step 5/12, Load: not within 60 s [x]" in capsys.readouterr().out
    assert figure_rows(Figures())
    assert all("look at: kubectl" in line for line in promise_lines(promises(Figures())))


def test_an_exception_in_a_step_becomes_one_that_names_the_step():
    with pytest.raises(StepFailedError, match="step 2/12, Install: ValueError: no chart"), step(2, "Install"):
        raise ValueError("no chart")


class Cluster:
    """An installation with one service, whose events and conditions the test sets."""

    def __init__(self):
        self.posted, self.status = [], {}

    def events(self, name, *, kind):
        return self.posted if (kind, name) == ("InferenceService", "chat") else []

    def custom(self, kind, name):
        if name == "absent":
            raise LookupError(name)
        return {"status": self.status}


def test_an_event_and_a_condition_are_printed_once_and_again_when_they_change(capsys):
    cluster, seen = Cluster(), []
    chat = Subject("InferenceService", "chat")
    watcher = Watcher(cluster, lambda name, status: seen.append(status.get("readyReplicas")))
    cluster.posted = [Event("Normal", "ScaledUp", "1→3: queue [12]", datetime.now(UTC), "u1")]
    cluster.status = {
        "readyReplicas": 1,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Available", "message": "1 of 1"}],
    }
    with watcher.watching(chat, Subject("LoRAAdapter", "absent")):
        pass
    watcher.print_changes(chat)
    cluster.status["conditions"][0] |= {"reason": "Degraded", "message": "2 of 3"}
    watcher.print_changes(chat)

    printed = capsys.readouterr().out
    assert printed.count("1→3: queue [12]") == 1
    assert printed.count("Ready=True") == 2
    assert "Degraded: 2 of 3" in printed
    assert "LookupError while looking at absent" in printed
    assert set(seen) == {1}


def test_the_steps_are_counted_to_the_last(capsys):
    with step(narration.STEPS, "Tear down"):
        pass

    assert "12/12 Tear down" in capsys.readouterr().out


@pytest.mark.parametrize("failure", [StepFailedError("step 5/12, Load: no"), LookupError("between two steps")])
def test_a_failure_within_a_step_or_between_two_ends_with_1_and_the_summary(failure, monkeypatch, capsys):
    class Failing:
        def __init__(self, slipway, figures):
            pass

        def run(self):
            raise failure

    @contextmanager
    def no_cluster(keep, figures):
        yield None

    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(demo, "a_cluster", no_cluster)
    monkeypatch.setattr(demo, "Slipway", lambda access: SimpleNamespace(install=lambda: None))
    monkeypatch.setattr(demo, "Acts", Failing)

    assert demo.main() == 1

    printed = capsys.readouterr().out
    assert str(failure) in printed
    assert "What was measured" in printed
