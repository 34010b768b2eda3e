"""Tokens of a pod's admin port and serving port: which one opens what."""

import pytest

from slipway_api.admin_token import admin_token, kernels_key, serving_token, token_digest, token_matches

CHAT = ("default", "chat-abcde-0-0", "d00d")


def test_the_token_of_a_pod_opens_that_pod():
    token = admin_token(b"master", *CHAT)

    assert token_matches(token, [token_digest(token)])


def test_the_token_of_another_pod_namespace_or_master_does_not():
    digests = [token_digest(admin_token(b"master", *CHAT))]

    assert not token_matches(admin_token(b"master", "default", "chat-abcde-1-0", "d00d"), digests)
    assert not token_matches(admin_token(b"master", "other", "chat-abcde-0-0", "d00d"), digests)
    assert not token_matches(admin_token(b"guess", *CHAT), digests)


def test_a_later_pod_of_the_same_name_has_another_token():
    """Security finding: a token captured by a pod of a predictable name opened the real pod of that name."""
    captured = admin_token(b"master", "default", "chat-abcde-0-0", "the nonce of a pod that is gone")

    assert not token_matches(captured, [token_digest(admin_token(b"master", *CHAT))])


def test_a_pod_made_before_there_were_nonces_keeps_its_token():
    assert (
        admin_token(b"master", "team", "chat-0") == "c2badb480fc6d996f29f5e462d58178e34f24926f96ddb23c3c353aa6e0d9a72"
    )


def test_during_a_rotation_both_masters_open_the_pod():
    tokens = [admin_token(master, *CHAT) for master in (b"current", b"previous")]
    digests = [token_digest(token) for token in tokens]

    assert all(token_matches(token, digests) for token in tokens)


def test_what_the_pod_knows_does_not_open_it():
    digest = token_digest(admin_token(b"master", *CHAT))

    assert not token_matches(digest, [digest])


def test_a_serving_token_is_of_one_service_and_never_an_admin_token():
    tokens = {
        serving_token(b"key", "team", "chat"),
        serving_token(b"key", "team", "other"),
        serving_token(b"key", "other", "chat"),
        serving_token(b"another key", "team", "chat"),
        admin_token(b"key", "team", "chat"),
    }

    assert len(tokens) == 5


@pytest.mark.capability("ST-10", "SE-3")
def test_a_key_of_kernels_is_of_one_service_and_never_a_token():
    keys = {
        kernels_key(b"master", "team", "chat"),
        kernels_key(b"master", "team", "other"),
        kernels_key(b"master", "other", "chat"),
        kernels_key(b"another master", "team", "chat"),
        admin_token(b"master", "team", "chat"),
        serving_token(b"master", "team", "chat"),
    }

    assert len(keys) == 6
