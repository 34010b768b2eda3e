"""A sample of the fault matrix (`make chaos` runs all): no wrong text, no silent cut, no double slot, no orphan."""

import asyncio

import pytest

from e2e.chaos.client import learn_references
from e2e.chaos.faults import FAULTS, SAMPLE, Fault
from e2e.chaos.matrix import run_fault, sentence
from e2e.chaos.stage import AUTO, FIXED, Stage
from e2e.cluster.launch import Cluster
from e2e.slipway import Slipway

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.mark.capability("OP-7", "RD-1", "RG-2", "RD-8")
def test_a_sample_of_faults_under_load_leaves_every_text_right(clean: Slipway, breakable: Cluster) -> None:
    stage = Stage(breakable, clean)
    stage.prepare()
    references = asyncio.run(learn_references(clean.base_url, [FIXED, AUTO]))

    rows = [run_fault(stage, fault, references, seed) for seed, fault in enumerate(sample())]

    for row in rows:
        print(sentence(row))
    assert [sentence(row) for row in rows if row.is_bad] == []
    assert all(row.counts.finished > 0 for row in rows)


def sample() -> list[Fault]:
    """The faults named in SAMPLE, each of which exists."""
    by_name = {fault.name: fault for fault in FAULTS}
    return [by_name[name] for name in SAMPLE]
