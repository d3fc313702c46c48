"""`DSparkCandidateGenerator`: the drafter's side of a generation.

Owns: the drafter's context (what it has seen of the committed text), the admission policy in force, drafting a block.
Does not own: the target's forward (`loop`), accepting (`verification`), the drafter's layers (`modeling_dspark`).
Axes: S committed tokens whose features are new, K drafted tokens, m tapped layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import CandidateGenerator
from transformers.utils import logging

from ..drafting_dspark import Admission, DraftBlock
from ..modeling_dspark import DSparkDraftModel
from ..scheduling.admission import ConfidenceThreshold, FixedLength, GuardedLength, RoundOutcome, RoundPolicy
from ..scheduling.belief import Expectation
from ..scheduling.lookahead import LookaheadScheduler
from ..scheduling.step_rates import StepRates
from .lookup import MOST_TOKENS, Copy, TextLookup
from .profiling import step_rates_of
from .stats import RoundRecord
from .targets import placeholder_ids

logger = logging.get_logger(__name__)
_CONTEXT_ATTRIBUTE = "dspark_context"


@dataclass
class DraftContext:
    """What the drafter has seen of one text: K/V of tokens already projected, features of those still to be.

    `start` is the position of the first of them; it is not 0 where a cache came without a context.
    """

    drafter_id: int
    start: int = 0
    cache: DynamicCache = field(default_factory=DynamicCache)
    pending: list[torch.Tensor] = field(default_factory=list)  # each [1, S, m * d_target]

    @property
    def num_pending(self) -> int:
        return sum(part.shape[1] for part in self.pending)

    @property
    def end(self) -> int:
        """Position after the last token seen."""
        return self.start + self.cache.get_seq_length() + self.num_pending

    def take_pending(self) -> torch.Tensor | None:
        """The features not yet projected, [1, S, m * d_target]; they are forgotten here."""
        parts, self.pending = self.pending, []
        return torch.cat(parts, dim=1) if parts else None

    def crop(self, end: int) -> None:
        """Forget what lies at `end` and after."""
        surplus = self.end - end
        while surplus > 0 and self.pending:
            last = self.pending.pop()
            if last.shape[1] > surplus:
                self.pending.append(last[:, :-surplus])
            surplus -= last.shape[1]
        if surplus > 0:
            self.cache.crop(-surplus)


def context_of(target_cache: Cache, drafter: DSparkDraftModel, num_tokens: int) -> DraftContext:
    """The drafter's context that came along with a kept target cache of `num_tokens` real tokens, or a new one."""
    context = getattr(target_cache, _CONTEXT_ATTRIBUTE, None)
    if num_tokens == 0 or context is None or context.drafter_id != id(drafter) or context.end < num_tokens:
        if num_tokens:
            logger.warning_once(
                f"The cache holds {num_tokens} tokens that this drafter has not seen (it was filled without it), so fewer "
                "drafts will be accepted at first. The output is not affected."
            )
        context = DraftContext(id(drafter), start=num_tokens)
    context.crop(num_tokens)
    return context


def keep_context(target_cache: Cache, context: DraftContext) -> None:
    """Let the context travel with the target's cache, for a next turn."""
    setattr(target_cache, _CONTEXT_ATTRIBUTE, context)


def scheduled(
    target: PreTrainedModel, drafter: DSparkDraftModel, step_rates: StepRates | None = None
) -> LookaheadScheduler:
    """The policy that a calibrated drafter has by default, with this machine's step rates (measured at first use).

    Set it as `drafter.admission` for a drafter that was never calibrated; it then starts from a neutral expectation.
    """
    config, expectation = drafter.config, None
    if config.expected_acceptance is not None:
        persistence = {} if config.acceptance_persistence is None else {"persistence": config.acceptance_persistence}
        expectation = Expectation(config.expected_acceptance, **persistence)
    return LookaheadScheduler(
        step_rates or step_rates_of(target, drafter),
        expectation,
        reads_survival=drafter.confidence_head is not None,
    )


@dataclass(frozen=True)
class Policy:
    """The admission policy of one generation, and the most tokens drafted a round."""

    admission: Admission
    cap: int


def policy_of(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    rates_of: Callable[[PreTrainedModel, DSparkDraftModel], StepRates] = step_rates_of,
) -> Policy:
    """From the drafter's settings: `admission`, else a confidence threshold, else the scheduler where it is calibrated.

    A drafter that was never calibrated drafts whole blocks for as long as any of them is of use. `rates_of` gives the
    scheduler's table where one is needed.

    Raises:
        ValueError: a negative `num_assistant_tokens`.
    """
    config, most = drafter.generation_config, drafter.config.num_draft_tokens
    cap = most if config.num_assistant_tokens is None else min(config.num_assistant_tokens, most)
    if cap < 0:
        raise ValueError(f"num_assistant_tokens must be at least 0, got {cap}.")
    admission, threshold = drafter.admission, config.assistant_confidence_threshold or 0.0
    if admission is None and threshold > 0:
        admission = ConfidenceThreshold(threshold)
    if admission is None and cap and drafter.config.is_calibrated:
        try:
            admission = scheduled(target, drafter, rates_of(target, drafter))
        # Whatever a target of its own kind raises.
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.warning_once(
                f"The step rates of {type(target).__name__} can't be measured ({type(error).__name__}: {error}), so every "
                "round drafts a whole block. Set drafter.step_rates to a table of your own to have it scheduled."
            )
    if admission is None:
        admission = GuardedLength(cap) if cap else FixedLength(0)
    return Policy(admission.fresh() if isinstance(admission, RoundPolicy) else admission, cap)


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts one block a round. The loop tells it the features of every committed token through `observe`."""

    requires_model_outputs = False

    def __init__(
        self,
        drafter: DSparkDraftModel,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        context: DraftContext,
        generator: torch.Generator | None = None,
        policy: Policy | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        drafter.bind_target(target)
        self.drafter, self.context, self.generator = drafter, context, generator
        self.sizes = sizes  # the numbers of rows that the target's forward may have, ascending from 1; empty: any
        self.room = 0  # tokens that this round may draft or pad with
        self.do_sample = bool(generation_config.do_sample)
        self.logits_processor = logits_processor
        self.max_length = generation_config.max_length
        policy = policy or policy_of(target, drafter)
        self.admission, self.max_tokens = policy.admission, policy.cap
        # Copies are weighed against blocks by what a second is worth, which this policy alone knows.
        weighs = drafter.lookup_drafts and isinstance(self.admission, LookaheadScheduler)
        self.lookup = TextLookup(placeholder_ids(target)) if weighs else None
        # A cap below what the drafter can do is the user's, and holds for copies too.
        self.max_copied = MOST_TOKENS if policy.cap >= drafter.config.num_draft_tokens else policy.cap
        self.copy: Copy | None = None  # what is verified in this round in place of a block
        self.planned = 0  # tokens that this round's block was made for
        self.parked = False  # whether that is 0 by the policy's choice
        self.backlog = 0  # tokens whose features the last draft projected

    def observe(self, features: torch.Tensor) -> None:
        """Tapped features of tokens just committed, [1, S, m * d_target]."""
        if features.shape[1]:
            self.context.pending.append(features)

    def plan(self, input_ids: torch.LongTensor, most: int | None = None) -> int:
        """How many tokens this round drafts at most after `input_ids` [1, L], `most` a limit; 0 makes it a plain step."""
        length = input_ids.shape[1]
        room = self.max_length - length - 1  # the target's own token needs a place too
        room = room if most is None else min(room, most)
        if self.sizes:
            room = max((size for size in self.sizes if size <= room + 1), default=1) - 1
        self.room = room
        limit = min(room, self.max_tokens)
        if self.context.end == self.context.start:
            limit = 0
        self.parked = False
        if limit > 0 and isinstance(self.admission, RoundPolicy):
            limit = min(self.admission.begin_round(length - 1, limit), limit)
            self.parked = limit <= 0
        self.planned = max(limit, 0)
        self.copy = self._copy(input_ids, room)
        if self.copy is not None:
            self.planned, self.parked = len(self.copy.tokens), False
        return self.planned

    def _copy(self, input_ids: torch.LongTensor, room: int) -> Copy | None:
        """What followed an earlier run like the text's end, where that promises more tokens a second than the block."""
        if self.lookup is None:
            return None
        known = len(self.lookup)
        # Of the prompt it is not learned: what repeats there says little of what the target will repeat.
        self.lookup.extend(input_ids[0, known:].tolist(), learn=known > 0)
        proposal = self.lookup.propose(min(room, self.max_copied))
        if proposal is None:
            return None
        survival = self.lookup.belief.survival(proposal.match, len(proposal.tokens))
        assert isinstance(self.admission, LookaheadScheduler)
        length = self.admission.copy_length(survival, input_ids.shape[1] - 1)
        return Copy(proposal.tokens[:length], proposal.match) if length else None

    def draft(self, input_ids: torch.LongTensor) -> DraftBlock | None:
        """Draft after `input_ids` [1, L], the last one being the anchor; `None` where nothing was planned."""
        if self.copy is not None:
            tokens = input_ids.new_tensor([self.copy.tokens])
            counts = torch.tensor([len(self.copy.tokens)])
            return DraftBlock(tokens, None, None, counts, [[]], 0.0, self.context.cache)
        if not self.planned:
            return None
        new = self.context.take_pending()
        if new is not None and self.drafter.config.is_autoregressive:
            # A token's features stand with the token behind it, which a prompt given as `inputs_embeds` does not tell.
            unknown = max(new.shape[1] - input_ids.shape[1], 0)
            new, self.context.start = new[:, unknown:], self.context.start + unknown
        first = self.context.start + self.context.cache.get_seq_length()
        self.backlog = count = 0 if new is None else new.shape[1]
        positions = torch.arange(first, first + count + self.drafter.config.block_size, device=self.drafter.device)
        return self.drafter.draft(
            input_ids,
            new,
            self.context.cache,
            do_sample=self.do_sample,
            logits_processor=self.logits_processor,
            admission=self.admission,
            generator=self.generator,
            position_ids=positions[None],
            max_tokens=self.planned,
        )

    def rows(self, drafted: int, length: int) -> int:
        """Tokens of the target's forward that verifies `drafted` ones after `length`: one more, or padded where cheaper."""
        if self.sizes:
            return next(size for size in self.sizes if size > drafted)
        if not isinstance(self.admission, RoundPolicy) or self.admission.step_rates is None:
            return drafted + 1
        padded = self.admission.step_rates.padded_rows(drafted + 1, length - 1)
        return padded if padded <= self.room + 1 else drafted + 1

    def end_round(self, length: int, record: RoundRecord, committed: int, seconds: tuple[float, float, float]) -> None:
        """Tell the policy what became of a round that began after `length` tokens; `seconds` drafting, verifying, in all."""
        if isinstance(self.admission, RoundPolicy):
            drafted = (
                not record.copied
            )  # of a copy the policy learns what the forward cost and gave, nothing of the drafter
            self.admission.end_round(
                RoundOutcome(
                    length - 1,
                    record.planned * drafted,
                    record.drafted * drafted,
                    record.accepted * drafted,
                    committed,
                    record.rows,
                    self.backlog,
                    record.survival,
                    *seconds,
                )
            )

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """transformers' interface: `input_ids` with the draft behind it, and the scores it was drawn from [1, K, V]."""
        self.plan(input_ids)
        block = self.draft(input_ids)
        if block is None:
            return input_ids, None
        ids = torch.cat([input_ids, block.token_ids.to(input_ids.device)], dim=1)
        return ids, self.full_scores(block).to(input_ids.device)

    def full_scores(self, block: DraftBlock) -> torch.Tensor:
        """A block's scores in the target's vocabulary: -inf where the draft vocabulary has no such token. [1, K, V]"""
        if block.logits is None:
            return self.full_probs(block).log()
        return self._in_target_vocabulary(block.logits, float("-inf"))

    def full_probs(self, block: DraftBlock) -> torch.Tensor:
        """What each token of a block was drawn from, in the target's vocabulary. [1, K, V]"""
        if block.logits is None:  # a copy: nothing was drawn
            one_hot = torch.nn.functional.one_hot(block.token_ids, self.drafter.config.vocab_size)
            return one_hot.to(torch.float32)
        return self._in_target_vocabulary(block.logits.softmax(-1), 0.0)

    def _in_target_vocabulary(self, values: torch.Tensor, elsewhere: float) -> torch.Tensor:
        if not self.drafter.config.has_reduced_vocab:
            return values
        full = values.new_full((*values.shape[:2], self.drafter.config.vocab_size), elsewhere)
        full[..., self.drafter.draft_token_ids()] = values
        return full

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Nothing to do: policies are told before drafting, not after."""
