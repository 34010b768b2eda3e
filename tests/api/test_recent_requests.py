"""Accounts of requests are bounded in number and in bytes, and ids that no request can have are refused."""

import pytest

from slipway_api.recent_requests import MOST_FOUND, REQUEST_ID, RecentRequests


@pytest.mark.capability("OB-12")
def test_the_oldest_accounts_are_dropped_beyond_the_number():
    recent = RecentRequests(max_requests=3)

    for number in range(5):
        recent.add(f"r{number}", {"n": number})

    assert [account["n"] for account in recent.newest(10)] == [4, 3, 2]
    assert recent.find("r1") == []
    assert recent.find("r2") == [{"n": 2}]


@pytest.mark.capability("OB-12")
def test_the_bytes_of_all_accounts_are_bounded():
    recent = RecentRequests(max_bytes=1000)

    for number in range(100):
        recent.add("same", {"n": number, "error": "x" * 100})
        assert recent.bytes <= 1000

    assert 0 < len(recent) < 10
    assert recent.newest(1)[0]["n"] == 99

    recent.add("huge", {"error": "x" * 2000})

    assert (len(recent), recent.bytes) == (0, 0)


def test_of_many_requests_with_one_id_the_newest_are_found():
    recent = RecentRequests()

    for number in range(MOST_FOUND + 5):
        recent.add("same", {"n": number})

    assert [account["n"] for account in recent.find("same")] == list(range(5, MOST_FOUND + 5))


@pytest.mark.parametrize("hostile", ["", "x" * 129, "a b", "a\n", "id?x=1", "ü", "<script>", "a\x00"])
def test_no_request_has_such_an_id(hostile):
    assert REQUEST_ID.fullmatch(hostile) is None
