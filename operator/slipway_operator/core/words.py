"""Words that several conditions and events share, and counts with singular and plural right."""

from typing import Final

from slipway_api.words import count

__all__ = ["REFUSED_KEY", "count"]

REFUSED_KEY: Final = "the operator's token (401): was the Secret slipway-admin-master replaced?"
