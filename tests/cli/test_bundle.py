"""A support bundle holds objects, and neither secrets nor prompts."""

import json
import tarfile

import pytest

from slipway_cli.bundle import REMOVED, collect_bundle, redact, redact_text, write_bundle
from slipway_cli.cluster import ClusterError

SECRETS = ("sk-very-secret", "You are a helpful pirate", "What is 2+2", "--hf-token=abc")
SERVICE = {
    "metadata": {
        "name": "chat",
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "What is 2+2", "team": "search"},
    },
    "spec": {
        "model": {"chatTemplate": "You are a helpful pirate", "warmPrompts": [{"prompt": "What is 2+2"}]},
        "runtime": {"env": [{"name": "TOKEN", "value": "sk-very-secret"}], "args": ["--hf-token=abc"]},
        "rollout": {"gates": {"smoke": [{"prompt": "What is 2+2", "mustMatch": "4"}]}},
        "replicas": 2,
    },
}


@pytest.mark.capability("PL-13", "SE-2")
def test_no_secret_and_no_prompt_is_written(tmp_path):
    path = tmp_path / "bundle.tar.gz"

    write_bundle(path, {"inferenceservices": [SERVICE]})

    with tarfile.open(path) as archive:
        (member,) = archive.getmembers()
        text = archive.extractfile(member).read().decode()
    assert not [secret for secret in SECRETS if secret in text]
    (kept,) = json.loads(text)
    assert kept["spec"]["replicas"] == 2
    assert kept["spec"]["runtime"]["env"] == [{"name": "TOKEN", "value": REMOVED}]
    assert kept["metadata"]["annotations"]["team"] == "search"


def test_what_is_private_by_nature_keeps_its_place():
    assert redact({"prompt": None, "value": "x", "deep": [{"args": ["a"]}]}) == {
        "prompt": None,
        "value": REMOVED,
        "deep": [{"args": REMOVED}],
    }


def pod(name: str, component: str = "", *, restarts: int = 0, state: str = "running"):
    status = {"name": "server", "restartCount": restarts, "state": {state: {}}}
    labels = {"app.kubernetes.io/component": component}
    return {
        "metadata": {"name": name, "namespace": "team", "labels": labels},
        "status": {"containerStatuses": [status]},
    }


class ForbiddenCluster:
    """Answers for what is allowed; everything else is a 403."""

    def __init__(self, **allowed):
        self._allowed = allowed

    def __getattr__(self, name):
        def answer(*arguments, **options):
            if name not in self._allowed:
                raise ClusterError(f"{name}: is forbidden", 403)
            allowed = self._allowed[name]
            return allowed(*arguments, **options) if callable(allowed) else allowed

        return answer


def test_the_bundle_has_logs_of_all_parts_nodes_and_routes():
    """review/shipping.md 2: support asks for these first."""

    def log(namespace, name, container, *, previous):
        return f"{name} {container} {'before' if previous else 'now'}"

    cluster = ForbiddenCluster(
        pods=[pod("chat-0", restarts=1, state="waiting"), pod("chat-1")],
        installation_pods=[pod("operator-a", "operator"), pod("gateway-a", "gateway")],
        log=log,
        nodes=[{"metadata": {"name": "a"}}],
        gateway_routes={"routes": []},
        server_version="v1",
        events=[],
        revisions=[],
        objects=[],
    )

    files = collect_bundle(cluster, "slipway-system")

    assert {name: text for name, text in files.items() if name.startswith("logs/")} == {
        "logs/operator-a-server.log": "operator-a server now",
        "logs/gateway-a-server.log": "gateway-a server now",
        "logs/chat-0-server-previous.log": "chat-0 server before",
        "logs/chat-1-server.log": "chat-1 server now",
    }
    assert files["routes/gateway-a"] == {"routes": []}
    assert files["nodes"] == [{"metadata": {"name": "a"}}]
    assert files["not-collected"] == {}


def test_a_part_that_may_not_be_read_is_named_and_the_others_are_written(tmp_path):
    cluster = ForbiddenCluster(pods=[pod("chat-0")], server_version="v1")

    files = collect_bundle(cluster, "slipway-system")
    write_bundle(tmp_path / "b.tgz", files)

    assert files["pods"] == [pod("chat-0")]
    missing = {"installation", "events", "revisions", "nodes", "inferenceservices", "loraadapters", "warmpools"}
    assert files["not-collected"].keys() == missing | {"logs/chat-0-server.log"}
    assert files["not-collected"]["nodes"] == "nodes: is forbidden"


@pytest.mark.parametrize(
    "secret",
    [
        "Authorization: Bearer abc.def-ghi",
        '"authorization": "Bearer abcdefghi"',
        "x-slipway-admin-token: 0123abcd",
        "api_key=0123abcd",
        "HF_TOKEN=hf_abcdefghijk",
        "using sk-abcdefghijkl now",
        "https://user:pass@hub.internal/x",
        "https://s3/x?X-Amz-Signature=0123abcd&other=1",
        "AWS_SECRET_ACCESS_KEY='0123abcd'",
    ],
)
@pytest.mark.capability("SE-2")
def test_tokens_in_logs_are_removed(secret):
    text = redact_text(f"before {secret} after")
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert REMOVED in text
    assert not [part for part in ("abc", "0123", "pass@") if part in text]


def test_plain_log_lines_stay():
    line = '{"message": "scaled", "service": "team/chat", "tokens": 5, "reason": "3 ready"} http://10.0.0.1:8000/v1'
    assert redact_text(line) == line
