"""The token by which a replica of a test recognises its gateway, and the headers that come with it."""

from typing import Final

GATEWAY_TOKEN: Final = "the token of this service's gateway"


def as_gateway(**values: str) -> dict[str, str]:
    """The internal headers of a gateway that shows its token: `tenant`, `priority`."""
    return {f"x-slipway-{name}": value for name, value in values.items()} | {"x-slipway-serving-token": GATEWAY_TOKEN}
