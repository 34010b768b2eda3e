"""Merges several async generators into one, in the order of arrival."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")


async def merged(sources: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """Yield the items of all sources until all have ended; closing this closes them. Bounded read-ahead."""
    ready: asyncio.Queue[_T | None] = asyncio.Queue(maxsize=1)  # None: a source has ended

    failures: list[Exception] = []

    async def read(source: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await ready.put(item)
        except Exception as error:  # noqa: BLE001  raised again in the reader
            failures.append(error)
        await ready.put(None)

    readers = [asyncio.create_task(read(source)) for source in sources]
    try:
        left = len(readers)
        while left:
            item = await ready.get()
            if failures:
                raise failures[0]
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
