"""A team names a fallback for its service; while the service has no replica, the fallback answers and says so."""

import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def asked(slipway: Slipway) -> tuple[str, str]:
    """The model that was asked, where another one answers, and the one that answered."""
    raw = slipway.openai().chat.completions.with_raw_response.create(
        model="large", messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=8
    )
    assert raw.parse().choices[0].message.content
    return raw.headers.get(names.HEADER_FALLBACK_FROM, ""), raw.headers[names.HEADER_MODEL]


@pytest.mark.capability("RG-9")
def test_while_a_service_is_suspended_its_fallback_answers(clean: Slipway) -> None:
    routing = {"fallback": {"service": "small", "afterSeconds": 1}}
    clean.apply(as_yaml(static("small", 1)))
    clean.apply(as_yaml(static("large", 1, routing=routing)))
    clean.wait_ready("small", replicas=1)
    before = clean.wait_ready("large", replicas=1)
    assert asked(clean) == ("", "large")

    clean.apply(as_yaml(static("large", 1, routing=routing, suspend=True)))
    wait_for("no pods of large", lambda: not clean.pods("large") or None, timeout=120)
    assert asked(clean) == ("large", "small")

    clean.apply(as_yaml(static("large", 1, routing=routing)))
    after = clean.wait_ready("large", replicas=1)
    wait_for("large to answer itself", lambda: asked(clean) == ("", "large") or None, timeout=60)
    assert after["status"]["currentRevision"] == before["status"]["currentRevision"], "routing restarts nothing"
