"""Runs a benchmark in a process of its own: memory and garbage of another one would be in its figures."""

import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from bench.figures import Section


def measure_in_process(name: str) -> Section:
    """The section of `bench.<name>`; raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_measure, name).result()


def _measure(name: str) -> Section:
    section: Section = importlib.import_module(f"bench.{name}").measure()
    return section
