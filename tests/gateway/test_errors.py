"""Retry-After: whole seconds for everyone, milliseconds for clients that read them."""

import pytest

from slipway_gateway.errors import set_retry_after


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("1", "1000")),
        ({"Retry-After": "7"}, ("7", "7000")),
        ({"Retry-After": "0.4"}, ("1", "400")),
        ({"Retry-After": "7", "retry-after-ms": "6500"}, ("7", "6500")),
        ({"retry-after-ms": "6500"}, ("7", "6500")),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, ("1", "1000")),
        ({"Retry-After": "nan"}, ("1", "1000")),
        ({"Retry-After": "-5"}, ("1", "1000")),
    ],
)
@pytest.mark.capability("RG-7")
def test_a_refusal_says_when_to_come_back_in_whole_seconds_and_in_milliseconds(given, expected):
    headers = dict(given)
    set_retry_after(headers)

    assert (headers["Retry-After"], headers["retry-after-ms"]) == expected
