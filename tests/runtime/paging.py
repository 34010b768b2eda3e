"""Between keys and values in the order of slots, as tests think of them, and the pages of a cache."""

from torch import Tensor


def paged(by_slot: Tensor, block_size: int) -> Tensor:
    """(slots, 2, Hkv, D) -> (blocks, 2, Hkv, page, D)."""
    return by_slot.unflatten(0, (-1, block_size)).permute(0, 2, 3, 1, 4).contiguous()


def by_slot(pages: Tensor) -> Tensor:
    """(blocks, 2, Hkv, page, D) -> (slots, 2, Hkv, D)."""
    return pages.permute(0, 3, 1, 2, 4).flatten(0, 1)
