"""Linear layers on a few rows, on a CPU: the formulation that is fastest here for each shape and number of rows.

Owns: the formulations, choosing among them by measurement, swapping them in while our decoding runs, undoing that.
Does not own: what a whole forward costs (`profiling`).
Axes: M rows of one product.

The math library's kernels for 2 to 8 rows are two to five times slower than they need be, so that verifying four tokens
costs more than sixteen. The products are the same, summed in another order, as for any other batch shape.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import logging

from ..files import cache_folder, write_json
from ..modeling_dspark import DSparkDraftModel

logger = logging.get_logger(__name__)
FORMS = ("stock", "transposed", "packed")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 128)  # measured; in between the next one's choice, beyond the last's
_PLACES = [bisect_left(ROWS, rows) for rows in range(ROWS[-1] + 1)]  # in ROWS, of each number of rows
_MOST_MEMORY = 0.25  # share of the free memory that packed copies may take
_WORTH = 0.97  # another form than the stock one must take less than this share of its time
_GROUP = 12  # layers of one shape that are gone through, so that their weights are not in the cache


def transposed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` as `(W @ x.T).T`. [..., in] -> [..., out]"""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count in (1, 3):  # slower than one row more
        rows = F.pad(rows, (0, 0, 0, 1))
    # Contiguous again, or every elementwise operation after it pays for the transposed layout.
    out = torch.mm(weight, rows.t()).t()[:count].contiguous()
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` with oneDNN's own arrangement of the weights (`pack`). [..., in] -> [..., out]"""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy of the weights in oneDNN's arrangement."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


@functools.cache
def cpu_name() -> str:
    """The processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def can_pack() -> bool:
    """Whether this build of torch has oneDNN's packed products."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


def _can_swap(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter  # quantisers put tensors of their own there
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and "forward" not in vars(module)  # accelerate's and others' own replacement
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def _shape(module: nn.Linear) -> str:
    bias = "" if module.bias is None else "+bias"
    return f"{module.out_features}x{module.in_features}{bias}:{str(module.weight.dtype).removeprefix('torch.')}"


class LinearLayers:
    """The chosen form of each shape for each of `ROWS`, and the packed copies made so far.

    choices: by shape, one of `FORMS` for each of `ROWS`; a shape that is not in it is left as it is.
    """

    def __init__(self, choices: dict[str, list[str]] | None = None) -> None:
        self.choices = choices or {}
        self._packed: weakref.WeakKeyDictionary[nn.Linear, tuple] = weakref.WeakKeyDictionary()

    def __reduce__(self):
        """Copies and pickles carry the choices; packed weights are made anew."""
        return LinearLayers, (self.choices,)

    @property
    def packs(self) -> bool:
        """Whether any choice needs a copy of the weights."""
        return any("packed" in choice for choice in self.choices.values())

    @property
    def digest(self) -> str:
        """Tells one set of choices from another."""
        return hashlib.sha256(json.dumps(self.choices, sort_keys=True).encode()).hexdigest()[:8]

    @contextmanager
    def swapped(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Use the chosen forms inside the block; afterwards, also after an error, all is as before."""
        swapped: list[nn.Module] = []
        try:
            if not torch.is_grad_enabled():
                for model in models:
                    for module in model.modules():
                        if _can_swap(module) and (choice := self.choices.get(_shape(module))):  # type: ignore[arg-type]
                            forward = self._forward(module, choice)  # type: ignore[arg-type]
                            swapped.append(module)
                            module.forward = forward  # type: ignore[method-assign]
            yield
        finally:
            for module in swapped:
                vars(module).pop("forward", None)

    def _forward(self, module: nn.Linear, choice: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
        weight, bias = module.weight, module.bias
        forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "stock": lambda x: F.linear(x, weight, bias),
            "transposed": lambda x: transposed_linear(x, weight, bias),
        }
        if "packed" in choice:
            packed = self.packed(module)
            forms["packed"] = lambda x: packed_linear(x, packed, bias)
        by_rows = [forms[choice[place]] for place in _PLACES]
        last = by_rows[-1]

        def forward(x: torch.Tensor) -> torch.Tensor:
            rows = x.numel() // x.shape[-1]
            return by_rows[rows](x) if rows <= ROWS[-1] else last(x)

        return forward

    def packed(self, module: nn.Linear) -> torch.Tensor:
        """The packed copy of a layer's weights, made anew where they changed.

        A sample of the weights is compared too, because what is written through `.data` (a merged LoRA) leaves no trace.
        """
        weight = module.weight.detach()
        state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        sample = weight.flatten()[:: max(1, weight.numel() // 256)]
        known = self._packed.get(module)
        if known is None or known[0] != state or not torch.equal(known[1], sample):
            self._packed[module] = known = state, sample.clone(), pack(weight)
        return known[2]


def linear_layers_of(target: PreTrainedModel, drafter: DSparkDraftModel) -> LinearLayers:
    """The pair's layers, with choices measured once for this machine and kept; empty where `drafter.skinny_linear` is off."""
    if not drafter.skinny_linear:
        return LinearLayers()
    drafter.bind_target(target)
    models = [target, drafter, *drafter.bound_heads()]
    groups: dict[str, list[nn.Linear]] = {}
    for model in models:
        for module in model.modules():
            if _can_swap(module):
                groups.setdefault(_shape(module), []).append(module)  # type: ignore[arg-type, union-attr]
    known = drafter.linear_layers
    if known is not None and groups.keys() <= known.choices.keys() and (drafter.packed_weights or not known.packs):
        return known  # also where they are swapped in already, so that none is left to swap
    if not groups:
        return LinearLayers()
    size = sum(m.weight.numel() * m.weight.element_size() for group in groups.values() for m in group)
    may_pack = drafter.packed_weights and can_pack() and size <= _MOST_MEMORY * psutil.virtual_memory().available
    drafter.linear_layers = LinearLayers(_stored_choices(groups, may_pack))
    return drafter.linear_layers


def _stored_choices(groups: dict[str, list[nn.Linear]], may_pack: bool) -> dict[str, list[str]]:
    """The choices of these shapes: those in the file, and those measured now and added to it."""
    key = {"threads": torch.get_num_threads(), "torch": torch.__version__, "packed": may_pack, "rows": ROWS}
    key["cpu"] = cpu_name()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "linear_layers" / f"{digest}.json"
    try:
        known = {k: v for k, v in json.loads(path.read_text(encoding="utf-8"))["choices"].items() if _is_choice(v)}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        known = {}
    missing = {shape: modules for shape, modules in groups.items() if shape not in known}
    if missing:
        known |= measure_choices(missing, may_pack)
        try:
            write_json({"key": key, "choices": known}, path)
        except OSError as error:
            logger.warning(f"The choice of linear layers can't be kept ({error}); the next process measures again.")
    return {shape: known[shape] for shape in groups}


def _is_choice(value: object) -> bool:
    return isinstance(value, list) and len(value) == len(ROWS) and set(value) <= set(FORMS)


@torch.inference_mode()
def measure_choices(groups: dict[str, list[nn.Linear]], may_pack: bool) -> dict[str, list[str]]:
    """The fastest form of each shape for each of `ROWS`, by the fastest of interleaved runs over layers of that shape."""
    return {shape: _measure_shape(modules[:_GROUP], may_pack) for shape, modules in groups.items()}


def _measure_shape(modules: Sequence[nn.Linear], may_pack: bool) -> list[str]:
    packed: list[torch.Tensor] = []
    try:
        packed = [pack(m.weight) for m in modules] if may_pack else []
    except RuntimeError:  # bfloat16 on a processor for which oneDNN has no such products
        may_pack = False

    def products(form: str, x: torch.Tensor) -> None:
        if form == "packed":
            for weight, module in zip(packed, modules):
                packed_linear(x, weight, module.bias)
        else:
            product = F.linear if form == "stock" else transposed_linear
            for module in modules:
                product(x, module.weight, module.bias)

    choice = []
    for rows in ROWS:
        x = torch.zeros(rows, modules[0].in_features, dtype=modules[0].weight.dtype)
        forms = [f for f in FORMS if (f != "packed" or may_pack) and (f != "transposed" or rows <= 16)]
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        for sweep in range(6 if rows <= 16 else 3):
            for form in forms:
                start = time.perf_counter()
                products(form, x)
                if sweep:  # the first one warms up
                    seconds[form].append(time.perf_counter() - start)
        fastest = {form: min(values) for form, values in seconds.items()}
        best = min(forms, key=lambda form: fastest[form])
        choice.append(best if fastest[best] < _WORTH * fastest["stock"] else "stock")
    return choice


def tuned(target: PreTrainedModel, drafter: DSparkDraftModel, models: Sequence[nn.Module] | None = None):
    """Context manager: the pair's linear layers (or those of `models`) in their fastest forms."""
    layers = linear_layers_of(target, drafter)
    if not layers.choices:
        return nullcontext()
    return layers.swapped([target, drafter, *drafter.bound_heads()] if models is None else models)
