"""`DSparkCandidateGenerator`: the drafter's side of a generation.

Owns: the admission policy in force, drafting a block, copies. Does not own: what the drafter has seen (`context`), the target's
forward (`loop`), accepting (`verification`), the drafter's layers (`modeling_dspark`).
Axes: S committed tokens whose features are new, K drafted tokens, m tapped layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.utils import logging

from ..model.modeling_dspark import DSparkDraftModel
from ..model.sampler_dspark import Admission, DraftBlock, in_target_vocabulary
from ..scheduling.acceptance_estimate import Expectation
from ..scheduling.admission import ConfidenceThreshold, FixedLength, GuardedLength, RoundOutcome, RoundPolicy
from ..scheduling.lookahead import LookaheadScheduler
from ..scheduling.step_costs import StepRates
from .draft_context import MOST_PENDING, DraftContext
from .profiling import step_rates_of
from .prompt_lookup import MOST_TOKENS, Copy, TextLookup
from .stats import RoundRecord
from .targets import placeholder_ids

logger = logging.get_logger(__name__)


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
        drafter.config.check_context_window()
        context.limit(drafter.config.context_window, drafter.config.context_sinks)
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
        self.backlog = 0  # tokens whose features were projected in this round

    def observe(self, features: torch.Tensor) -> None:
        """Tapped features of tokens just committed, [1, S, m * d_target]."""
        self.context.add(features)

    def plan(self, input_ids: torch.LongTensor, most: int | None = None, known: Sequence[int] = ()) -> int:
        """How many tokens this round drafts at most after `input_ids` [1, L], `most` a limit; 0 makes it a plain step.

        `known`: the last of these ids where they are on the host, so that the device is not asked for them.
        """
        length = input_ids.shape[1]
        room = self.max_length - length - 1  # the target's own token needs a place too
        room = room if most is None else min(room, most)
        if self.sizes:
            room = max((size for size in self.sizes if size <= room + 1), default=1) - 1
        self.room = room
        limit = min(room, self.max_tokens)
        if not self.context.num_kept:
            limit = 0
        self.parked = False
        if limit > 0 and isinstance(self.admission, RoundPolicy):
            limit = min(self.admission.begin_round(length - 1, limit), limit)
            self.parked = limit <= 0
        self.planned = max(limit, 0)
        self.copy = self._copy(input_ids, room, known)
        if self.copy is not None:
            self.planned, self.parked = len(self.copy.tokens), False
        return self.planned

    def _copy(self, input_ids: torch.LongTensor, room: int, known: Sequence[int]) -> Copy | None:
        """What followed an earlier run like the text's end, where that promises more tokens a second than the block."""
        if self.lookup is None:
            return None
        seen = len(self.lookup)
        new = input_ids.shape[1] - seen
        tokens = known[len(known) - new :] if new <= len(known) else input_ids[0, seen:].tolist()
        # Of the prompt it is not learned: what repeats there says little of what the target will repeat.
        self.lookup.extend(tokens, learn=seen > 0)
        proposal = self.lookup.propose(min(room, self.max_copied))
        if proposal is None:
            return None
        survival = self.lookup.belief.survival(proposal.match, len(proposal.tokens))
        assert isinstance(self.admission, LookaheadScheduler)
        length = self.admission.copy_length(survival, input_ids.shape[1] - 1)
        return Copy(proposal.tokens[:length], proposal.match) if length else None

    @torch.inference_mode()
    def draft(self, input_ids: torch.LongTensor) -> DraftBlock | None:
        """Draft after `input_ids` [1, L], the last one being the anchor; `None` where nothing was planned."""
        drafts = self.planned > 0 and self.copy is None
        self._project(input_ids, drafts)
        if self.copy is not None:
            tokens = input_ids.new_tensor([self.copy.tokens])
            counts = torch.tensor([len(self.copy.tokens)])
            # Each is the only candidate of its position.
            alone = torch.zeros_like(tokens[..., None], dtype=torch.float32)
            return DraftBlock(tokens, alone, tokens[..., None], None, counts, [[]], 0.0, self.context.cache)
        if not drafts:
            return None
        context, config = self.context, self.drafter.config
        # Those of cached tokens are told where a middle is missing; Eagle3's one layer asks for none.
        told = context.dropped > 0 and not config.is_autoregressive
        known = context.positions(0 if told else context.cache.get_seq_length())
        block = torch.arange(context.end, context.end + config.block_size)
        return self.drafter.draft(
            input_ids,
            context.take_pending(),
            context.cache,
            do_sample=self.do_sample,
            logits_processor=self.logits_processor,
            admission=self.admission,
            generator=self.generator,
            position_ids=torch.cat([known, block])[None].to(self.drafter.device),
            max_tokens=self.planned,
        )

    def _project(self, input_ids: torch.LongTensor, drafts: bool) -> None:
        """Turn waiting features into K/V where a block follows, or where too many would wait."""
        context, self.backlog = self.context, 0
        if not drafts and context.num_pending <= MOST_PENDING:
            return
        self.backlog = context.num_pending
        if not self.drafter.config.is_autoregressive:
            context.project(self.drafter, input_ids)
            return
        # A token's features stand with the token behind it, which a prompt given as `inputs_embeds` does not tell.
        context.forget_before(context.end - input_ids.shape[1])
        context.project(self.drafter, input_ids, leave=int(drafts))  # the last one's output is what a draft begins with

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
        """A block's scores in the target's vocabulary: -inf where a token was no candidate. [1, K, V]"""
        logits = block.logits.clone()  # an ordinary tensor, which may be written into
        return in_target_vocabulary(logits, block.candidate_ids, self.drafter.config.vocab_size, float("-inf"))

    def full_probs(self, block: DraftBlock) -> torch.Tensor:
        """What each token of a block was drawn from, in the target's vocabulary. [1, K, V]"""
        return in_target_vocabulary(block.logits.softmax(-1), block.candidate_ids, self.drafter.config.vocab_size, 0.0)

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Nothing to do: policies are told before drafting, not after."""
