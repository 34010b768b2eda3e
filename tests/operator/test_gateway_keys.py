"""The gateway's key, as the operator reads it."""

import asyncio

import pytest

from slipway_operator.masters import REPLACED_SECONDS, GatewayKeys


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


@pytest.mark.capability("RD-12")
def test_a_replica_made_just_after_a_replacement_accepts_gateways_that_have_the_old_files(tmp_path):
    """Seen in `make chaos`: the kubelets of operator and gateways replace the files a minute apart (16 × 401)."""
    now = [0.0]
    keys = GatewayKeys(tmp_path, monotonic=lambda: now[0])
    (tmp_path / "current").write_text("one")
    (one,) = keys.digests("demo", "chat")

    (tmp_path / "current").write_text("another")
    now[0] += 5
    other, still = keys.digests("demo", "chat")
    assert (still, other != one) == (one, True)

    now[0] += REPLACED_SECONDS
    assert keys.digests("demo", "chat") == (other,)


def test_a_key_that_returns_counts_once(tmp_path):
    keys = GatewayKeys(tmp_path, monotonic=lambda: 0.0)
    for key in ("one", "another", "one"):
        (tmp_path / "current").write_text(key)
        known = keys.read()

    assert known == (b"one", b"another")
