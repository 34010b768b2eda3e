"""The gateway's key, as the operator reads it."""

import asyncio

import pytest

from slipway_operator.masters import GatewayKeys


@pytest.mark.capability("RD-12")
async def test_a_replaced_key_is_noticed_and_a_missing_one_is_not_a_change(tmp_path):
    """ADR 172: its services are looked at without waiting for a resync."""
    (tmp_path / "current").write_text("one")
    changes = []
    watch = asyncio.create_task(GatewayKeys(tmp_path).watch(lambda: changes.append(1), every=0))

    async def settle():
        for _ in range(20):
            await asyncio.sleep(0)

    await settle()
    assert changes == []
    (tmp_path / "current").unlink()
    await settle()
    assert changes == []
    (tmp_path / "current").write_text("two")
    await settle()
    assert changes == [1]
    watch.cancel()
