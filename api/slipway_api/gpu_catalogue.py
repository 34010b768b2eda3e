"""The catalogue of GPUs: memory, bandwidth and number formats of a product, by its label `nvidia.com/gpu.product`.

The planner reads it before a pod exists. Memory is what the driver reports, which is less than what the name says; of a
MIG slice it is that of the slice. A product that is not listed is not planned for: its runtime finds out by itself.
"""

import re
from dataclasses import dataclass, replace
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30
FP8_SINCE: Final = (8, 9)
SUPPORTED_SINCE: Final = (8, 0)  # our kernels multiply bf16 on tensor cores

_MIG_SLICE: Final = re.compile(r"-MIG-(\d+)g\.(\d+)gb", re.IGNORECASE)
_SHARED: Final = "-SHARED"  # what the device plugin appends to the label of a time-sliced GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUFacts:
    """One product."""

    name: str
    memory_bytes: int
    terabytes_per_second: float
    compute_capability: tuple[int, int]
    shared: bool = False  # time-sliced: other processes compute on it, and hold memory of it

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply fp8."""
        return self.compute_capability >= FP8_SINCE

    @property
    def is_supported(self) -> bool:
        """Whether the runtime's kernels run on it."""
        return self.compute_capability >= SUPPORTED_SINCE


def _gpu(name: str, mib: int, bandwidth: float, capability: tuple[int, int]) -> GPUFacts:
    return GPUFacts(name=name, memory_bytes=mib * MIB, terabytes_per_second=bandwidth, compute_capability=capability)


# By the beginning of the label; the longest that fits counts. MiB as nvidia-smi prints them, TB/s of the data sheet.
CATALOGUE: Final = {
    "NVIDIA-B200": _gpu("B200", 183_359, 8.0, (10, 0)),
    "NVIDIA-GB200": _gpu("GB200", 189_471, 8.0, (10, 0)),
    "NVIDIA-H200": _gpu("H200", 143_771, 4.8, (9, 0)),
    "NVIDIA-GH200-480GB": _gpu("GH200", 97_871, 4.0, (9, 0)),
    "NVIDIA-H100": _gpu("H100 80 GB", 81_559, 3.35, (9, 0)),
    "NVIDIA-H100-PCIe": _gpu("H100 PCIe", 81_559, 2.0, (9, 0)),
    "NVIDIA-H100-NVL": _gpu("H100 NVL", 95_830, 3.9, (9, 0)),
    "NVIDIA-L40S": _gpu("L40S", 46_068, 0.864, (8, 9)),
    "NVIDIA-L40": _gpu("L40", 46_068, 0.864, (8, 9)),
    "NVIDIA-L4": _gpu("L4", 23_034, 0.3, (8, 9)),
    "NVIDIA-A100-SXM4-80GB": _gpu("A100 80 GB", 81_920, 2.0, (8, 0)),
    "NVIDIA-A100-80GB": _gpu("A100 80 GB PCIe", 81_920, 1.9, (8, 0)),
    "NVIDIA-A100-SXM4-40GB": _gpu("A100 40 GB", 40_960, 1.6, (8, 0)),
    "NVIDIA-A100-PCIE-40GB": _gpu("A100 40 GB PCIe", 40_960, 1.6, (8, 0)),
    "NVIDIA-A30": _gpu("A30", 24_576, 0.93, (8, 0)),
    "NVIDIA-A40": _gpu("A40", 46_068, 0.7, (8, 6)),
    "NVIDIA-A10": _gpu("A10", 23_028, 0.6, (8, 6)),
    "NVIDIA-A10G": _gpu("A10G", 23_028, 0.6, (8, 6)),
    "Tesla-V100": _gpu("V100", 16_384, 0.9, (7, 0)),
    "Tesla-T4": _gpu("T4", 15_360, 0.32, (7, 5)),
}


def find_gpu(product: str) -> GPUFacts | None:
    """The facts of a product by its label; None where it is not listed.

    >>> find_gpu("NVIDIA-H100-80GB-HBM3").name
    'H100 80 GB'
    >>> find_gpu("NVIDIA-H100-80GB-HBM3-MIG-2g.20gb").memory_bytes // GIB
    20
    """
    fitting = [label for label in CATALOGUE if product == label or product.startswith(f"{label}-")]
    if not fitting:
        return None
    facts = CATALOGUE[max(fitting, key=len)]
    if (slice := _MIG_SLICE.search(product)) is not None:
        part = int(slice[1]) / 7  # a GPU has seven compute slices
        facts = replace(
            facts,
            name=f"{facts.name} MIG {slice[1]}g.{slice[2]}gb",
            memory_bytes=int(slice[2]) * GIB,
            terabytes_per_second=round(facts.terabytes_per_second * part, 2),
        )
    return replace(facts, shared=True) if product.endswith(_SHARED) else facts
