"""Chooses which of pydantic's errors of a body to report, and the path of fields to it. Pure.

Where a field may have one of several types, pydantic reports the errors of each type, and puts a name of the type into
the path: `messages.0.content.str` and `messages.0.content.list[TextPart].0.type` for a content with an image. The error
to report is that of the type which fits the value best, and its path has fields and indices alone.
"""

from collections.abc import Sequence
from typing import Any, Final

_Path = tuple[str | int, ...]

# The value is of another type: these say nothing about what is wrong inside of it.
_OTHER_TYPE: Final = frozenset(
    {"string_type", "list_type", "dict_type", "model_type", "int_type", "int_parsing", "int_from_float", "float_type",
     "float_parsing", "bool_type", "bool_parsing", "literal_error", "none_required"}
)  # fmt: skip
_SHOULD_BE: Final = "Input should be "
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
            return first["type"] not in _OTHER_TYPE, _WHOLE_LIST, 0
        index = first["loc"][depth + 1]
        return True, index if isinstance(index, int) else 0, -len(own)

    best = max(of_types.values(), key=fit)
    if len(of_types) > 1 and not fit(best)[0]:
        return [{**best[0], "msg": _of_no_type([own[0]["msg"] for own in of_types.values()])}]
    return best


def _of_no_type(messages: Sequence[str]) -> str:
    """What is wrong with a value of none of a field's types: "Input should be a valid string or a valid list"."""
    kinds = dict.fromkeys(message.removeprefix(_SHOULD_BE) for message in messages if message.startswith(_SHOULD_BE))
    return _SHOULD_BE + " or ".join(kinds) if kinds else messages[0]
