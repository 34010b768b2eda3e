"""The plugin on a real cluster: events of a kubelet, and errors in one sentence (review/shipping.md 2)."""

import json
import sys
from types import SimpleNamespace

import pytest

from slipway_api import names
from slipway_cli import main as cli
from slipway_cli.cluster import Cluster


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
