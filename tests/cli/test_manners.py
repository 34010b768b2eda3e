"""The plugin on a real cluster: events of a kubelet, and errors in one sentence (review/shipping.md 2)."""

import json
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from slipway_api import __version__, names
from slipway_cli import main as cli
from slipway_cli.cluster import Cluster, ClusterError


def test_events_without_a_time_are_read():
    """A kubelet and controllers write `eventTime: null`, which the client's own model refuses."""
    ours = {"reportingController": names.FIELD_MANAGER, "regarding": {"name": "chat"}, "eventTime": None}
    pulled = {"reportingController": "kubelet", "regarding": {"name": "chat-0"}, "eventTime": None}
    cluster = Cluster.__new__(Cluster)
    cluster.namespace = "team"
    seen: dict[str, object] = {}

    def list_namespaced_event(namespace: str, **options: object) -> SimpleNamespace:
        seen.update(options, namespace=namespace)
        return SimpleNamespace(data=json.dumps({"items": [pulled, ours]}))

    cluster._events = SimpleNamespace(list_namespaced_event=list_namespaced_event)

    assert cluster.events() == [ours]
    assert seen == {"namespace": "team", "_preload_content": False}


def test_any_exception_is_one_sentence(monkeypatch, capsys):
    def fail() -> None:
        raise ValueError("Invalid value\nfor `event_time`")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["kubectl-slipway", "bundle"])

    with pytest.raises(SystemExit) as ended:
        cli.main()

    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: ValueError: Invalid value for `event_time`\n"


def test_version_and_kubeconfig_stand_before_the_verb(tmp_path):
    """review/shipping.md 35."""
    version = CliRunner().invoke(cli.app, ["--version"])
    assert (version.exit_code, version.output) == (0, f"kubectl-slipway {__version__} ({names.API_VERSION})\n")
    missing = tmp_path / "nowhere"
    try:
        result = CliRunner().invoke(cli.app, ["--kubeconfig", str(missing), "status", "chat"])
        assert isinstance(result.exception, ClusterError)
        assert str(missing) in str(result.exception) or "kubeconfig" in str(result.exception)
    finally:
        Cluster.kubeconfig = None


def test_a_drain_that_the_disruption_budget_forbids_asks_for_a_replacement_first(monkeypatch):
    """review/shipping.md 15: the only replica of a service can never be evicted."""
    annotated = []

    class OneReplica:
        namespace = "team"

        def __init__(self, *_: object) -> None: ...

        def pods(self, service: str) -> list[dict[str, dict[str, str]]]:
            return [{"metadata": {"name": f"{service}-0"}}]

        def evict(self, pod: str) -> None:
            raise ClusterError(f"pod team/{pod}: Cannot evict pod as it would violate the budget.", 429)

        def request_replacement(self, pod: str, moment: str) -> None:
            annotated.append((pod, datetime.fromisoformat(moment).tzinfo))

    monkeypatch.setattr(cli, "Cluster", OneReplica)
    result = CliRunner().invoke(cli.app, ["drain", "chat", "chat-0"])

    assert result.exit_code == 0, result.exception
    assert annotated == [("chat-0", UTC)]
    assert "chat-0 drains when its replacement is ready" in result.output


def test_a_table_in_a_pipe_is_not_folded():
    assert cli.out.is_terminal or cli.out.width == cli.PIPE_WIDTH
