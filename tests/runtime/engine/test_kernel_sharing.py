"""When an engine shares compiled kernels, and what it reports of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton import knobs

from slipway_runtime.engine import build
from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.decide import EnginePlan
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.engine.parts import share_compiled_kernels
from slipway_runtime.kernels.compile_cache import SharedCacheManager
from slipway_runtime.storage.kernel_store import KernelCounts
from tests.runtime.machine import TINY


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The card of this process; and Triton gets its own cache back."""
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(SharedCacheManager, "store", None)
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    return found


def a_plan(device: str, **options: Any) -> EnginePlan:
    return cast(EnginePlan, SimpleNamespace(device=torch.device(device), options=EngineOptions(**options)))


@pytest.mark.capability("ST-10")
def test_an_engine_on_a_gpu_shares_kernels_if_it_has_a_key(card, tmp_path: Path):
    (tmp_path / "kernels").mkdir()
    plan = a_plan("cuda", kernels_key="a key", kernels_directory=str(tmp_path / "kernels"))

    counts = share_compiled_kernels(plan)

    assert knobs.cache.manager_class is SharedCacheManager
    store = SharedCacheManager.store
    assert store is not None
    assert not store.fault
    store.save("KERNEL", {"_norm.cubin": b"code"})
    assert counts.compiled == 1
    card.name = "NVIDIA H200"
    share_compiled_kernels(plan)
    assert SharedCacheManager.store.load("KERNEL") is None, "another card"


@pytest.mark.capability("ST-10")
def test_neither_a_cpu_nor_an_engine_without_a_key_shares_any(card, tmp_path: Path):
    for plan in (
        a_plan("cpu", kernels_key="a key", kernels_directory=str(tmp_path)),
        a_plan("cuda", kernels_directory=str(tmp_path)),
    ):
        share_compiled_kernels(plan)

    assert SharedCacheManager.store is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.capability("ST-10")
def test_an_engine_shares_before_it_loads_and_reports_what_its_warm_up_compiled(monkeypatch: pytest.MonkeyPatch):
    counts, order = KernelCounts(), []
    load = build._load

    def share(plan: EnginePlan) -> KernelCounts:
        order.append("share")
        return counts

    def loaded(*arguments: Any) -> Any:
        order.append("load")
        counts.compiled, counts.shared, counts.refused = 3, 2, 1
        return load(*arguments)

    monkeypatch.setattr(build, "share_compiled_kernels", share)
    monkeypatch.setattr(build, "_load", loaded)

    facts = build_engine(TINY, device="cpu", max_model_len=64, max_num_seqs=2).facts

    assert order == ["share", "load"]
    assert (facts.kernels_compiled, facts.kernels_shared, facts.kernels_refused) == (3, 2, 1)
