"""The token of a pod's admin port, derived from one master secret that never enters a user's namespace.

The operator and the gateway hold the master and derive the token; the pod holds only the token's
SHA-256, so reading a pod's spec does not open its admin port.
"""

import hashlib
import hmac
from collections.abc import Iterable


def admin_token(master: bytes, namespace: str, pod: str) -> str:
    """The hex token that opens the admin port of `namespace/pod`."""
    return hmac.new(master, f"{namespace}/{pod}".encode(), hashlib.sha256).hexdigest()


def token_digest(token: str) -> str:
    """What the pod may know of the token: its SHA-256 in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def token_matches(token: str, digests: Iterable[str]) -> bool:
    """Whether the token is one of those behind `digests`; takes the same time for every wrong token."""
    presented = token_digest(token)
    # A list, not a generator: every digest is compared, whichever matches.
    return any([hmac.compare_digest(presented, digest) for digest in digests])  # noqa: C419
