"""Which formulation of its linear layers is fastest for a model on this CPU, by the number of rows.

Owns: measuring, keeping the choices. Does not own: the formulations (`linear_forms`), using them (`linear_layers`), the
forwards that are timed (`trial_forwards`).
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
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from transformers.utils import logging

from ..decoding.trial_forwards import quiet_progress
from ..loading.files import cache_folder, write_json
from .linear_forms import Unit

logger = logging.get_logger(__name__)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 128)  # measured; in between the next one's choice, beyond the last's
_WORTH = 0.98  # another form than the stock one must take less than this share of its time
_VISITS, _RUNS = 3, 2  # each form in turn, and again, so that a slow moment of the machine touches all alike
_FEW = 8  # rows; with more, one visit tells enough
_LONGEST = 1.5  # seconds for one number of rows, after which no further visit begins
_CACHE = 16 << 20  # float32 numbers that fill the processor's cache

Candidate = Callable[[str], AbstractContextManager]
RunOf = Callable[[int], Callable[[], object]]


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
    part: str, units: Sequence[Unit], forms: Sequence[str], candidate: Candidate, run_of: Callable[[], RunOf]
) -> list[str]:
    """The fastest of `forms` for each of `ROWS`, from the file or measured now and kept.

    `candidate(form)` is a context in which the layers of `units` have that form; `run_of()(rows)` runs them once.
    """
    key = {"part": part, "forms": forms, "rows": ROWS, "layers": _layers(units), "cpu": cpu_name()}
    key |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "linear_layers" / f"{digest}.json"
    try:
        choice = json.loads(path.read_text(encoding="utf-8"))["choice"]
        if isinstance(choice, list) and len(choice) == len(ROWS) and set(choice) <= set(forms):
            return choice
    except (OSError, ValueError, KeyError, TypeError):
        pass
    choice = measure_forms(part, forms, candidate, run_of())
    try:
        write_json({"key": key, "choice": choice}, path)
    except OSError as error:
        logger.warning(f"The choice of linear layers can't be kept ({error}); the next process measures again.")
    return choice


def _layers(units: Sequence[Unit]) -> dict[str, int]:
    """How many layers there are of each shape."""
    counts = Counter(
        "+".join(str(module.out_features) for module in unit)
        + f"x{unit[0].in_features} {unit[0].weight.dtype}"
        + ("" if unit[0].bias is None else " bias")
        for unit in units
    )
    return dict(counts)


def measure_forms(part: str, forms: Sequence[str], candidate: Candidate, run_of: RunOf) -> list[str]:
    """As `chosen_forms`, by the fastest of interleaved forwards."""
    usable = [form for form in forms if _works(form, candidate, run_of(1))]
    choice = []
    description = f"first use: linear layers of the {part}"
    with quiet_progress(sum(_VISITS if rows <= _FEW else 1 for rows in ROWS), description) as bar:
        for rows in ROWS:
            run = run_of(rows)
            spent: dict[str, list[float]] = {form: [] for form in usable if form != "transposed" or rows <= 16}
            until = time.perf_counter() + _LONGEST
            for visit in range(_VISITS if rows <= _FEW else 1):
                bar.update()
                if visit and time.perf_counter() > until:
                    continue
                for form, values in spent.items():
                    with candidate(form):
                        run()  # looks up the copies of the weights
                        for _ in range(_RUNS):
                            start = time.perf_counter()
                            run()
                            values.append(time.perf_counter() - start)
            fastest = {form: min(values) for form, values in spent.items()}
            best = min(fastest, key=lambda form: fastest[form])
            choice.append(best if fastest[best] < _WORTH * fastest["stock"] else "stock")
    return choice


def _works(form: str, candidate: Candidate, run: Callable[[], object]) -> bool:
    """Whether this processor has such products; the copies that they need are made here too."""
    try:
        with candidate(form):
            run()
        return True
    except RuntimeError:
        if form == "stock":
            raise
        return False


def passes_through(units: Sequence[Unit]) -> RunOf:
    """For layers that have no forward of M rows alone: each is called once, in the model's order."""
    inputs = {(unit[0].in_features, unit[0].weight.dtype) for unit in units}
    other = torch.ones(_CACHE)

    def run_of(rows: int) -> Callable[[], None]:
        xs = {(width, dtype): torch.zeros(1, rows, width, dtype=dtype) for width, dtype in inputs}

        def run() -> None:
            other.add_(1.0)  # the target has read all its weights in between
            for unit in units:
                x = xs[unit[0].in_features, unit[0].weight.dtype]
                for module in unit:
                    module(x)

        return run

    return run_of
