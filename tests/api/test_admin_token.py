"""Who may speak to the admin port of a pod."""

from slipway_api.admin_token import admin_token, token_digest, token_matches


def test_the_token_of_a_pod_opens_that_pod():
    token = admin_token(b"master", "default", "chat-abcde-0-0")

    assert token_matches(token, [token_digest(token)])


def test_the_token_of_another_pod_namespace_or_master_does_not():
    digests = [token_digest(admin_token(b"master", "default", "chat-abcde-0-0"))]

    assert not token_matches(admin_token(b"master", "default", "chat-abcde-1-0"), digests)
    assert not token_matches(admin_token(b"master", "other", "chat-abcde-0-0"), digests)
    assert not token_matches(admin_token(b"guess", "default", "chat-abcde-0-0"), digests)


def test_during_a_rotation_both_masters_open_the_pod():
    tokens = [admin_token(master, "default", "chat-abcde-0-0") for master in (b"current", b"previous")]
    digests = [token_digest(token) for token in tokens]

    assert all(token_matches(token, digests) for token in tokens)


def test_what_the_pod_knows_does_not_open_it():
    digest = token_digest(admin_token(b"master", "default", "chat-abcde-0-0"))

    assert not token_matches(digest, [digest])
