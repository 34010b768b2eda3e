"""Counts in sentences, with singular and plural right."""


def count(number: int, one: str, many: str = "") -> str:
    """`1 replica`, `2 replicas`; with a verb: `count(n, "replica is", "replicas are")`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
