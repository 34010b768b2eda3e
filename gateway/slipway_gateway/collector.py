"""Python's cyclic garbage collector in the gateway: it runs rarely, because a full collection stops every stream.

Requests leave no cycles (`tests/gateway/test_garbage.py`), so little waits for it.
"""

import gc
from typing import Final

# New objects, minus freed ones, before the youngest are looked at; then collections of one generation for each of the
# next. The interpreter's: 700, 10, 10.
THRESHOLDS: Final = (20_000, 20, 50)


def collect_rarely() -> None:
    """Exempt everything that exists now, such as modules and the routing table, and look rarely at what follows."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
