"""The step-rate table: reading, correcting, keeping it, and measuring one."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from test_policies import round_record, sequence_record

from dspark_hf import DSparkDraftModel, StepRates, scheduled, step_rates_of
from dspark_hf.decoding import profiling
from dspark_hf.decoding.profiling import ProfilePlan, measure_step_rates, table_key
from dspark_hf.linear import linear_forms
from dspark_hf.scheduling.step_costs import load_step_rates, table_path

JAGGED = {1: 0.062, 2: 0.096, 3: 0.119, 4: 0.096, 6: 0.086, 8: 0.091}


def test_cost_is_monotone_and_the_measured_curve_stays_jagged():
    rates = StepRates.of_target(JAGGED)
    assert [rates.measured(b, 1) for b in JAGGED] == list(JAGGED.values())
    costs = [rates.cost(b, 1) for b in range(1, 9)]
    assert costs == sorted(costs)
    assert rates.cost(2, 1) == rates.cost(4, 1) == 0.086
    assert rates.padded_rows(3, 1) == 6
    assert rates.padded_rows(1, 1) == 1
    assert rates.padded_rows(6, 1) == 6
    assert rates.cost(5, 1) == pytest.approx(0.086)
    assert rates.measured(16, 1) > rates.measured(8, 1)


def test_depths_are_interpolated():
    rates = StepRates([1, 2], [100, 300], [[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0]] * 2, [0.5, 0.6], 0.1)
    assert rates.cost(1, 10) == rates.cost(1, 100) == 1.0
    assert rates.cost(2, 200) == pytest.approx(3.0)
    assert rates.cost(1, 500) == pytest.approx(3.0)
    assert rates.draft_cost(2, 1) == pytest.approx(0.7)
    assert rates.draft_cost(0, 0) == 0.0
    assert rates.round_cost(1, 1, 2, 100) == pytest.approx(2.6)


def live_round(rates: StepRates, count: int = 1, **changes) -> None:
    """One round in which each of `count` sequences verified one drafted token."""
    sequence = sequence_record(planned=1, drafted=1, verified=1, rows=2)
    rates.observe(round_record([sequence] * count, **changes))


def test_live_rounds_correct_slowly():
    rates = StepRates([1, 2], [1], [[1.0, 2.0]], [[0.0, 0.0]], [0.5], 0.0)
    live_round(rates, draft_seconds=0.5, verify_seconds=4.0)
    assert 2.0 < rates.cost(2, 1) < 2.6
    for _ in range(200):
        live_round(rates, draft_seconds=1.0, verify_seconds=4.0)
    assert rates.cost(2, 1) == pytest.approx(4.0, rel=0.02)
    assert rates.draft_cost(1, 1) == pytest.approx(1.0, rel=0.02)
    assert rates.cost(1, 1) > 1.1  # the whole machine is taken to be slower
    assert rates.target_seconds == [[1.0, 2.0]]  # what is kept in the file stays what was measured
    rates.live = False
    before = rates.cost(2, 1)
    live_round(rates, verify_seconds=40.0)
    assert rates.cost(2, 1) == before


def test_rounds_that_say_nothing_of_the_drafter():
    """A draft after many plain steps is no usual one; a copy drafts nothing, and its forward counts all the same."""
    for backlog, copied, count in ((500, False, 1), (1, True, 1), (40, False, 2)):
        rates = StepRates([1, 2], [1], [[1.0, 2.0]], [[0.0, 0.0]], [0.5], 0.0)
        sequence = sequence_record(planned=1, drafted=1, verified=1, rows=2, copied=copied)
        rates.observe(round_record([sequence] * count, backlog=backlog, draft_seconds=9.0, verify_seconds=8.0))
        assert rates.draft_cost(1, 1) == 0.5
        assert rates.cost(2, 1) > 2.0
    live_round(rates, 3, backlog=40, draft_seconds=9.0)
    assert rates.draft_cost(1, 1) > 0.5
    rates.observe(round_record([], rows=9))


def test_columns_for_several_sequences():
    table = [1, 8], [1], [[1.0, 2.0]], [[0.0, 0.0]], [0.5, 0.7], 0.1
    rates = StepRates(*table, {}, [2, 4], [0.2, 0.6], [[1.0, 1.2], [2.0, 2.2]], [0.15, 0.2])
    assert [rates.cost(8, 1, n) for n in (1, 2, 3, 4)] == pytest.approx([2.0, 2.2, 2.4, 2.6])
    assert [rates.draft_cost(1.5, 2, n) for n in (1, 2, 3)] == pytest.approx([0.8, 1.4, 1.95])
    assert rates.blocks_cost([2, 0, 1], 2) == pytest.approx(1.4)
    assert rates.blocks_cost([0, 0], 0) == 0.0
    sequences = [sequence_record(planned=n, drafted=n, rows=n + 1) for n in (1, 2, 0)]
    record = round_record(sequences, rows=8, prefill_rows=2)
    assert rates.record_cost(record) == pytest.approx(1.4 + rates.cost(6, 10, 3))
    for _ in range(200):
        live_round(rates, 4, rows=8, draft_seconds=4.4, verify_seconds=5.2)
    assert rates.cost(8, 1, 4) == pytest.approx(5.2, rel=0.02)
    assert rates.draft_cost(1, 1, 4) == pytest.approx(4.4, rel=0.02)
    with pytest.raises(ValueError, match="sequences must ascend from 2"):
        StepRates(*table, {}, [4, 2], [0.2, 0.6], [[1.0], [2.0]], [0.1, 0.2])


def test_a_table_for_a_few_sizes_of_forwards():
    """Compiled forwards: three rows cost what four do, and what live rounds taught stays."""
    rates = StepRates([1, 3, 4, 8], [1], [[1.0, 9.0, 2.0, 3.0]], [[0.0] * 4], [], 0.0)
    stepped = rates.stepped((1, 4, 8))
    assert [stepped.measured(b, 1) for b in (1, 2, 3, 4, 5, 8)] == [1.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    live_round(stepped, rows=4, verify_seconds=4.0)
    assert rates.stepped((1, 4, 8)) is stepped and stepped.cost(3, 1) > 2.0 and rates.cost(4, 1) == 2.0
    rates.live = False
    assert not rates.stepped((1, 4, 8)).live


@pytest.mark.parametrize(
    "values",
    [
        {"rows": [2, 3]},
        {"rows": [1, 1]},
        {"depths": []},
        {"target_seconds": [[1.0]]},
        {"target_seconds": [[1.0, float("nan")]]},
        {"target_seconds": [[1.0, 0.0]]},
    ],
)
def test_bad_tables(values):
    good = {"rows": [1, 2], "depths": [1], "target_seconds": [[1.0, 2.0]], "target_spread": [[0.0, 0.0]]}
    with pytest.raises(ValueError, match="StepRates"):
        StepRates(**good | {"block_seconds": [], "draft_step_seconds": 0.0} | values)


def test_a_table_is_kept_and_read_again(caplog):
    rates = StepRates([1, 2], [1], [[1.0, 2.0]], [[0.1, 0.1]], [0.5], 0.01, key={"device": "here"})
    assert load_step_rates(rates.key) is None
    path = rates.save()
    assert load_step_rates(rates.key) == rates
    assert load_step_rates({"device": "there"}) is None
    assert not list(path.parent.glob("*.tmp"))
    path.write_text(path.read_text()[:40])
    assert load_step_rates(rates.key) is None
    assert "measured anew" in caplog.text
    path.write_text("[]")
    assert load_step_rates(rates.key) is None


def test_measuring_a_tiny_pair(target, drafter):
    rates = measure_step_rates(target, drafter, ProfilePlan((1, 2, 3, 5), (16, 64), sweeps=2))
    assert rates.rows == [1, 2, 3, 5]
    assert rates.depths == [16, 64]
    assert len(rates.block_seconds) == drafter.config.num_draft_tokens
    assert all(s > 0 for line in rates.target_seconds for s in line)
    assert rates.key == table_key(target, drafter)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe"])
def test_measuring_other_families(family):
    target = make_target(family, dtype=torch.float32)
    rates = measure_step_rates(target, make_drafter(target), ProfilePlan((1, 2), (40,), sweeps=1))
    assert rates.depths == [40]


def test_depths_that_do_not_fit(target, drafter):
    assert measure_step_rates(target, drafter, ProfilePlan((1, 6), (40, 4096, 9999), sweeps=1)).depths == [40, 250]
    with pytest.raises(ValueError, match="context of 256"):
        measure_step_rates(target, drafter, ProfilePlan((1, 300), (40,)))
    with pytest.raises(ValueError, match="at least 1"):
        ProfilePlan((0,), (8,))


def calibrated(drafter: DSparkDraftModel) -> DSparkDraftModel:
    length = drafter.config.num_draft_tokens
    drafter.config.confidence_temperatures = [1.0] * length
    drafter.config.expected_acceptance = [0.5] * length
    return drafter


def test_first_use_measures_once_and_says_where(target, drafter, monkeypatch, caplog):
    calls = []
    real = profiling.measure_step_rates

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(profiling, "measure_step_rates", counted)
    arguments = {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(prompt_ids(), **arguments)
    for _ in range(2):
        fast = target.generate(prompt_ids(), assistant_model=calibrated(drafter), **arguments)
        assert torch.equal(plain, fast)
    assert drafter.last_generation.policy == "LookaheadScheduler"
    assert len(calls) == 1
    assert str(table_path(table_key(target, drafter))) in caplog.text
    another = calibrated(make_drafter(target))
    assert step_rates_of(target, another).target_seconds == drafter.options.step_rates.target_seconds
    assert len(calls) == 1


def test_a_table_holds_for_its_circumstances(monkeypatch):
    monkeypatch.setattr(linear_forms, "_WORTHWHILE", 0)
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    key = table_key(target, drafter)
    assert key == table_key(target, calibrated(drafter))  # calibration changes no cost
    drafter.options.skinny_linear = False
    assert key != table_key(target, drafter)
    drafter.options.skinny_linear = True
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert key != table_key(target, drafter)
    torch.set_num_threads(threads)
    assert key != table_key(make_target(num_hidden_layers=5, dtype=torch.float32), drafter)


def test_scheduled_for_a_drafter_without_confidence(target):
    drafter = make_drafter(target, enable_confidence_head=False)
    drafter.options.policy = scheduled(target, drafter)
    arguments = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(
        target.generate(prompt_ids(), **arguments), target.generate(prompt_ids(), assistant_model=drafter, **arguments)
    )
    assert drafter.last_generation.policy == "LookaheadScheduler"


def test_generate_finds_the_table_that_profile_kept():
    """Also where linear layers are swapped while it decodes (float32 on a CPU)."""
    target = make_target(dtype=torch.float32)
    profiled = measure_step_rates(target, make_drafter(target), ProfilePlan((1, 2, 3, 4, 5, 9), (16,), sweeps=1))
    profiled.save()
    drafter = calibrated(make_drafter(target))
    target.generate(prompt_ids(), max_new_tokens=6, do_sample=False, assistant_model=drafter)
    assert drafter.options.step_rates.rows == profiled.rows
    assert drafter.options.step_rates.key == table_key(target, drafter)


def test_an_unbound_drafter_finds_its_table(target):
    """The head's rows of a reduced draft vocabulary are among the linear layers that the table holds for."""
    target = make_target(dtype=torch.float32)
    first = make_drafter(target, draft_vocab_size=8)
    rates = step_rates_of(target, first)
    unbound = make_drafter(target, draft_vocab_size=8, bind=False)
    assert scheduled(target, unbound).step_rates == rates


def test_where_nothing_can_be_measured_whole_blocks_are_drafted(target, drafter, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(profiling, "measure_step_rates", fail)
    target.generate(prompt_ids(), max_new_tokens=8, do_sample=False, assistant_model=calibrated(drafter))
    assert drafter.last_generation.policy == "GuardedLength"
    assert "no such kernel" in caplog.text


def test_batch_columns_time_whole_drafts(monkeypatch):
    """A block for 1 or γ tokens of which none is drawn runs the parallel stage; each drawn token one step for all requests."""
    target = make_target()
    drafter = make_drafter(target)
    blocks, steps = [], []
    stage, project = type(drafter).run_layers, type(drafter.markov_head).project

    def counted_stage(model, hidden, *arguments):
        blocks.append(hidden.shape[0] * hidden.shape[1])
        return stage(model, hidden, *arguments)

    def counted_project(head, latent, rows):
        steps.append(latent.shape[0])
        return project(head, latent, rows)

    monkeypatch.setattr(type(drafter), "run_layers", counted_stage)
    monkeypatch.setattr(type(drafter.markov_head), "project", counted_project)
    rates = measure_step_rates(target, drafter, ProfilePlan((1, 2), (16,), sweeps=1), max_sequences=3)
    assert rates.sequences == [2, 3]
    width = drafter.config.block_size
    for count in (2, 3):  # warm-up and one sweep, of blocks and drafts for 1 and γ tokens
        assert blocks.count(count * width) == 8
        assert steps.count(count) == 2 * (1 + drafter.config.num_draft_tokens)
    assert all(s > 0 for line in rates.batch_block_seconds for s in line)
