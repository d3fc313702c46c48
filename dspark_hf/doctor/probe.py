"""How much a drafter's guesses agree with its target as it is configured, and under other readings of the same weights.

Owns: the texts to probe on, the other readings (layout, tapped layers, rope base), the agreement under each, when one is
clearly better. Does not own: what is said about it (`checks`), the drafter's forward over a text (`training.step`).
Axes: S tokens of one text, A anchors in it, γ positions, V_d draft vocabulary, m tapped layers.

Nothing is decoded for a reading: the target answers a few prompts once, and at every third token of its answers the drafter
makes a block with the answer so far. The sum of min(target's, drafter's probability) over the vocabulary is the probability that
a drafted token stands (paper §2.1); it moves far less by chance than counted tokens do.
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

ANSWER_TOKENS = 64
_AT_ONCE = 12
_STRIDE = 3  # tokens between anchors: neighbouring blocks tell almost the same
_GROUP = 8  # blocks that follow each other count as one observation
_ROPE_BASES = (1e4, 1e5, 1e6, 5e6)
_LIKELY_ERRORS = 2.0
_CLEAR_ERRORS, _CLEAR_GAIN = 3.5, 0.004  # a better reading gains so many standard errors, and so much acceptance
BLOCK_FORMS = ("qwen3", "gemma4")


@dataclass(frozen=True)
class Reading:
    """One way to read a drafter's weights; `kind` is "configured", "layout", "taps" or "rope"."""

    kind: str
    name: str
    sample_from_anchor: bool
    target_layer_ids: tuple[int, ...]
    rope_parameters: dict[str, Any]


@dataclass
class Agreement:
    """Of one reading, for each anchor: the probability that a drafted token stands [γ], how many did greedily."""

    reading: Reading
    probabilities: list[torch.Tensor] = field(default_factory=list)  # each [A, γ], NaN beyond the text's end
    accepted: list[torch.Tensor] = field(default_factory=list)  # each [A]

    @property
    def acceptance(self) -> float:
        """Mean probability that a drafted token stands where all before it did."""
        return float(torch.cat(self.probabilities).nanmean())

    @property
    def accepted_tokens(self) -> float:
        """Mean number of tokens of a block that stand in greedy decoding."""
        return float(torch.cat(self.accepted).float().mean())

    def prefix_lengths(self) -> list[float]:
        """Mean number of accepted tokens where 1, 2, ... γ are drafted; blocks at the text's end are left out."""
        whole = ~torch.cat(self.probabilities).isnan().any(-1)
        accepted = torch.cat(self.accepted)
        accepted = accepted[whole] if bool(whole.any()) else accepted
        longest = self.probabilities[0].shape[1]
        return [float(accepted.clamp(max=k).float().mean()) for k in range(1, longest + 1)]


@dataclass(frozen=True)
class Comparison:
    """How another reading's acceptance differs from the configured one's: in all, and its standard error."""

    reading: Reading
    acceptance: float
    accepted_tokens: float
    gain: float
    error: float
    is_better: bool


@dataclass(frozen=True)
class ProbeResult:
    """`coverage`: share of the answers' tokens that the draft vocabulary holds."""

    configured: Agreement
    others: list[Comparison]
    coverage: float
    tokens: int

    @property
    def best(self) -> Comparison | None:
        """The reading that gains most, where any is clearly better: what is further off blurs what is less so."""
        if not any(other.is_better for other in self.others):
            return None
        likely = [other for other in self.others if other.gain > _LIKELY_ERRORS * other.error]
        return max(likely, key=lambda other: other.gain)


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
    own = Reading("configured", "as configured", config.sample_from_anchor, taps, rope)
    found = [own]
    if config.block_size > 1:
        name = "fill-in" if config.sample_from_anchor else "anchor-first"
        found.append(replace(own, kind="layout", name=name, sample_from_anchor=not config.sample_from_anchor))
    last = target.config.get_text_config().num_hidden_layers - 2
    for step in (-1, 1):
        moved = tuple(i + step for i in taps)
        if min(moved) >= -1 and max(moved) <= last:
            found.append(replace(own, kind="taps", name=f"target_layer_ids {list(moved)}", target_layer_ids=moved))
    for base in sorted({*_ROPE_BASES, *rope_bases(target)} - {float(rope["rope_theta"])}):
        found.append(
            replace(own, kind="rope", name=f"rope_theta {base:.0f}", rope_parameters=rope | {"rope_theta": base})
        )
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


@torch.inference_mode()
def probe(target: PreTrainedModel, drafter: DSparkDraftModel, texts: Sequence[Answer]) -> ProbeResult:
    """Compare all readings of a block drafter on the target's answers.

    Raises:
        ValueError: no answer of at least two tokens.
    """
    texts = [text for text in texts if len(text.response_ids) > 1]
    if not texts:
        raise ValueError("The target's answers have fewer than two tokens each, too few to probe on.")
    agreements = [Agreement(reading) for reading in readings(target, drafter)]
    layers = sorted({i for a in agreements for i in a.reading.target_layer_ids})
    step = DraftTrainingStep(drafter).to(drafter.device)
    with tqdm(total=len(texts), desc="probing", unit="text", leave=False, disable=None) as bar:
        for text in texts:
            features, target_probs = _targets_side(target, drafter, text, layers)
            for agreement in agreements:
                context = torch.cat([features[i] for i in agreement.reading.target_layer_ids], dim=-1)
                with _read_as(drafter, agreement.reading):
                    _add_text(agreement, step, text, context, target_probs)
            bar.update()
    tokens = torch.tensor([i for text in texts for i in text.response_ids])
    configured, *others = agreements
    return ProbeResult(
        configured,
        [_compare(configured, other) for other in others],
        float((step.to_draft.cpu()[tokens] >= 0).float().mean()),
        len(tokens),
    )


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
    agreement: Agreement,
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
    stood = torch.minimum(logits.float().softmax(-1), target_probs[blocks.label_positions[0] - 1]).sum(-1)
    agreement.probabilities.append(stood.masked_fill(~valid, torch.nan).cpu())
    # With the right tokens before it, a draft's leading run is what greedy drafting would have had accepted.
    right = (logits.argmax(-1) == step.to_draft[labels]) & valid
    agreement.accepted.append(right.long().cumprod(-1).sum(-1).cpu())


def _compare(configured: Agreement, other: Agreement) -> Comparison:
    """Paired over anchors, at the positions that both readings draft; neighbouring blocks are one observation."""
    gains = []
    for ours, theirs in zip(configured.probabilities, other.probabilities, strict=True):
        shared = min(ours.shape[1], theirs.shape[1])
        difference = (theirs[:, :shared] - ours[:, :shared]).nanmean(-1)
        gains += [float(part.mean()) for part in difference.split(_GROUP)]
    values = torch.tensor(gains)
    gain, error = float(values.mean()), float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("inf")
    is_better = gain > max(_CLEAR_ERRORS * error, _CLEAR_GAIN)
    return Comparison(other.reading, other.acceptance, other.accepted_tokens, gain, error, is_better)
