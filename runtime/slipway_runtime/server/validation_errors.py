"""Chooses which of pydantic's errors of a body to report, and the path of fields to it. Pure.

Where a field may have one of several types, pydantic reports the errors of each type, and puts a name of the type into
the path: `messages.0.content.str` and `messages.0.content.list[TextPart].0.type` for a content with an image. The error
to report is that of the type which fits the value best, and its path has fields and indices alone.
"""

from collections.abc import Sequence
from typing import Any, Final

_Path = tuple[str | int, ...]

# The JSON type wanted, by the types of pydantic errors for a value of another type: they say nothing about its content.
_EXPECTED: Final = {
    "string_type": "a string", "list_type": "a list", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object", "int_type": "an integer", "int_parsing": "an integer",
    "int_from_float": "an integer", "float_type": "a number", "float_parsing": "a number", "bool_type": "a boolean",
    "bool_parsing": "a boolean", "literal_error": "", "none_required": "null",
}  # fmt: skip
_WHOLE_LIST: Final = 1 << 30  # later than any index


def first_cause(errors: Sequence[Any], body: Any) -> tuple[Any, _Path]:
    """The first error, of the best fitting type where there are several, and the path of fields in `body` to it.

    Without a body, which is what FastAPI's own errors have, types and fields cannot be told apart.
    """
    path: _Path = ()
    if body is None:
        return errors[0], tuple(part for part in errors[0]["loc"] if part != "body")
    value, depth = body, 0
    while depth < len(loc := errors[0]["loc"]):
        part = loc[depth]
        if _has(value, part):
            path, value = (*path, part), value[part]
        elif depth == len(loc) - 1 and errors[0]["type"] == "missing":
            path = (*path, part)
        else:
            errors = _of_best_type([error for error in errors if error["loc"][:depth] == loc[:depth]], depth)
        depth += 1
    return errors[0], path


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _of_best_type(errors: Sequence[Any], depth: int) -> list[Any]:
    """The errors of one type of a union, whose name is at this depth of their paths.

    Worked: ["a", 1] as list[int] fails at 0, as list[str] at 1, as str at once: list[str] fits best.
    """
    of_types: dict[Any, list[Any]] = {}
    for error in errors:
        of_types.setdefault(error["loc"][depth], []).append(error)

    def fit(own: list[Any]) -> tuple[bool, int, int]:
        first = own[0]
        if len(first["loc"]) == depth + 1:
            return first["type"] not in _EXPECTED, _WHOLE_LIST, 0
        index = first["loc"][depth + 1]
        return True, index if isinstance(index, int) else 0, -len(own)

    best = max(of_types.values(), key=fit)
    if len(of_types) > 1 and not fit(best)[0]:
        kinds = dict.fromkeys(_expected(own[0]) for own in of_types.values() if own[0]["type"] in _EXPECTED)
        return [{**best[0], "expected": " or ".join(kinds)}]
    return best


def wrong_type(error: Any, body: Any, path: _Path) -> str | None:
    """The sentence about a value of another type than its field's, without the value; None: the error is another one.

    Worked: "expected a string or a list, got an integer".
    """
    if error["type"] not in _EXPECTED:
        return None
    expected = error.get("expected") or _expected(error)
    value = body
    for part in path:
        if not _has(value, part):
            return f"expected {expected}"
        value = value[part]
    is_other_word = isinstance(value, str) and "'" in expected  # one of several words was wanted
    return f"expected {expected}, got {'another string' if is_other_word else name_type(value)}"


def name_type(value: Any) -> str:
    """The JSON type of a value, with its article."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "another type")


def _expected(error: Any) -> str:
    return _EXPECTED[error["type"]] or str(error.get("ctx", {}).get("expected", "another value"))
