"""A replica that refuses the operator's token is known as one that refuses, not as a silent one."""

import asyncio

import pytest

from slipway_api.runtime_api import Signals
from slipway_operator.replica_client import ReplicaRefused
from tests.operator.scraped_fleet import Fleet
from tests.operator.virtual_time import run_in_virtual_time


@pytest.mark.capability("OP-18")
def test_a_replica_that_refuses_the_token_is_remembered_until_it_answers():
    """review/operator-users.md 14: a wrong key was told as silence."""
    fleet = Fleet()
    fleet.load["a"] = 0
    refused: list[bool] = []

    async def refuse(uid: str) -> Signals:
        raise ReplicaRefused(401, f"{uid}: the token is wrong")

    async def story() -> None:
        answer, fleet.scraper._ask = fleet.scraper._ask, refuse
        await asyncio.sleep(20)
        refused.append(fleet.scraper.refuses_token("a"))
        fleet.scraper._ask = answer
        await asyncio.sleep(20)
        refused.append(fleet.scraper.refuses_token("a"))

    async def both() -> None:
        task = asyncio.create_task(fleet.run())
        await story()
        task.cancel()

    run_in_virtual_time(both())

    assert refused == [True, False]
    assert fleet.news["chat"] >= 2, "one pass because it refuses, one because it answers"
