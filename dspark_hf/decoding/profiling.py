"""Measuring the step-rate table of a pair on this machine (`dspark-hf profile`, and by itself at first use).

Axes: B tokens in one forward, `depth` tokens of context, R requests, K tokens drafted for each. Units: seconds.
Every sweep goes once through all measurements in another order, so that a slow moment of the machine touches all alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import logging

from ..linear.linear_choices import cpu_name, quiet_progress
from ..model.configuration_dspark import CALIBRATION_FIELDS
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.policy import FixedLength
from ..scheduling.step_costs import StepRates, load_step_rates
from .attention import grouped_attention
from .backend import Rows
from .draft_context import DraftContext
from .drafting import Drafting
from .prompt_lookup import MOST_TOKENS
from .ragged_cache import RaggedStore
from .ragged_target import RaggedTarget
from .sequence import TextSequence
from .statistics import GenerationStats, synchronize
from .trial_forwards import context_length, filled_cache, target_run
from .tuned_pair import linear_layers_of, tuned

logger = logging.get_logger(__name__)
QUICK_DEPTHS = (128, 1024)
DEPTHS = (128, 1024, 4096)
MAX_ROWS = 64
_MANY_DEPTH = 128  # context of each of several requests
_MOST_ROWS = 256
_MANY_ROWS = (12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class ProfilePlan:
    """What is measured: every B of `rows` at every depth, in at most `sweeps` sweeps and about `seconds` (one at least)."""

    rows: tuple[int, ...]
    depths: tuple[int, ...]
    sweeps: int = 7
    seconds: float = math.inf

    def __post_init__(self) -> None:
        for name, values in (("rows", self.rows), ("depths", self.depths)):
            if not values or min(values) < 1:
                raise ValueError(f"Profile: {name} must be numbers of at least 1, got {list(values)}.")
        if self.sweeps < 1:
            raise ValueError(f"Profile: sweeps must be at least 1, got {self.sweeps}.")


def table_key(target: PreTrainedModel, drafter: DSparkDraftModel) -> dict[str, Any]:
    """What a table holds for: the pair, dtype, device, attention, threads and versions."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    quantization = target.config.to_dict().get("quantization_config")
    return {
        "target": str(target.config._name_or_path),
        "target_config": _digest(target.config),
        "quantization": None if quantization is None else str(quantization),
        "drafter": str(drafter.config._name_or_path),
        "drafter_config": _digest(drafter.config),
        "top_candidates": drafter.num_candidates(drafter.options.top_candidates),
        "dtype": str(target.dtype),
        "drafter_dtype": str(drafter.dtype),
        "device": f"{device.type}: {name}",
        "drafter_device": drafter.device.type,
        "attention": str(target.config._attn_implementation),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "linear_layers": linear_layers_of(target, drafter).digest,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _digest(config: Any) -> str:
    """A hash of what makes the forward: without names, versions, what calibration adds and what a draft sees of a long text."""
    ignored = ("_name_or_path", "transformers_version", "context_window", "context_sinks", *CALIBRATION_FIELDS)
    record = {k: v for k, v in config.to_dict().items() if k not in ignored}
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:16]


def step_rates_of(target: PreTrainedModel, drafter: DSparkDraftModel, max_sequences: int = 1) -> StepRates:
    """The pair's table for up to `max_sequences` at once: the one in use, else the stored one, else measured now and stored.

    Measuring takes about ten seconds, half a minute for 16 requests.
    """
    key = table_key(target, drafter)
    for rates in (drafter.options.step_rates, load_step_rates(key)):
        if rates is None or (rates.key and rates.key != key):
            continue
        if not rates.key or max_sequences == 1 or (rates.sequences and rates.sequences[-1] >= max_sequences):
            drafter.options.step_rates = rates
            return rates
    most = drafter.config.num_draft_tokens + 1
    rows = {*range(1, most + 1), 12, MOST_TOKENS + 1}
    if max_sequences > 1:
        rows |= {b for b in _MANY_ROWS if b <= max(max_sequences * most, most)}
    plan = ProfilePlan(tuple(sorted(rows)), QUICK_DEPTHS, sweeps=5, seconds=8.0 if max_sequences == 1 else 15.0)
    rates = measure_step_rates(target, drafter, plan, max_sequences, "first use: measuring step rates")
    try:
        logger.warning(f"Step rates of this pair on this machine are measured and kept in {rates.save()}.")
    except OSError as error:
        logger.warning(f"The step rates are measured but can't be kept ({error}); the next process measures again.")
    drafter.options.step_rates = rates
    return rates


@torch.inference_mode()
def measure_step_rates(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    plan: ProfilePlan,
    max_sequences: int = 1,
    description: str = "profile",
) -> StepRates:
    """Time target forwards and drafts; lower quartiles of interleaved, warmed-up sweeps.

    A depth that does not fit the target's context is measured as deep as it goes. `max_sequences` above 1 adds what several
    requests at once cost, in a second run of sweeps.

    Raises:
        ValueError: the target's context is shorter than the longest forward; a target that can't serve several requests.
    """
    drafter.bind_target(target)
    rows = sorted({1, *plan.rows})
    room = context_length(target) - max(rows)
    depths = sorted({min(d, room) for d in plan.depths})
    if room < 1:
        raise ValueError(
            f"The target's context of {context_length(target)} tokens has no room for {max(rows)} in one forward."
        )
    lengths = range(1, drafter.config.num_draft_tokens + 1)
    stand_ins = _StandIns(target, drafter, min(_MANY_DEPTH, *depths))
    runs: dict[tuple, Callable[[], None]] = {}
    with tuned(target, drafter), grouped_attention():
        for depth in depths:
            cache = filled_cache(target, depth)
            runs |= {("target", depth, b): target_run(target, cache, b) for b in rows}
        for k in lengths:
            runs |= {("block", 1, k): stand_ins.draft(1, k, 0), ("draft", 1, k): stand_ins.draft(1, k, k)}
        seconds = timed_sweeps(runs, plan, target.device, description)
    typical = {name: lower_quartile(values) for name, values in seconds.items()}
    steps = [(typical["draft", 1, k] - typical["block", 1, k]) / k for k in lengths]
    return StepRates(
        rows=rows,
        depths=depths,
        target_seconds=[[typical["target", d, b] for b in rows] for d in depths],
        target_spread=[[_spread(seconds["target", d, b]) for b in rows] for d in depths],
        block_seconds=[typical["block", 1, k] for k in lengths],
        draft_step_seconds=max(statistics.median(steps), 0.0),
        key=table_key(target, drafter),
        **_columns_of_many(target, drafter, stand_ins, max_sequences, plan),
    )


def _columns_of_many(
    target: PreTrainedModel, drafter: DSparkDraftModel, stand_ins: _StandIns, max_sequences: int, plan: ProfilePlan
) -> dict[str, list]:
    counts = [2]
    while counts[-1] < max_sequences:
        counts.append(min(2 * counts[-1], max_sequences))
    if max_sequences < 2:
        return {}
    backend, length = RaggedTarget(target, drafter), drafter.config.num_draft_tokens
    runs: dict[tuple, Callable[[], None]] = {}
    for count in counts:
        runs["ragged", count] = stand_ins.forward(backend, count, 1)
        runs["single", count] = stand_ins.forward(backend, 1, count)
        for k in sorted({1, length}):
            runs |= {
                ("block", count, k): stand_ins.draft(count, k, 0),
                ("draft", count, k): stand_ins.draft(count, k, k),
            }
    with tuned(target, drafter), backend.armed():
        times = timed_sweeps(runs, plan, target.device, f"measuring step rates, up to {counts[-1]} requests")
    typical = {name: lower_quartile(values) for name, values in times.items()}

    def blocks(count: int) -> list[float]:
        low, high = typical["block", count, 1], typical["block", count, length]
        return [low + (high - low) * k / max(length - 1, 1) for k in range(length)]

    steps = [(typical["draft", c, length] - typical["block", c, length]) / length for c in counts]
    return {
        "sequences": counts,
        "sequence_seconds": [max(typical["ragged", c] - typical["single", c], 0.0) for c in counts],
        "batch_block_seconds": [blocks(c) for c in counts],
        "batch_step_seconds": [max(s, 0.0) for s in steps],
    }


class _StandIns:
    """Greedy sequences whose caches hold `depth` tokens (of zeros: only their number matters), made as they are needed."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel, depth: int) -> None:
        self._target, self._drafter, self._depth = target, drafter, depth
        self._drafting, self._store = Drafting(drafter), RaggedStore()
        self._sequences: list[TextSequence] = []
        width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
        # Two tokens of new context, as an average round has them.
        self._new = torch.zeros(1, 2, width, dtype=drafter.dtype, device=drafter.device)

    def _first(self, count: int) -> list[TextSequence]:
        config = GenerationConfig(max_new_tokens=1, do_sample=False)
        while len(self._sequences) < count:
            ids = torch.ones(1, self._depth + 3, dtype=torch.long, device=self._target.device)
            stats = GenerationStats(self._drafter.config.num_draft_tokens)
            s = TextSequence(ids, config, LogitsProcessorList(), StoppingCriteriaList(), None, stats)
            s.draft_context = DraftContext.open(self._drafter, self._store)
            s.draft_context.store.reserve(s.draft_context.slot, self._depth + 2 + self._drafter.config.block_size)
            s.draft_context.slot.length = self._depth
            self._sequences.append(s)
        return self._sequences[:count]

    def draft(self, count: int, limit: int, drawn: int) -> Callable[[], None]:
        """Of so many sequences, blocks made for `limit` tokens of which `drawn` are drawn."""
        sequences, policy = self._first(count), FixedLength(drawn)

        def run() -> None:
            for s in sequences:
                s.draft_context.pending = [self._new]
            self._drafting.draft(sequences, [limit] * count, policy)
            for s in sequences:
                s.draft_context.slot.length = self._depth

        return run

    def forward(self, backend: RaggedTarget, count: int, rows: int) -> Callable[[], None]:
        """One of the target over `rows` tokens of each of so many sequences."""
        sequences = self._first(count)
        ids = torch.ones(rows, dtype=torch.long, device=self._target.device)
        for s in sequences:
            if s.slot is None:
                s.slot = backend.store.open(self._depth + _MOST_ROWS)
                s.slot.length = self._depth
        spans = [Rows(s, ids, rows) for s in sequences]

        def run() -> None:
            backend.read(spans, 0)

        return run


def timed_sweeps(
    runs: Mapping[tuple, Callable[[], None]], plan: ProfilePlan, device: torch.device, description: str
) -> dict[tuple, list[float]]:
    """Seconds of every run, warmed up and interleaved in another order each sweep."""
    seconds: dict[tuple, list[float]] = {name: [] for name in runs}
    order = list(runs)
    shuffle = random.Random(0).shuffle
    with quiet_progress(total=len(order) * (plan.sweeps + 1), desc=description) as bar:
        for run in runs.values():  # warm-up
            run()
            bar.update()
        started = time.perf_counter()
        for sweep in range(plan.sweeps):
            shuffle(order)
            for name in order:
                synchronize(device)
                start = time.perf_counter()
                runs[name]()
                synchronize(device)
                seconds[name].append(time.perf_counter() - start)
                bar.update()
            spent = time.perf_counter() - started
            if spent * (sweep + 2) / (sweep + 1) > plan.seconds:
                break
    return seconds


def lower_quartile(values: Sequence[float]) -> float:
    """What a run takes when nothing else disturbs the machine: disturbances only ever add."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def _spread(values: Sequence[float]) -> float:
    """Interquartile range."""
    if len(values) < 2:
        return 0.0
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return quarters[2] - quarters[0]
