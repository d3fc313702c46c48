"""How a drafter drafts on this machine: nothing of it changes the text, and nothing is saved with the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..scheduling.policy import Policy
from ..scheduling.step_costs import StepRates


@dataclass
class DraftingOptions:
    """`drafter.options`. Every field has a default that fits; each says what it costs.

    acceptance: of sampled drafts. "same_text": the text that plain decoding draws with the same generator, token for token.
        "rejection": the paper's rule, another text of exactly the target's distribution; for processors with a memory the
        same text all the same.
    policy: how far each sequence drafts and what is verified. Default: `generation_config.assistant_confidence_threshold` where
        one is set, the `LookaheadScheduler` for a calibrated drafter, else whole blocks for as long as any are accepted.
    step_rates: what forwards cost on this machine; loaded or measured at first need (some ten seconds).
    lookup_drafts: text may be copied where that promises more tokens a second. Costs a search in the text every round.
    top_candidates: tokens that a position is drawn from, `None` for all; "auto": 1,024 of a large vocabulary. Fewer are quicker
        to draw from and less often accepted.
    deferred_admission: tokens are drawn before the policy is asked (see `Sampler`); `None`: where the drafter is not on a CPU.
    skinny_linear: linear layers of a CPU in the form that is fastest for few rows; chosen by measuring at first use.
    packed_weights: that may keep copies of the target's weights, up to a quarter of the free memory.
    draft_precision: the lowest precision of the drafter's products; "bfloat16" is quicker and costs next to no acceptance.
    """

    acceptance: Literal["same_text", "rejection"] = "same_text"
    policy: Policy | None = None
    step_rates: StepRates | None = None
    lookup_drafts: bool = True
    top_candidates: int | Literal["auto"] | None = "auto"
    deferred_admission: bool | None = None
    skinny_linear: bool = True
    packed_weights: bool = True
    draft_precision: Literal["bfloat16", "float32"] = "bfloat16"

    def check(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            ValueError: names the field, what it was given and what it may be.
        """
        top = self.top_candidates
        if top not in (None, "auto") and (type(top) is not int or top < 1):
            raise ValueError(
                f'options.top_candidates must be a whole number from 1, None for all tokens, or "auto"; got {top!r}.'
            )
        if self.acceptance not in ("same_text", "rejection"):
            raise ValueError(f'options.acceptance must be "same_text" or "rejection", got {self.acceptance!r}.')
        if self.draft_precision not in ("bfloat16", "float32"):
            raise ValueError(
                f"options.draft_precision must be 'bfloat16' or 'float32', got {self.draft_precision!r}. It is the lowest "
                "precision that the drafter's products may have."
            )
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ValueError(
                f"options.policy must be a Policy (FixedLength, LookaheadScheduler, ...), got {self.policy!r}."
            )
