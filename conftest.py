"""What every test may use: the local cluster, started when a test asks for it, and a guard over the session."""

from e2e.cluster.fixtures import apiserver, cluster
from e2e.cluster.guard import (
    pytest_collection_finish,
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_terminal_summary,
)

__all__ = [
    "apiserver",
    "cluster",
    "pytest_collection_finish",
    "pytest_sessionfinish",
    "pytest_sessionstart",
    "pytest_terminal_summary",
]
