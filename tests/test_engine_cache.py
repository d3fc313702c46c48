"""`RaggedStore` and `Layout`: every sequence finds its own keys and values again, wherever they were moved to."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids

from dspark_hf import BatchEngine, FixedLength
from dspark_hf.decoding import ragged_cache as cache
from dspark_hf.decoding.ragged_cache import Layout, RaggedStore, Slot, causal_mask

CPU = torch.device("cpu")


@dataclass(eq=False)
class Text:
    """A sequence as the store should hold it: per layer keys and values [K, L, D], without any padding."""

    slot: Slot
    layers: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class World:
    """A store and, beside it, what it should hold. Some layers are windowed or capped, values are wider than keys."""

    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 4
    value_dim: int = 6
    windows: tuple[int | None, ...] = (None, 5)
    softcap: float | None = None
    scaling: float | None = None
    seed: int = 0
    store: RaggedStore = field(default_factory=RaggedStore)
    texts: list[Text] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def open(self, capacity: int) -> Text:
        empty = [
            (
                torch.zeros(self.kv_heads, 0, self.key_dim).double(),
                torch.zeros(self.kv_heads, 0, self.value_dim).double(),
            )
            for _ in self.windows
        ]
        text = Text(self.store.open(capacity), empty)
        self.texts.append(text)
        return text

    def close(self, text: Text) -> None:
        self.store.close(text.slot)
        self.texts.remove(text)

    def forward(self, texts: list[Text], rows: list[int], kept: list[int]) -> Layout:
        """Write new rows of `texts`, compare attention of each with the dense one, then let `kept` of the rows stand."""
        for text, count in zip(texts, rows):
            self.store.reserve(text.slot, text.slot.length + count)
        layout = Layout([t.slot for t in texts], rows, CPU)
        total = sum(rows)
        assert layout.num_rows == total
        assert layout.positions == [texts[i].slot.length + q for i in layout.order for q in range(rows[i])]
        for layer, window in enumerate(self.windows):
            keys = self.random(1, self.kv_heads, total, self.key_dim)
            values = self.random(1, self.kv_heads, total, self.value_dim)
            queries = self.random(1, self.heads, total, self.key_dim)
            layout.write(layer, keys, values)
            found = layout.attend(layer, queries, causal_mask(window), window, self.scaling, self.softcap)
            assert found.shape == (1, total, self.heads, self.value_dim)
            for i, (text, count) in enumerate(zip(texts, rows)):
                here = slice(layout.starts[i], layout.starts[i] + count)
                text.layers[layer] = tuple(
                    torch.cat([old, new[0, :, here]], dim=1)
                    for old, new in zip(text.layers[layer], (keys, values), strict=True)
                )
                wanted = self.dense(*text.layers[layer], queries[0, :, here], window)
                torch.testing.assert_close(found[0, here], wanted, atol=1e-12, rtol=0)
        for text, count, stays in zip(texts, rows, kept):
            text.slot.length += stays
            drop = count - stays
            if drop:
                text.layers = [(k[:, :-drop], v[:, :-drop]) for k, v in text.layers]
        return layout

    def dense(self, keys, values, queries, window) -> torch.Tensor:
        """Plain attention of one sequence, row by row. [Q, H, D]"""
        count, start = queries.shape[1], keys.shape[1] - queries.shape[1]
        out = torch.empty(count, self.heads, self.value_dim, dtype=torch.float64)
        for q in range(count):
            first = 0 if window is None else max(start + q + 1 - window, 0)
            for head in range(self.heads):
                group = head // (self.heads // self.kv_heads)
                scores = keys[group, first : start + q + 1] @ queries[head, q]
                scores = scores * (self.key_dim**-0.5 if self.scaling is None else self.scaling)
                if self.softcap is not None:
                    scores = torch.tanh(scores / self.softcap) * self.softcap
                out[q, head] = scores.softmax(0) @ values[group, first : start + q + 1]
        return out

    def check_contents(self) -> None:
        """Everything that stands is where its slot says."""
        for text in self.texts:
            slot = text.slot
            assert slot.pool.slots[slot.index] is slot
            for layer, wanted in enumerate(text.layers):
                for tensor, want in zip(slot.pool.tensors.get(layer, ()), wanted):
                    assert torch.equal(tensor[slot.index, :, : slot.length], want)
        assert self.store.num_slots == len(self.texts)
        assert self.store.num_tokens == sum(t.layers[0][0].shape[1] for t in self.texts)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"heads": 6, "kv_heads": 1, "softcap": 2.0},
        {"heads": 3, "kv_heads": 3, "windows": (2, None, 9), "scaling": 0.7},
    ],
    ids=["grouped", "one-key-head-softcap", "ungrouped-windows"],
)
@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_keep_their_contents(settings, seed):
    """Opening, growing, rolling back and closing in any order; wide spans beside narrow ones, idle slots between."""
    world, rnd = World(seed=seed, **settings), random.Random(seed)
    idle = wide = moved = 0
    for _ in range(45):
        if len(world.texts) < 9 and rnd.random() < 0.6:
            world.open(rnd.choice([1, 10, 64, 65, 130]))
        if len(world.texts) > 2 and rnd.random() < 0.3:
            world.close(rnd.choice(world.texts))
        if rnd.random() < 0.2 and world.texts:
            text = rnd.choice(world.texts)
            before = text.slot.pool
            world.store.reserve(text.slot, text.slot.length + rnd.randint(1, 90))
            moved += text.slot.pool is not before
        texts = rnd.sample(world.texts, rnd.randint(0, len(world.texts)))
        if texts:
            rows = [rnd.choice([1, 1, 2, 3, 5, 16, rnd.randint(17, 40)]) for _ in texts]
            layout = world.forward(texts, rows, [rnd.randint(0, n) for n in rows])
            idle += sum(0 in group.rows for group in layout.groups)
            wide += sum(group.width > 16 for group in layout.groups)
        world.check_contents()
    assert idle > 0 and wide > 0 and moved > 0
    assert len({text.slot.pool.capacity for text in world.texts}) > 1
    for text in list(world.texts):
        world.close(text)
    assert world.store.num_slots == world.store.num_tokens == world.store.num_bytes == 0


def test_narrow_spans_of_one_pool_attend_together():
    world = World()
    texts = [world.open(40) for _ in range(6)]
    layout = world.forward(texts, [3, 1, 2, 1, 1, 4], [3, 1, 2, 1, 1, 4])
    assert [(g.first, g.count) for g in layout.groups] == [(0, 6)]
    layout = world.forward(texts[::-1], [1] * 6, [1] * 6)
    assert [(g.first, g.count) for g in layout.groups] == [(0, 6)]
    assert layout.order == [5, 4, 3, 2, 1, 0]
    layout = world.forward([texts[2], texts[4]], [30, 2], [30, 2])
    assert sorted((g.first, g.count, g.width) for g in layout.groups) == [(2, 1, 30), (4, 1, 2)]


def test_idle_slots_cost_at_most_as_much_as_the_used_ones():
    world = World()
    texts = [world.open(40) for _ in range(30)]
    for used in ([0, 29], [0, 1, 2, 20], [0, 2, 4, 6, 8], [0, 3, 6, 9, 29], list(range(30))):
        layout = world.forward([texts[i] for i in used], [1] * len(used), [1] * len(used))
        assert sum(len(g.rows) - g.rows.count(0) for g in layout.groups) == len(used)
        assert all(2 * (len(g.rows) - g.rows.count(0)) >= len(g.rows) for g in layout.groups)


def test_each_mask_is_made_once_for_a_kind_of_layer():
    world = World(windows=(None, 5, 5, None))
    calls = []

    def counted(window):
        inner = causal_mask(window)

        def mask_of(group):
            calls.append(window)
            return inner(group)

        return mask_of

    texts = [world.open(20) for _ in range(3)]
    layout = Layout([t.slot for t in texts], [2, 1, 3], CPU)
    for layer, window in enumerate(world.windows):
        layout.write(layer, world.random(1, 2, 6, 4), world.random(1, 2, 6, 6))
        layout.attend(layer, world.random(1, 4, 6, 4), counted(window), window)
    assert sorted(calls, key=str) == [5, None]


def test_memory_follows_the_tokens_held():
    """One long sequence beside many short ones; then most leave, and what they held is given back."""
    world = World(windows=(None,))
    per_token = world.kv_heads * (world.key_dim + world.value_dim) * 8
    for length in [2000] + [40 + i % 20 for i in range(30)]:
        text = world.open(length + 1)
        layout = Layout([text.slot], [length], CPU)
        layout.write(0, torch.zeros(1, 2, length, 4).double(), torch.zeros(1, 2, length, 6).double())
        text.slot.length = length
        assert world.store.num_bytes <= 4 * per_token * world.store.num_tokens
    assert world.store.num_bytes < 31 * 2001 * per_token / 8
    full = world.store.num_bytes
    for text in world.texts[3:]:
        world.store.close(text.slot)
    assert world.store.num_slots == 3
    assert full - world.store.num_bytes >= 20 * 64 * per_token
    assert world.store.num_bytes <= 4 * per_token * world.store.num_tokens


def test_memory_of_an_engine_follows_the_tokens_held():
    """One long text beside many short ones takes what their tokens take, not what the longest takes for each."""
    target = make_target(vocab_size=8, max_position_embeddings=2048)
    drafter = make_drafter(target)
    engine = BatchEngine(target, drafter, policy=FixedLength(3), max_sequences=17, prefill_chunk=1600)
    engine.add(prompt_ids(1500, 8)[0], max_new_tokens=40, do_sample=False)
    for i in range(32):
        engine.add(prompt_ids(34 + i % 20, 8, i)[0], max_new_tokens=8 + i % 7, do_sample=False)
    # Keys and values of 8 numbers of 8 bytes, 2 heads, 4 layers; the drafter has two more.
    per_token, most = 2 * 8 * 8 * 2 * (4 + 2), 0
    while engine.num_unfinished:
        engine.step()
        assert engine.cache_bytes <= 4 * per_token * max(engine.cache_tokens, 64)
        most = max(most, engine.cache_bytes)
    assert most < 17 * 1540 * per_token / 4


def test_nothing_is_lost_where_memory_runs_out_while_growing(monkeypatch):
    """`open` and `reserve` fail whole: every sequence has what it had, and the next try works."""
    world, rnd = World(), random.Random(5)
    for _ in range(4):
        world.open(60)
    world.forward(world.texts, [40] * 4, [33, 40, 20, 38])
    original, left = cache._Pool._resized, 0

    def resized(self, old, room):
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("no memory")
        return original(self, old, room)

    monkeypatch.setattr(cache._Pool, "_resized", resized)
    failed = 0
    for allowed in (0, 1, 2, 3):
        left = allowed
        try:
            for _ in range(4):
                world.open(60)
        except torch.OutOfMemoryError:
            failed += 1
        world.check_contents()
    assert failed
    left = 100
    world.forward(world.texts, [rnd.randint(1, 9) for _ in world.texts], [1] * len(world.texts))

    def fail(self, layer, keys, values):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(cache._Pool, "of_layer", fail)
        with pytest.raises(MemoryError):
            world.store.reserve(world.texts[1].slot, 300)
    world.check_contents()
    world.store.reserve(world.texts[1].slot, 300)
    world.check_contents()


def test_closing_works_where_there_is_no_memory_to_shrink(monkeypatch):
    """A request makes way because memory ran out: giving its place back must not need memory."""
    world = World()
    for _ in range(8):
        world.open(60)
    world.forward(world.texts, [20] * 8, [20] * 8)
    original, allowed = cache._Pool._resized, 1

    def resized(self, old, room):
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            raise torch.OutOfMemoryError("no memory")
        return original(self, old, room)

    monkeypatch.setattr(cache._Pool, "_resized", resized)
    for text in world.texts[2:]:
        world.close(text)
    world.check_contents()
    monkeypatch.undo()
    for _ in range(5):
        world.open(60)
    world.forward(world.texts, [3] * 7, [3] * 7)
    world.check_contents()


def test_a_text_without_finite_numbers_does_not_spoil_the_next_in_its_place():
    world = World()
    long, broken = world.open(60), world.open(60)
    world.forward([long], [50], [50])
    layout = Layout([broken.slot], [30], CPU)
    for layer in range(2):
        layout.write(
            layer, torch.full((1, 2, 30, 4), torch.nan).double(), torch.full((1, 2, 30, 6), torch.nan).double()
        )
    world.close(broken)
    world.forward([long, world.open(60)], [2, 3], [2, 3])
