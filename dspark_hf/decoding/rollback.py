"""Rolling a target's cache back to before tokens that were rejected.

Axes: rows of one forward: `lag` committed tokens, the anchor, the drafted ones; W slots of a static sliding layer.

Keys and values are cropped. The state of a linear-attention layer (Qwen3.5, Falcon-H1, ...) sums up all it has read, and
nothing can be taken out of the sum: it is copied before drafted tokens are read, and restored where one of them fell. The
tokens that stood are then read again, ahead of the next round's, in the same forward. A static layer is shortened in place;
what fell stays in its slots, hidden by the causal mask until it is written over. A static sliding layer, once full, moves old
keys and values out as it reads: they are copied before, and put together with those of the tokens that stood.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticCache, StaticLayer, StaticSlidingWindowLayer

from .compat import CACHE_ARGUMENT
from .kv_cache import grow_in_place, make_plain
from .target import cross_attention_layers, has_bounded_time_step, has_recurrent_layers, keeps_state_in_modules

_CHECKED = "_dspark_rollback_checked"
_STATES = ("conv_states", "recurrent_states")  # written in place
_COUNT = "cumulative_length_linear"  # likewise; since 5.25
# Of a forward, unless blocks are longer than half of it. A plain step keeps all it reads, so that nothing is left to be read
# again: with more rows drafting on gets dear, with fewer there are plain steps too often.
_MOST_ROWS = 16
# Share of the logits' spread by which reading several tokens at once may differ from one at a time in the check: rounding
# (4e-6 was seen in single, 0.05 in half precision). Families that do not read on from their state differ by 1 to 4.
_TOLERANCE, _HALF_TOLERANCE = 2e-3, 0.2


class Rollback:
    """The cache of one generation, after its prefill.

    lag: so many committed tokens before the anchor are not in the cache; 0 unless a layer is recurrent.

    Raises:
        ValueError: a layer can be neither cropped nor restored.
    """

    def __init__(self, cache: Cache, target: PreTrainedModel) -> None:
        self.lag = 0
        # A layer that never holds anything can't always be cropped.
        layers = [layer for layer in _layers(cache, target) if vars(layer).get("is_initialized", True)]
        self._recurrent = [layer for layer in layers if _is_recurrent(layer)]
        self._static = [layer for layer in layers if type(layer) is StaticLayer]
        self._windows = [_StaticWindow(layer) for layer in layers if type(layer) is StaticSlidingWindowLayer]
        self._others = [layer for layer in layers if not _is_recurrent(layer) and type(layer) not in _STATIC]
        # A user's own may claim that they can be cropped; seen at the first crop, before anything is read behind it.
        self._unverified = [layer for layer in self._others if type(layer).__module__ != Cache.__module__]
        self._snapshots: list[dict[str, Any]] = []
        self._lengths: list[int | torch.Tensor] = []
        self._static_lengths: list[torch.Tensor] = []
        if not all(layer.is_croppable for layer in self._others):
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
        if self._windows:  # of more rows than it has slots a static window would not keep the first
            return min(window.size for window in self._windows) - 1
        if not self._recurrent:
            return None
        return block_size if self.lag == 0 or self.lag + block_size < max(_MOST_ROWS, 2 * block_size) else 0

    @property
    def may_pad(self) -> bool:
        """Whether a forward may have rows that stand for nothing: they would have to be taken back every time."""
        return not self._recurrent

    def snapshot(self, rows: int, may_be_rejected: bool = True) -> None:
        """Before a forward of `rows` tokens; `may_be_rejected`: whether one is a draft (else only an exception takes it back)."""
        self._lengths = [_length(layer) for layer in self._others]
        self._static_lengths = [layer.cumulative_length.clone() for layer in self._static]
        for window in self._windows:
            window.snapshot(rows)
        self._snapshots = []
        for layer in self._recurrent if may_be_rejected else ():
            # Keys and values are not copied: layers of both kinds replace them.
            self._snapshots.append({name: dict(v) if isinstance(v, dict) else v for name, v in vars(layer).items()})
            for name in _STATES:
                states = vars(layer)[name]
                vars(layer)[name] = {i: None if state is None else state.clone() for i, state in states.items()}
            if _COUNT in vars(layer):
                vars(layer)[_COUNT] = vars(layer)[_COUNT].clone()

    def undo(self) -> None:
        """After a forward that an exception ended, anywhere in the target: each layer as it was before."""
        for layer, length in zip(self._others, self._lengths, strict=True):
            if surplus := int(_length(layer) - length):
                layer.crop(-surplus)
        for layer, length in zip(self._static, self._static_lengths, strict=True):
            layer.cumulative_length.copy_(length)
        for window in self._windows:
            window.roll_back(0, 0)
        for layer, copied in zip(self._recurrent, self._snapshots):
            vars(layer).update(copied)
        self._snapshots = []

    def roll_back(self, rows: int, committed: int) -> None:
        """After a forward of `rows` tokens in all, of which `lag` and the first `committed` behind them stand.

        Raises:
            ValueError: a layer of a class that is not transformers' has not cropped what it was to.
        """
        surplus = rows - self.lag - committed
        if surplus and self._snapshots:
            for layer, copied in zip(self._recurrent, self._snapshots, strict=True):
                vars(layer).update(copied)
            surplus = rows
            self.lag += committed
        else:
            self.lag = 0
        self._snapshots = []
        lengths = [_length(layer) for layer in self._unverified] if surplus else []
        for layer in self._others:
            layer.crop(-surplus)
        for layer, length in zip(self._unverified, lengths):
            if _length(layer) != length - surplus:
                raise ValueError(
                    f"The cache's {type(layer).__name__} can't be rolled back, so drafts can't be verified with it: "
                    f"crop({-surplus}) left {int(_length(layer))} of {int(length)} tokens. "
                    "Leave out the cache, or decode without assistant_model."
                )
        if surplus:
            self._unverified = []
            for layer in self._static:
                layer.cumulative_length.sub_(surplus)  # in place: compiled code reads it where it lies
            for window in self._windows:
                window.roll_back(rows, rows - surplus)

    def release(self) -> None:
        """After the last forward: layers drop again what lies outside of their windows, as in plain decoding."""
        for layer in self._others:
            layer.crop(0)
            if "record_past" in vars(layer):
                layer.record_past = False
        make_plain(self._cache)


def _length(layer: Any) -> int | torch.Tensor:
    """Tokens that it holds, or inputs of its convolution."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) and not hasattr(layer, "get_seq_length"):  # before 5.25
        return max((state.shape[-1] for state in layer.conv_states.values() if state is not None), default=0)
    length = layer.get_seq_length()
    return length.clone() if isinstance(length, torch.Tensor) else length  # counted in place


class _StaticWindow:
    """A static sliding layer around one forward."""

    def __init__(self, layer: StaticSlidingWindowLayer) -> None:
        self._layer, self.size = layer, layer.max_cache_len
        self._length = 0  # tokens read before the forward
        self._snapshots: list[torch.Tensor] | None = None

    def snapshot(self, rows: int) -> None:
        self._length = self._layer.cumulative_length_int
        overflows = self._length + rows > self.size
        self._snapshots = [self._layer.keys.clone(), self._layer.values.clone()] if overflows else None

    def roll_back(self, rows: int, kept: int) -> None:
        """After a forward of `rows` tokens (at most W), of which the first `kept` stay."""
        for i, copied in enumerate(self._snapshots or ()):
            states = (self._layer.keys, self._layer.values)[i]  # [B, heads, W, d], written in place
            read = states[:, :, self.size - rows : self.size - rows + kept]
            whole = torch.cat([copied[:, :, : self._length], read], dim=2)[:, :, -self.size :]
            states[:, :, : whole.shape[2]] = whole
        self._layer.cumulative_length_int = self._length + kept
        self._layer.cumulative_length.fill_(self._length + kept)


_STATIC = (StaticLayer, StaticSlidingWindowLayer)  # these exactly: a subclass may keep more


def _layers(cache: Cache, target: PreTrainedModel) -> list[Any]:
    """Those that change with each token."""
    fixed = cross_attention_layers(target)
    return [layer for i, layer in enumerate(cache.layers) if i not in fixed]


def check_cache(cache: Cache, target: PreTrainedModel) -> None:
    """Refuse a cache that can't be restored to before a draft, as far as it shows (before the prefill, for a new one).

    Raises:
        ValueError: quantised layers, static ones of a hybrid, a cache of its own kind.
    """
    layers = _layers(cache, target)
    if has_recurrent_layers(target) or any(_is_recurrent(layer) for layer in layers):
        # A static layer of both kinds writes its keys in place, and a subclass may keep more than its layers.
        usable = type(cache) is DynamicCache
    else:
        usable = type(cache) in (DynamicCache, StaticCache) or cache.is_croppable
    if not usable or not all(_can_roll_back(layer) for layer in layers):
        raise ValueError(
            f"Drafts can't be verified with this {type(cache).__name__} of {type(target).__name__}: it can't be rolled back, "
            "since its layers can be neither cropped nor copied. Leave out cache_implementation and the cache, or decode without "
            "assistant_model."
        )


def check_room(cache: Cache, num_tokens: int) -> None:
    """Refuse a static cache that is too short for a text of `num_tokens`: it would fail, or worse, in the middle.

    Raises:
        ValueError: fewer places than the tokens that will be read; the last one of a text is not.
    """
    places = min((layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer), default=num_tokens)
    if places < num_tokens - 1:
        raise ValueError(
            f"The {type(cache).__name__} has places for {places} tokens, and this call may need {num_tokens - 1}. Give it "
            f"max_cache_len={num_tokens - 1} or more, or ask for {num_tokens - 1 - places} new tokens less."
        )


def _can_roll_back(layer: Any) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin) and not any(layer.is_conv_states_initialized.values()):
        return True  # does not know yet whether it will be recurrent; `Rollback` finds out
    return type(layer) in _STATIC or _is_recurrent(layer) or layer.is_croppable


def _is_recurrent(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.is_recurrent_states_initialized.values())


def _unusable(target: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(
        f"{type(target).__name__} keeps a state that can't be rolled back, so drafts can't be verified with it: {reason}. "
        "Decode it without assistant_model."
    )


@torch.no_grad()
def check_rollback(target: PreTrainedModel) -> None:
    """Refuse a target whose state can't be restored; found out once for a model, on a tiny text.

    Raises:
        ValueError: a state of a kind that we do not know, or one from which the target does not read on rightly.
    """
    if not target._supports_default_dynamic_cache():
        raise _unusable(target, "it is kept outside of transformers' caches")
    if getattr(target, _CHECKED, False) or not (has_recurrent_layers(target) or keeps_state_in_modules(target)):
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
        raise _unusable(target, "none of its layers is one of attention")
    if any(
        isinstance(layer, LinearAttentionCacheLayerMixin) and not any(layer.is_conv_states_initialized.values())
        for layer in cache.layers
    ):
        raise _unusable(target, "it is kept in its modules")
    Rollback(cache, target)
    with _refusing(target):
        got = _rolled_back_logits(target, ids)
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


def _rolled_back_logits(target: PreTrainedModel, ids: torch.LongTensor) -> torch.Tensor:
    """Of all but the first three of `ids` [1, 9]: a round of which two tokens fall, and one that reads what stood again."""
    cache = _new_cache(target)
    _read(target, cache, ids[:, :3], 0)
    rollback = Rollback(cache, target)
    rollback.snapshot(4)
    first = _read(target, cache, torch.cat([ids[:, 3:5], ids[:, :2]], dim=1), 3)
    rollback.roll_back(rows=4, committed=2)
    rows = rollback.lag + 3
    rollback.snapshot(rows)
    second = _read(target, cache, ids[:, 8 - rows : 8], 8 - rows)
    rollback.roll_back(rows, committed=3)
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
