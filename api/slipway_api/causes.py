"""Rows of the tables of conditions: what a reason means, who can help, and the remedy.

`vocabulary`, `adapter_conditions` and `warm_pool_conditions` have one table for each kind. The reference pages are made
from them, the gateway quotes them to clients, and tests compare them with the conditions that the operator writes.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from slipway_api.conditions import ConditionStatus


class Helper(StrEnum):
    """The person who can remove the cause of a condition."""

    NOBODY = "nobody has to act"
    AUTHOR = "the author of the spec"
    QUOTA_OWNER = "the owner of the quota"
    OTHER_OWNER = "the owner of the other object"
    CLUSTER = "the administrator of the cluster"
    INSTALLATION = "the administrator of Slipway"
    MAINTAINERS = "the maintainers of Slipway"


class Cause(NamedTuple):
    """The meaning of a reason, who can help, and the remedy as a sentence."""

    meaning: str
    helper: Helper = Helper.NOBODY
    remedy: str = ""


class Row(NamedTuple):
    """One reason of one condition."""

    type: StrEnum
    status: ConditionStatus
    reason: StrEnum
    cause: Cause

    @property
    def meaning(self) -> str:
        """The meaning of the reason."""
        return self.cause.meaning


def condition_table(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a Markdown table of conditions."""
    yield "| condition | status | reason | meaning | who can help | remedy |"
    yield "|---|---|---|---|---|---|"
    for type, status, reason, cause in rows:
        helper = "" if cause.helper is Helper.NOBODY else cause.helper.value
        yield f"| {type} | {status} | {reason} | {cause.meaning} | {helper} | {cause.remedy} |"
