"""Checks after all stories: the operator's use of its RBAC rights, and the logs. Runs last by its name."""

from datetime import datetime

import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, Slipway

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SECRET_WORDS = "the zebra wears a violet raincoat"


@pytest.mark.capability("SE-3")
def test_least_privilege_is_enough(slipway: Slipway) -> None:
    account = f"system:serviceaccount:{RELEASE_NAMESPACE}:"
    refused = [
        f"{entry['user']['username']} {entry['verb']} {entry['requestURI']}"
        for entry in slipway.access.audit()
        if entry["user"].get("username", "").startswith(account)  # a request that was not authenticated has no name
        and (answer := entry.get("responseStatus", {})).get("code") == 403
        and "exceeded quota" not in answer.get("message", "")  # 403 too, and no lack of rights
        and not slipway.was_away(datetime.fromisoformat(entry["requestReceivedTimestamp"]))
    ]

    assert refused == []


@pytest.mark.capability("PF-9", "OB-7")
def test_no_prompt_or_answer_is_in_logs_or_events(clean: Slipway) -> None:
    clean.apply(as_yaml(static("quiet", 1)))
    clean.wait_ready("quiet", replicas=1)
    answer = clean.openai().chat.completions.create(
        model="quiet", messages=[{"role": "user", "content": f"Remember: {SECRET_WORDS}"}], max_tokens=24
    )

    logs = clean.logs("app.kubernetes.io/part-of=slipway") + clean.logs("slipway.dev/service=quiet", "default")
    notes = "\n".join(event.note for event in clean.events("quiet"))

    assert answer.id in logs, "the request itself is logged"
    for text in (SECRET_WORDS, "violet raincoat", answer.choices[0].message.content or "-"):
        assert text not in logs
        assert text not in notes
