"""Whether a source of draft tokens drafts now: it stops when drafting does not pay, and is tried again later. Pure.

When fewer than `MIN_ACCEPTED_SHARE` of the draft tokens of all rows are accepted, or none are made in many steps, the
source stops. After `REST_TOKENS` generated tokens it is tried again; each failure in a row doubles the rest, up to
`LONGEST_REST_TOKENS`.
"""

MIN_ACCEPTED_SHARE = 0.4  # share of accepted draft tokens
ENOUGH_DRAFT_TOKENS = 100  # before judging
ENOUGH_STEPS = 256  # of rows, before judging that there is too little to draft from
MIN_ACCEPTED_PER_ROW = 0.05  # accepted draft tokens a row and step
REST_TOKENS = 2_000
LONGEST_REST_TOKENS = 64_000


class DraftActivity:
    """Counts the draft tokens of one source, and decides whether it drafts."""

    def __init__(self) -> None:
        self.active = True
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self._recent_rows = 0
        self._recent_draft_tokens = 0
        self._recent_accepted = 0
        self._rest = REST_TOKENS
        self._rested = 0

    def record(self, drafted: int, accepted: int) -> None:
        """Record a row's step: how many draft tokens it verified, and how many of them were accepted."""
        self._recent_rows += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self._recent_draft_tokens += drafted
        self._recent_accepted += accepted

    def update(self, tokens: int) -> None:
        """Decide, after a step that generated so many tokens, whether drafting goes on, stops or starts again."""
        if not self.active:
            self._rested += tokens
            if self._rested >= self._rest:
                self._rest = min(2 * self._rest, LONGEST_REST_TOKENS)
                self.active = True
                self._start_over()
            return
        acceptance_is_low = (
            self._recent_draft_tokens >= ENOUGH_DRAFT_TOKENS
            and self._recent_accepted < MIN_ACCEPTED_SHARE * self._recent_draft_tokens
        )
        idle = self._recent_rows >= ENOUGH_STEPS and self._recent_accepted < MIN_ACCEPTED_PER_ROW * self._recent_rows
        if acceptance_is_low or idle:
            self.stop()
        elif self._recent_rows >= 2 * ENOUGH_STEPS:  # drafting pays: halve the counts, and reset the rest
            self._recent_rows //= 2
            self._recent_draft_tokens //= 2
            self._recent_accepted //= 2
            self._rest = REST_TOKENS

    def stop(self) -> None:
        """Stop drafting until the rest is over."""
        self.active = False
        self._start_over()

    def _start_over(self) -> None:
        self._rested = self._recent_rows = self._recent_draft_tokens = self._recent_accepted = 0
