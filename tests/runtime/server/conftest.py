"""One thread for torch: two cores are shared by all tests, and OpenMP barriers on shared cores are catastrophic."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
