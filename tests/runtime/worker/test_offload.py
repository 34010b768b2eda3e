"""Memory that was given back, and comes back with what was in it."""

from pathlib import Path

import pytest
import torch

from slipway_runtime.worker.offload import HostCopy, tensors_of
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.machine import Machine, Stretch


@pytest.mark.capability("ST-7")
def test_a_model_moved_to_the_host_and_back_computes_the_same(tmp_path: Path):
    a_checkpoint(tmp_path, tie_word_embeddings=True, vocab_size=96)
    machine = Machine(tmp_path, rows=1, packed=False)  # what a processor packs has no address
    before = machine.logits(Stretch(0, (1, 5, 9, 11), 0, 4))[0]
    tensors = list(tensors_of(machine.decoder))
    assert sum({t.data_ptr(): t.nbytes for t in tensors}.values()) >= machine.decoder.nbytes

    copy = HostCopy(tensors)
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
    copy.restore()

    assert torch.equal(machine.logits(Stretch(0, (1, 5, 9, 11), 0, 4))[0], before)


def test_views_share_the_memory_that_comes_back():
    whole = torch.arange(12, dtype=torch.float32)
    part = whole[4:8]
    copy = HostCopy([part])
    assert whole.untyped_storage().nbytes() == 0
    copy.restore()
    assert whole.tolist() == list(range(12))
    part += 1
    assert whole[4] == 5
