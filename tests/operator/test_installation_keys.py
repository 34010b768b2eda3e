"""The keys of an installation are created once, and never read or changed."""

import base64

import pytest

from slipway_kube.errors import AlreadyExists, Forbidden, KubeError, Unreachable
from slipway_operator.installation_keys import TRIES, create_missing_keys


class Secrets:
    """The Secrets of one namespace; the first calls fail with the given errors."""

    def __init__(self, *errors: KubeError) -> None:
        self.kept: dict[str, bytes] = {}
        self.errors = list(errors)
        self.calls = 0

    async def create(self, path: str, body: dict) -> bytes:
        self.calls += 1
        assert path == "/api/v1/namespaces/system/secrets"
        if self.errors:
            raise self.errors.pop(0)
        name = body["metadata"]["name"]
        if name in self.kept:
            raise AlreadyExists(409, "it exists")
        self.kept[name] = base64.b64decode(body["data"]["current"])
        return b"{}"


async def no_sleep(_seconds: float) -> None:
    """Time does not pass."""


@pytest.mark.capability("SE-3")
async def test_a_key_that_exists_is_kept_and_each_has_its_own():
    secrets = Secrets()
    await create_missing_keys(secrets, "system", ["a"], sleep=no_sleep)
    first = dict(secrets.kept)
    await create_missing_keys(secrets, "system", ["a", "b"], sleep=no_sleep)

    assert secrets.kept["a"] == first["a"]
    assert secrets.kept["a"] != secrets.kept["b"]
    assert min(len(key) for key in secrets.kept.values()) >= 32


async def test_a_network_or_right_that_comes_a_moment_later_is_waited_for():
    secrets = Secrets(Unreachable("no route"), Forbidden(403, "cannot create secrets"))
    await create_missing_keys(secrets, "system", ["a"], sleep=no_sleep)
    assert set(secrets.kept) == {"a"}


async def test_a_lasting_refusal_ends_the_command_with_its_cause():
    secrets = Secrets(*[Forbidden(403, "cannot create secrets")] * (TRIES + 1))
    with pytest.raises(Forbidden, match="cannot create secrets"):
        await create_missing_keys(secrets, "system", ["a"], sleep=no_sleep)
    assert secrets.calls == TRIES
