"""Measuring the step-rate table of a pair on this machine (`dspark-hf profile`, and by itself at first use).

Owns: the forwards that are timed, their order, the key a table holds for. Does not own: the table (`scheduling.step_rates`).
Axes: B tokens in one forward, `depth` tokens of context. Units: seconds.

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
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from ..linear.linear_choices import cpu_name, quiet_progress
from ..model.configuration_dspark import CALIBRATION_FIELDS
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.admission import FixedLength
from ..scheduling.step_costs import StepRates, load_step_rates
from .prompt_lookup import MOST_TOKENS
from .quick_forward import grouped_attention
from .stats import synchronize
from .trial_forwards import context_length, filled_cache, target_run
from .tuned_pair import linear_layers_of, tuned

logger = logging.get_logger(__name__)
QUICK_DEPTHS = (128, 1024)
DEPTHS = (128, 1024, 4096)
MAX_ROWS = 64


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
        "top_candidates": drafter.top_candidates,
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


def step_rates_of(target: PreTrainedModel, drafter: DSparkDraftModel) -> StepRates:
    """The pair's table: the one in use, else the stored one, else one measured now in about ten seconds and stored."""
    key = table_key(target, drafter)
    if drafter.step_rates is not None and (not drafter.step_rates.key or drafter.step_rates.key == key):
        return drafter.step_rates
    rates = load_step_rates(key)
    if rates is None:
        rows = {*range(1, drafter.config.num_draft_tokens + 2), 12, MOST_TOKENS + 1}
        plan = ProfilePlan(tuple(sorted(rows)), QUICK_DEPTHS, sweeps=5, seconds=8.0)
        rates = measure_step_rates(target, drafter, plan, description="first use: measuring step rates")
        try:
            logger.warning(f"Step rates of this pair on this machine are measured and kept in {rates.save()}.")
        except OSError as error:
            logger.warning(f"The step rates are measured but can't be kept ({error}); the next process measures again.")
    drafter.step_rates = rates
    return rates


@torch.inference_mode()
def measure_step_rates(
    target: PreTrainedModel, drafter: DSparkDraftModel, plan: ProfilePlan, description: str = "profile"
) -> StepRates:
    """Time target forwards and drafts; lower quartiles of interleaved, warmed-up sweeps.

    A depth that does not fit the target's context is measured as deep as it goes.

    Raises:
        ValueError: the target's context is shorter than the longest forward.
    """
    drafter.bind_target(target)
    rows = sorted({1, *plan.rows})
    room = context_length(target) - max(rows)
    depths = sorted({min(d, room) for d in plan.depths})
    if room < 1:
        raise ValueError(
            f"The target's context of {context_length(target)} tokens has no room for {max(rows)} in one forward."
        )
    with tuned(target, drafter), grouped_attention():
        runs: dict[tuple, Callable[[], None]] = {}
        for depth in depths:
            cache = filled_cache(target, depth)
            runs |= {("target", depth, b): target_run(target, cache, b) for b in rows}
        for k in range(1, drafter.config.num_draft_tokens + 1):
            runs["block", k] = _draft_run(drafter, k, FixedLength(0))
            runs["draft", k] = _draft_run(drafter, k, None)
        seconds = timed_sweeps(runs, plan, target.device, description)
    typical = {name: lower_quartile(values) for name, values in seconds.items()}
    lengths = range(1, drafter.config.num_draft_tokens + 1)
    steps = [(typical["draft", k] - typical["block", k]) / k for k in lengths]
    return StepRates(
        rows=rows,
        depths=depths,
        target_seconds=[[typical["target", d, b] for b in rows] for d in depths],
        target_spread=[[_spread(seconds["target", d, b]) for b in rows] for d in depths],
        block_seconds=[typical["block", k] for k in lengths],
        draft_step_seconds=max(statistics.median(steps), 0.0),
        key=table_key(target, drafter),
    )


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


def _draft_run(drafter: DSparkDraftModel, limit: int, admission: FixedLength | None) -> Callable[[], None]:
    """A draft with two tokens of new context, as an average round has it."""
    config = drafter.config
    width = len(config.target_layer_ids) * config.target_hidden_size
    new = torch.zeros(1, 2, width, dtype=drafter.dtype, device=drafter.device)
    text = torch.ones(1, 64, dtype=torch.long, device=drafter.device)
    cache = DynamicCache()
    drafter.draft(text, new.new_zeros(1, 64, width), cache, max_tokens=1)

    def run() -> None:
        drafter.draft(text, new, cache, admission=admission, max_tokens=limit)
        cache.crop(-2)

    return run
