"""Host memory tier of the KV cache: offloads evicted prefixes, promotes them on a hit, stops while hits are rare.

    device, cached ──(its block is needed)──> demoted: in host memory, under the same key
    host ──(a prompt begins with it)──> promoted: in a block of the device again, before the step computes
    host ──(its slot is needed, its adapter leaves memory, the cache is flushed)──> gone

- The slots are a BlockPool whose blocks are all cached or free, with the keys and groups of the device, in segmented
  LRU order. So prefixes are evicted with their adapter here too, and a prompt seen once does not evict reused ones.
- A promoted block keeps its slot, so that evicting it from the device again costs no copy.
- Moves are executed in the order of their decision, before the rest of their plan, and plans in order. So a move reads
  what its source held when it was decided, even if the block or the slot is reused next.

Copies cost time, even if no prompt uses them. Each time as many blocks were copied and asked for as there are slots,
the hit rate is checked: the share of blocks missed on the device that host memory held. Below `MIN_HIT_RATE`,
offloading stops and the memory is given back. It starts again after a rest, which doubles with each failure in a row.
"""

from collections.abc import Iterable, Sequence

from slipway_runtime.messages import Demote, FreeHostMemory, HostMove, Medium, Promote
from slipway_runtime.scheduling.block_pool import BlockPool, KvEvent, KvEventLog
from slipway_runtime.scheduling.text_blocks import TextBlockIndex

MIN_HIT_RATE = 0.2  # least share of hits among the blocks asked for
ENOUGH = 256  # blocks demoted and asked for, before judging
REST = 4  # times as many blocks asked for as are judged by, before the next try
LONGEST_REST = 64


class HostTier:
    """Slots 1 … `num_blocks` of host memory, each as large as a block of the device."""

    def __init__(self, num_blocks: int, block_size: int, *, enough: int = ENOUGH) -> None:
        self.total = num_blocks
        self.active = True
        self.demotions = 0
        self.promotions = 0
        self._slots = BlockPool(num_blocks, block_size)
        self._moves: list[HostMove] = []
        self._window = max(num_blocks, enough)
        self._filling = True  # while the slots fill, few hits are no failure
        self._copied = self._asked = self._found = 0  # blocks, since it was judged last
        self._rest = REST

    @property
    def held(self) -> int:
        """Slots with a prefix in them."""
        return self._slots.total - self._slots.free

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and bool(self._slots.match((key,)))

    # --- called by the pool of the device

    def demote(self, block: int, key: bytes, group: str) -> None:
        """Offload a cached block of the device that is evicted, unless host memory holds it already."""
        slots = self._slots
        if not self.active:
            return
        if known := slots.match((key,)):
            slots.hold(known)  # hold and release: the slot is the most recently used now
            slots.release(known)
        elif slots.available:  # else all slots are held for promotion
            (slot,) = slots.allocate(1)
            slots.publish(slot, key, group)
            slots.release((slot,))
            if slots.events is not None:
                slots.events.stored(None, key, (), "")
            self._moves.append(Demote(block, slot))
            self.demotions += 1
            self._copied += 1

    def evict_group(self, group: str) -> None:
        """Drop the prefixes computed with this adapter."""
        self._slots.evict_group(group)

    def forget_all(self) -> None:
        """Drop all prefixes, and the moves that are not in a plan yet. The caller records the KV event."""
        slots, told = self._slots, self._slots.events is not None
        slots.events = None
        slots.forget_all()
        self._moves.clear()
        if told:
            self.record_events()

    # --- prompts

    def count(self, asked: int, found: int) -> None:
        """Count the blocks that a prompt missed on the device, and how many of them host memory held."""
        self._asked += asked
        self._found += found

    def hold(self, keys: Sequence[bytes]) -> None:
        """Hold the slots of these keys, so that they are not evicted before they are promoted."""
        self._slots.hold(self._slots.match(keys))

    def release(self, keys: Sequence[bytes]) -> None:
        """End the hold of these keys: they may be evicted again."""
        self._slots.release(self._slots.match(keys))

    def promote(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy the held slots of these keys into these blocks of the device, and release the slots."""
        slots = self._slots.match(keys)
        self._moves += [Promote(slot, block) for slot, block in zip(slots, blocks, strict=True)]
        self.promotions += len(slots)
        self._slots.count_use(slots)
        self._slots.release(slots)

    # --- plans

    def update_activity(self) -> None:
        """Decide before each plan whether offloading goes on, stops or starts again."""
        if not self.active:
            if self._asked >= self._rest * self._window:
                self._rest = min(2 * self._rest, LONGEST_REST)
                self.active = self._filling = True
                self._start_over()
        elif self._filling:
            if self._copied >= self._window:
                self._filling = False
                self._start_over()
        elif min(self._copied, self._asked) >= self._window:
            if self._found < MIN_HIT_RATE * self._asked:
                self._switch_off()
            else:
                self._rest = REST
            self._start_over()

    def take_moves(self) -> tuple[HostMove, ...]:
        """The moves decided since the last call, for the plan being made."""
        moves, self._moves = self._moves, []
        return tuple(moves)

    def _switch_off(self) -> None:
        for group in list(self._slots.groups()):
            self._slots.evict_group(group)
        self._moves = [FreeHostMemory()]
        self.active = False

    def _start_over(self) -> None:
        self._copied = self._asked = self._found = 0

    # --- KV events, groups and checks

    def record_events(self) -> None:
        """Record KV events from now on."""
        self._slots.events = KvEventLog(self._slots.block_size, Medium.HOST)

    def take_events(self) -> tuple[KvEvent, ...]:
        """The KV events since the last call."""
        return self._slots.events.take() if self._slots.events is not None else ()

    def track_text_blocks(self, index: TextBlockIndex) -> None:
        """Report from now on which keys are dropped from host memory."""
        self._slots.text_blocks = index

    def groups(self) -> Iterable[str]:
        """The adapters whose prefixes are in host memory."""
        return self._slots.groups()

    def members(self, group: str) -> int:
        """How many blocks of an adapter are in host memory."""
        return self._slots.members(group)

    def check(self) -> None:
        """Raise AssertionError when the slots are inconsistent; between plans no slot is held."""
        self._slots.check()
        assert self._slots.live == 0, "slots are held between plans"
        assert self.active or not self.held
