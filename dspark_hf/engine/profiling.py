"""Measuring what several requests at once cost: the batch columns of a step-rate table.

Owns: ragged forwards and batched drafts that are timed. Does not own: the table (`scheduling.step_rates`), its other columns
(`decoding.profiling`).
Axes: R requests, K tokens drafted for each, B rows of one forward. Units: seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..decoding.commit import Text
from ..decoding.profiling import QUICK_DEPTHS, ProfilePlan, lower_quartile, measure_step_rates, table_key, timed_sweeps
from ..decoding.stats import GenerationStats
from ..decoding.tuned_pair import tuned
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.admission import FixedLength
from ..scheduling.batch import PerRequest
from ..scheduling.step_costs import StepRates, load_step_rates
from .drafting import BatchDrafter
from .runner import Runner, Span
from .sequence import Request, prepare

logger = logging.get_logger(__name__)
_DEPTH = 128
_MOST_ROWS = 256
_ROWS = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def batch_rates_of(target: PreTrainedModel, drafter: DSparkDraftModel, max_sequences: int) -> StepRates:
    """The pair's table with columns for up to `max_sequences`: the one in use, the stored one, or measured now and stored.

    Measuring takes about half a minute for 16 requests on a small machine.
    """
    key = table_key(target, drafter)
    for rates in (drafter.step_rates, load_step_rates(key)):
        if rates is not None and (not rates.key or (rates.key == key and _covers(rates, max_sequences))):
            drafter.step_rates = rates
            return rates
    rates = measure_batch_rates(target, drafter, max_sequences)
    try:
        logger.warning(
            f"Step rates for up to {max_sequences} requests at once are measured and kept in {rates.save()}."
        )
    except OSError as error:
        logger.warning(f"The step rates are measured but can't be kept ({error}); the next process measures again.")
    drafter.step_rates = rates
    return rates


def _covers(rates: StepRates, max_sequences: int) -> bool:
    return max_sequences == 1 or (bool(rates.sequences) and rates.sequences[-1] >= max_sequences)


def measure_batch_rates(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    max_sequences: int,
    plan: ProfilePlan | None = None,
    seconds: float = 15.0,
) -> StepRates:
    """A whole table with batch columns. plan: of the single-sequence part; by default up to all blocks of all requests."""
    counts = [2]
    while counts[-1] < max_sequences:
        counts.append(min(2 * counts[-1], max_sequences))
    length = drafter.config.num_draft_tokens
    if plan is None:
        most = min(counts[-1] * (length + 1), _MOST_ROWS)
        plan = ProfilePlan(tuple(b for b in _ROWS if b <= max(most, length + 1)), QUICK_DEPTHS, 5, seconds)
    rates = measure_step_rates(target, drafter, plan, "measuring step rates, one request")
    return dataclasses.replace(rates, **_batch_columns(target, drafter, counts, plan))


@torch.inference_mode()
def _batch_columns(
    target: PreTrainedModel, drafter: DSparkDraftModel, counts: Sequence[int], plan: ProfilePlan
) -> dict[str, list]:
    runner, batch = Runner(target, drafter), BatchDrafter(drafter)
    length = drafter.config.num_draft_tokens
    depth = min(_DEPTH, min(plan.depths))
    requests = [_stand_in(target, drafter, runner, batch, depth) for _ in range(counts[-1])]
    runs: dict[tuple, Callable[[], None]] = {}
    for count in counts:
        runs["ragged", count] = _forward(runner, requests[:count], 1)
        runs["single", count] = _forward(runner, requests[:1], count)
        for k in sorted({1, length}):
            runs["block", count, k] = _draft(batch, requests[:count], k, 0)
            runs["draft", count, k] = _draft(batch, requests[:count], k, k)
    with tuned(target, drafter), runner.armed():
        times = timed_sweeps(runs, plan, target.device, f"measuring step rates, up to {counts[-1]} requests")
    typical = {name: lower_quartile(values) for name, values in times.items()}

    def blocks(count: int) -> list[float]:
        low, high = typical["block", count, 1], typical["block", count, length]
        return [low + (high - low) * k / max(length - 1, 1) for k in range(length)]

    steps = [(typical["draft", c, length] - typical["block", c, length]) / length for c in counts]
    return {
        "sequences": list(counts),
        "sequence_seconds": [max(typical["ragged", c] - typical["single", c], 0.0) for c in counts],
        "batch_block_seconds": [blocks(c) for c in counts],
        "batch_step_seconds": [max(s, 0.0) for s in steps],
    }


def _stand_in(target, drafter, runner: Runner, batch: BatchDrafter, depth: int) -> Request:
    """A greedy request whose caches hold `depth` tokens (of zeros: only their number matters)."""
    ids = torch.ones(1, 1, dtype=torch.long, device=target.device)
    prepared = prepare(target, ids, GenerationConfig(max_new_tokens=1, do_sample=False), None, None, {})
    generator = torch.Generator(target.device)
    request = Request(
        id=0,
        prepared=prepared,
        text=Text(ids, prepared.config, prepared.criteria, None),
        generator=generator,
        draft_generator=generator,
        stats=GenerationStats(drafter.config.num_draft_tokens),
    )
    request.slot = runner.store.open(depth + _MOST_ROWS)
    request.draft_slot = batch.store.open(batch.room(depth + 2))
    request.slot.length = request.draft_slot.length = depth
    return request


def _forward(runner: Runner, requests: Sequence[Request], rows: int) -> Callable[[], None]:
    ids = torch.ones(rows, dtype=torch.long, device=runner.device)
    spans = [Span(r.slot, ids, rows) for r in requests if r.slot is not None]

    def run() -> None:
        runner.forward(spans)

    return run


def _draft(batch: BatchDrafter, requests: Sequence[Request], limit: int, drawn: int) -> Callable[[], None]:
    """A draft with two tokens of new context for each request, as an average step has it."""
    config = batch.drafter.config
    width = len(config.target_layer_ids) * config.target_hidden_size
    new = torch.zeros(1, 2, width, dtype=batch.drafter.dtype, device=batch.drafter.device)
    policy = _Drawn(drawn)

    def run() -> None:
        for request in requests:
            request.pending = [new]
        batch.extend(requests)
        batch.draft(requests, [limit] * len(requests), policy)
        for request in requests:
            assert request.draft_slot is not None
            request.draft_slot.length -= 2

    return run


class _Drawn(PerRequest):
    """Draws so many tokens of blocks that may be made for more."""

    def __init__(self, drawn: int) -> None:
        super().__init__(FixedLength(drawn))

    def admit(self, position: int, open_requests: Sequence[int], survival: Sequence[Sequence[float]]) -> list[bool]:
        return [self.policy.admit(position, []) for _ in open_requests]
