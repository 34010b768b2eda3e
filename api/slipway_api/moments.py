"""Reads moments that people write into annotations and labels, which have no schema. Pure."""

from datetime import UTC, datetime
from typing import Final

_LAST_YEAR: Final = 9000  # datetime ends with 9999, and decisions add time to what they read


def read_moment(text: str | None) -> datetime | None:
    """The moment in UTC; None if the text is absent, is not ISO 8601, or leaves no room for arithmetic."""
    try:
        moment = datetime.fromisoformat(text or "")
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment if 1970 <= moment.year < _LAST_YEAR else None
