"""Load on an OpenAI endpoint, and what its users would have felt: TTFT, ITL, tokens, failures.

    python -m bench.load --base-url http://127.0.0.1:8000/v1 --model tiny --concurrency 8 --duration 30

Only addresses of this machine are accepted: this is a measuring tool, not a weapon.
"""

import argparse
import asyncio
import ipaddress
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.prompts import CHAT_MIX, Share, prompts
from bench.stream import ShedError, StreamFailedError, Timings, chat_stream

MAX_DURATION_SECONDS = 600.0
MAX_CONCURRENCY = 1024
MAX_SECONDS_SHED = 120.0  # a request told 429 for longer than this has failed


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to send. With `rate`, arrivals are Poisson (open loop); without, `concurrency` users ask again and again."""

    base_url: str  # http://127.0.0.1:8000/v1
    model: str
    concurrency: int = 8  # with `rate`: the most requests open at once
    duration_seconds: float = 30.0  # new requests start until then; those that run are waited for
    max_requests: int | None = None
    rate: float | None = None  # requests per second
    max_tokens: int = 64
    temperature: float = 0.7
    ignore_eos: bool = False  # every answer has `max_tokens` tokens, so that runs can be compared
    seed: int = 0
    mix: Sequence[Share] = CHAT_MIX
    request_timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        refuse_unless_loopback(self.base_url)
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"concurrency is 1..{MAX_CONCURRENCY}, not {self.concurrency}")
        if not 0 < self.duration_seconds <= MAX_DURATION_SECONDS:
            raise ValueError(f"duration is at most {MAX_DURATION_SECONDS:.0f} s, not {self.duration_seconds}")


@dataclass(frozen=True)
class Percentiles:
    """In seconds; zeros when nothing was measured."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Nearest-rank percentiles of `values`."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(*(ordered[math.ceil(share * len(ordered)) - 1] for share in (0.50, 0.95, 0.99)))


@dataclass
class Progress:
    """Counts so far; sent = finished + failed + open."""

    sent: int = 0
    finished: int = 0
    failed: int = 0
    retries_429: int = 0
    open: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What came of a plan. A 429 that a retry honoured is not a failure; it is counted apart."""

    sent: int
    finished: int
    failed: int
    retries_429: int
    failures: dict[str, int] = field(default_factory=dict)  # sentence -> how often
    revisions: dict[str, int] = field(default_factory=dict)  # which revision answered how often
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens_per_second: float = 0.0
    requests_per_second: float = 0.0
    ttft: Percentiles = field(default_factory=Percentiles)  # of the attempt that was accepted
    itl: Percentiles = field(default_factory=Percentiles)
    shed_wait: Percentiles = field(default_factory=Percentiles)  # waiting that 429s asked for, of requests that met one


async def run_load(
    plan: LoadPlan,
    *,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> LoadReport:
    """Send the plan's requests and report; setting `stop` ends the sending early, running streams still finish."""
    return await _Load(plan, stop or asyncio.Event(), on_progress or (lambda progress: None)).run()


class _Load:
    """One run: users or arrivals share the prompts, the counts and the samples."""

    def __init__(self, plan: LoadPlan, stop: asyncio.Event, on_progress: Callable[[Progress], None]) -> None:
        self.plan = plan
        self.stop = stop
        self.on_progress = on_progress
        self.progress = Progress()
        self.failures: Counter[str] = Counter()
        self.revisions: Counter[str] = Counter()
        self.timings: list[Timings] = []
        self.shed_waits: list[float] = []
        self.prompts: Iterator[str] = prompts(plan.seed, plan.mix)
        self.draw = random.Random(plan.seed)
        self.deadline = 0.0

    async def run(self) -> LoadReport:
        started = time.monotonic()
        self.deadline = started + self.plan.duration_seconds
        timeout = aiohttp.ClientTimeout(total=self.plan.request_timeout_seconds, sock_connect=5)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await (self.closed_loop(session) if self.plan.rate is None else self.open_loop(session, self.plan.rate))
        return self.report(time.monotonic() - started)

    async def closed_loop(self, session: aiohttp.ClientSession) -> None:
        async def user() -> None:
            while self.may_send():
                await self.request(session)

        await asyncio.gather(*(user() for _ in range(self.plan.concurrency)))

    async def open_loop(self, session: aiohttp.ClientSession, rate: float) -> None:
        """Arrivals do not wait for answers; only the cap on open requests holds them back."""
        slots = asyncio.Semaphore(self.plan.concurrency)
        async with asyncio.TaskGroup() as arrivals:

            async def arrival() -> None:
                try:
                    await self.request(session)
                finally:
                    slots.release()

            while self.may_send():
                await slots.acquire()
                arrivals.create_task(arrival())
                await self.pause(self.draw.expovariate(rate))

    def may_send(self) -> bool:
        enough = self.plan.max_requests is not None and self.progress.sent >= self.plan.max_requests
        return not enough and not self.stop.is_set() and time.monotonic() < self.deadline

    async def pause(self, seconds: float) -> None:
        """Sleep, but wake at once when asked to stop, and never sleep past the end."""
        seconds = min(seconds, max(0.0, self.deadline - time.monotonic()))
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return

    async def request(self, session: aiohttp.ClientSession) -> None:
        self.progress.sent += 1
        self.progress.open += 1
        prompt, seed = next(self.prompts), self.draw.getrandbits(31)
        try:
            timings = await self.until_accepted(session, prompt, seed)
        except StreamFailedError as failure:
            self.progress.failed += 1
            self.failures[str(failure)] += 1
        else:
            self.progress.finished += 1
            self.progress.output_tokens += timings.output_tokens
            self.timings.append(timings)
            self.revisions[timings.revision or "unknown"] += 1
        self.progress.open -= 1
        self.on_progress(self.progress)

    async def until_accepted(self, session: aiohttp.ClientSession, prompt: str, seed: int) -> Timings:
        """One request; a 429 is obeyed: wait as long as it says, then ask again."""
        plan, waited = self.plan, 0.0
        body = {
            "model": plan.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if plan.ignore_eos else {})
        while True:
            try:
                timings = await chat_stream(session, plan.base_url, body)
            except ShedError as shed:
                self.progress.retries_429 += 1
                waited += shed.retry_after_seconds
                if waited > MAX_SECONDS_SHED:
                    raise StreamFailedError(f"429 for more than {MAX_SECONDS_SHED:.0f} s") from shed
                # Jitter on top, so that those who were refused together do not come back together.
                await asyncio.sleep(shed.retry_after_seconds * self.draw.uniform(1.0, 1.2))
            else:
                if waited:
                    self.shed_waits.append(waited)
                return timings

    def report(self, seconds: float) -> LoadReport:
        tokens = sum(timings.output_tokens for timings in self.timings)
        return LoadReport(
            sent=self.progress.sent,
            finished=self.progress.finished,
            failed=self.progress.failed,
            retries_429=self.progress.retries_429,
            failures=dict(self.failures),
            revisions=dict(self.revisions),
            seconds=seconds,
            prompt_tokens=sum(timings.prompt_tokens for timings in self.timings),
            output_tokens=tokens,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            requests_per_second=self.progress.finished / seconds if seconds else 0.0,
            ttft=Percentiles.of([timings.ttft for timings in self.timings]),
            itl=Percentiles.of([gap for timings in self.timings for gap in timings.gaps]),
            shed_wait=Percentiles.of(self.shed_waits),
        )


def refuse_unless_loopback(url: str) -> None:
    """Raise ValueError unless `url` is an address of this machine; names other than localhost are not looked up."""
    host = urlsplit(url).hostname or ""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(f"load goes only to this machine (127.0.0.1, ::1, localhost), not to {host or url!r}")


def table(report: LoadReport, title: str) -> Table:
    """The report for a human."""
    rows = Table(title=title, show_header=False)
    rows.add_row("requests", f"{report.sent} sent, {report.finished} finished, {report.failed} failed")
    rows.add_row("429 honoured", str(report.retries_429))
    rows.add_row("tokens/s", f"{report.tokens_per_second:.1f} ({report.output_tokens} in {report.seconds:.1f} s)")
    for name, spread in (("TTFT", report.ttft), ("ITL", report.itl)):
        rows.add_row(
            f"{name} P50/P95/P99", f"{spread.p50 * 1e3:.0f} / {spread.p95 * 1e3:.0f} / {spread.p99 * 1e3:.0f} ms"
        )
    for failure, count in report.failures.items():
        rows.add_row("failure", f"{count} × {failure}")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m bench.load`; exit status 1 when a request failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--duration", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--max-requests", type=int, default=None)
    parser.add_argument("--rate", type=float, default=None, help="Poisson arrivals per second; default: closed loop")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    try:
        plan = LoadPlan(
            base_url=options.base_url,
            model=options.model,
            concurrency=options.concurrency,
            duration_seconds=options.duration,
            max_requests=options.max_requests,
            rate=options.rate,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
    except ValueError as refusal:
        parser.error(str(refusal))
    report = asyncio.run(run_load(plan))
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        Console().print(table(report, f"{plan.model} at {plan.base_url}"))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
