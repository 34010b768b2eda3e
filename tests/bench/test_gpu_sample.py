"""Launches that are left out of `make test` have another one that stands for them."""

from dataclasses import dataclass, field

from bench.gpu_sample import stand_ins

TARGETS = (80, 89, 90, 100, 120)


@dataclass
class Launch:
    """The fields of a recorded launch that a choice reads."""

    kernel: str
    target: int
    signature: dict[str, str] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=lambda: {"num_warps": 4})


def attention(kernel: str, target: int, cache: str, **constants: object) -> Launch:
    values = {"BLOCK_SIZE": 16, "QUANTIZED": cache in ("*i8", "*fp8e4nv"), **constants}
    return Launch(kernel, target, {"q": "*bf16", "cache": cache}, values)


def extends(target: int) -> list[Launch]:
    return [
        attention("_extend", target, cache, PARTIAL=partial)
        for cache in ("*bf16", "*i8", *(["*fp8e4nv"] if target >= 89 else []))
        for partial in (False, True)
    ]


def product(target: int, rows: int, size: int, codes: str = "*i8", warps: int = 4) -> Launch:
    return Launch(
        "_times",
        target,
        {"x": "*bf16", "codes": codes},
        {"BLOCK_M": rows, "IN": size, "OUT": 4096},
        {"num_warps": warps},
    )


def test_a_matrix_of_other_sizes_stands_for_one_of_the_same_tile():
    first, other = product(80, 16, 4096), product(80, 16, 14336)
    assert stand_ins([first, other]) == [first]
    for unlike in (
        product(80, 64, 4096),
        product(80, 16, 4096, "*u8"),
        product(90, 16, 4096),
        product(80, 16, 4096, warps=8),
    ):
        assert stand_ins([first, unlike]) == [first, unlike]


def test_on_hopper_each_cache_is_compiled_in_each_form():
    assert stand_ins(extends(90)) == extends(90)


def test_elsewhere_a_16_bit_cache_is_compiled_in_both_forms_and_a_quantized_one_in_one():
    chosen = {target: stand_ins(extends(target)) for target in TARGETS if target != 90}
    for target, launches in chosen.items():
        forms = [(one.signature["cache"], one.constants["PARTIAL"]) for one in launches]
        assert forms[:2] == [("*bf16", False), ("*bf16", True)]
        assert len(forms) == 3, target
    quantized = [(one.signature["cache"], one.constants["PARTIAL"]) for found in chosen.values() for one in found[2:]]
    assert set(quantized) == {(cache, form) for cache in ("*i8", "*fp8e4nv") for form in (False, True)}


def test_decode_and_stores_of_a_quantized_cache_are_compiled_on_every_target():
    for target in TARGETS:
        for kernel in ("_decode", "_extend_in_order", "_rope_and_store"):
            chosen = stand_ins([attention(kernel, target, cache) for cache in ("*bf16", "*i8", "*fp8e4nv")])
            assert sum(bool(one.constants["QUANTIZED"]) for one in chosen) == (2 if target == 90 else 1)


def test_each_other_block_size_is_compiled_in_one_form_and_both_forms_in_one():
    every = [
        attention("_extend", 90, "*bf16", PARTIAL=form, BLOCK_SIZE=size) for size in (8, 64) for form in (False, True)
    ]
    chosen = [(one.constants["BLOCK_SIZE"], one.constants["PARTIAL"]) for one in stand_ins(every)]
    assert chosen == [(8, False), (64, True)]
    decodes = [attention("_decode", 90, "*bf16", PARTIAL=False, BLOCK_SIZE=size) for size in (8, 64)]
    assert stand_ins(decodes) == decodes
