"""Drafting for n sequences: one parallel stage for all blocks, one sequential sampler over their rows (paper §3.1).

Axes: n sequences that draft, Q slots of a block, S new context tokens of one sequence, d hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ..model.eagle3_dspark import Eagle3Slots
from ..model.layers_dspark import block_mask, sees_everything
from ..model.modeling_dspark import DSparkDraftModel
from ..model.sampler_dspark import Admission, BlockSlots, DraftRow, Sampler, Slots
from .draft_context import DraftContext
from .options import DraftingOptions
from .proposal import Proposal
from .ragged_cache import Group, Layout
from .sequence import TextSequence

MOST_PENDING = 256  # features that may wait; those of several layers are larger than the K/V they become


class Drafting:
    """The drafter's side of a round; it is bound to its target.

    backlog: context tokens that the last draft took in first. policy_seconds: as in `Sampler`.
    """

    def __init__(self, drafter: DSparkDraftModel) -> None:
        drafter.config.check_context_window()
        self.drafter: DSparkDraftModel = drafter
        self.options: DraftingOptions = drafter.options
        self.backlog = 0
        self.policy_seconds = 0.0
        # Slot of a block's first prediction.
        self._first = 0 if drafter.config.sample_from_anchor else 1

    @property
    def deferred(self) -> bool:
        wish = self.options.deferred_admission
        return self.drafter.device.type != "cpu" if wish is None else wish

    def draft(
        self, sequences: Sequence[TextSequence], limits: Sequence[int], admission: Admission | None
    ) -> list[Proposal]:
        """A proposal for each sequence: of at most its limit of tokens, empty where that is 0.

        admission: asked about places in `sequences`.
        """
        self.backlog, self.policy_seconds = 0, 0.0
        drafting = [i for i, limit in enumerate(limits) if limit]
        waiting = [s for s, limit in zip(sequences, limits) if not limit and s.draft_context.num_pending > MOST_PENDING]
        self.take_in([sequences[i] for i in drafting], drafts=True)
        self.take_in(waiting)
        rows = [
            DraftRow(
                s.input_ids.to(self.drafter.device),
                limit,
                s.do_sample,
                s.draft_processors,
                s.draft_generator,
                s.noise,  # type: ignore[arg-type]  # that file is checked without `None`
            )
            for s, limit in zip(sequences, limits)
        ]
        if drafting:
            sampler = Sampler(self.drafter, rows, admission, self.deferred)
            self._sample(sampler, sequences, drafting)
            self.policy_seconds = sampler.policy_seconds
        return [Proposal.drafted(row, s.input_ids.device) for s, row in zip(sequences, rows)]

    def _sample(self, sampler: Sampler, sequences: Sequence[TextSequence], drafting: Sequence[int]) -> None:
        contexts = [sequences[i].draft_context for i in drafting]
        limits = [sampler.rows[i].limit for i in drafting]
        if self.drafter.config.is_autoregressive:
            taken = [(context, context.take(1), context.slot.length + 1) for context in contexts]
            self.backlog += len(taken)
            try:
                sampler.draw(_Places(self._eagle3_slots(contexts, torch.cat([t[1] for t in taken]), limits), drafting))
            finally:
                for context, feature, length in taken:
                    if context.slot.length < length:  # it was not read
                        context.pending.insert(0, feature)
                    context.slot.length = min(length, context.slot.length)
        else:
            anchors = torch.cat([sampler.rows[i].prefix[0, -1:] for i in drafting])
            hidden, first = self._parallel_stage(contexts, anchors, limits)
            count = self.drafter.num_candidates(self.options.top_candidates)
            sampler.draw(_Places(BlockSlots(self.drafter, hidden, first, limits, count), drafting))

    # -- context -----------------------------------------------------------------------------------------------------

    def take_in(self, sequences: Sequence[TextSequence], drafts: bool = False) -> None:
        """Turn waiting features into K/V; `drafts`: a draft follows, which begins with an Eagle3 layer's last feature."""
        leave = 0
        if self.drafter.config.is_autoregressive:
            leave = int(drafts)
            for s in sequences:  # a token's features go with the token behind it, which embeddings do not tell
                s.draft_context.forget_before(s.draft_context.end - s.length)
        while waiting := [s for s in sequences if s.draft_context.num_pending > leave]:
            self._project(waiting, [min(s.draft_context.num_pending - leave, MOST_PENDING) for s in waiting])

    @torch.inference_mode()
    def _project(self, sequences: Sequence[TextSequence], counts: Sequence[int]) -> None:
        """The K/V of the first `counts` waiting features of each, by one pass for all."""
        model, contexts = self.drafter, [s.draft_context for s in sequences]
        for context, count in zip(contexts, counts):
            context.store.reserve(context.slot, context.slot.length + count + model.config.block_size)
        layout = Layout([context.slot for context in contexts], counts, model.device)
        next_ids = None
        if model.config.is_autoregressive:
            starts = [layout.starts[i] for i in range(len(counts))]
            known = [
                s.input_ids[0, s.length - context.end + position]
                for s, context, start, count in zip(sequences, contexts, starts, counts)
                for position in layout.positions[start : start + count]
            ]
            next_ids = torch.stack(known)[None].to(model.device)
        taken = [context.take(count) for context, count in zip(contexts, counts)]
        try:
            features = torch.cat([taken[i] for i in layout.order], dim=1)
            positions = torch.tensor([layout.positions], device=model.device)
            for layer, key_values in enumerate(model.context_key_values(features, positions, next_ids)):
                layout.write(layer, *key_values)
        except BaseException:
            for context, part in zip(contexts, taken):
                context.pending.insert(0, part)
            raise
        for context, count in zip(contexts, counts):
            context.slot.length += count
        self.backlog += sum(counts)

    # -- the parallel stage ------------------------------------------------------------------------------------------

    def _parallel_stage(
        self, contexts: Sequence[DraftContext], anchors: torch.LongTensor, limits: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Hidden states of all blocks, each as wide as its limit asks: [rows, d], and where each one's predictions begin."""
        model, config = self.drafter, self.drafter.config
        widths = [model.block_width(limit) for limit in limits]
        layout = self._layout(contexts, widths)
        ids = torch.full((layout.num_rows,), config.mask_token_id, device=model.device)
        ids[layout.starts if len(widths) > 1 else 0] = anchors.to(model.device)
        masks = {kind: functools.partial(_mask, config, kind) for kind in config.layer_types}

        def attends(layer: int) -> Callable:
            kind = config.layer_types[layer]

            def attend(queries, keys, values, scaling):
                layout.write(layer, keys, values)
                return layout.attend(layer, queries, masks[kind], kind, scaling)

            return attend

        positions = torch.tensor([layout.positions], device=model.device)
        contexts_of = [attends(layer) for layer in range(config.num_hidden_layers)]
        hidden = model.run_layers(model.embed(ids[None]), positions, contexts_of, {})[0]
        return hidden, [start + self._first for start in layout.starts]

    def _layout(self, contexts: Sequence[DraftContext], widths: Sequence[int]) -> Layout:
        for context, width in zip(contexts, widths):
            context.store.reserve(context.slot, context.slot.length + width)
        return Layout([context.slot for context in contexts], widths, self.drafter.device)

    def _eagle3_slots(
        self,
        contexts: Sequence[DraftContext],
        features: torch.Tensor,  # [n, 1, m * d_target], of each one's last token
        limits: Sequence[int],
    ) -> Eagle3Slots:
        """Each token drafted is one row behind the context; `_sample` takes them out again."""
        model = self.drafter
        for context, limit in zip(contexts, limits):
            context.store.reserve(context.slot, context.slot.length + limit + 1)

        def read(hidden: torch.Tensor, ids: torch.LongTensor, k: int, places: Sequence[int]) -> torch.Tensor:
            slots = [contexts[i].slot for i in places]
            layout = Layout(slots, [1] * len(slots), model.device)

            def attend(queries, keys, values, scaling):
                layout.write(0, keys, values)
                return layout.attend(0, queries, _all_held, "eagle3", scaling)

            rope = model.rotary_emb(hidden, torch.tensor([layout.positions], device=model.device))
            order = layout.order
            states = model.layers[0](
                hidden[order].transpose(0, 1), model.embed(ids[order]).transpose(0, 1), rope, attend
            )
            for slot in slots:
                slot.length += 1
            return states[0, [layout.starts[j] for j in range(len(slots))]][:, None]

        count = model.num_candidates(self.options.top_candidates)
        return Eagle3Slots(model, model.context_features(features), read, count)


class _Places:
    """Slots of the sequences that draft, asked by places among all sequences."""

    def __init__(self, slots: Slots, drafting: Sequence[int]) -> None:
        self._slots, self._place = slots, {i: j for j, i in enumerate(drafting)}

    def at(self, k: int, sequences: Sequence[int], previous: torch.LongTensor):
        return self._slots.at(k, [self._place[i] for i in sequences], previous)

    def skipped(self, sequences: Sequence[int]):
        return self._slots.skipped([self._place[i] for i in sequences])


def _all_held(group: Group) -> torch.Tensor | None:
    """One row each, which sees what its slot holds and itself. [count, 1, C]"""
    return None if group.count == 1 else group.key_places() <= group.length_column


def _mask(config, kind: str, group: Group) -> torch.Tensor | None:
    """What the rows of each block see: [count, Q, C], bool; its context, and itself as the layer's kind allows."""
    lengths, keys, rows, width = group.length_column, group.key_places(), group.rows_column, group.width
    if sees_everything(config, kind):
        return None if group.count == 1 else (keys < lengths + rows).expand(-1, width, -1)
    context = group.positions(keys.expand(group.count, -1, -1))[:, 0]
    block = group.positions(lengths + torch.arange(width, device=group.device))[:, 0]  # [count, Q]
    seen = block_mask(config, kind, context, block, block[:, :1])  # [count, Q, C + Q]
    held, within = seen[..., : group.columns] & (keys < lengths), seen[..., group.columns :]
    # Row q of a block is its key number `lengths + q`; rows that a narrower block has not are seen by nobody.
    where = keys - lengths  # [count, 1, C]
    inside = (where >= 0) & (where < rows)
    return held | (within.gather(2, where.clamp(0, width - 1).expand(-1, width, -1)) & inside)
