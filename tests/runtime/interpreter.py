"""Makes Triton's interpreter repeat less: kernels compute the same, in about half the time.

Each call of a device function (`tl.cdiv` and `tl.zeros` are such functions too) lists some 500 members of
`triton.language` and replaces the builtins among them, though its launch did so already. And each operation builds a
table of 18 dtypes to look up one. `tests/runtime/kernels/test_interpreter.py` compares results and leftovers.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter


@contextmanager
def repeating_less() -> Iterator[None]:
    """Replace builtins once a launch, and keep the dtypes that were looked up."""
    replace, launch, dtype_of = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    replaced: set[str] = set()  # the namespaces of this launch

    def replace_once(fn: Callable[..., Any]) -> Any:
        needed = _namespaces(fn)
        if needed and needed <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(needed)
        return replace(fn)

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        try:
            launch(executor, *args, **kwargs)
        finally:
            replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_afresh
    interpreter._get_np_dtype = _kept(dtype_of)
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace, launch
        interpreter._get_np_dtype = dtype_of


def _kept(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function with a memory. Types of pointers and blocks have no hash."""
    of_scalar = functools.cache(dtype_of)

    def kept(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, interpreter.tl.block_type) else dtype
        return dtype_of(scalar) if isinstance(scalar, interpreter.tl.pointer_type) else of_scalar(scalar)

    return kept


@functools.cache
def _namespaces(fn: Callable[..., Any]) -> frozenset[str]:
    """The namespaces whose builtins a function uses, as `_patch_lang` finds them."""
    language = {"language": interpreter.tl, "core": interpreter.tl.core}
    return frozenset(name for name, module in language.items() if any(x is module for x in fn.__globals__.values()))
