"""Drafting for many requests at once: one parallel stage for all, one sequential loop over their rows (paper §3.1).

Owns: the drafter's context of every request, drawing the blocks, asking the batch policy before each token exists.
Does not own: the drafter's layers (`modeling_dspark`), which policy (`scheduling`), verification. Contexts are kept whole here:
`context_window` is for `decoding.context`.
Axes: R requests that draft, Q slots of a block, S new context tokens of one request, d hidden size, V_d draft vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..decoding import sampling
from ..model.layers_dspark import block_mask, sees_everything
from ..model.modeling_dspark import DSparkDraftModel
from ..model.sampler_dspark import Candidates, calibrated_confidences, in_target_vocabulary, scores_dtype
from ..scheduling.batch import BatchPolicy
from .cache import Group, Layout, RaggedStore
from .sequence import Request


@dataclass
class RequestDraft:
    """One request's block so far.

    token_ids, scores: each drafted token, and what it was drawn from, [N]; candidate_ids: the target ids that stand for the
    columns of each, or `None` as in `Candidates`. survival: calibrated (a_1, a_2, ...) that the
    policy read, of the refused position too. confidence_logits: as the head gives them. error: raised by a processor of
    the request's own.
    """

    request: Request
    limit: int
    token_ids: list[int] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    candidate_ids: list[torch.Tensor | None] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    confidence_logits: list[float] = field(default_factory=list)
    error: Exception | None = None


class BatchDrafter:
    """The drafter's side of the engine."""

    def __init__(self, drafter: DSparkDraftModel) -> None:
        if drafter.config.is_autoregressive:
            raise ValueError(
                "The batch engine drafts blocks, and an Eagle3 drafter drafts one forward a token. Decode one request at a time "
                "with generate(assistant_model=...), or use a DSpark or DFlash drafter."
            )
        self.drafter = drafter
        self.store = RaggedStore()
        self._first = 0 if drafter.config.sample_from_anchor else 1  # slot of the first prediction

    def room(self, num_tokens: int) -> int:
        """Tokens that a slot needs to hold for a text of `num_tokens`: the block lies behind the context for a while."""
        return num_tokens + self.drafter.config.block_size

    def extend(self, requests: Sequence[Request]) -> int:
        """Project the features of newly committed tokens into each request's context; how many there were."""
        requests = [r for r in requests if r.pending]
        if not requests:
            return 0
        slots, counts = [], []
        for request in requests:
            if request.draft_slot is None:
                request.draft_slot = self.store.open(self.room(request.num_pending))
            self.store.reserve(request.draft_slot, self.room(request.draft_slot.length + request.num_pending))
            slots.append(request.draft_slot)
            counts.append(request.num_pending)
        layout = Layout(slots, counts, self.drafter.device)
        features = torch.cat([part for i in layout.order for part in requests[i].pending], dim=1)
        positions = torch.tensor([layout.positions], device=self.drafter.device)
        for layer, key_values in enumerate(self.drafter.context_key_values(features, positions)):
            layout.write(layer, *key_values)
        for request, slot, count in zip(requests, slots, counts):
            slot.length += count
            request.pending.clear()
        return sum(counts)

    def draft(self, requests: Sequence[Request], limits: Sequence[int], policy: BatchPolicy) -> list[RequestDraft]:
        """Draft a block for each request with a limit; the lists go with `requests`."""
        drafts = [RequestDraft(r, n) for r, n in zip(requests, limits)]
        rows = [r for r, n in enumerate(limits) if n]
        if not rows:
            return drafts
        hidden, places = self._parallel_stage([drafts[r] for r in rows])
        base = self.drafter.compute_logits(hidden[[at + k for at, r in zip(places, rows) for k in range(limits[r])]])
        candidates = Candidates.of(self.drafter, base.to(scores_dtype(base)))
        self._sequential_stage(drafts, rows, hidden, places, candidates, policy)
        return drafts

    def _parallel_stage(self, drafts: Sequence[RequestDraft]) -> tuple[torch.Tensor, list[int]]:
        """Hidden states of all blocks, each as wide as its own limit asks: [rows, d], and where each one's predictions begin."""
        model, config = self.drafter, self.drafter.config
        widths = [config.block_size] * len(drafts)
        if config.min_block_size is not None:
            widths = [max(config.min_block_size, d.limit + self._first) for d in drafts]
        slots = [d.request.draft_slot for d in drafts if d.request.draft_slot is not None]
        for slot, width in zip(slots, widths):
            self.store.reserve(slot, slot.length + width)
        layout = Layout(slots, widths, model.device)
        ids = torch.full((layout.num_rows,), config.mask_token_id, device=model.device)
        anchors = torch.cat([d.request.text.input_ids[0, -1:] for d in drafts])
        ids[layout.starts] = anchors.to(model.device)
        masks = {kind: functools.partial(_mask, config, kind) for kind in config.layer_types}

        def attends(layer: int) -> Callable:
            def attend(queries, keys, values, scaling):
                layout.write(layer, keys, values)
                kind = config.layer_types[layer]
                return layout.attend(layer, queries, masks[kind], kind, scaling)

            return attend

        positions = torch.tensor([layout.positions], device=model.device)
        contexts = [attends(layer) for layer in range(config.num_hidden_layers)]
        hidden = model.run_layers(model.embed(ids[None]), positions, contexts, {})[0]
        return hidden, [start + self._first for start in layout.starts]

    def _sequential_stage(self, drafts, rows, hidden, places, base: Candidates, policy: BatchPolicy) -> None:
        model, head = self.drafter, self.drafter.markov_head
        device = model.device
        previous = torch.cat([drafts[r].request.text.input_ids[0, -1:] for r in rows]).to(device)
        state = None
        if self._first and head is not None:  # fill-in: slot 0 proposes nothing, but the recurrent state starts there
            state = head.step(head.markov_w1(previous), hidden[[at - 1 for at in places]], None)[1]
        starts = [sum(drafts[r].limit for r in rows[:i]) for i in range(len(rows))]
        alive = list(range(len(rows)))  # places in `rows` of those still drafting
        survival: list[list[float]] = [d.survival for d in drafts]
        for k in range(max(drafts[r].limit for r in rows)):
            going = [i for i in alive if drafts[rows[i]].limit > k]
            previous, state = _narrowed(previous, alive, going), _narrowed(state, alive, going)
            alive = going
            if not alive:
                return
            states = hidden[[places[i] + k for i in alive]]
            latent = embedding = None
            if head is not None:
                embedding = head.markov_w1(previous)
                latent, state = head.step(embedding, states, state)
            if model.confidence_head is not None:
                logits = model.confidence(states, embedding).tolist()
                known = calibrated_confidences(model.config, logits, k + 1)
                for i, raw, c in zip(alive, logits, known):
                    draft = drafts[rows[i]]
                    draft.confidence_logits.append(raw)
                    if policy.reads_survival:
                        draft.survival.append(c * (draft.survival[-1] if draft.survival else 1.0))
            admitted = policy.admit(k + 1, [rows[i] for i in alive], survival)
            going = [i for i, goes_on in zip(alive, admitted) if goes_on]
            previous, state = _narrowed(previous, alive, going), _narrowed(state, alive, going)
            latent = _narrowed(latent, alive, going)
            alive = going
            if not alive:
                return
            candidates = base[[starts[i] + k for i in alive]]
            scores = candidates.logits if latent is None else candidates.logits + head.project(latent, candidates.rows)
            tokens = self._draw([drafts[rows[i]] for i in alive], candidates, scores)
            going = [i for i, token in zip(alive, tokens) if token is not None]
            state = _narrowed(state, alive, going)
            alive = going
            previous = torch.tensor([token for token in tokens if token is not None], dtype=torch.long, device=device)

    def _draw(self, drafts: Sequence[RequestDraft], candidates: Candidates, scores: torch.Tensor) -> list[int | None]:
        """One token for each row of scores [rows, N]; `None` where the request's processors leave none, or fail."""
        best = candidates.chosen(scores.argmax(-1)).tolist()
        tokens: list[int | None] = []
        for i, (draft, token) in enumerate(zip(drafts, best)):
            row, own, prepared = scores[i : i + 1], candidates[i : i + 1], draft.request.prepared
            try:
                if prepared.processors:
                    row = self._process(draft, own, row)
                    token = None if bool(torch.isneginf(row).all()) else int(own.chosen(row.argmax(-1)))
                if token is not None and prepared.config.do_sample:
                    token = int(own.chosen(sampling.draw_tokens(row.softmax(-1), draft.request.draft_generator)))
            except Exception as error:
                draft.error, token = error, None
            if token is not None:
                draft.token_ids.append(token)
                draft.scores.append(row[0])
                draft.candidate_ids.append(None if own.token_ids is None else own.token_ids[0])
            tokens.append(token)
        return tokens

    def _process(self, draft: RequestDraft, candidates: Candidates, scores: torch.Tensor) -> torch.Tensor:
        """The request's processors on one row [1, N], with its text and draft as the prefix."""
        ids = draft.request.text.input_ids
        ids = torch.cat([ids, ids.new_tensor([draft.token_ids])], dim=1).to(scores.device)
        return candidates.process(draft.request.prepared.processors, ids, scores, self.drafter.config.vocab_size)

    def probs(self, draft: RequestDraft, count: int) -> torch.Tensor:
        """What the first `count` tokens were drawn from, in the target's vocabulary. [1, count, V]"""
        probs = torch.stack(draft.scores[:count]).softmax(-1)
        known = [ids for ids in draft.candidate_ids[:count] if ids is not None]
        ids = torch.stack(known) if known else None
        return in_target_vocabulary(probs, ids, self.drafter.config.vocab_size, 0.0)[None]


def _narrowed(values: torch.Tensor | None, rows: Sequence[int], kept: Sequence[int]) -> torch.Tensor | None:
    """The rows of `kept` alone, in their order; `rows` name the rows of `values`."""
    if values is None or len(rows) == len(kept):
        return values
    return values[[rows.index(i) for i in kept]]


def _mask(config, kind: str, group: Group) -> torch.Tensor | None:
    """What the rows of each block see: [count, Q, C], bool; its context, and itself as the layer's kind allows."""
    lengths, keys, width = group.length_column, group.key_places(), group.width
    rows = torch.tensor(group.rows, device=group.device)[:, None, None]
    if sees_everything(config, kind):
        return None if group.count == 1 else (keys < lengths + rows).expand(-1, width, -1)
    block = lengths[:, 0] + torch.arange(width, device=group.device)  # [count, Q] positions
    places = keys[0].expand(group.count, -1)
    seen = block_mask(config, kind, places, block, lengths[:, 0])  # [count, Q, C + Q]
    context, within = seen[..., : group.columns] & (keys < lengths), seen[..., group.columns :]
    # Row q of a block is its key number `lengths + q`; rows that a narrower block has not are seen by nobody.
    where = keys - lengths  # [count, 1, C]
    inside = (where >= 0) & (where < rows)
    return context | (within.gather(2, where.clamp(0, width - 1).expand(-1, width, -1)) & inside)
