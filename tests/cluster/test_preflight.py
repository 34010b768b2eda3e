"""A machine that lacks something is told what, in one sentence each."""

from dataclasses import replace

import pytest

from e2e.cluster.preflight import Machine, missing

GOOD = Machine(
    system="Linux", user=0, python=(3, 11), max_user_namespaces=1000, closed=(), find=lambda name: f"/usr/bin/{name}"
)


def test_a_machine_that_has_everything_hears_nothing() -> None:
    assert missing(GOOD) == []


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (replace(GOOD, system="Darwin"), "needs Linux, and this is Darwin"),
        (replace(GOOD, user=1000), "needs root"),
        (replace(GOOD, python=(3, 9)), "needs Python 3.11 or newer, and this is 3.9"),
        (replace(GOOD, max_user_namespaces=0), "User namespaces are switched off"),
        (replace(GOOD, closed=("/src/slipway",)), "chmod -R o+rX /src/slipway"),
    ],
)
def test_what_is_missing_is_named(machine: Machine, words: str) -> None:
    (sentence,) = missing(machine)

    assert words in sentence


@pytest.mark.parametrize("command", ["nsenter", "unshare", "setpriv", "ip", "git", "make"])
def test_a_missing_command_is_named_with_the_package_that_has_it(command: str) -> None:
    lacking = replace(GOOD, find=lambda name: None if name == command else f"/usr/bin/{name}")

    (sentence,) = missing(lacking)
    assert sentence.startswith(f"The command {command} is missing: ")
    assert "; install " in sentence
