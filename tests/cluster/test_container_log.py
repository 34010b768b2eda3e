"""Log files in the form that the kubelet reads."""

from pathlib import Path

from e2e.cluster.container_log import LONGEST_LINE, Log


def lines(path: Path) -> list[tuple[str, str, str]]:
    """(stream, tag, text) of each line."""
    return [tuple(line.split(" ", 3)[1:]) for line in path.read_text().splitlines()]  # type: ignore[misc]


def test_lines_are_written_whole_however_they_arrive(tmp_path: Path) -> None:
    log = Log(tmp_path / "0.log")
    for piece in (b"one\ntw", b"o", b"\n", b"three"):
        log.write("stdout", piece)
    log.write("stderr", b"oops\n")
    log.end()

    assert lines(log.path) == [
        ("stdout", "F", "one"),
        ("stdout", "F", "two"),
        ("stderr", "F", "oops"),
        ("stdout", "P", "three"),
    ]


def test_long_lines_are_split_and_marked(tmp_path: Path) -> None:
    log = Log(tmp_path / "0.log")
    log.write("stdout", b"x" * (2 * LONGEST_LINE + 1) + b"\n")

    assert [(tag, len(text)) for _, tag, text in lines(log.path)] == [
        ("P", LONGEST_LINE),
        ("P", LONGEST_LINE),
        ("F", 1),
    ]


def test_a_rotated_log_goes_on_in_a_new_file(tmp_path: Path) -> None:
    log = Log(tmp_path / "0.log")
    log.write("stdout", b"old\n")
    log.path.rename(tmp_path / "0.log.1")

    log.reopen()
    log.write("stdout", b"new\n")

    assert [text for _, _, text in lines(log.path)] == ["new"]
