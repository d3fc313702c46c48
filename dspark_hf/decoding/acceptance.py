"""Acceptance of proposals: from the target's rows to processed scores, and from these to a path that is committed.

By the same-text rule a token is accepted where the target itself chooses it: the best one, or the one that the noise of its
position draws (`noise`). The paper's rule (§2.1) rejects at random, and its draws go through `draw_tokens` and `flip`, so that
a test can enumerate them.

Axes: K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList

from ..model.sampler_dspark import apply_processors, are_value_only, draw_tokens, scores_dtype
from .noise import choose
from .proposal import Proposal
from .sequence import Choice, TextSequence

__all__ = ["Verification", "accept", "draw_tokens", "flip", "process_rows", "verify_block", "verify_chosen"]


def flip(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """True with the given probability, independently for each entry. [...] -> [...], bool"""
    return torch.rand(probs.shape, dtype=probs.dtype, device=probs.device, generator=generator) < probs


def process_rows(
    processors: LogitsProcessorList,
    input_ids: torch.LongTensor,  # [1, L + K], committed tokens, then drafted ones
    scores: torch.Tensor,  # [K + 1, V], row i follows the first L + i tokens
) -> torch.Tensor:
    """Processed scores of every row, each with the tokens before it as its prefix; for stateless processors. [K + 1, V]"""
    if not processors:
        return scores
    if are_value_only(processors):
        return apply_processors(processors, input_ids, scores)
    start = input_ids.shape[1] - scores.shape[0] + 1
    rows = [
        apply_processors(processors, input_ids[:, : start + i], scores[i : i + 1].clone())
        for i in range(scores.shape[0])
    ]
    return torch.cat(rows)


@dataclass(frozen=True)
class Verification:
    """num_accepted [], 0..K; next_token [], the correction of the first rejected token, or the bonus token."""

    num_accepted: torch.LongTensor
    next_token: torch.LongTensor


def verify_block(
    draft_tokens: torch.LongTensor,  # [K]
    draft_probs: torch.Tensor,  # [K, V], what each token was drawn from
    target_probs: torch.Tensor,  # [K + 1, V]
    *,
    generator: torch.Generator | None = None,
) -> Verification:
    """Accept left to right with probability min(1, target / draft); correct the first rejection from the normalised
    positive part of target - draft; draw the bonus token from the target where all are accepted."""
    num_drafted = len(draft_tokens)
    if num_drafted == 0:
        accepted = draft_tokens.new_zeros(1)
        return Verification(accepted[0], draw_tokens(target_probs[:1], generator)[0])
    chosen = draft_tokens[:, None]
    ratio = target_probs[:-1].gather(1, chosen) / draft_probs.gather(1, chosen)
    accepted = _leading_run(flip(ratio[:, 0].clamp(max=1.0), generator))
    residual = target_probs[accepted[None]]
    rejected = accepted < num_drafted
    corrected = (residual - draft_probs[accepted[None].clamp(max=num_drafted - 1)]).clamp(min=0.0)
    # Where rounding leaves nothing of the difference the two distributions are the same.
    use = rejected & (corrected.sum(-1) > 0)
    residual = torch.where(use[:, None], corrected / corrected.sum(-1, keepdim=True).clamp(min=1e-300), residual)
    return Verification(accepted, draw_tokens(residual, generator)[0])


def verify_chosen(
    draft_tokens: torch.LongTensor,  # [K]
    target_tokens: torch.LongTensor,  # [K + 1], the target's own choice at every position
) -> Verification:
    """The same-text rule: accepted is what the target chooses; needs no probabilities of the draft."""
    accepted = _leading_run(draft_tokens == target_tokens[:-1])
    return Verification(accepted, target_tokens[accepted[None]][0])


def _leading_run(accepted: torch.Tensor) -> torch.LongTensor:
    return accepted.long().cumprod(dim=0).sum(dim=0)


def accept(
    sequences: Sequence[TextSequence], proposals: Sequence[Proposal], logits: Sequence[torch.Tensor]
) -> list[Choice | Exception]:
    """What the target makes of each proposal, by its logits [K + 1, V] of the anchor's row and those of the nodes.

    The device is read once for all sequences, and once a token for one whose processors have a memory. An exception of a
    sequence's own processors, raised now or while it was drafted, stands in its place.
    """
    verified: list[_Verified | Choice | Exception] = []
    for sequence, proposal, rows in zip(sequences, proposals, logits, strict=True):
        try:
            verified.append(proposal.error or _verify(sequence, proposal, rows))
        except Exception as error:
            verified.append(error)
    known = [
        torch.cat([v.result.num_accepted[None], v.tokens, v.result.next_token[None]])
        for v in verified
        if isinstance(v, _Verified)
    ]
    numbers = torch.cat(known).tolist() if known else []  # of several devices' sequences none are served together
    choices: list[Choice | Exception] = []
    for entry in verified:
        if not isinstance(entry, _Verified):
            choices.append(entry)
            continue
        own, numbers = numbers[: len(entry.tokens) + 2], numbers[len(entry.tokens) + 2 :]
        accepted = own[0]
        # Of a chain; a tree's path follows the children that the target chose.
        ids = torch.cat([entry.tokens[:accepted], entry.result.next_token[None]])
        choices.append(_checked(Choice(list(range(accepted)), own[1 : accepted + 1] + own[-1:], ids, *entry.rows)))
    return choices


@dataclass(frozen=True)
class _Verified:
    """On the target's device still; rows: its logits and the scores that they became."""

    result: Verification
    tokens: torch.LongTensor
    rows: tuple[torch.Tensor, torch.Tensor]


def _verify(sequence: TextSequence, proposal: Proposal, logits: torch.Tensor) -> _Verified | Choice:
    tokens, ids = proposal.token_ids, sequence.input_ids
    by_rejection = sequence.do_sample and sequence.noise is None
    raw = logits.to(ids.device, scores_dtype(logits) if by_rejection else torch.float32)
    if sequence.has_memory:
        return _walk(sequence, proposal, raw)
    if len(tokens):
        ids = torch.cat([ids, tokens[None]], dim=1)
    scores = process_rows(sequence.processors, ids, raw)
    if not by_rejection:
        return _Verified(verify_chosen(tokens, _choices(sequence, scores)), tokens, (raw, scores))
    probs = scores.new_zeros(0, scores.shape[-1])
    if len(tokens):
        probs = proposal.probs(scores.shape[-1]).to(scores.device, scores.dtype)
    result = verify_block(tokens, probs, scores.softmax(-1), generator=sequence.generator)
    return _Verified(result, tokens, (raw, scores))


def _choices(sequence: TextSequence, scores: torch.Tensor, first: int = 0) -> torch.LongTensor:
    """The target's own token of each row, `first` being the position of the first one behind the text. [K, V] -> [K]"""
    if sequence.noise is None:
        return scores.argmax(-1)
    noise = [sequence.noise.at(first + i, scores.shape[-1]) for i in range(len(scores))]
    return choose(scores, torch.stack(noise))


def _walk(sequence: TextSequence, proposal: Proposal, raw: torch.Tensor) -> Choice:
    """Row by row along the accepted path, so that the processors are called once for each token of the text, in order."""
    drafted, ids, rows = proposal.token_ids.tolist(), sequence.input_ids, []
    chosen: list[int] = []
    for i in range(len(raw)):
        rows.append(apply_processors(sequence.processors, ids, raw[i : i + 1].clone()))
        token = _choices(sequence, rows[-1], i)
        chosen += token.tolist()
        ids = torch.cat([ids, token[None]], dim=1)
        if chosen[i:] != drafted[i : i + 1] or sequence.ends_with(chosen[i], ids.shape[1]):
            break
    path = list(range(len(chosen) - 1))
    return _checked(Choice(path, chosen, ids[0, sequence.length :], raw, torch.cat(rows)))


def _checked(choice: Choice) -> Choice:
    """Raises a RuntimeError where a token could not be drawn, as plain decoding does."""
    if choice.token_ids[-1] < 0:
        raise RuntimeError("The target's scores have NaN in them, so no token can be drawn.")
    return choice
