"""Which cold prefixes host memory keeps, and whether that pays.

    device, cached ──(its block is needed)──> demoted: in host memory, under the same key
    host ──(a prompt begins with it)──> promoted: in a block of the device again, before the step computes
    host ──(its slot is needed, its adapter leaves memory, the cache is flushed)──> gone

- The slots are a pool like that of the device, in which everything is cached: the same keys, groups and order of
  eviction. So a prefix lives and dies with its adapter here too, and a prompt seen once does not push out the others.
- A promoted block keeps its slot: evicted again, it costs no copy.
- Moves are decided one after the other and made in that order, before anything else of their plan. Plans are executed
  in order, so what a move reads is what was there when it was decided, whoever gets the block or the slot next.

Copies cost time whether anybody comes back or not. Each time the content of the slots has changed once, it is asked how
many of the blocks that prompts missed on the device were here. Fewer than `WORTH_KEEPING`: nothing is demoted any more
and the memory is given back. After a rest it is tried again; each failure in a row doubles the rest.
"""

from collections.abc import Iterable, Sequence

from slipway_runtime.messages import Demote, GiveBack, HostMove, Medium, Promote
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.kv_events import KvEvent, KvEventLog

WORTH_KEEPING = 0.2  # share of the blocks asked for
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
        self._filling = True  # few hits mean nothing yet
        self._copied = self._asked = self._found = 0  # blocks, since it was judged last
        self._rest = REST

    @property
    def held(self) -> int:
        """Slots with a prefix in them."""
        return self._slots.total - self._slots.free

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and bool(self._slots.match((key,)))

    # --- what the pool of the device tells

    def demote(self, block: int, key: bytes, group: str) -> None:
        """A cached block of the device is about to be given to somebody else."""
        slots = self._slots
        if not self.active:
            return
        if known := slots.match((key,)):
            slots.hold(known)  # and let go again: it is the most recent one now
            slots.release(known)
        elif slots.available:  # else all of them are about to be read
            (slot,) = slots.allocate(1)
            slots.publish(slot, key, group)
            slots.release((slot,))
            if slots.events is not None:
                slots.events.stored(None, key, (), "")
            self._moves.append(Demote(block, slot))
            self.demotions += 1
            self._copied += 1

    def evict_group(self, group: str) -> None:
        """Nobody can use what was computed with this adapter any more."""
        self._slots.evict_group(group)

    def forget_all(self) -> None:
        """Drop everything, and the moves that are not in a plan yet. Whoever asks tells that all is gone."""
        slots, told = self._slots, self._slots.events is not None
        slots.events = None
        slots.forget_all()
        self._moves.clear()
        if told:
            self.tell_events()

    # --- prompts

    def count(self, asked: int, found: int) -> None:
        """A prompt missed so many blocks on the device; so many of them were here."""
        self._asked += asked
        self._found += found

    def hold(self, keys: Sequence[bytes]) -> None:
        """Keep these, which are here, while room is made for them on the device."""
        self._slots.hold(self._slots.match(keys))

    def release(self, keys: Sequence[bytes]) -> None:
        """End the hold of these keys: they may be evicted again."""
        self._slots.release(self._slots.match(keys))

    def promote(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy what is held into these blocks of the device, and end its hold."""
        slots = self._slots.match(keys)
        self._moves += [Promote(slot, block) for slot, block in zip(slots, blocks, strict=True)]
        self.promotions += len(slots)
        self._slots.count_use(slots)
        self._slots.release(slots)

    # --- plans

    def judge(self) -> None:
        """Before a plan is made: go on, stop, or try again."""
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
            if self._found < WORTH_KEEPING * self._asked:
                self._switch_off()
            else:
                self._rest = REST
            self._start_over()

    def take_moves(self) -> tuple[HostMove, ...]:
        """What was decided since this was last asked, for the plan being made."""
        moves, self._moves = self._moves, []
        return tuple(moves)

    def _switch_off(self) -> None:
        for group in list(self._slots.groups()):
            self._slots.evict_group(group)
        self._moves = [GiveBack()]
        self.active = False

    def _start_over(self) -> None:
        self._copied = self._asked = self._found = 0

    # --- what it tells

    def tell_events(self) -> None:
        """Note from now on which blocks come and go."""
        self._slots.events = KvEventLog(self._slots.block_size, Medium.HOST)

    def take_events(self) -> tuple[KvEvent, ...]:
        """What came and went since the last call."""
        return self._slots.events.take() if self._slots.events is not None else ()

    def groups(self) -> Iterable[str]:
        """The adapters whose prefixes are here."""
        return self._slots.groups()

    def members(self, group: str) -> int:
        """How many blocks an adapter has here."""
        return self._slots.members(group)

    def check(self) -> None:
        """Raise AssertionError when the table do not balance; between plans nothing is held."""
        self._slots.check()
        assert self._slots.live == 0, "a slot is kept for nobody"
        assert self.active or not self.held
