"""Token counts of each sequence, kept on the device for penalties.

A step uploads only the tokens that it adds, not a table over the whole vocabulary; in decode only the rows, since the
tokens that the last step sampled are on the device. The table counts accepted tokens; draft tokens before a row's
further samples are added to a copy.
"""

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.reference_sampling import IN_PROMPT
from slipway_runtime.kernels.upload import Ints, upload
from slipway_runtime.worker.input_batch import InputBatch


class TokenCounts:
    """Counts of penalized rows. Memory: 4 bytes per row and token of the vocabulary, grown as rows need it."""

    def __init__(self, rows: InputBatch) -> None:
        self._rows = rows
        self._counts = torch.zeros(0, 0, dtype=torch.int32)
        self._starts = np.full(len(rows.starts), -1, dtype=np.int64)  # which sequence of a row is counted
        self._counted = np.zeros(len(rows.starts), dtype=np.int64)  # how many of its tokens

    def of(self, row_ids: Ints, positions: Ints, like: Tensor) -> Tensor:
        """Counts before each sample: (D, V) int32. A row's samples are adjacent. like: (…, V) on the device."""
        rows, vocabulary = self._rows, like.shape[1]
        is_first = np.append(True, row_ids[1:] != row_ids[:-1])
        self.up_to(row_ids[is_first], positions[is_first], like)
        draft_samples: list[int] = []
        drafts: list[int] = []
        for sample in np.flatnonzero(~is_first).tolist():
            counted = self._counted[row_ids[sample]]
            tokens = rows.tokens[row_ids[sample], counted : positions[sample]].tolist()
            known = [token for token in tokens if token < vocabulary]
            draft_samples += [sample] * len(known)
            drafts += known
        extra = np.array(draft_samples, dtype=np.int64) * vocabulary + np.array(drafts, dtype=np.int64)
        wanted, extra_on_device = upload((row_ids, extra), like.device)
        counts = self._counts.index_select(0, wanted)
        if len(extra):
            _add(counts, extra_on_device)
        return counts

    def up_to(self, row_ids: Ints, positions: Ints, like: Tensor) -> Tensor:
        """Count `row_ids` up to their positions; the table of all rows, (…, V) int32. like: (…, V) on the device."""
        self._make_room(int(row_ids.max()) + 1, like)
        self._count(row_ids, positions, like.shape[1])
        return self._counts

    def _make_room(self, num_rows: int, like: Tensor) -> None:
        if self._counts.shape[1] == like.shape[1] and num_rows <= len(self._counts):
            return
        room = min(1 << (num_rows - 1).bit_length(), len(self._starts))
        counts = torch.zeros(room, like.shape[1], dtype=torch.int32, device=like.device)
        if self._counts.shape[1] == like.shape[1]:
            counts[: len(self._counts)] = self._counts
        self._counts = counts

    def _count(self, row_ids: Ints, ends: Ints, vocabulary: int) -> None:
        """Update the counts of rows to their first `ends` tokens."""
        rows = self._rows
        is_new = (self._starts[row_ids] != rows.starts[row_ids]) | (self._counted[row_ids] > ends)
        new = row_ids[is_new]
        self._starts[new] = rows.starts[new]
        self._counted[new] = rows.num_prompt[new]
        prompts = [
            _places(row, np.unique(rows.tokens[row, : rows.num_prompt[row]]), vocabulary) for row in new.tolist()
        ]
        begins = self._counted[row_ids]
        is_last = (begins < ends) & (rows.last_position[row_ids] == ends - 1)  # the host may not know this token yet
        last, known = row_ids[is_last], ends - is_last
        if (known - begins == 1).all():
            added = _places(row_ids, rows.tokens[row_ids, begins], vocabulary)
        else:
            more = known > begins
            added = np.concatenate([
                np.zeros(0, dtype=np.int64),
                *(_places(row, rows.tokens[row, begin:end], vocabulary)
                for row, begin, end in zip(row_ids[more].tolist(), begins[more].tolist(), known[more].tolist(),
                                           strict=True)),
            ])  # fmt: skip
        self._counted[row_ids] = ends
        prompt = np.concatenate([np.zeros(0, dtype=np.int64), *prompts])
        new_on_device, prompt_on_device, added_on_device, last_on_device = upload(
            (new, prompt, added, last), self._counts.device
        )
        if len(new):
            self._counts.index_fill_(0, new_on_device, 0)
            self._counts.view(-1).index_fill_(0, prompt_on_device, IN_PROMPT)
        if len(added):
            _add(self._counts, added_on_device)
        if len(last):
            tokens = rows.last_tokens.index_select(0, last_on_device)
            _add(self._counts, torch.add(tokens, last_on_device, alpha=vocabulary))


def _places(row: Ints | int, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]", vocabulary: int) -> Ints:
    """Flat indices of the counts of a row's tokens. Tokens beyond the vocabulary have none."""
    places: Ints = np.where(tokens < vocabulary, np.asarray(row) * vocabulary + tokens.astype(np.int64), -1)
    return places[places >= 0]


def _add(counts: Tensor, places: Tensor) -> None:
    counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
