"""The target's side of a round, behind one interface: any transformers cache for one sequence, here; the ragged store for many
(`ragged_target`).

Axes: Q rows of one sequence in one forward, m tapped layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ..model.modeling_dspark import DSparkDraftModel
from .compat import CACHE_ARGUMENT, cache_of
from .compiled import compiled_forward, uncompiled
from .rollback import Rollback, check_cache, check_room
from .sequence import TextSequence
from .target import TargetTaps, check_image_mask, length_dependent_rope, most_read_alike

# Arguments with a line for each token that grow rightly by one line at a time only.
_GROWN_BY_ONE = ("token_type_ids", "cross_attention_mask", "image_attention_mask")


@dataclass(frozen=True)
class Rows:
    """New tokens of one sequence: `token_ids` [Q], behind what its cache holds; logits of the last `keep` of them are wanted."""

    sequence: TextSequence
    token_ids: torch.LongTensor
    keep: int


@dataclass(frozen=True)
class Reading:
    """What the target says of rows: logits [keep, V], features [1, Q, m * d_target] if it is tapped."""

    logits: torch.Tensor
    features: torch.Tensor | None


class Backend(Protocol):
    """One forward of the target over rows, and which of them its cache keeps."""

    def room(self, sequence: TextSequence) -> int:
        """How many tokens may be drafted for it in this round."""

    def padded(self, rows: int, wanted: int) -> int:
        """The rows of a forward of `rows` that would be cheaper with `wanted`."""

    def read(self, rows: Sequence[Rows], padding: int) -> list[Reading]:
        """One forward over all rows and `padding` idle ones. After an exception the cache is as before."""

    def keep(self, paths: Sequence[Sequence[int]]) -> int:
        """For each of the rows just read, those that are the text's from now on, ascending; the cache forgets the others.

        Returns how many of the rows were committed tokens that had to be read again.
        """


class CacheBackend:
    """One sequence over a cache of transformers: cropped, recurrent or static ones, the user's own."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDraftModel,
        config: GenerationConfig,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.config, self.kwargs = target, config, model_kwargs
        self.cache = model_kwargs[CACHE_ARGUMENT]
        check_cache(self.cache, target)
        check_room(self.cache, _most_read(input_ids, config, model_kwargs))
        self.compiled = compiled_forward(target, drafter, config, model_kwargs)
        # The numbers of rows that a forward may have, ascending from 1; empty: any.
        self.sizes = () if self.compiled is None else self.compiled.sizes
        self.hidden_states: tuple = ()
        self.attentions: tuple = ()
        self._taps = TargetTaps(target, drafter.config.target_layer_ids)
        self._device, self._most = drafter.device, drafter.config.num_draft_tokens
        self._rope = length_dependent_rope(target)
        self._rollback: Rollback
        self._outputs: ModelOutput | None = None
        self._rows = self._room = 0  # of the last forward, the anchor's and the drafts'; that may be drafted or padded
        self._outlives = bool(config.return_dict_in_generate) or getattr(self.cache, "_is_user_defined", False)

    def __enter__(self) -> CacheBackend:
        self._taps.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._taps.__exit__(*error)
        if hasattr(self, "_rollback") and self._outlives:
            self._rollback.release()

    def prefill(self, sequence: TextSequence) -> Reading:
        """Read the prompt: the last token's logits [1, V], and the features of all that are not padding."""
        mask, kwargs = self.kwargs.get("attention_mask"), self.kwargs
        check_image_mask(self.target, self.cache, kwargs)
        real = None if mask is None else mask[0].bool()
        outputs = self.target._prefill(sequence.input_ids, uncompiled(self.config), kwargs)
        features = self._taps.take(self._device)
        self.cache = cache_of(outputs)
        self._rollback = Rollback(self.cache, self.target)
        self._outputs, self._rows, self._sequence = outputs, 0, sequence
        sequence.stats.prompt_tokens = features.shape[1]
        if real is not None:
            features = features[:, real[-features.shape[1] :].to(features.device)]
        return Reading(outputs.logits[0, -1:], features)

    def num_known(self) -> int:
        """Real tokens that the cache came with."""
        cached = int(self.cache.get_seq_length())  # a static cache counts in a tensor that goes on growing
        mask = self.kwargs.get("attention_mask")
        return cached if mask is None else int(mask[0].bool()[:cached].sum())

    def room(self, sequence: TextSequence) -> int:
        limits = (
            sequence.room,
            self._rollback.most_drafted(self._most),
            most_read_alike(self._rope, sequence.length),
        )
        room = min(limit for limit in limits if limit is not None)
        if self.sizes:
            room = max((size for size in self.sizes if size <= room + 1), default=1) - 1
        self._room = room
        return room

    def padded(self, rows: int, wanted: int) -> int:
        if not self._rollback.may_pad:
            return rows
        if self.sizes:
            return next(size for size in self.sizes if size >= rows)
        return wanted if wanted <= self._room + 1 else rows

    def read(self, rows: Sequence[Rows], padding: int) -> list[Reading]:
        (row,) = rows
        text, count = row.sequence.input_ids, len(row.token_ids)
        lag, new = self._rollback.lag, count + padding
        ids = torch.cat([text[:, :-1], row.token_ids[None], row.token_ids[-1:].expand(1, padding)], dim=1)
        self._rollback.snapshot(lag + new, may_be_rejected=count > 1)
        try:
            self._outputs = self._forward(ids, lag + new, self._grown(new - 1))
        except BaseException:
            self._rollback.undo()
            raise
        self._rows = new
        features = self._taps.take(self._device)[:, lag : lag + count]
        logits = self._outputs.logits[0, -new:][count - row.keep : count]
        # Ordinary ones where processors may write into them, or they may be kept.
        keeps = row.sequence.processors or self.config.return_dict_in_generate
        return [Reading(logits.clone() if keeps else logits, features)]

    def keep(self, paths: Sequence[Sequence[int]]) -> int:
        (path,) = paths
        count, lag = len(path), self._rollback.lag
        assert list(path) == list(range(count)), "a cache of transformers keeps chains alone"
        for i in range(count):
            self._record(i, lag)
        if self._rows:
            self._rollback.roll_back(lag + self._rows, count)
        # Nothing reads the last token of a finished text.
        self.kwargs = self._grown(count - self._sequence.finished)
        return lag

    def finish(self, sequence: TextSequence) -> None:
        """Read what a cache that outlives this generation lacks."""
        if self._rollback.lag and self._outlives:
            self._forward(sequence.input_ids[:, :-1], self._rollback.lag, self.kwargs)
            self._taps.drop()

    def _forward(self, ids: torch.LongTensor, rows: int, kwargs: dict[str, Any]) -> ModelOutput:
        """The target over the last `rows` of `ids` [1, L]; `kwargs` are those of a text of L tokens."""
        inputs = self.target.prepare_inputs_for_generation(ids, next_sequence_length=rows, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = rows
        self._taps.drop()  # a processor may have run the target, as guidance does
        if self.compiled is not None:
            return self.compiled(self._taps, inputs)
        # 4 to 11 % faster than without gradients alone, where a forward is many small operations.
        with torch.inference_mode():
            return self.target(**inputs, return_dict=True)

    def _grown(self, count: int) -> dict[str, Any]:
        """A copy of the arguments that is as `count` steps of plain decoding would leave it."""
        kwargs = dict(self.kwargs)
        # transformers repeats as many of the last types as there are new tokens, and one line of a mask over images.
        one_by_one = any(kwargs.get(name) is not None for name in _GROWN_BY_ONE)
        for number in [1] * count if one_by_one else [count] * (count > 0):
            kwargs = self.target._update_model_kwargs_for_generation(
                self._outputs, kwargs, is_encoder_decoder=False, num_new_tokens=number
            )
        return kwargs

    def _record(self, i: int, lag: int) -> None:
        """Keep hidden states and attentions of a committed token where they were asked for; of a prompt, all."""
        config, outputs = self.config, self._outputs
        if not config.return_dict_in_generate or outputs is None:
            return
        own = slice(lag + i, lag + i + 1) if self._rows else slice(None)
        if config.output_hidden_states:
            self.hidden_states += (tuple(layer[:, own].clone() for layer in outputs.hidden_states),)
        if config.output_attentions:
            behind = self._rows - 1 - i if self._rows else 0  # tokens that came after this one in the same forward
            self.attentions += (tuple(a[..., own, : a.shape[-1] - behind].clone() for a in outputs.attentions),)


def _most_read(input_ids: torch.LongTensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Tokens of the whole text at the most, cached and embedded ones included."""
    mask, new = model_kwargs.get("attention_mask"), config.max_length - input_ids.shape[1]
    if mask is not None and mask.ndim == 2:
        return mask.shape[1] + new
    # Where it was all ones, transformers 5.24 drops the mask and keeps its length.
    return vars(config).get("_mask_length", input_ids.shape[1]) + new
