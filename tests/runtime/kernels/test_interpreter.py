"""The interpreter that repeats less computes what Triton's own does, and leaves `triton.language` as it found it."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.runtime.interpreter import _kept, repeating_less

# Triton as it was imported; the session's fixture has replaced these by the time a test runs.
OWN = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype


@triton.jit
def _softmax_of_pair(a, b):
    top = tl.maximum(a, b)
    whole = tl.exp(a - top) + tl.exp(b - top)
    return tl.exp(a - top) / whole, tl.exp(b - top) / whole


@triton.jit
def _rows(x, out, count, N: tl.constexpr):  # noqa: N803  a constant
    row = tl.program_id(0)
    place = tl.arange(0, N)
    total = tl.zeros([N], dtype=tl.float32)
    for first in range(0, tl.cdiv(count, N) * N, N):
        here = first + place < count
        a = tl.load(x + row * count + first + place, mask=here, other=0.0)
        left, right = _softmax_of_pair(a, total)
        total += tl.where(here, left * a + right, 0.0)
    tl.store(out + row, tl.sum(total, 0))


def _computed(rows: int = 3, columns: int = 37) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(rows)
    _rows[(rows,)](x, out, columns, N=16)
    return out


def _members() -> dict[str, object]:
    """What is found in `triton.language` and in its tensors."""
    return {
        f"{owner}.{name}": value
        for owner, place in (("tl", tl), ("tensor", tl.tensor), ("math", tl.math))
        for name, value in vars(place).items()
    }


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter without what the session replaced."""
    monkeypatch.setattr(interpreter, "_patch_lang", OWN[0])
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", OWN[1])
    monkeypatch.setattr(interpreter, "_get_np_dtype", OWN[2])


def test_the_same_bits_are_computed(own):
    expected = _computed()
    assert expected.abs().min() > 0
    with repeating_less():
        assert torch.equal(_computed(), expected)
    assert (interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype) == OWN


def test_builtins_are_replaced_once_a_launch(own, monkeypatch):
    replaced = []
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: (replaced.append(fn.__name__), OWN[0](fn))[1])
    with repeating_less():
        _computed()
        first = list(replaced)
        assert first[0] == "_rows"
        assert "_softmax_of_pair" not in first, "it is in the kernel's module, whose builtins are replaced already"
        assert len(first) <= 2, "once for `tl`, and once for `tl.core`, where functions of Triton itself are found"
        _computed()
        assert replaced == 2 * first, "a launch restores what it replaced, so the next one replaces it again"


def test_nothing_is_left_replaced_that_triton_would_restore(own):
    _computed()  # what Triton's own interpreter never restores is left from here on
    before = _members()
    with repeating_less():
        _computed()
    assert _members() == before


@triton.jit
def _fails(x):
    tl.static_assert(False, "on purpose")
    tl.store(x, tl.cdiv(1, 2))


def test_a_launch_after_one_that_failed_replaces_them_again(own):
    expected = _computed()
    with repeating_less():
        with pytest.raises(interpreter.InterpreterError, match="on purpose"):
            _fails[(1,)](torch.zeros(1))
        assert torch.equal(_computed(), expected)


def test_every_dtype_is_looked_up_as_triton_does():
    kept = _kept(OWN[2])
    scalars = [getattr(tl, name) for name in dir(tl) if isinstance(getattr(tl, name), tl.dtype)]
    known = [one for one in scalars if one != tl.void]
    assert len(known) >= 15
    for one in known:
        for dtype in (one, tl.block_type(one, [16]), tl.pointer_type(one), tl.block_type(tl.pointer_type(one), [4, 8])):
            assert kept(dtype) == kept(dtype) == OWN[2](dtype)
