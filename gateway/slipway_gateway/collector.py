"""Python's cyclic garbage collector in the gateway: it runs rarely, because a full collection stops every stream.

With the interpreter's thresholds a gateway with 600 streams spent 9 % of its CPU time in the collector, and a full
collection stopped all of them for up to 0.16 s. Requests leave no cycles (`tests/gateway/test_garbage.py`), so little
waits for it.
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
