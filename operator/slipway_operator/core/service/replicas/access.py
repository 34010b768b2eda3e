"""Builds the token digests of a new pod, with which its two ports check their callers; the pod never gets a token.

The admin port is always closed. The serving port is closed where `spec.routing.directAccess` is GatewayOnly: the
gateway reads from the pod's annotation which token the pod expects, so a rotation of its key breaks no replica.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, Final

from slipway_api import names
from slipway_api.inference_service import DirectAccess, InferenceService
from slipway_operator.core.observed import Observed

NONCE_LENGTH: Final = 32  # hex digits: 128 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PortAccess:
    """The digests of one pod."""

    nonce: str
    """Random; the pod's admin tokens are derived from it."""
    admin_digests: tuple[str, ...]
    serving_digests: tuple[str, ...] = ()
    """None: the serving port takes requests without a token."""

    def annotations(self) -> dict[str, str]:
        """Annotations from which operator and gateway derive the pod's tokens."""
        closed = {names.ANNOTATION_SERVING_TOKEN_SHA256: ",".join(self.serving_digests)} if self.serving_digests else {}
        return {names.ANNOTATION_ADMIN_NONCE: self.nonce} | closed

    def arguments(self) -> list[str]:
        """Flags of the runtime that make its serving port require a token."""
        return [part for digest in self.serving_digests for part in ("--serving-token-sha256", digest)]

    def environment(self) -> dict[str, Any]:
        """Environment variable with the digests that the runtime's admin port accepts."""
        return {"name": names.ENV_ADMIN_TOKEN_SHA256, "value": ",".join(self.admin_digests)}


def port_access(observed: Observed, service: InferenceService, pod: str) -> PortAccess:
    """The digests of a pod that is about to be created under this name; `service` as the pod's revision has it."""
    namespace = service.metadata.namespace
    nonce = derive_nonce(observed.nonce_seed, namespace, pod)
    return PortAccess(
        nonce=nonce,
        admin_digests=observed.token_digests(namespace, pod, nonce),
        serving_digests=serving_digests(observed, service),
    )


def serving_digests(observed: Observed, service: InferenceService) -> tuple[str, ...]:
    """The digests of the serving tokens; none where the port takes requests without a token."""
    is_closed = service.spec.routing.direct_access is DirectAccess.GATEWAY_ONLY
    return observed.serving_digests(service.metadata.namespace, service.metadata.name) if is_closed else ()


def derive_nonce(seed: bytes, namespace: str, pod: str) -> str:
    """The nonce of a new pod, from random bytes of this pass."""
    return hmac.new(seed, f"{namespace}/{pod}".encode(), hashlib.sha256).hexdigest()[:NONCE_LENGTH]
