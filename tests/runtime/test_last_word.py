"""The sentence that a runtime leaves behind in its pod when it cannot serve."""

from pathlib import Path

import pytest

from slipway_runtime.serve import last_word
from slipway_runtime.storage.fetch import FetchError, fetch


def why_not(uri: str, cache: Path) -> str:
    with pytest.raises(FetchError) as refused:
        fetch(uri, cache=cache)
    return last_word(uri, refused.value)


def test_a_model_that_is_not_there_is_told_in_a_word_that_the_operator_knows(tmp_path: Path):
    assert why_not("file:///nowhere", tmp_path) == "ModelNotFound: file:///nowhere: there is no directory /nowhere"


def test_any_other_refusal_is_told_as_what_it_is(tmp_path: Path):
    assert why_not("s3://bucket/x", tmp_path).startswith("cannot serve s3://bucket/x: ")
    assert last_word("file:///x", FileNotFoundError("no config.json")) == "cannot serve file:///x: no config.json"
