"""The drafter's context window: what a draft sees, what is kept, next turns, memory."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, make_eagle3, make_target, prompt_ids
from transformers import GenerationConfig, LogitsProcessorList

from dspark_hf import DSparkConfig, DSparkDraftModel, FixedLength
from dspark_hf.decoding import drafting as drafting_module
from dspark_hf.decoding.candidate_generator import DSparkCandidateGenerator
from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of
from dspark_hf.decoding.draft_context import DraftContext, context_of, keep_context
from dspark_hf.decoding.ragged_cache import RaggedStore

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}
DRAFTERS = {
    "block": (make_drafter, {}),
    "fill-in": (make_drafter, {"sample_from_anchor": False}),
    "sliding": (make_drafter, SLIDING),
    "sliding-query": (make_drafter, SLIDING | {"sliding_window_origin": "query", "sliding_window_non_causal": True}),
    "eagle3": (make_eagle3, {}),
}
WIDTH = 64  # of the features of two tapped layers


@pytest.fixture
def target():
    return make_target()


@pytest.fixture(params=DRAFTERS)
def windowed(request, target):
    """Drafters of every kind that see 2 sinks and 8 to 10 last tokens."""
    make, settings = DRAFTERS[request.param]
    drafter = make(target, context_window=8, context_sinks=2, **settings)
    drafter.options.policy = FixedLength(drafter.config.num_draft_tokens)
    return drafter


def generator_of(drafter, target) -> DSparkCandidateGenerator:
    config = GenerationConfig(max_length=200, do_sample=False)
    return DSparkCandidateGenerator(drafter, target, config, LogitsProcessorList())


def features(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_sees(drafter, proposal, ids, everything, kept):
    """`proposal` is what is drafted where the whole text was read, and all but the `kept` positions is masked."""
    length = everything.shape[1]
    mask = torch.zeros(1, length + drafter.config.block_size)
    mask[:, length:] = 1
    mask[:, kept] = 1
    whole = drafter.draft(ids, everything, attention_mask=mask)
    torch.testing.assert_close(proposal.probs(24), whole.logits[0].softmax(-1))
    assert torch.equal(proposal.token_ids, whole.token_ids[0])


def empty_context(start: int = 0, drafter_id: int = 0) -> DraftContext:
    store = RaggedStore()
    context = DraftContext(drafter_id, store, store.open(1))
    context.slot.start = start
    return context


def read(context, *counts):
    for i, count in enumerate(counts):
        context.add(features(count, seed=i))


# -- what a draft sees -----------------------------------------------------------------------------------------------


def test_a_long_prompt(windowed, target):
    candidates, ids, new = generator_of(windowed, target), prompt_ids(41), features(40)
    candidates.observe(new)
    kept = [0, 1, *range(32, 40)]
    assert candidates.context.positions() == kept
    assert_sees(windowed, candidates.propose(ids), ids, new, kept)
    assert candidates.drafting.backlog == len(kept)  # what is dropped was never projected


def test_a_text_that_grows(windowed, target):
    candidates, ids, new = generator_of(windowed, target), prompt_ids(61), features(60)
    end = 0
    for count in (7, 1, 3, 1, 1, 4, 2, 12, 1, 1, 5, 3, 2, 4):
        candidates.observe(new[:, end : end + count])
        end += count
        kept = candidates.context.positions()
        assert candidates.context.end == end
        assert kept[:2] == [0, 1] and kept[2:] == list(range(max(2, end - len(kept) + 2), end))
        assert min(end, 10) <= len(kept) <= 12
        assert_sees(windowed, candidates.propose(ids[:, : end + 1]), ids[:, : end + 1], new[:, :end], kept)
        assert candidates.context.slot.length == len(kept)


def test_projecting_in_pieces_is_projecting_at_once(windowed, target, monkeypatch):
    blocks, ids = [], prompt_ids(31)
    windowed.config.context_window = None
    for most in (256, 4):
        monkeypatch.setattr(drafting_module, "MOST_PENDING", most)
        candidates = generator_of(windowed, target)
        candidates.observe(features(30))
        blocks.append(candidates.propose(ids))
    torch.testing.assert_close(blocks[0].scores(24), blocks[1].scores(24))


def test_a_short_text_is_seen_whole(windowed, target):
    rounds = []
    for window in (None, 64):
        windowed.config.context_window = window
        target.generate(prompt_ids(), max_new_tokens=40, do_sample=False, assistant_model=windowed)
        rounds.append([(r.drafted, r.accepted, r.survival) for r in windowed.last_generation.history])
    assert rounds[0] == rounds[1]


# -- output ----------------------------------------------------------------------------------------------------------


def test_greedy_is_token_identical_and_the_cache_bounded(windowed, target):
    ids = prompt_ids(40)
    plain = target.generate(ids, max_new_tokens=90, do_sample=False)
    fast = target.generate(
        ids, max_new_tokens=90, do_sample=False, assistant_model=windowed, return_dict_in_generate=True
    )
    assert torch.equal(plain, fast.sequences)
    context = cache_of(fast).dspark_context
    assert context.end == 40 + 90 - 1
    assert context.num_kept <= 2 + 8 + 8 // 4


def test_left_padding(windowed, target):
    ids = prompt_ids(30)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(35) >= 5).long()[None]
    arguments = {"max_new_tokens": 20, "do_sample": False, "assistant_model": windowed}
    plain = target.generate(ids, **arguments)
    rounds = windowed.last_generation.history
    assert torch.equal(target.generate(padded, attention_mask=mask, **arguments)[:, 5:], plain)
    assert [r.accepted for r in windowed.last_generation.history] == [r.accepted for r in rounds]


def test_an_eagle3_drafter_after_a_prompt_of_embeddings(target):
    """Of the prompt only the last token has a known one behind it, wherever the window's gap is."""
    for length, sinks in ((3, 4), (30, 2), (5, 0)):
        drafter = make_eagle3(target, context_window=6, context_sinks=sinks)
        drafter.options.policy = FixedLength(4)
        embeds = target.get_input_embeddings()(prompt_ids(length))
        arguments = {"inputs_embeds": embeds, "max_new_tokens": 30, "do_sample": False}
        output = target.generate(assistant_model=drafter, return_dict_in_generate=True, **arguments)
        assert torch.equal(output.sequences, target.generate(**arguments))
        assert cache_of(output).dspark_context.end == length + 29


def test_what_is_before_a_position_is_forgotten():
    for position, kept in ((0, [0, 1, 12, 13, 14]), (1, [1, 12, 13, 14]), (7, [12, 13, 14]), (13, [13, 14])):
        context = empty_context()
        context.limit(3, 2)
        read(context, 15)
        assert context.positions() == [0, 1, 12, 13, 14]
        context.forget_before(position)
        assert context.positions() == kept
        assert context.end == 15


# -- next turns ------------------------------------------------------------------------------------------------------


def test_next_turns(windowed, target):
    cache, ids = None, prompt_ids(25)
    for turn in range(3):
        given = {} if cache is None else {CACHE_ARGUMENT: cache}
        plain = target.generate(ids, max_new_tokens=15, do_sample=False)
        fast = target.generate(
            ids, max_new_tokens=15, do_sample=False, assistant_model=windowed, return_dict_in_generate=True, **given
        )
        assert torch.equal(plain, fast.sequences)
        cache = cache_of(fast)
        context = cache.dspark_context
        assert context.end == cache.get_seq_length() == plain.shape[1] - 1
        assert context.num_kept <= 12
        ids = torch.cat([plain, prompt_ids(9, seed=turn)], dim=1)


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        (40, [0, 1, *range(32, 40)]),
        (35, [0, 1, 32, 33, 34]),
        (32, [0, 1]),
        (20, [0, 1]),
        (2, [0, 1]),
        (1, [0]),
    ],
)
def test_cropping_back(windowed, target, end, kept):
    """Also into what was dropped: the sinks stay, and the text that follows stands in its true places."""
    candidates, ids, new = generator_of(windowed, target), prompt_ids(41), features(40)
    candidates.observe(new)
    candidates.propose(ids)
    context = candidates.context
    context.crop(end)
    assert context.end == end
    assert context.positions() == kept
    other = features(2, seed=9)
    context.add(other)
    kept = [*kept, end, end + 1]
    assert context.positions() == kept
    ids = torch.cat([ids[:, : end + 1], prompt_ids(2, seed=5)], dim=1)
    assert_sees(windowed, candidates.propose(ids), ids, torch.cat([new[:, :end], other], dim=1), kept)


def test_a_cache_that_was_cropped_before_its_context_begins(drafter, target):
    class Cache:
        pass

    cache = Cache()
    context = empty_context(10, id(drafter))
    read(context, 5)
    keep_context(cache, context)
    assert context_of(cache, drafter, 12).end == 12
    fresh = context_of(cache, drafter, 6)
    assert (fresh.slot.start, fresh.end, fresh.num_kept) == (6, 6, 0)


def test_the_window_may_change_between_turns():
    context = empty_context()
    context.limit(None, 4)
    read(context, 60)
    assert context.num_kept == 60
    context.limit(8, 4)
    assert context.positions() == [*range(4), *range(52, 60)]
    context.limit(None, 0)  # what is dropped stays dropped, and the sinks are those that are there
    read(context, 20)
    assert context.positions() == [*range(4), *range(52, 80)]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_features_of_a_long_prompt_are_not_held(drafter, target):
    drafter.config.context_window, drafter.config.context_sinks = 8, 2
    candidates = generator_of(drafter, target)
    candidates.observe(features(5000))
    held = sum(part.untyped_storage().nbytes() for part in candidates.context.pending)
    assert held == 10 * WIDTH * 8


@pytest.mark.parametrize("make", [make_drafter, make_eagle3])
def test_waiting_features_are_bounded_while_nothing_is_drafted(target, make, monkeypatch):
    monkeypatch.setattr(drafting_module, "MOST_PENDING", 16)
    drafter, waiting = make(target), []
    drafter.generation_config.num_assistant_tokens = 0
    draft = drafting_module.Drafting.draft

    def watched(self, sequences, *args):
        waiting.append(sequences[0].draft_context.num_pending)
        return draft(self, sequences, *args)

    monkeypatch.setattr(drafting_module.Drafting, "draft", watched)
    arguments = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(prompt_ids(7), assistant_model=drafter, **arguments)
    assert max(waiting) == 17
    context = cache_of(first).dspark_context
    assert context.slot.length > 40
    # A drafter that was never asked has read it all the same.
    drafter.generation_config.num_assistant_tokens = 4
    drafter.options.policy = FixedLength(4)
    ids = torch.cat([first.sequences, prompt_ids(4, seed=8)], dim=1)
    fast = target.generate(ids, assistant_model=drafter, **{CACHE_ARGUMENT: cache_of(first)} | arguments)
    assert torch.equal(fast.sequences, target.generate(ids, **arguments).sequences)


# -- config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_window": 0}, "context_window must be None or a whole number from 1, got 0"),
        ({"context_sinks": -1}, "context_sinks must be a whole number from 0, got -1"),
    ],
)
def test_config_refuses(target, drafter, settings, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**settings)
    for name, value in settings.items():  # at run time too
        setattr(drafter.config, name, value)
    with pytest.raises(ValueError, match=message):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_save_and_load(target, drafter, tmp_path):
    assert (drafter.config.context_window, drafter.config.context_sinks) == (None, 4)
    drafter.config.context_window = 1024
    drafter.save_pretrained(tmp_path)
    assert DSparkDraftModel.from_pretrained(tmp_path).config.context_window == 1024
