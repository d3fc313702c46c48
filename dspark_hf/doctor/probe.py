"""How much a drafter's guesses agree with its target as it is configured, and under other readings of the same weights.

Axes: S tokens of one text, A anchors in it, γ positions, V_d draft vocabulary, m tapped layers.

Nothing is decoded for a reading: the target answers a few prompts once, and at every third token of its answers the drafter
makes a block with the answer so far. The sum of min(target's, drafter's probability) over the vocabulary is the probability that
a drafted token is accepted (paper §2.1); it moves far less by chance than counted tokens do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..decoding.checks import rope_bases
from ..decoding.target import TargetTaps
from ..decoding.trial_forwards import context_length
from ..evaluation.prompt_sets import load_conversations
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel, Qwen3RotaryEmbedding
from ..training.corpus import Answer, AnswerPlan, Prompt, decode_answers
from ..training.step import Batch, DraftTrainingStep, make_blocks

BLOCK_FORMS = ("qwen3", "gemma4")
ANSWER_TOKENS = 64
_AT_ONCE = 12
_STRIDE = 3  # tokens between anchors: neighbouring blocks say almost the same
_GROUP = 8  # blocks that follow each other count as one observation
_ROPE_BASES = (1e4, 1e5, 1e6, 5e6)
_LIKELY_ERRORS = 2.0
_CLEAR_ERRORS, _CLEAR_GAIN = 3.5, 0.004  # a better reading gains so many standard errors, and so much acceptance


@dataclass
class Reading:
    """One way to read a drafter's weights, and what it drafts at each anchor; `kind` is configured, layout, taps or rope.

    probabilities: by text, [A, γ], that a drafted token is accepted; NaN beyond the text's end. accepted: by text, [A], how
    many are accepted greedily. gain, error: acceptance above the configured reading's, and its standard error.
    """

    kind: str
    name: str
    sample_from_anchor: bool
    target_layer_ids: tuple[int, ...]
    rope_parameters: dict[str, Any]
    probabilities: list[torch.Tensor] = field(default_factory=list)
    accepted: list[torch.Tensor] = field(default_factory=list)
    gain: float = 0.0
    error: float = float("inf")

    @property
    def acceptance(self) -> float:
        """Mean probability that a drafted token is accepted where all before it were."""
        return float(torch.cat(self.probabilities).nanmean())

    @property
    def accepted_tokens(self) -> float:
        """Mean number of tokens of a block that are accepted in greedy decoding."""
        return float(torch.cat(self.accepted).float().mean())

    @property
    def is_better(self) -> bool:
        """Whether it is clearly better than the configured one."""
        return self.gain > max(_CLEAR_ERRORS * self.error, _CLEAR_GAIN)

    def prefix_lengths(self) -> list[float]:
        """Mean number of accepted tokens where 1, 2, ... γ are drafted; blocks at the text's end are left out."""
        whole = ~torch.cat(self.probabilities).isnan().any(-1)
        accepted = torch.cat(self.accepted)
        accepted = accepted[whole] if bool(whole.any()) else accepted
        longest = self.probabilities[0].shape[1]
        return [float(accepted.clamp(max=k).float().mean()) for k in range(1, longest + 1)]

    def compare(self, configured: Reading) -> None:
        """Paired over anchors, at the positions that both readings draft; neighbouring blocks are one observation."""
        gains = []
        for ours, theirs in zip(configured.probabilities, self.probabilities, strict=True):
            shared = min(ours.shape[1], theirs.shape[1])
            difference = (theirs[:, :shared] - ours[:, :shared]).nanmean(-1)
            gains += [float(part.mean()) for part in difference.split(_GROUP)]
        values = torch.tensor(gains)
        self.gain = float(values.mean())
        self.error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("inf")


@dataclass(frozen=True)
class ProbeResult:
    """All readings compared; `coverage`: share of the answers' tokens that the draft vocabulary holds."""

    configured: Reading
    others: list[Reading]
    coverage: float
    tokens: int

    @property
    def best(self) -> Reading | None:
        """The reading that gains most, where any is clearly better: what is further off blurs what is less so."""
        if not any(other.is_better for other in self.others):
            return None
        return max((o for o in self.others if o.gain > _LIKELY_ERRORS * o.error), key=lambda other: other.gain)


def probe_texts(target: Target) -> list[Answer]:
    """The target's own greedy answers to our prompts, 64 tokens each; those that do not fit its context are left out."""
    room = context_length(target.model) - ANSWER_TOKENS
    prompts = [(c.domain, encode_messages(target.tokenizer, c.messages)) for c in load_conversations(None)]
    fitting = [(domain, ids) for domain, ids in prompts if len(ids) <= room]
    plans = [AnswerPlan(i, Prompt(domain, tuple(ids))) for i, (domain, ids) in enumerate(fitting)]
    results = decode_answers(target.model, plans, max_new_tokens=ANSWER_TOKENS, num_slots=_AT_ONCE)
    bar = tqdm(results, total=len(plans), desc="the target answers", unit="text", leave=False, disable=None)
    return [Answer(plan.prompt.domain, list(plan.prompt.input_ids), ids) for plan, ids in bar]


def readings(target: PreTrainedModel, drafter: DSparkDraftModel) -> list[Reading]:
    """The configured reading first, then those that differ from it in one thing."""
    config = drafter.config
    taps, rope = tuple(config.target_layer_ids), dict(config.rope_parameters)

    def reading(kind: str, name: str, **changed: Any) -> Reading:
        own = Reading(kind, name, config.sample_from_anchor, taps, rope)
        return replace(own, probabilities=[], accepted=[], **changed)

    found = [reading("configured", "as configured")]
    if config.block_size > 1:
        name = "fill-in" if config.sample_from_anchor else "anchor-first"
        found.append(reading("layout", name, sample_from_anchor=not config.sample_from_anchor))
    last = target.config.get_text_config().num_hidden_layers - 2
    for step in (-1, 1):
        moved = tuple(i + step for i in taps)
        if min(moved) >= -1 and max(moved) <= last:
            found.append(reading("taps", f"target_layer_ids {list(moved)}", target_layer_ids=moved))
    for base in sorted({*_ROPE_BASES, *rope_bases(target)} - {float(rope["rope_theta"])}):
        found.append(reading("rope", f"rope_theta {base:.0f}", rope_parameters=rope | {"rope_theta": base}))
    return found


@contextmanager
def _read_as(drafter: DSparkDraftModel, reading: Reading) -> Iterator[None]:
    """The drafter drafts by another reading inside the block (its tapped features are the caller's affair)."""
    config = drafter.config
    before = config.sample_from_anchor, config.rope_parameters, drafter.rotary_emb
    config.sample_from_anchor = reading.sample_from_anchor
    if reading.rope_parameters != config.rope_parameters:
        config.rope_parameters = reading.rope_parameters
        drafter.rotary_emb = Qwen3RotaryEmbedding(config).to(drafter.device)
    try:
        yield
    finally:
        config.sample_from_anchor, config.rope_parameters, drafter.rotary_emb = before


@torch.no_grad()
def probe(target: PreTrainedModel, drafter: DSparkDraftModel, texts: Sequence[Answer]) -> ProbeResult:
    """Compare all readings of a block drafter on the target's answers.

    Raises:
        ValueError: no answer of at least two tokens.
    """
    texts = [text for text in texts if len(text.response_ids) > 1]
    if not texts:
        raise ValueError("The target's answers have fewer than two tokens each, too few to probe on.")
    configured, *others = every = readings(target, drafter)
    layers = sorted({i for reading in every for i in reading.target_layer_ids})
    step = DraftTrainingStep(drafter).to(drafter.device)
    for text in tqdm(texts, desc="probing", unit="text", leave=False, disable=None):
        features, target_probs = _targets_side(target, drafter, text, layers)
        for reading in every:
            context = torch.cat([features[i] for i in reading.target_layer_ids], dim=-1)
            with _read_as(drafter, reading):
                _add_text(reading, step, text, context, target_probs)
    for other in others:
        other.compare(configured)
    tokens = torch.tensor([i for text in texts for i in text.response_ids])
    coverage = float((step.to_draft.cpu()[tokens] >= 0).float().mean())
    return ProbeResult(configured, others, coverage, len(tokens))


def _targets_side(
    target: PreTrainedModel, drafter: DSparkDraftModel, text: Answer, layers: Sequence[int]
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Each layer's output [S, d_target], and the target's probabilities of the draft vocabulary after each token [S, V_d]."""
    ids = torch.tensor([text.input_ids + text.response_ids], device=target.device)
    with TargetTaps(target, layers) as taps:
        logits = target(input_ids=ids, use_cache=False).logits[0]
        columns = taps.take(drafter.device)[0].split(drafter.config.target_hidden_size, dim=-1)
    probs = logits.float().softmax(-1).to(drafter.device)[:, drafter.draft_token_ids()]
    return dict(zip(layers, columns, strict=True)), probs


def _add_text(
    reading: Reading,
    step: DraftTrainingStep,
    text: Answer,
    context: torch.Tensor,  # [S, m * d_target]
    target_probs: torch.Tensor,  # [S, V_d]
) -> None:
    device = context.device
    start, length = len(text.input_ids), len(text.input_ids) + len(text.response_ids)
    ids = torch.tensor([text.input_ids + text.response_ids], device=device)
    mask = (torch.arange(length, device=device) >= start)[None].long()
    anchors = torch.arange(start, length - 1, _STRIDE, device=device)[None]
    blocks = make_blocks(step.drafter.config, ids, mask, anchors, torch.ones_like(anchors, dtype=torch.bool))
    nothing = target_probs.new_zeros(1, length, 0)  # what only losses read
    hidden = step.block_hidden(Batch(ids, mask, context[None], nothing, nothing), blocks)[0]
    labels, valid = blocks.labels[0], blocks.valid[0]
    logits, _ = step.heads(hidden, blocks.input_ids[0, :, 0], labels)
    chances = torch.minimum(logits.float().softmax(-1), target_probs[blocks.label_positions[0] - 1]).sum(-1)
    reading.probabilities.append(chances.masked_fill(~valid, torch.nan).cpu())
    # With the right tokens before it, a draft's leading run is what greedy drafting would have had accepted.
    right = (logits.argmax(-1) == step.to_draft[labels]) & valid
    reading.accepted.append(right.long().cumprod(-1).sum(-1).cpu())
