"""A key in files that the kubelet swaps: read anew when it changes, kept while it cannot be read."""

import pytest

from slipway_api.mounted_key import MissingKey, MountedKey


def a_key(directory, **files: bytes) -> MountedKey:
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return MountedKey(directory, mounted_from="a-secret")


def test_the_current_key_comes_first_and_line_ends_do_not_count(tmp_path):
    assert a_key(tmp_path, current=b"new\n", previous=b"old\n").read() == (b"new", b"old")


def test_a_rotation_is_seen_without_a_restart(tmp_path):
    key = a_key(tmp_path, current=b"old")
    key.read()
    (tmp_path / "previous").write_bytes(b"old")
    (tmp_path / "fresh").write_bytes(b"new")
    (tmp_path / "fresh").rename(tmp_path / "current")

    assert key.read() == (b"new", b"old")


@pytest.mark.parametrize("trouble", ["gone", "empty", "unreadable"])
def test_the_last_good_key_stays_valid_while_the_file_is_not(tmp_path, trouble):
    """Security finding: the gateway forgot its key while the file was away."""
    key = a_key(tmp_path, current=b"good")
    key.read()
    (tmp_path / "current").unlink()
    if trouble == "empty":
        (tmp_path / "current").write_bytes(b"\n")
    if trouble == "unreadable":
        (tmp_path / "current").mkdir()

    assert key.read() == (b"good",)


def test_without_a_key_the_message_names_the_secret(tmp_path):
    with pytest.raises(MissingKey, match="mount the Secret a-secret there"):
        a_key(tmp_path).read()
