"""Which form of its linear layers is fastest for a model on this CPU, by the number of rows: measured once and kept.

Axes: M rows of one forward.

One form is chosen for all layers of a model, by whole forwards. Single products do not tell what they cost there: their weights
stay in the processor's cache, and the threads of one library wait while another's run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers.utils import logging

from ..loading.files import cache_folder, write_json
from .linear_forms import swappable_layers
from .linear_layers import ROWS, LinearLayers, drop_copies

logger = logging.get_logger(__name__)
# A bar that vanishes when it is done, and is not drawn at all in a pipe.
quiet_progress = functools.partial(tqdm, unit="run", leave=False, disable=None)
_WORTH = 0.98  # another form than the stock one must take less than this share of its time
_VISITS, _RUNS = 3, 2  # each form in turn, and again, so that a slow moment of the machine touches all alike
_FEW = 8  # rows; with more, one visit tells enough
_LONGEST = 1.5  # seconds for one number of rows, after which no further visit begins
_CACHE = 16 << 20  # float32 numbers that fill the processor's cache

RunOf = Callable[[int], Callable[[], object]]  # of M rows, what runs them once


@functools.cache
def cpu_name() -> str:
    """The processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@torch.inference_mode()
def chosen_forms(
    part: str, models: Sequence[nn.Module], forms: Sequence[str], make_run: Callable[[], RunOf]
) -> list[str]:
    """The fastest of `forms` for each of `ROWS`, from the file or measured now and kept.

    part: "target" or "drafter". `make_run()(rows)` runs the layers of `models` once.
    """
    layers = swappable_layers(models)
    key = {"part": part, "forms": forms, "rows": ROWS, "layers": _counts(layers), "cpu": cpu_name()}
    key |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "linear_layers" / f"{digest}.json"
    try:
        choice = json.loads(path.read_text(encoding="utf-8"))["choice"]
        if isinstance(choice, list) and len(choice) == len(ROWS) and set(choice) <= set(forms):
            return choice
    except (OSError, ValueError, KeyError, TypeError):
        pass
    choice = []
    try:
        choice = measure_forms(part, models, forms, make_run())
    finally:
        drop_copies(layers, unless=choice)
    try:
        write_json({"key": key, "choice": choice}, path)
    except OSError as error:
        logger.warning(f"The choice of linear layers can't be kept ({error}); the next process measures again.")
    return choice


def _counts(layers: Sequence[nn.Linear]) -> dict[str, int]:
    """How many layers there are of each shape."""
    return Counter(
        f"{m.out_features}x{m.in_features} {m.weight.dtype}" + ("" if m.bias is None else " bias") for m in layers
    )


def measure_forms(part: str, models: Sequence[nn.Module], forms: Sequence[str], run_of: RunOf) -> list[str]:
    """As `chosen_forms`, by the fastest of interleaved forwards."""

    def in_form(form: str):
        return LinearLayers({part: [form] * len(ROWS)}).swapped(**{part: models})

    def works(form: str) -> bool:
        """Whether this processor has such products; the copies that they need are made here too."""
        try:
            with in_form(form):
                run_of(1)()
            return True
        except RuntimeError:
            if form == "stock":
                raise
            return False

    usable = [form for form in forms if works(form)]
    choice = []
    visits = {rows: _VISITS if rows <= _FEW else 1 for rows in ROWS}
    with quiet_progress(total=sum(visits.values()), desc=f"first use: linear layers of the {part}") as bar:
        for rows in ROWS:
            run = run_of(rows)
            fastest = dict.fromkeys(usable, float("inf"))
            until = time.perf_counter() + _LONGEST
            for visit in range(visits[rows]):
                bar.update()
                if visit and time.perf_counter() > until:
                    continue
                for form in usable:
                    if form == "transposed" and rows > 16:  # far slower there
                        continue
                    with in_form(form):
                        run()  # warms up
                        for _ in range(_RUNS):
                            start = time.perf_counter()
                            run()
                            fastest[form] = min(fastest[form], time.perf_counter() - start)
            best = min(usable, key=lambda form: fastest[form])
            choice.append(best if fastest[best] < _WORTH * fastest["stock"] else "stock")
    return choice


def passes_through(models: Sequence[nn.Module]) -> RunOf:
    """For layers that have no forward of M rows alone: each is called once, in the model's order."""
    layers = swappable_layers(models)
    inputs = {(layer.in_features, layer.weight.dtype) for layer in layers}
    other = torch.ones(_CACHE)

    def run_of(rows: int) -> Callable[[], None]:
        xs = {(width, dtype): torch.zeros(1, rows, width, dtype=dtype) for width, dtype in inputs}

        def run() -> None:
            other.add_(1.0)  # the target has read all its weights in between
            for layer in layers:
                layer(xs[layer.in_features, layer.weight.dtype])

        return run

    return run_of
