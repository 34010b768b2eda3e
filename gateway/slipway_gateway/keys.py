"""Derives tokens from the gateway's own key, which gives no access to the admin ports of replicas."""

from pathlib import Path

from slipway_api.admin_token import admin_token, serving_token, token_digest
from slipway_api.mounted_key import MissingKey, MountedKey
from slipway_api.names import HEADER_SERVING_TOKEN
from slipway_gateway.picker.endpoints import Endpoint

REMEMBERED_KEYS = 8  # replicas made with an older key refuse this gateway


class GatewayKeys:
    """Derives tokens from the mounted key; without one, it derives none."""

    def __init__(self, directory: Path) -> None:
        self._key = MountedKey(directory, mounted_from="slipway-gateway-key")
        self._remembered: tuple[bytes, ...] = ()  # the mounted keys, then those that were mounted earlier
        self._read()

    def admin_tokens(self, namespace: str, pod: str) -> list[str]:
        """The tokens that the admin port of this gateway's pod accepts: one for each valid key."""
        return [admin_token(key, namespace, pod) for key in self._read()]

    def serving_headers(self, endpoint: Endpoint) -> dict[str, str]:
        """The header that a replica requires from a gateway; empty where it accepts requests without a token.

        A replica knows the digests of the keys that were valid when it was made: the token of one of these is sent. If
        somebody replaced the key without keeping the previous one, such a replica accepts only a key that this process
        has read earlier; the admin port accepts the mounted keys alone.
        """
        if endpoint.token_digests:
            namespace, _, service = endpoint.service.partition("/")
            self._read()
            for key in self._remembered:
                token = serving_token(key, namespace, service)
                if token_digest(token) in endpoint.token_digests:
                    return {HEADER_SERVING_TOKEN: token}
        return {}

    def _read(self) -> tuple[bytes, ...]:
        try:
            mounted = self._key.read()
        except MissingKey:
            return ()
        if self._remembered[: len(mounted)] != mounted:
            earlier = (key for key in self._remembered if key not in mounted)
            self._remembered = (*mounted, *earlier)[:REMEMBERED_KEYS]
        return mounted
