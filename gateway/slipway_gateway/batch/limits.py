"""How much a tenant may keep in the batch API: a leaf that the settings import."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much a tenant may keep."""

    file_bytes: int = 100 << 20
    tenant_bytes: int = 1 << 30  # of all its files, results too
    requests: int = 50_000  # of a batch
    open_batches: int = 20
