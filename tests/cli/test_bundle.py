"""A support bundle holds objects, and neither secrets nor prompts."""

import json
import tarfile

import pytest

from slipway_cli.bundle import REMOVED, redact, write_bundle

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
