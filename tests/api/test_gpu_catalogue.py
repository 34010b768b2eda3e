"""The catalogue names a GPU by the label of its nodes, whole, sliced or shared."""

import pytest

from slipway_api.gpu_catalogue import CATALOGUE, GIB, find_gpu


@pytest.mark.capability("OP-9")
@pytest.mark.parametrize(
    ("label", "name", "gib", "fp8"),
    [
        ("NVIDIA-H100-80GB-HBM3", "H100 80 GB", 79, True),
        ("NVIDIA-H100-PCIe", "H100 PCIe", 79, True),
        ("NVIDIA-H200", "H200", 140, True),
        ("NVIDIA-B200", "B200", 179, True),
        ("NVIDIA-A100-SXM4-80GB", "A100 80 GB", 80, False),
        ("NVIDIA-A10G", "A10G", 22, False),
        ("NVIDIA-L4", "L4", 22, True),
        ("NVIDIA-L40S", "L40S", 44, True),
    ],
)
def test_a_product_is_known_by_its_label(label, name, gib, fp8):
    facts = find_gpu(label)

    assert facts is not None
    assert (facts.name, facts.memory_bytes // GIB, facts.has_fp8) == (name, gib, fp8)


def test_a_product_is_not_taken_for_another_with_a_longer_or_shorter_name():
    assert find_gpu("NVIDIA-A10").name == "A10"  # type: ignore[union-attr]
    assert find_gpu("NVIDIA-A1000") is None
    assert find_gpu("NVIDIA-RTX-9999") is None
    assert find_gpu("") is None


@pytest.mark.capability("MT-3")
def test_a_slice_has_its_own_memory_and_a_shared_gpu_says_so():
    slice = find_gpu("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb")
    shared = find_gpu("NVIDIA-A100-SXM4-80GB-SHARED")

    assert slice is not None
    assert (slice.memory_bytes, slice.shared) == (10 * GIB, False)
    assert slice.terabytes_per_second == pytest.approx(2.0 / 7, abs=0.01)
    assert shared is not None
    assert shared.shared


@pytest.mark.capability("OP-9")
def test_only_gpus_since_ampere_run_the_kernels():
    unsupported = {facts.name for facts in CATALOGUE.values() if not facts.is_supported}

    assert unsupported == {"V100", "T4"}
