"""Derives the tokens of a pod's two ports, and the key of its kernels, from keys that never enter a user's namespace.

The pod holds only the SHA-256 of each token, so reading its spec opens neither port. It holds the key of its kernels as
it is: the key opens nothing, and is of use only to who can also write to the folder of the kernels (ADR 158).

| port    | token                             | derived from the | held by               |
|---------|-----------------------------------|------------------|-----------------------|
| admin   | HMAC(key, namespace/pod/nonce)    | admin master     | operator              |
| serving | HMAC(key, namespace/service)      | gateway key      | operator and gateway  |
| none    | HMAC(key, namespace/service)      | admin master     | operator and replicas |
"""

import hashlib
import hmac
from collections.abc import Iterable


def admin_token(master: bytes, namespace: str, pod: str, nonce: str = "") -> str:
    """The hex token that the admin port of `namespace/pod` accepts.

    The nonce makes it the token of one pod and not of every pod that will ever have this name. Pods that were made
    before there were nonces have none.
    """
    return _derive(master, "/".join(part for part in (namespace, pod, nonce) if part))


def serving_token(gateway_key: bytes, namespace: str, service: str) -> str:
    """The hex token that the serving port of the replicas of `namespace/service` accepts from a gateway."""
    return _derive(gateway_key, f"serving:{namespace}/{service}")


def kernels_key(master: bytes, namespace: str, service: str) -> str:
    """The hex key by which the replicas of `namespace/service` seal the compiled kernels that they share on a node.

    No namespace has a colon in it, so this is never the admin token of a pod.
    """
    return _derive(master, f"kernels:{namespace}/{service}")


def token_digest(token: str) -> str:
    """The SHA-256 of a token in hex: what the pod holds instead of the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def token_matches(token: str, digests: Iterable[str]) -> bool:
    """Whether the token is one of those behind `digests`; takes the same time for every wrong token."""
    presented = token_digest(token)
    # A list, not a generator: every digest is compared, whichever matches.
    return any([hmac.compare_digest(presented, digest) for digest in digests])  # noqa: C419


def _derive(key: bytes, purpose: str) -> str:
    return hmac.new(key, purpose.encode(), hashlib.sha256).hexdigest()
