"""A tenant that sends streams at a fixed rate and takes no refusal for an answer; it prints the answers by status.

python -m bench.flooder --url http://127.0.0.1:8000 --key sk-flood --rate 100 --seconds 10
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter

import aiohttp
import uvloop

from bench.arrivals import poisson
from bench.plan import refuse_unless_loopback
from bench.servers import MODEL_NAME

MAX_OPEN = 64  # requests; arrivals beyond are not sent
MAX_TOKENS = 16


async def flood(url: str, key: str, rate: float, seconds: float) -> Counter[str]:
    """Send for `seconds`; the answers by status."""
    answers: Counter[str] = Counter()
    end = time.monotonic() + seconds
    draw = random.Random(1)
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as open_ones:
        running = 0

        async def ask(number: int) -> None:
            nonlocal running
            messages = [{"role": "user", "content": f"Story number {number}, please. " * 20}]
            body = {"model": MODEL_NAME, "messages": messages, "stream": True, "max_tokens": MAX_TOKENS}
            try:
                async with session.post(
                    f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
                ) as response:
                    answers[str(response.status)] += 1
                    await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                answers[type(error).__name__] += 1
            finally:
                running -= 1

        for number, pause in enumerate(poisson(rate, draw)):
            if time.monotonic() >= end:
                break
            if running < MAX_OPEN:
                running += 1
                open_ones.create_task(ask(number))
            await asyncio.sleep(pause)
    return answers


def main() -> None:
    """`python -m bench.flooder`."""
    parser = argparse.ArgumentParser(prog="python -m bench.flooder", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    refuse_unless_loopback(options.url)
    print(json.dumps(uvloop.run(flood(options.url, options.key, options.rate, options.seconds))))


if __name__ == "__main__":
    main()
