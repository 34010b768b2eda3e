"""Clients that are slow, or that never finish a request, are disconnected and do not affect others."""

import pytest

from e2e import checks
from e2e.chaos import hostile
from e2e.manifests import as_yaml, static
from e2e.slipway import GATEWAY, Slipway

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CLOSED_WITHIN_SECONDS = 120  # more than the gateway gives a client for its headers, or for the next piece of a body


@pytest.mark.capability("RG-2", "SE-6")
def test_clients_that_dribble_headers_are_ended_and_the_others_are_served(clean: Slipway) -> None:
    """Chaos finding C6: the time for the headers of a request is limited."""
    clean.apply(as_yaml(static("patient", 1)))
    clean.wait_ready("patient", replicas=1)

    with hostile.header_dribblers(clean.access.port(GATEWAY)) as opened:
        failures = checks.first_attempts(clean, "patient", 10)
        left = hostile.wait_closed(opened, CLOSED_WITHIN_SECONDS)

    assert failures == []
    assert left == 0, f"{left} of {len(opened)} are still open"


@pytest.mark.full
@pytest.mark.capability("RG-2", "SE-6")
def test_stalled_uploads_are_ended_and_the_others_are_served(clean: Slipway) -> None:
    """Finding 1.7: half-sent bodies do not close the gateway, since the time between two pieces is limited."""
    clean.apply(as_yaml(static("calm", 1)))
    clean.wait_ready("calm", replicas=1)

    with hostile.stalled_uploads(clean.access.port(GATEWAY)) as opened:
        failures = checks.first_attempts(clean, "calm", 10)
        left = hostile.wait_closed(opened, CLOSED_WITHIN_SECONDS)
    assert failures == []
    assert left == 0, f"{left} of {len(opened)} are still open"

    with hostile.stalled_uploads(clean.access.port(GATEWAY), count=40, sent=2**24 - 2**16):
        # Together more than both gateways hold: new requests may be refused, until the silent ones are ended.
        checks.wait_serving(clean, "calm", timeout=CLOSED_WITHIN_SECONDS)


@pytest.mark.full
@pytest.mark.capability("RG-2", "SE-6")
def test_readers_that_never_read_hold_up_no_other(clean: Slipway) -> None:
    clean.apply(as_yaml(static("spoken", 1)))
    clean.wait_ready("spoken", replicas=1)

    with hostile.deaf_readers(clean.access.port(GATEWAY), "spoken", count=4):
        failures = checks.first_attempts(clean, "spoken", 10)

    assert failures == []
