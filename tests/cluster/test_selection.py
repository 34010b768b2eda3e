"""The folder of `tests` that `make test-cluster` collects holds every test of the whole cluster."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_test_of_the_cluster_lies_in_a_folder_that_is_not_collected() -> None:
    """`make test-apiserver` needs no such rule: it collects the files that have its mark, wherever they are."""
    folders = [path for path in TESTS.iterdir() if path.is_dir() and path.name != "cluster"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert [str(path.relative_to(TESTS)) for path in files if "mark.cluster" in path.read_text()] == []
