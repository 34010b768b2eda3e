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
    """How the two ports of one pod are protected."""

    nonce: str
    """Random; the pod's admin tokens are derived from it."""
    admin_digests: tuple[str, ...]
    serving_digests: tuple[str, ...] = ()
    """None: the serving port takes requests without a token."""
    gateway_digests: tuple[str, ...] = ()
    """Of an open serving port: tokens by which it recognises its gateway, whose tenant and priority it then accepts."""
    tls: bool = False
    """Whether both ports speak TLS, with the certificate of the namespace."""

    def annotations(self) -> dict[str, str]:
        """Annotations from which operator and gateway derive the pod's tokens."""
        digests = ",".join(self.serving_digests or self.gateway_digests)
        known = {names.ANNOTATION_SERVING_TOKEN_SHA256: digests} if digests else {}
        return {names.ANNOTATION_ADMIN_NONCE: self.nonce} | known

    def arguments(self) -> list[str]:
        """Flags of the runtime that make its serving port require a token."""
        return [part for digest in self.serving_digests for part in ("--serving-token-sha256", digest)]

    def environment(self) -> list[dict[str, Any]]:
        """Environment variables: digests that the admin port accepts, and by which an open port knows its gateway.

        Not flags: an older runtime ignores a variable that it does not know.
        """
        found = [{"name": names.ENV_ADMIN_TOKEN_SHA256, "value": ",".join(self.admin_digests)}]
        if self.gateway_digests:
            found.append({"name": names.ENV_GATEWAY_TOKEN_SHA256, "value": ",".join(self.gateway_digests)})
        return found


def port_access(observed: Observed, service: InferenceService, pod: str) -> PortAccess:
    """The digests of a pod that is about to be created under this name; `service` as the pod's revision has it."""
    namespace = service.metadata.namespace
    nonce = derive_nonce(observed.nonce_seed, namespace, pod)
    return PortAccess(
        nonce=nonce,
        admin_digests=observed.token_digests(namespace, pod, nonce),
        serving_digests=serving_digests(observed, service),
        gateway_digests=gateway_digests(observed, service),
        tls=observed.defaults.internal_tls,
    )


def serving_digests(observed: Observed, service: InferenceService) -> tuple[str, ...]:
    """The digests of the serving tokens; none where the port takes requests without a token."""
    return _digests(observed, service) if service.direct_access is DirectAccess.GATEWAY_ONLY else ()


def gateway_digests(observed: Observed, service: InferenceService) -> tuple[str, ...]:
    """The digests by which an open port recognises its gateway; none where the port is closed to all others."""
    return _digests(observed, service) if service.direct_access is DirectAccess.OPEN else ()


def with_recorded_access(service: InferenceService, default: DirectAccess) -> InferenceService:
    """The service with its direct access filled in: spec, else status, else the default of the installation.

    A service that served before the operator recorded this was open, and stays so until its spec closes it: closing it
    replaces its replicas and cuts off its direct callers, and both need somebody who wants it.
    """
    if service.spec.routing.direct_access is not None:
        return service
    known = service.status.direct_access or (DirectAccess.OPEN if service.status.current_revision else default)
    routing = service.spec.routing.model_copy(update={"direct_access": DirectAccess(known)})
    return service.model_copy(update={"spec": service.spec.model_copy(update={"routing": routing})})


def _digests(observed: Observed, service: InferenceService) -> tuple[str, ...]:
    return observed.serving_digests(service.metadata.namespace, service.metadata.name)


def derive_nonce(seed: bytes, namespace: str, pod: str) -> str:
    """The nonce of a new pod, from random bytes of this pass."""
    return hmac.new(seed, f"{namespace}/{pod}".encode(), hashlib.sha256).hexdigest()[:NONCE_LENGTH]
