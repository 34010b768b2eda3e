"""The last requests that a process answered, bounded in number and bytes; `kubectl slipway why` reads them.

An account of a request has ids, names, times, numbers and reasons. It never has text of a prompt or of an answer.
"""

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

# All characters of the ids that gateway and runtime accept from clients.
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
INVALID_ID: Final = "A request ID has 1 to 128 characters: letters, digits and . _ : / + = - only."
MAX_REQUESTS: Final = 4_000
MAX_BYTES: Final = 4 * 2**20
MOST_FOUND: Final = 20  # accounts of one id: clients choose ids, so several requests may have the same one


class RecentRequests:
    """Accounts of the last requests, by id; the oldest are dropped first."""

    def __init__(self, *, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._accounts: deque[tuple[str, bytes]] = deque()  # encoded: their size is known, and they are read rarely
        self._bytes = 0
        self.total = 0
        """The requests that have ended since the start, dropped ones included."""

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def bytes(self) -> int:
        """The size of all accounts."""
        return self._bytes

    def add(self, request_id: str, account: Mapping[str, Any]) -> None:
        """Keep the account of a request that has ended."""
        encoded = json.dumps(account, separators=(",", ":")).encode()
        self.total += 1
        self._accounts.append((request_id, encoded))
        self._bytes += len(encoded)
        while self._accounts and (len(self._accounts) > self._max_requests or self._bytes > self._max_bytes):
            _, oldest = self._accounts.popleft()
            self._bytes -= len(oldest)

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """The newest accounts of this id, the oldest of them first."""
        found = [encoded for given, encoded in self._accounts if given == request_id]
        return [json.loads(encoded) for encoded in found[-MOST_FOUND:]]

    def newest(self, number: int) -> list[dict[str, Any]]:
        """The last accounts, the newest first."""
        last = min(number, len(self._accounts))
        return [json.loads(self._accounts[-1 - index][1]) for index in range(last)]
