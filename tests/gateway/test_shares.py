"""Shared capacity: no owner can use up another's part."""

from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.shares import SharedCapacity


def fill(capacity: SharedCapacity, owner: str) -> int:
    """Take as much as is granted, in ones."""
    taken = 0
    while capacity.take(owner, 1):
        taken += 1
    return taken


def test_one_greedy_owner_gets_half_and_leaves_a_part_for_every_next_one():
    capacity = SharedCapacity(120)

    assert fill(capacity, "a") == 60
    assert fill(capacity, "b") == 30
    assert capacity.free == 30


def test_what_is_given_back_is_free_again():
    capacity = SharedCapacity(120)
    taken = fill(capacity, "a")
    capacity.give_back("a", taken)

    assert (capacity.free, capacity.held_by("a")) == (120, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=60))
def test_an_owner_that_holds_nothing_always_gets_a_part(steps):
    """Whatever others do: OP-14."""
    capacity, held = SharedCapacity(100), dict.fromkeys("abc", 0)
    for owner, amount, give_back in steps:
        if give_back:
            capacity.give_back(owner, min(amount, held[owner])) if held[owner] else None
            held[owner] -= min(amount, held[owner])
        elif capacity.take(owner, amount):
            held[owner] += amount
    assert capacity.free == 100 - sum(held.values())
    assert capacity.take("newcomer", capacity.free // 2)
    assert capacity.free > 0
