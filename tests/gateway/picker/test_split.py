"""Cohorts: each choice gets its share of the users, and few move when the weights change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.picker.split import choose_by_hash, choose_revision

USERS = [f"user-{number}" for number in range(4000)]
weights_of_revisions = st.dictionaries(
    st.sampled_from(["r1", "r2", "r3", "r4"]), st.integers(0, 100), min_size=2
).filter(lambda weights: sum(weights.values()) > 0)


def choices(weights: dict[str, int]) -> list[str | None]:
    return [choose_by_hash(weights, user) for user in USERS]


@pytest.mark.capability("EV-5", "RG-1")
@pytest.mark.parametrize("canary", [1, 5, 25, 50])
def test_each_revision_gets_its_share_of_the_users(canary):
    share = choices({"old": 100 - canary, "new": canary}).count("new") / len(USERS)

    deviation = (canary / 100 * (1 - canary / 100) / len(USERS)) ** 0.5
    assert abs(share - canary / 100) < 5 * deviation


@pytest.mark.capability("EV-5")
@given(weights_of_revisions, st.sampled_from(["r1", "r2", "r3", "r4"]), st.integers(1, 100))
def test_when_one_weight_grows_users_move_only_to_it(weights, grown, more):
    before = [choose_by_hash(weights, user) for user in USERS[:300]]
    after = [choose_by_hash(weights | {grown: weights.get(grown, 0) + more}, user) for user in USERS[:300]]

    assert all(new in (old, grown) for old, new in zip(before, after, strict=True))


@pytest.mark.capability("EV-5")
def test_as_many_users_move_as_the_weights_demand():
    before, after = choices({"old": 90, "new": 10}), choices({"old": 75, "new": 25})
    moved = sum(old != new for old, new in zip(before, after, strict=True)) / len(USERS)

    assert abs(moved - 0.15) < 0.03


def test_a_revision_without_weight_or_replica_gets_no_user():
    assert {choose_revision({"a": 0, "b": 1, "c": 9}, {"a", "b"}, 0.5, user) for user in USERS[:200]} == {"b"}
    assert choose_by_hash({"a": 0}, "user") is None
    assert choose_by_hash({}, "user") is None


def test_a_cohort_does_not_depend_on_the_draw():
    assert len({choose_revision({"a": 50, "b": 50}, {"a", "b"}, draw / 10, "user-1") for draw in range(10)}) == 1
