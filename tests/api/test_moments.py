"""A moment that somebody wrote into an annotation is read, or counts as absent; it never stops a pass."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.moments import read_moment

pytestmark = pytest.mark.capability("OP-16")


# review/control-plane.md 13
@pytest.mark.parametrize(
    "text",
    [None, "", "soon", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00", "9999-01-01T00:00:00Z", "1e400"],
)
def test_what_cannot_be_read_counts_as_absent(text):
    assert read_moment(text) is None


def test_a_moment_without_a_zone_is_utc_and_others_are_converted():
    assert read_moment("2026-01-02T03:04:05") == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert read_moment("2026-01-02T03:04:05+02:00") == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)


@given(
    st.one_of(
        st.text(max_size=40),
        st.datetimes().map(datetime.isoformat),
        st.datetimes(timezones=st.timezones()).map(datetime.isoformat),
    )
)
def test_every_text_is_read_or_absent_and_leaves_room_for_arithmetic(text):
    moment = read_moment(text)
    if moment is not None:
        assert moment.tzinfo is UTC
        assert moment - timedelta(days=365) < moment < moment + timedelta(days=365 * 900)
