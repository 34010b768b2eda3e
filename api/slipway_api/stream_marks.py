"""Marks in the event streams from runtime to gateway: which tokens the events so far were made of.

A gateway asks for them with the header `x-slipway-token-ids`, removes them from what its client sees, and continues the
stream on another replica with the tokens of the marks when the first one goes away. They are comments of server-sent
events, so whatever does not know them ignores them:

| mark                          | meaning                                                                            |
|-------------------------------|------------------------------------------------------------------------------------|
| `: tokens <index> <ids>`      | all events of these new tokens of answer `index` have been sent before this mark   |
| `: tokens <index> <ids> end`  | the same, and the answer has ended                                                 |
| `: handover <reason>`         | last thing of a stream that another replica can continue; no `[DONE]` follows      |

An event between two marks is part of what the next mark covers. JSON escapes line ends, so no text of a model can look
like a mark.
"""

import re
from collections.abc import Iterable
from typing import Final

REPORT: Final = "1"  # value of `x-slipway-token-ids`: put marks into the stream
RESUME: Final = "resume"  # the same, and the body's `slipway_resume` is the gateway's own

# An event never ends like this, since its JSON ends with a bracket; a lookbehind would cost 8 µs an event.
TOKENS_MARK: Final = re.compile(rb": tokens (\d+) ([\d,]*)( end)?\n\n")
HANDOVER_MARK: Final = re.compile(rb"(?:(?<=\n\n)|\A): handover ([^\n]*)\n\n")


def tokens_mark(index: int, token_ids: Iterable[int], *, ended: bool) -> bytes:
    """The mark behind the events of new tokens of one answer."""
    return b": tokens %d %s%s\n\n" % (index, ",".join(map(str, token_ids)).encode(), b" end" if ended else b"")


def handover_mark(reason: str) -> bytes:
    """The mark that ends a stream which another replica can continue."""
    return b": handover " + " ".join(reason.split()).encode() + b"\n\n"
