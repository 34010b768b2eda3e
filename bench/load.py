"""A load generator for an OpenAI endpoint, which measures TTFT, ITL, tokens and failures.

    python -m bench.load --base-url http://127.0.0.1:8000/v1 --model tiny --concurrency 8 --duration 30

Only addresses of this machine are accepted, so that it cannot overload another system.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.arrivals import bursty, poisson
from bench.plan import LoadPlan, LoadReport, Percentiles, Progress, Slo
from bench.stream import ReaderLeft, ShedError, StreamFailedError, Timings, chat_stream
from bench.workload import MIXES, Conversation, Workload

MAX_SECONDS_SHED = 120.0  # a request answered with 429 for longer than this has failed


async def run_load(
    plan: LoadPlan,
    *,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> LoadReport:
    """Send the plan's requests and report; setting `stop` ends the sending early, running streams still finish."""
    return await _Load(plan, stop or asyncio.Event(), on_progress or (lambda progress: None)).run()


class _Load:
    """One run: users or arrivals share the workload, the counts and the samples."""

    def __init__(self, plan: LoadPlan, stop: asyncio.Event, on_progress: Callable[[Progress], None]) -> None:
        self.plan = plan
        self.stop = stop
        self.on_progress = on_progress
        self.progress = Progress()
        self.failures: Counter[str] = Counter()
        self.revisions: Counter[str] = Counter()
        self.timings: list[tuple[int, Timings]] = []  # (how many were sent before, …)
        self.shed_waits: list[float] = []
        self.retried = 0
        self.draw = random.Random(plan.seed)
        self.users = 0
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
                await self.conversation(session)

        await asyncio.gather(*(user() for _ in range(self.plan.concurrency)))

    async def open_loop(self, session: aiohttp.ClientSession, rate: float) -> None:
        """Arrivals do not wait for answers; only the cap on open conversations holds them back."""
        slots = asyncio.Semaphore(self.plan.concurrency)
        burst = self.plan.burst
        pauses = bursty(rate, self.draw, burst=burst) if burst > 1 else poisson(rate, self.draw)
        async with asyncio.TaskGroup() as arrivals:

            async def arrival() -> None:
                try:
                    await self.conversation(session)
                finally:
                    slots.release()

            while self.may_send():
                await slots.acquire()
                arrivals.create_task(arrival())
                await self.pause(next(pauses))

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

    async def conversation(self, session: aiohttp.ClientSession) -> None:
        """One conversation, turn after turn; a failure ends it."""
        self.users += 1
        conversation = self.plan.workload.conversation(random.Random(f"{self.plan.seed}/{self.users}"))
        while not conversation.over and self.may_send():
            if not await self.request(session, conversation):
                return

    async def request(self, session: aiohttp.ClientSession, conversation: Conversation) -> bool:
        """One turn; whether it was answered."""
        number = self.progress.sent
        self.progress.sent += 1
        self.progress.open += 1
        try:
            timings = await self.until_accepted(session, conversation)
        except ReaderLeft:
            self.progress.left += 1
            return False
        except StreamFailedError as failure:
            self.progress.failed += 1
            self.failures[str(failure)] += 1
            return False
        else:
            conversation.answered(timings.text)
            self.progress.finished += 1
            self.progress.output_tokens += timings.output_tokens
            self.timings.append((number, timings))
            self.revisions[timings.revision or "unknown"] += 1
            return True
        finally:
            self.progress.open -= 1
            self.on_progress(self.progress)

    async def until_accepted(self, session: aiohttp.ClientSession, conversation: Conversation) -> Timings:
        """One request; after a 429, waits for its Retry-After and sends the request again."""
        plan, attempts, waited = self.plan, 0, 0.0
        body = {
            "model": conversation.adapter or plan.model,
            "messages": conversation.ask(),
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "seed": conversation.draw.getrandbits(31),
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if plan.ignore_eos else {})
        body |= conversation.extra()
        leave_after = conversation.leaves_after(plan.max_tokens)
        while True:
            try:
                timings = await chat_stream(session, plan.base_url, body, leave_after=leave_after)
            except ShedError as shed:
                if not plan.retry_429:
                    raise StreamFailedError("status 429") from shed
                attempts += 1
                self.progress.retries_429 += 1
                waited += shed.retry_after_seconds
                if waited > MAX_SECONDS_SHED:
                    raise StreamFailedError(f"429 for more than {MAX_SECONDS_SHED:.0f} s") from shed
                # Jitter on top, so that requests refused together are not repeated together.
                await asyncio.sleep(shed.retry_after_seconds * self.draw.uniform(1.0, 1.2))
            else:
                if attempts:
                    self.retried += 1
                    self.shed_waits.append(waited)
                return timings

    def report(self, seconds: float) -> LoadReport:
        everything = [timings for _, timings in self.timings]
        steady = [timings for number, timings in self.timings if number >= self.plan.cold_requests]
        cold = [timings for number, timings in self.timings if number < self.plan.cold_requests]
        short = [timings for timings in steady if timings.prompt_tokens <= self.plan.short_prompt_tokens]
        tokens = sum(timings.output_tokens for timings in everything)
        return LoadReport(
            sent=self.progress.sent,
            finished=self.progress.finished,
            failed=self.progress.failed,
            left=self.progress.left,
            retries_429=self.progress.retries_429,
            retried=self.retried,
            failures=dict(self.failures),
            revisions=dict(self.revisions),
            seconds=seconds,
            prompt_tokens=sum(timings.prompt_tokens for timings in everything),
            output_tokens=tokens,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            requests_per_second=self.progress.finished / seconds if seconds else 0.0,
            ttft=Percentiles.of([timings.ttft for timings in steady]),
            itl=Percentiles.of([gap for timings in steady for gap in timings.gaps]),
            cold_ttft=Percentiles.of([timings.ttft for timings in cold]),
            short_ttft=Percentiles.of([timings.ttft for timings in short]),
            good=sum(self.plan.slo.kept_by(timings) for timings in everything),
            shed_wait=Percentiles.of(self.shed_waits),
        )


def table(report: LoadReport, title: str) -> Table:
    """The report for a human."""
    rows = Table(title=title, show_header=False)
    rows.add_row("requests", f"{report.sent} sent, {report.finished} finished, {report.failed} failed")
    rows.add_row("readers that left", str(report.left))
    rows.add_row("within the SLO", f"{report.good} ({report.good / max(1, report.sent):.0%} of those sent)")
    rows.add_row("429 honoured", f"{report.retries_429}, of {report.retried} requests")
    rows.add_row("tokens/s", f"{report.tokens_per_second:.1f} ({report.output_tokens} in {report.seconds:.1f} s)")
    for name, spread in (("TTFT", report.ttft), ("cold TTFT", report.cold_ttft), ("ITL", report.itl)):
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
    parser.add_argument("--burst", type=float, default=1.0, help="with --rate: bursts so many times as dense")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--mix", choices=sorted(MIXES), default="chat", help="lengths of prompts")
    parser.add_argument("--turns", type=int, default=1, help="of each conversation")
    parser.add_argument("--prefixes", type=int, default=0, help="so many system prompts are shared")
    parser.add_argument("--prefix-words", type=int, default=200)
    parser.add_argument("--adapter", action="append", default=[], help="asked by half of the traffic; repeatable")
    parser.add_argument("--leaving", type=float, default=0.0, help="share of readers that go away in the middle")
    parser.add_argument("--slo-ttft", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--slo-itl", type=float, default=0.1, metavar="SECONDS")
    parser.add_argument("--cold", type=int, default=0, metavar="REQUESTS", help="report the first so many apart")
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
            burst=options.burst,
            max_tokens=options.max_tokens,
            seed=options.seed,
            cold_requests=options.cold,
            slo=Slo(options.slo_ttft, options.slo_itl),
            workload=Workload(
                mix=MIXES[options.mix],
                turns=options.turns,
                prefixes=options.prefixes,
                prefix_words=options.prefix_words,
                adapters=options.adapter,
                leaving=options.leaving,
            ),
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
