"""Counts in sentences, with singular and plural right, and sentences that several conditions and events share."""

from typing import Final

REFUSED_KEY: Final = "the operator's token (401): was the Secret slipway-admin-master replaced?"


def count(number: int, one: str, many: str = "") -> str:
    """`1 replica`, `2 replicas`; with a verb: `count(n, "replica is", "replicas are")`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
