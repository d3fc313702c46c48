"""`DSparkCandidateGenerator`: transformers' interface to our drafters. Our own loop (`generation`) does not need it."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator

from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.policy import SequenceState
from .default_policy import policy_of
from .draft_context import DraftContext
from .drafting import Drafting
from .noise import Noise
from .proposal import Proposal
from .ragged_cache import RaggedStore
from .sequence import TextSequence
from .statistics import GenerationStats


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts one block a round; it is given the features of every committed token through `observe`.

    generator: drafts of a sampled text are drawn with it, unless they are guessed with the `noise` of the text.
    """

    requires_model_outputs = False

    def __init__(
        self,
        drafter: DSparkDraftModel,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        generator: torch.Generator | None = None,
        noise: Noise | None = None,
    ) -> None:
        drafter.bind_target(target)
        self.vocab_size = drafter.target_vocab_size
        self.policy, self.cap = policy_of(target, drafter)
        self.drafting = Drafting(drafter)
        self._sequence = TextSequence(
            torch.zeros(1, 0, dtype=torch.long, device=target.device),
            generation_config,
            LogitsProcessorList(),
            StoppingCriteriaList(),
            None,
            GenerationStats(drafter.config.num_draft_tokens),
            draft_generator=generator,
            acceptance="rejection",  # transformers' loop accepts by it
        )
        self._sequence.draft_processors, self._sequence.noise = logits_processor, noise
        self._sequence.draft_context = DraftContext.open(drafter, RaggedStore())

    @property
    def context(self) -> DraftContext:
        """What the drafter has seen."""
        return self._sequence.draft_context

    def observe(self, features: torch.Tensor) -> None:
        """Tapped features of tokens just committed, [1, S, m * d_target]."""
        self.context.add(features)

    @torch.inference_mode()
    def propose(self, input_ids: torch.LongTensor) -> Proposal:
        """A draft after `input_ids` [1, L], the last one being the anchor; empty where the policy plans none."""
        s = self._sequence
        s.input_ids = input_ids
        limit = max(min(s.room, self.cap), 0) if self.context.num_kept else 0
        (plan,) = self.policy.plan([SequenceState(s.id, s.length - 1, limit)])
        (proposal,) = self.drafting.draft([s], [plan.tokens], self.policy)
        if proposal.error is not None:
            raise proposal.error
        return proposal.cut(self.policy.schedule([proposal.survival], [len(proposal)])[0])

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """transformers' interface: `input_ids` with the draft behind it, and the scores it was drawn from [1, K, V]."""
        proposal = self.propose(input_ids)
        if not len(proposal):
            return input_ids, None
        with torch.inference_mode(False):
            ids = torch.cat([input_ids, proposal.token_ids[None].clone()], dim=1)
            return ids, proposal.scores(self.vocab_size)[None].to(input_ids.device)

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Nothing to do: policies are asked before drafting, not after."""
