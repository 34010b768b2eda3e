"""Reads the credentials of a Secret that a spec names. Values are never logged and never kept."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from slipway_api import names


class CredentialsInvalid(Exception):  # noqa: N818  reads as a fact where it is raised
    """The Secret is missing, may not be read, or has none of the known keys; the message is for its owner."""


def decoded(secret: Mapping[str, Any], name: str) -> dict[str, str]:
    """The known keys of a Secret as decoded JSON. Raises CredentialsInvalid."""
    data = secret.get("data") or {}
    try:
        found = {key: base64.b64decode(data[key]).decode().strip() for key in names.CREDENTIALS if data.get(key)}
    except (binascii.Error, UnicodeDecodeError) as exc:
        raise CredentialsInvalid(f"a key of the Secret {name} is not text") from exc
    if not found:
        raise CredentialsInvalid(f"the Secret {name} contains none of the keys {', '.join(names.CREDENTIALS)}")
    return found
