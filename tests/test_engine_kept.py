"""Finished texts that keep their cache for the next turn (`keep_finished`)."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, prompt_ids

from dspark_hf import BatchEngine, FixedLength
from dspark_hf.decoding.ragged_cache import RaggedStore


def fixed():
    return FixedLength(3)


def run_one(engine, ids, count=8):
    engine.add(ids, max_new_tokens=count, do_sample=False)
    (output,) = list(engine.run())
    assert output.error is None
    return output


def alone(target, ids, count=8):
    return target.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("cut", [0, 3, 11])
def test_the_next_turn_reads_only_what_is_new(with_drafter, cut, target):
    """Also where the new text leaves the old one before its end: drafts and text are those of a fresh start."""
    drafter = make_drafter(target) if with_drafter else None
    engine = BatchEngine(target, drafter, keep_finished=2, policy=fixed())
    first = run_one(engine, prompt_ids(30))
    text = torch.tensor([first.prompt_ids + first.token_ids])
    turn = torch.cat([text[:, : text.shape[1] - cut], prompt_ids(9, seed=8)], dim=1)
    again = run_one(engine, turn)
    assert again.token_ids == alone(target, turn)
    assert again.stats.prompt_tokens <= 9 + 1
    fresh = run_one(BatchEngine(target, drafter, policy=fixed()), turn)
    assert fresh.stats.prompt_tokens == turn.shape[1]
    assert [r.accepted for r in again.stats.history] == [r.accepted for r in fresh.stats.history]


def test_the_oldest_goes_first_and_nothing_short_is_used(target, drafter):
    engine = BatchEngine(target, drafter, keep_finished=2, policy=fixed())
    prompts = [prompt_ids(30, seed=s) for s in range(3)]
    for ids in prompts:
        run_one(engine, ids)
    assert engine._backend.store.num_slots == 2
    read = [run_one(engine, ids).stats.prompt_tokens for ids in (prompts[2], prompts[0])]
    assert read == [1, 30]
    assert run_one(engine, prompt_ids(10)).stats.prompt_tokens == 10


def test_kept_texts_make_way(target, drafter, monkeypatch):
    """For requests by `max_tokens_in_cache`, and where memory runs out."""
    engine = BatchEngine(target, drafter, keep_finished=4, max_tokens_in_cache=80, policy=fixed())
    for seed in range(3):
        run_one(engine, prompt_ids(30, seed=seed))
        assert engine.cache_tokens <= 80
    opened = RaggedStore.open

    def short_of_memory(store, capacity):
        if store is engine._backend.store and store.num_slots:
            raise MemoryError
        return opened(store, capacity)

    monkeypatch.setattr(RaggedStore, "open", short_of_memory)
    ids = prompt_ids(30, seed=9)
    assert run_one(engine, ids).token_ids == alone(target, ids)


def test_faults_and_cancelled_requests_keep_nothing(target, drafter):
    engine = BatchEngine(target, drafter, keep_finished=4, policy=fixed())
    request = engine.add(prompt_ids(30), max_new_tokens=50, do_sample=False)
    engine.step()
    assert engine.cancel(request)
    assert engine.cache_tokens == engine.cache_bytes == 0
