"""One thread: the tests share the machine, and two OpenMP threads on shared cores wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
