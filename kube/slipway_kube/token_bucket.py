"""A token bucket for rate limits. Pure: the caller passes the time in, and waits."""


class TokenBucket:
    """`burst` at once, then `rate` a second."""

    def __init__(self, *, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at: float | None = None
        self._closed_until = float("-inf")

    def reserve(self, now: float) -> float:
        """Take a token, in advance if none is left; returns the seconds until it is due. First come, first served."""
        self._fill(now)
        self._tokens -= 1
        # 3 tokens in advance at 50 a second → wait 60 ms.
        return max(0.0, -self._tokens / self._rate, self._closed_until - now)

    def try_take(self, now: float) -> bool:
        """Take a token if there is one."""
        self._fill(now)
        if self._tokens < 1 or now < self._closed_until:
            return False
        self._tokens -= 1
        return True

    def close_for(self, seconds: float, now: float) -> None:
        """Give out no token for some seconds, because the server answered 429."""
        self._closed_until = max(self._closed_until, now + seconds)

    def _fill(self, now: float) -> None:
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._tokens = min(self._burst, self._tokens + passed * self._rate)
        self._at = now
