"""Reads and validates values of untrusted JSON configuration files: type and range are checked before use."""

import json
import math
import stat
from pathlib import Path
from typing import Any, Final

from slipway_api import names

MOST_BYTES: Final = 16 << 20  # of a JSON file beside the weights; the largest known index has one megabyte


class ModelRefusedError(Exception):
    """A checkpoint or a setting that this engine does not support; the message is a sentence for the user."""


class DoesNotFitError(ModelRefusedError):
    """The memory is too small for the model and its settings; the message has the arithmetic.

    The message begins with the word that the operator uses as a condition's reason, because only the message passes
    from the engine's process to the process that leaves it to the kubelet.
    """

    def __init__(self, arithmetic: str) -> None:
        super().__init__(f"{names.WORD_DOES_NOT_FIT}{arithmetic}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a regular file of at most MOST_BYTES. Raises ModelRefusedError."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would block, a device would never end
            raise ModelRefusedError(f"{path.name} is not a file")
        if about.st_size > MOST_BYTES:
            raise ModelRefusedError(f"{path.name} has {about.st_size} bytes: no configuration is that long")
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelRefusedError(f"there is no {path.name} in the checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise ModelRefusedError(f"{path.name} is not JSON: {error}") from error
    except OSError as error:
        raise ModelRefusedError(f"{path.name} cannot be read: {error.strerror}") from error
    if not isinstance(raw, dict):
        raise ModelRefusedError(f"{path.name} holds no JSON object")
    return raw


def whole(raw: dict[str, Any], key: str, *, at_most: int) -> int:
    """A positive whole number up to `at_most`; KeyError if it is absent."""
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelRefusedError(f"config.json: {key} is {shown(value)}; a positive whole number is needed")
    if value > at_most:
        raise ModelRefusedError(f"config.json: {key} is {shown(value)}; more than {at_most} makes no sense")
    return value


def number(raw: dict[str, Any], key: str, *, above: float = 0.0, at_most: float = 1e12) -> float:
    """A finite number above a limit; KeyError if it is absent."""
    value = raw[key]
    # JSON as Python reads it has NaN and Infinity, and comparisons with NaN are always false.
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and above < value <= at_most
    if not fits or not math.isfinite(float(value)):
        raise ModelRefusedError(f"config.json: {key} is {shown(value)}; a number above {above:g} is needed")
    return float(value)


def flag(raw: dict[str, Any], key: str) -> bool:
    """true or false; absent and null mean false."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelRefusedError(f"config.json: {key} is {shown(value)}; true or false is needed")
    return bool(value)


def demand(raw: dict[str, Any], key: str, value: object) -> None:
    """Raise ModelRefusedError if `key` has another value; an absent key is accepted."""
    if raw.get(key, value) != value:
        raise ModelRefusedError(f"config.json: {key} is {shown(raw[key])}; only {value!r} is supported")


def shown(value: object) -> str:
    """A value as text for an error message, shortened to 80 characters."""
    # A number of a million digits takes minutes to print.
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
