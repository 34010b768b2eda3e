"""Which of several objects is the oldest: one order for the operator and the gateway."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from slipway_api.seniority import older_first

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
NAMES = st.text("ab-", min_size=1, max_size=4)


def test_two_of_the_same_second_are_ordered_by_namespace_and_then_by_name():
    """Finding 20: `a/x` is before `a-b/x`, although the joined strings sort the other way round."""
    assert older_first(NOON, "a", "x") < older_first(NOON, "a-b", "x")
    assert "a-b/x" < "a/x"


def test_age_comes_before_names():
    assert older_first(NOON, "z", "z") < older_first(NOON + timedelta(seconds=1), "a", "a")


def test_the_time_zone_in_which_a_moment_is_written_does_not_matter():
    berlin = NOON.astimezone(timezone(timedelta(hours=2)))

    assert older_first(berlin, "a", "x") == older_first(NOON, "a", "x")
    assert older_first(NOON.replace(tzinfo=None), "a", "x") == older_first(NOON, "a", "x")


def test_without_a_creation_time_an_object_is_the_oldest():
    assert older_first(None, "z", "z") < older_first(NOON, "a", "a")


@given(
    st.lists(
        st.tuples(st.sampled_from([None, NOON, NOON + timedelta(seconds=1)]), NAMES, NAMES),
        unique_by=lambda one: one[1:],
        min_size=1,
    ),
    st.randoms(),
)
def test_there_is_one_oldest_however_the_list_arrives(objects, random):
    oldest = min(objects, key=lambda one: older_first(*one))
    random.shuffle(objects)

    assert min(objects, key=lambda one: older_first(*one)) == oldest
