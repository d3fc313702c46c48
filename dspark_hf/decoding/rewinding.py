"""Putting a target's cache back to before tokens that did not stand.

Owns: which layers are cropped and which restored, the committed tokens that the cache lacks afterwards, the check that a
target's state can be put back at all. Does not own: forwards (`loop`), cropping keys and values (transformers).
Axes: rows of one forward: `lag` committed tokens, the anchor, the drafted ones.

Keys and values are cropped. The state of a linear-attention layer (Qwen3.5, Falcon-H1, ...) sums up all it has read, and
nothing can be taken out of the sum: it is copied before drafted tokens are read, and put back where one of them fell. The
tokens that stood are then read again, ahead of the next round's, in the same forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .compat import CACHE_ARGUMENT
from .quick_forward import grow_in_place, settled
from .targets import cross_attention_layers, has_bounded_time_step

_CHECKED = "_dspark_rewinding_checked"
_STATES = ("conv_states", "recurrent_states")  # written in place
# Of a forward, unless blocks are longer than half of it. A plain step keeps all it reads, so that nothing is left to be read
# again: with more rows drafting on gets dear, with fewer there are plain steps too often.
_MOST_ROWS = 16
# Share of the logits' spread by which reading several tokens at once may differ from one at a time in the check: rounding
# (4e-6 was seen in single, 0.05 in half precision). Families that do not read on from their state differ by 1 to 4.
_TOLERANCE, _HALF_TOLERANCE = 2e-3, 0.2


class Rewinder:
    """The cache of one generation, after its prefill.

    lag: so many committed tokens before the anchor are not in the cache; 0 unless a layer is recurrent.

    Raises:
        ValueError: a layer can be neither cropped nor restored.
    """

    def __init__(self, cache: Cache, target: PreTrainedModel) -> None:
        self.lag = 0
        fixed = cross_attention_layers(target)
        layers = [layer for i, layer in enumerate(cache.layers) if i not in fixed]
        self._recurrent = [layer for layer in layers if _is_recurrent(layer)]
        # A layer that never holds anything can't always be cropped.
        self._others = [x for x in layers if not _is_recurrent(x) and vars(x).get("is_initialized", True)]
        self._held: list[dict[str, Any]] = []
        usable = all(layer.is_croppable for layer in self._others)
        # A static layer of both kinds writes its keys in place, and a subclass may keep more than its layers.
        usable = usable and (type(cache) is DynamicCache if self._recurrent else cache.is_croppable)
        if not usable:
            raise _unusable(target, f"a {type(cache).__name__} with layers that can be neither cropped nor copied")
        for layer in self._others:
            # Only now: the prefill may drop what lies outside of a window.
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
            layer.crop(0)
        self._cache = cache
        grow_in_place(cache)

    def most_drafted(self, block_size: int) -> int | None:
        """How many tokens may be drafted now, `None`: any; 0 where a plain step is cheaper than reading so many again."""
        if not self._recurrent:
            return None
        return block_size if self.lag == 0 or self.lag + block_size < max(_MOST_ROWS, 2 * block_size) else 0

    @property
    def may_pad(self) -> bool:
        """Whether a forward may have rows that stand for nothing: they would have to be taken back every time."""
        return not self._recurrent

    def hold(self) -> None:
        """Before a forward of which rows may fall."""
        self._held = []
        for layer in self._recurrent:
            # Keys and values are not copied: layers of both kinds replace them.
            self._held.append({name: dict(v) if isinstance(v, dict) else v for name, v in vars(layer).items()})
            for name in _STATES:
                states = vars(layer)[name]
                vars(layer)[name] = {i: None if state is None else state.clone() for i, state in states.items()}

    def settle(self, rows: int, committed: int) -> None:
        """After a forward of `rows` tokens in all, of which `lag` and the first `committed` behind them stand."""
        surplus = rows - self.lag - committed
        if surplus and self._recurrent:
            for layer, held in zip(self._recurrent, self._held, strict=True):
                vars(layer).update(held)
            surplus = rows
            self.lag += committed
        else:
            self.lag = 0
        self._held = []
        for layer in self._others:
            layer.crop(-surplus)

    def release(self) -> None:
        """After the last forward: layers drop again what lies outside of their windows, as in plain decoding."""
        for layer in self._others:
            layer.crop(0)
            if "record_past" in vars(layer):
                layer.record_past = False
        settled(self._cache)


def _is_recurrent(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.is_recurrent_states_initialized.values())


def _unusable(target: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(
        f"{type(target).__name__} keeps a state that can't be rewound, so drafts can't be verified with it: {reason}. Decode it "
        "without assistant_model."
    )


@torch.no_grad()
def check_rewinding(target: PreTrainedModel) -> None:
    """Refuse a target whose state can't be put back; found out once for a model, on a tiny text.

    Raises:
        ValueError: a state of a kind that we do not know, or one from which the target does not read on rightly.
    """
    if not target._supports_default_dynamic_cache():
        raise _unusable(target, "it is kept outside of transformers' caches")
    if not target._is_stateful or getattr(target, _CHECKED, False):
        return
    if has_bounded_time_step(target):
        raise _unusable(target, "it bounds its time step where it reads several tokens, and not where it reads one")
    ids = torch.arange(2, 11, device=target.device)[None] % target.config.get_text_config().vocab_size
    with _refusing(target):
        cache = _new_cache(target)
        wanted = [_read(target, cache, ids[:, :3], 0)]
        wanted += [_read(target, cache, ids[:, i : i + 1], i) for i in range(3, ids.shape[1])]
    if foreign := {type(layer).__name__ for layer in cache.layers if type(layer).__module__ != Cache.__module__}:
        raise _unusable(target, f"its {', '.join(sorted(foreign))} is a cache of its own kind")
    if not any(isinstance(vars(layer).get("keys"), torch.Tensor) for layer in cache.layers):
        raise _unusable(target, "without a layer of attention its cache does not tell how many tokens it has read")
    Rewinder(cache, target)
    with _refusing(target):
        got = _rewound_logits(target, ids)
    plain = torch.cat(wanted[1:])
    is_exact = (
        target.dtype.itemsize > 2 and torch.get_float32_matmul_precision() == "highest"
    )  # TF32 is as wide as half
    spread, tolerance = float(plain.std()), _TOLERANCE if is_exact else _HALF_TOLERANCE
    if not torch.allclose(plain, got, atol=tolerance * spread, rtol=0.0):
        raise _unusable(
            target,
            "reading several tokens at once gives other logits than one at a time (off by "
            f"{float((plain - got).abs().max()) / spread:.2g} of their spread)",
        )
    setattr(target, _CHECKED, True)


@contextmanager
def _refusing(target: PreTrainedModel) -> Iterator[None]:
    """What a target of its own kind raises is the reason why it is refused."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _unusable(target, " ".join(str(error).split())[:200]) from error


def _rewound_logits(target: PreTrainedModel, ids: torch.LongTensor) -> torch.Tensor:
    """Of all but the first three of `ids` [1, 9]: a round of which two tokens fall, and one that reads what stood again."""
    cache = _new_cache(target)
    _read(target, cache, ids[:, :3], 0)
    rewinder = Rewinder(cache, target)
    rewinder.hold()
    first = _read(target, cache, torch.cat([ids[:, 3:5], ids[:, :2]], dim=1), 3)
    rewinder.settle(rows=4, committed=2)
    rows = rewinder.lag + 3
    rewinder.hold()
    second = _read(target, cache, ids[:, 8 - rows : 8], 8 - rows)
    rewinder.settle(rows, committed=3)
    return torch.cat([first[:2], second[-3:], _read(target, cache, ids[:, 8:], 8)])


def _new_cache(target: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=target.config.get_text_config(decoder=True))


def _read(target: PreTrainedModel, cache: DynamicCache, ids: torch.LongTensor, start: int) -> torch.Tensor:
    """Logits of tokens that stand at `start` and behind it, as does what the cache holds before them. [1, S] -> [S, V]"""
    arguments: dict[str, Any] = {CACHE_ARGUMENT: cache}
    if (
        "position_ids" in inspect.signature(target.forward).parameters
    ):  # given by `generate()` too; some count from 0 without
        arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    return target(input_ids=ids, use_cache=True, **arguments).logits[0].float()
