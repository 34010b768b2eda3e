"""How much a tenant may keep in the batch API: a leaf that the settings import."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much a tenant may keep."""

    file_bytes: int = 100 << 20
    tenant_bytes: int = 1 << 30  # of all its files, results too
    requests: int = 50_000  # of a batch
    open_batches: int = 20
    files: int = 1_000  # of a tenant, results too
    kept_batches: int = 1_000  # that have ended; older ones are forgotten
    kept_seconds: float = 30 * 86_400.0  # after which a batch that has ended is forgotten, and its files stay
    calls: int = 16  # of a tenant to files and batches, concurrently
