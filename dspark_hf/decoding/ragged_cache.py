"""K/V of many sequences of different lengths, written and read in place.

Axes: N slots of a pool, T rows of one forward, Q rows of one sequence in it, C tokens of context, H query heads, K key/value
heads, G = H / K, D head size.

Sequences of like length share a pool, [N, K, capacity, D] for keys and for values, so that one attention call serves all of
them without copying what they hold; capacities are powers of two, and a sequence that outgrows its pool moves to the next.
Memory follows the tokens held: each pool holds little more than its sequences, each slot at most twice its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

_SMALLEST = 64  # capacity of the first pool
_WIDE = 16  # a sequence with more rows in a forward (a prompt being read) attends alone


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is memory running out, on whichever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("allocate memory" in text or "not enough memory" in text)


@dataclass(eq=False)
class Slot:
    """One sequence's place. length: tokens it holds; what lies behind them is overwritten by the next forward.

    start: position of the first token. dropped: tokens missing after the first `sinks` ones, which leave a gap in the positions.
    """

    pool: _Pool
    index: int
    length: int = 0
    start: int = 0
    sinks: int = 0
    dropped: int = 0

    def position(self, place: int) -> int:
        """Of the token at `place`, counted from 0."""
        return self.start + place + (self.dropped if place >= self.sinks else 0)


class _Pool:
    """Slots of one capacity, the ones in use first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[Slot] = []
        self.room = 0  # slots that the tensors have
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer, two of [room, K, capacity, D]

    def open(self) -> Slot:
        if len(self.slots) == self.room:
            self._resize(self.room + max(1, self.room // 2))
        slot = Slot(self, len(self.slots))
        for pair in self.tensors.values():
            for tensor in pair:
                tensor[slot.index].zero_()  # what an earlier text left may not be finite
        self.slots.append(slot)
        return slot

    def close(self, slot: Slot) -> None:
        last = self.slots.pop()
        if last is not slot:
            for keys, values in self.tensors.values():
                keys[slot.index].copy_(keys[last.index])
                values[slot.index].copy_(values[last.index])
            last.index = slot.index
            self.slots[slot.index] = last
        if not self.slots:
            self.tensors, self.room = {}, 0
        elif 3 * len(self.slots) <= self.room:
            try:
                self._resize(len(self.slots))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise  # else it stays as large as it is: making room must not need room

    def _resize(self, room: int) -> None:
        # One layer at a time, so that no more than one is there twice. After an error some have the old room, some the new.
        self.room = min(self.room, room)
        for layer, pair in self.tensors.items():
            self.tensors[layer] = self._resized(pair[0], room), self._resized(pair[1], room)
        self.room = room

    def _resized(self, old: torch.Tensor, room: int) -> torch.Tensor:
        # Zeros, because attention may touch what is masked out, and what it touches must be finite.
        new = _zeros(old, room, *old.shape[1:])
        new[: len(self.slots)] = old[: len(self.slots)]
        return new

    def of_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's tensors, made at its first use to fit `keys` and `values` [1, K, T, D]."""
        if layer not in self.tensors:
            shapes = [(self.room, t.shape[1], self.capacity, t.shape[3]) for t in (keys, values)]
            self.tensors[layer] = _zeros(keys, *shapes[0]), _zeros(values, *shapes[1])
        return self.tensors[layer]


@torch.inference_mode(False)
def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """An ordinary tensor: slots are opened and closed outside of steps too, which run in inference mode."""
    return like.new_zeros(shape)


class RaggedStore:
    """The slots of all sequences."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def open(self, capacity: int) -> Slot:
        """A place for a sequence of `capacity` tokens, empty."""
        return self._pool(capacity).open()

    def reserve(self, slot: Slot, capacity: int) -> None:
        """Make room for `capacity` tokens; what the slot holds moves along where it must."""
        if capacity <= slot.pool.capacity:
            return
        old, target = slot.pool, self._pool(capacity)
        new = target.open()
        try:
            for layer, (keys, values) in old.tensors.items():
                room = target.of_layer(layer, keys, values)
                for there, here in zip(room, (keys, values)):
                    there[new.index, :, : slot.length] = here[slot.index, :, : slot.length]
        except BaseException:
            target.close(new)
            raise
        old.close(slot)
        slot.pool, slot.index = target, new.index
        target.slots[new.index] = slot

    def remove(self, slot: Slot, first: int, last: int) -> None:
        """Forget the tokens from the `first` one up to the `last`, which stays; what lies behind moves up."""
        count = slot.length - last
        for pair in slot.pool.tensors.values():
            for tensor in pair:
                row = tensor[slot.index]
                row[:, first : first + count] = row[:, last : slot.length].clone()
        slot.length -= last - first

    def keep(self, slot: Slot, path: Sequence[int]) -> None:
        """Of the rows read behind `slot.length`, those of `path` (ascending) are the text's; the others are forgotten."""
        if list(path) != list(range(len(path))):
            places = torch.tensor(path) + slot.length
            for pair in slot.pool.tensors.values():
                for tensor in pair:
                    row = tensor[slot.index]
                    row[:, slot.length : slot.length + len(path)] = row[:, places.to(row.device)]
        slot.length += len(path)

    def close(self, slot: Slot) -> None:
        """Forget a sequence and free its place."""
        slot.pool.close(slot)
        slot.length = 0

    @property
    def num_slots(self) -> int:
        return sum(len(pool.slots) for pool in self._pools.values())

    @property
    def num_tokens(self) -> int:
        """Tokens held by all sequences."""
        return sum(slot.length for pool in self._pools.values() for slot in pool.slots)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        pairs = [pair for pool in self._pools.values() for pair in pool.tensors.values()]
        return sum(t.numel() * t.element_size() for pair in pairs for t in pair)

    def _pool(self, capacity: int) -> _Pool:
        size = max(_SMALLEST, 1 << (capacity - 1).bit_length())
        return self._pools.setdefault(size, _Pool(size))


class Group:
    """Rows of one forward that attend together: those of neighbouring slots of one pool, or of one sequence alone.

    first, count: the slots. start, stop: the rows. slots: by place, `None` for one that is no part of the forward. rows: of each
    slot, 0 for those. width: Q, the most of them. columns: keys that are looked at.
    """

    def __init__(
        self, first: int, slots: Sequence[Slot | None], rows: Sequence[int], start: int, device: torch.device
    ) -> None:
        self.first, self.slots, self.rows, self.device = first, slots, rows, device
        self.pool = next(slot.pool for slot in slots if slot is not None)
        self.count, self.start, self.stop = len(slots), start, start + sum(rows)
        self.lengths = [0 if slot is None else slot.length for slot in slots]
        self.width = max(rows)
        self.columns = max(length + n for length, n in zip(self.lengths, rows))
        self.is_full = all(n == self.width for n in rows)
        self.masks: dict[Hashable, torch.Tensor | None] = {}
        self._written: dict[int, torch.Tensor] = {}  # by number of heads: where each row's heads go, flat

    @cached_property
    def taken(self) -> torch.Tensor:
        """Places of the rows in [count * Q]. [rows]"""
        return torch.tensor([i * self.width + q for i, n in enumerate(self.rows) for q in range(n)], device=self.device)

    @cached_property
    def gathered(self) -> torch.Tensor:
        """The row at each place, any where there is none. [count * Q]"""
        inverse = torch.zeros(self.count * self.width, dtype=torch.long, device=self.device)
        inverse[self.taken] = torch.arange(len(self.taken), device=self.device)
        return inverse

    def _column(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)[:, None, None]

    @cached_property
    def length_column(self) -> torch.Tensor:
        """Tokens that each slot holds. [count, 1, 1]"""
        return self._column(self.lengths)

    @cached_property
    def rows_column(self) -> torch.Tensor:
        """Rows of each slot. [count, 1, 1]"""
        return self._column(self.rows)

    def write(self, room: torch.Tensor, new: torch.Tensor) -> None:
        """Put the rows of `new` [K, T, D] behind what the slots hold in `room` [N, K, capacity, D]."""
        rows = new[:, self.start : self.stop]
        if self.count == 1:
            room[self.first, :, self.lengths[0] : self.lengths[0] + self.width] = rows
            return
        heads, capacity = rows.shape[0], self.pool.capacity
        if heads not in self._written:
            starts = [
                (self.first + i) * heads * capacity + self.lengths[i] + q
                for i, count in enumerate(self.rows)
                for q in range(count)
            ]
            per_head = torch.arange(heads, device=self.device)[:, None] * capacity
            self._written[heads] = (per_head + torch.tensor(starts, device=self.device)).flatten()
        flat = room.view(-1, room.shape[-1])
        flat.index_copy_(0, self._written[heads].to(flat.device), rows.reshape(-1, rows.shape[-1]).to(flat.dtype))

    def query_offsets(self) -> torch.Tensor:
        """0, 1, ... of each row within its sequence. [1, Q, 1]"""
        return torch.arange(self.width, device=self.device)[None, :, None]

    def key_places(self) -> torch.Tensor:
        """0, 1, ... of each key within its sequence. [1, 1, C]"""
        return torch.arange(self.columns, device=self.device)[None, None, :]

    def positions(self, places: torch.Tensor) -> torch.Tensor:
        """Positions in the text of places in the slots, for masks that count in these. [count, ...] -> [count, ...]"""
        start, sinks, dropped = (
            self._column([0 if slot is None else getattr(slot, name) for slot in self.slots])
            for name in ("start", "sinks", "dropped")
        )
        return start + places + dropped * (places >= sinks)


MaskOf = Callable[[Group], torch.Tensor | None]


class Layout:
    """Where the rows of one forward lie: `slots[i]` has `rows[i]` new ones, right behind the tokens that stand.

    `order` says which span comes when in the flattened row; `starts[i]` is the first row of span i.
    """

    def __init__(self, slots: Sequence[Slot], rows: Sequence[int], device: torch.device) -> None:
        self.groups: list[Group] = []
        self.starts = [0] * len(slots)
        self.order: list[int] = []
        narrow: dict[int, list[int]] = {}
        alone = []
        for i, (slot, count) in enumerate(zip(slots, rows)):
            if count > _WIDE:
                alone.append([i])
            else:
                narrow.setdefault(id(slot.pool), []).append(i)
        for members in [*narrow.values(), *alone]:
            members = sorted(members, key=lambda i: slots[i].index)
            # Slots in between that are no part of this forward cost attention all the same: few of them are let be.
            for part in _runs(members, [slots[i].index for i in members]):
                self._add(part, slots, rows, device)
        self.num_rows = len(self.order) and self.groups[-1].stop
        self.positions = [slots[i].position(slots[i].length + q) for i in self.order for q in range(rows[i])]

    def _add(self, part: Sequence[int], slots: Sequence[Slot], rows: Sequence[int], device: torch.device) -> None:
        first = slots[part[0]].index
        count = slots[part[-1]].index - first + 1
        stop = start = self.groups[-1].stop if self.groups else 0
        members: list[Slot | None] = [None] * count
        widths = [0] * count
        for i in part:
            place = slots[i].index - first
            members[place], widths[place] = slots[i], rows[i]
            self.starts[i] = stop
            self.order.append(i)
            stop += rows[i]
        self.groups.append(Group(first, members, widths, start, device))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the rows' keys and values, [1, K, T, D] each, into their slots."""
        for group in self.groups:
            for room, new in zip(group.pool.of_layer(layer, keys, values), (keys, values)):
                group.write(room, new[0])

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,  # [1, H, T, D]
        mask_of: MaskOf,  # [count, Q, C] of a group, bool, True where it is seen; `None` where all is
        kind: Hashable,  # masks of one kind are the same in every layer
        scaling: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Each row attends to its own sequence. [1, T, H, D]"""
        parts = []
        for group in self.groups:
            keys, values = (t[group.first : group.first + group.count] for t in group.pool.tensors[layer])
            keys, values = keys[:, :, : group.columns], values[:, :, : group.columns]
            parts.append(self._attend_group(group, queries, keys, values, mask_of, kind, scaling, softcap))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    @staticmethod
    def _attend_group(group, queries, keys, values, mask_of, kind, scaling, softcap) -> torch.Tensor:
        heads, dim = queries.shape[1], queries.shape[3]
        kv_heads, count, width = keys.shape[1], group.count, group.width
        per_group = heads // kv_heads
        rows = queries[0, :, group.start : group.stop].transpose(0, 1)  # [rows, H, D]
        if not group.is_full:
            rows = rows[group.gathered.to(rows.device)]
        # The query heads of one key/value head side by side with the rows: no copies of keys for grouped heads.
        grouped = rows.reshape(count, width, kv_heads, per_group, dim).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(count, kv_heads, per_group * width, dim)
        name = kind, per_group, queries.device
        if name not in group.masks:
            seen = mask_of(group)
            mask = (
                None if seen is None else _additive(seen.to(queries.device), queries.dtype).repeat(1, 1, per_group, 1)
            )
            group.masks[name] = mask
        mask = group.masks[name]
        if softcap is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        else:
            scores = grouped @ keys.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
            scores = torch.tanh(scores / softcap) * softcap
            out = (scores if mask is None else scores + mask).softmax(-1) @ values
        out = out.view(count, kv_heads, per_group, width, -1).permute(0, 3, 1, 2, 4).reshape(count * width, heads, -1)
        return out if group.is_full else out[group.taken.to(out.device)]


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[count, Q, C] bool -> [count, 1, Q, C], 0 where it is seen"""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


def _runs(members: Sequence[int], indices: Sequence[int]) -> list[list[int]]:
    """Split members, ascending by slot index, where more slots would be idle than are used."""
    runs = [[members[0]]]
    first = indices[0]
    for member, index in zip(members[1:], indices[1:]):
        if index - first + 1 > 2 * (len(runs[-1]) + 1):
            runs.append([])
            first = index
        runs[-1].append(member)
    return runs


def causal_mask(window: int | None) -> MaskOf:
    """What a row of a causal model sees: itself and what is before it, within `window` tokens where there is one."""

    def mask_of(group: Group) -> torch.Tensor | None:
        if group.width == 1 and group.count == 1 and (window is None or group.columns <= window):
            return None
        own, keys = group.length_column + group.query_offsets(), group.key_places()
        seen = keys <= own
        return seen if window is None else seen & (keys > own - window)

    return mask_of
