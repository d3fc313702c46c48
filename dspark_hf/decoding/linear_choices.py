"""Which formulation of a linear layer is fastest on this CPU, by kind of layer and number of rows.

Owns: what layers are alike, layers side by side, measuring, keeping the choices. Does not own: the formulations
(`linear_forms`), using them (`linear_layers`).
Axes: M rows of one product.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers.utils import logging

from ..files import cache_folder, write_json
from .linear_forms import EXACT_FORMS, FORMS, ROUNDED_FORMS, arranged, keeps_copy, product

logger = logging.get_logger(__name__)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 128)  # measured; in between the next one's choice, beyond the last's
APART = "apart"  # the choice of layers side by side that are not multiplied together
_SIDE_BY_SIDE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_WORTH = 0.97  # another form than the stock one must take less than this share of its time
_LONGEST = 0.5  # seconds for one number of rows, where something else keeps the processor busy
_GROUP = 12  # layers of one shape that are gone through, so that their weights are not in the cache

Unit = tuple[nn.Linear, ...]  # one layer, or several side by side


@functools.cache
def cpu_name() -> str:
    """The processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _can_swap(module: nn.Module | None) -> bool:
    return (
        isinstance(module, nn.Linear)
        and type(module) is nn.Linear
        and type(module.weight) is nn.Parameter  # quantisers put tensors of their own there
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and "forward" not in vars(module)  # accelerate's and others' own replacement
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def kind_of(unit: Unit, precision: str = "float32") -> str:
    """What layers have in common that are done alike: sizes, dtype, bias, and the precision that their products may have."""
    first = unit[0]
    sizes = "+".join(str(module.out_features) for module in unit)
    bias = "" if first.bias is None else "+bias"
    dtype = str(first.weight.dtype).removeprefix("torch.")
    lower = f"~{precision}" if precision != "float32" and dtype == "float32" else ""
    return f"{sizes}x{first.in_features}{bias}:{dtype}{lower}"


def _rounded_forms(kind: str) -> tuple[str, ...]:
    return ROUNDED_FORMS[kind.partition("~")[2] or "float32"]


def units_of(model: nn.Module) -> Iterator[Unit]:
    """The layers of a model that can be swapped: each by itself, and those side by side."""
    for module in model.modules():
        if _can_swap(module):
            yield (module,)  # type: ignore[misc]
        for names in _SIDE_BY_SIDE:
            children = [module._modules.get(name) for name in names]
            if all(map(_can_swap, children)) and len({(m.in_features, m.bias is None) for m in children}) == 1:  # type: ignore[union-attr]
                yield tuple(children)  # type: ignore[arg-type]


def stored_choices(groups: dict[str, list[Unit]], may_copy: bool) -> dict[str, list[str]]:
    """The choices of these kinds: those in the file, and those measured now and added to it."""
    key = {"threads": torch.get_num_threads(), "torch": torch.__version__, "packed": may_copy, "rows": ROWS}
    key["cpu"] = cpu_name()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "linear_layers" / f"{digest}.json"
    try:
        known = {k: v for k, v in json.loads(path.read_text(encoding="utf-8"))["choices"].items() if _is_choice(v)}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        known = {}
    missing = {kind: units for kind, units in groups.items() if kind not in known}
    if missing:
        known |= measure_choices(missing, may_copy, known)
        try:
            write_json({"key": key, "choices": known}, path)
        except OSError as error:
            logger.warning(f"The choice of linear layers can't be kept ({error}); the next process measures again.")
    return {kind: known[kind] for kind in groups}


def _is_choice(value: object) -> bool:
    return isinstance(value, list) and len(value) == len(ROWS) and set(value) <= {*FORMS, APART}


@torch.inference_mode()
def measure_choices(
    groups: dict[str, list[Unit]], may_copy: bool, known: dict[str, list[str]] | None = None
) -> dict[str, list[str]]:
    """The fastest form of each kind for each of `ROWS`, by the fastest of interleaved runs over layers of that kind.

    `known` are choices of single layers that layers side by side are compared with.
    """
    choices = dict(known or {})
    for kind, units in sorted(groups.items(), key=lambda group: len(group[1][0])):
        choices[kind] = _measure_kind(kind, units[:_GROUP], may_copy, choices)
    return {kind: choices[kind] for kind in groups}


def _measure_kind(kind: str, units: Sequence[Unit], may_copy: bool, choices: dict[str, list[str]]) -> list[str]:
    side_by_side = len(units[0]) > 1
    lower = kind.partition("~")[2] or "float32"
    runs: dict[str, Callable[[torch.Tensor, int], object]] = {}
    for form in ("packed", *_rounded_forms(kind)) if may_copy else ():
        try:
            runs[form] = _together(form, units)
        except (RuntimeError, AttributeError):  # no such products for this processor, or in this torch
            continue
    if side_by_side:
        runs[APART] = _each(units, [choices[kind_of((module,), lower)] for module in units[0]])
    else:
        runs |= {form: _together(form, units) for form in EXACT_FORMS if not keeps_copy(form)}
    base, choice = APART if side_by_side else "stock", []
    for place, rows in enumerate(ROWS):
        x = torch.zeros(rows, units[0][0].in_features, dtype=units[0][0].weight.dtype)
        forms = [form for form in runs if form != "transposed" or rows <= 16]
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        until = time.perf_counter() + _LONGEST
        for sweep in range(6 if rows <= 16 else 3):
            if sweep > 1 and time.perf_counter() > until:
                break
            for form in forms:
                start = time.perf_counter()
                runs[form](x, place)
                if sweep:  # the first one warms up
                    seconds[form].append(time.perf_counter() - start)
        fastest = {form: min(values) for form, values in seconds.items()}
        best = min(forms, key=lambda form: fastest[form])
        choice.append(best if fastest[best] < _WORTH * fastest[base] else base)
    return choice


def _together(form: str, units: Sequence[Unit]) -> Callable[[torch.Tensor, int], object]:
    """One product a unit, and the shares of its layers."""
    parts = []
    for unit in units:
        weights, biases = [module.weight.detach() for module in unit], [module.bias for module in unit]
        weight = weights[0] if len(unit) == 1 else torch.cat(weights)
        bias = None if biases[0] is None else torch.cat(biases)
        copy = arranged(form, weight) if keeps_copy(form) else None
        parts.append((weight if copy is None else None, bias, copy, [module.out_features for module in unit]))

    def run(x: torch.Tensor, place: int) -> None:
        for weight, bias, copy, sizes in parts:
            out = product(form, x, weight, bias, copy)  # type: ignore[arg-type]
            if len(sizes) > 1:
                for share in out.split(sizes, dim=-1):
                    share.contiguous()

    run(
        torch.zeros(1, units[0][0].in_features, dtype=units[0][0].weight.dtype), 0
    )  # so that what can't be done fails here
    return run


def _each(units: Sequence[Unit], choices: Sequence[list[str]]) -> Callable[[torch.Tensor, int], object]:
    """One product for each layer of a unit, in its own form."""
    copies = [
        [
            {form: arranged(form, m.weight) for form in set(choice) if keeps_copy(form)}
            for m, choice in zip(unit, choices)
        ]
        for unit in units
    ]

    def run(x: torch.Tensor, place: int) -> None:
        for unit, kept in zip(units, copies):
            for module, choice, copy in zip(unit, choices, kept):
                product(choice[place], x, module.weight, module.bias, copy.get(choice[place]))

    return run
