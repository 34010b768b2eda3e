"""A law over all verbs: whatever the API server does, a verb ends with one sentence and never with a traceback."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import urllib3
from urllib3.exceptions import MaxRetryError, ReadTimeoutError

from slipway_cli import main as cli
from slipway_cli.cluster import Cluster

KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "x",
    "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x", "namespace": "team"}}],
    "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "x", "user": {"token": "t"}}],
}
CLUSTER_VERBS: dict[str, tuple[str, ...]] = {
    "status": ("chat",),
    "why-scale": ("chat",),
    "promote": ("chat",),
    "abort": ("chat",),
    "rollback": ("chat", "--to", "abc"),
    "pause": ("chat",),
    "drain": ("chat", "chat-0"),
    "wake": ("chat",),
    "routes": ("chat", "--gateway", "infra/public"),
    "bundle": ("bundle.tgz",),
    "cleanup": (),
    "why": ("req-1",),
    "console": ("--no-browser",),
}
FILE_VERBS: dict[str, tuple[str, ...]] = {
    "plan": ("-f", "broken.yaml"),
    "simulate": ("-f", "broken.yaml", "--trace", "broken.csv"),
}


def answer(status: int, body: object) -> Callable[..., urllib3.HTTPResponse]:
    def respond(*_: object, **options: object) -> urllib3.HTTPResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return urllib3.HTTPResponse(
            body=data, status=status, reason="R", preload_content=bool(options.get("preload_content", True))
        )

    return respond


def failing(error: Exception) -> Callable[..., urllib3.HTTPResponse]:
    def respond(*_: object, **__: object) -> urllib3.HTTPResponse:
        raise error

    return respond


def refusal(status: int, message: str) -> Callable[..., urllib3.HTTPResponse]:
    return answer(status, {"kind": "Status", "status": "Failure", "message": message, "code": status})


API_SERVERS = {
    "401": refusal(401, "Unauthorized"),
    "403": refusal(403, 'services is forbidden: User "x" cannot get it'),
    "404": refusal(404, "not found"),
    "409": refusal(409, "the object has been modified"),
    "422": refusal(422, "is invalid"),
    "500": refusal(500, "etcd is away"),
    "503 of a proxy in HTML": answer(503, b"<html>\n<body>no\nbackend</body></html>"),
    "200 without JSON": answer(200, b"<html>a login page</html>"),
    "200 with another kind": answer(200, {"kind": "Other", "items": [{"metadata": {}}], "metadata": {}}),
    "200 with null": answer(200, b"null"),
    "refused": failing(MaxRetryError(None, "/", ConnectionRefusedError("refused"))),
    "timeout": failing(ReadTimeoutError(None, "/", "Read timed out.")),
    "reset": failing(ConnectionResetError("reset by peer")),
    "broken client": failing(ValueError("eventTime\nmust not be None")),
}


def test_the_law_covers_every_verb():
    verbs = {one.name or one.callback.__name__.replace("_", "-") for one in cli.app.registered_commands}
    assert CLUSTER_VERBS.keys() | FILE_VERBS.keys() | {"completion"} == verbs, "completion reads nothing"


@pytest.mark.capability("OP-16")
@pytest.mark.parametrize("verb", CLUSTER_VERBS)
def test_every_verb_ends_with_one_sentence_whatever_the_api_server_does(verb, monkeypatch, capsys, tmp_path: Path):
    """review/shipping.md 2"""
    config = tmp_path / "config"
    config.write_text(json.dumps(KUBECONFIG))
    monkeypatch.setattr(Cluster, "kubeconfig", None)  # the command sets it; this sets it back
    kubeconfig = ("--kubeconfig", str(config))
    monkeypatch.chdir(tmp_path)
    for name, server in API_SERVERS.items():
        monkeypatch.setattr(urllib3.PoolManager, "request", server)
        code, errors = run(monkeypatch, capsys, *kubeconfig, verb, *CLUSTER_VERBS[verb])

        assert "kubeconfig" not in errors, "the API server was not asked"
        assert "Traceback" not in errors, (name, errors)
        if verb == "bundle":  # it names each part that it could not read, and writes the others
            assert code == 0, (name, errors)
            assert all(line.startswith("not collected: ") for line in errors.splitlines()), (name, errors)
            continue
        if verb == "cleanup" and code == 0:  # no kind is installed, or the list is empty
            assert errors == "", name
            continue
        assert code == 1, name
        assert errors.startswith("error: "), (name, errors)
        assert len(errors.splitlines()) == 1, (name, errors)


@pytest.mark.parametrize("verb", FILE_VERBS)
@pytest.mark.parametrize("content", [None, "", "a: [", "- 1\n- 2", "kind: Pod", "\x00\x01"])
def test_a_file_that_cannot_be_used_is_one_sentence(verb, content, monkeypatch, capsys, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        for name in ("broken.yaml", "broken.csv"):
            Path(name).write_text(content)

    code, errors = run(monkeypatch, capsys, verb, *FILE_VERBS[verb])

    assert code == 1
    assert errors.startswith("error: ")
    assert len(errors.splitlines()) == 1, errors


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["kubectl-slipway", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0, capsys.readouterr().err
