"""Derives tokens from the gateway's own key, which gives no access to the admin ports of replicas."""

from pathlib import Path

from slipway_api.admin_token import admin_token, serving_token, token_digest
from slipway_api.mounted_key import MissingKey, MountedKey
from slipway_api.names import HEADER_SERVING_TOKEN
from slipway_gateway.picker.endpoints import Endpoint


class GatewayKeys:
    """Derives tokens from the mounted key; without one, it derives none."""

    def __init__(self, directory: Path) -> None:
        self._key = MountedKey(directory, mounted_from="slipway-gateway-key")

    def admin_tokens(self, namespace: str, pod: str) -> list[str]:
        """The tokens that the admin port of this gateway's pod accepts: one for each valid key."""
        return [admin_token(key, namespace, pod) for key in self._read()]

    def serving_headers(self, endpoint: Endpoint) -> dict[str, str]:
        """The header that a replica requires from a gateway; empty where it accepts requests without a token.

        A replica knows the digests of the keys that were valid when it was made: the token of one of these is sent.
        """
        if endpoint.token_digests:
            namespace, _, service = endpoint.service.partition("/")
            for key in self._read():
                token = serving_token(key, namespace, service)
                if token_digest(token) in endpoint.token_digests:
                    return {HEADER_SERVING_TOKEN: token}
        return {}

    def _read(self) -> tuple[bytes, ...]:
        try:
            return self._key.read()
        except MissingKey:
            return ()
