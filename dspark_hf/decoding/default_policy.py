"""Which policy a drafter has: the one in its options, or the default for what is known of it."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.acceptance_estimate import Expectation
from ..scheduling.lookahead import LookaheadScheduler
from ..scheduling.policy import ConfidenceThreshold, FixedLength, GuardedLength, Policy
from ..scheduling.step_costs import StepRates
from .profiling import step_rates_of

logger = logging.get_logger(__name__)


def scheduled(
    target: PreTrainedModel, drafter: DSparkDraftModel, step_rates: StepRates | None = None, max_sequences: int = 1
) -> LookaheadScheduler:
    """The policy that a calibrated drafter has by default, with this machine's step rates (measured at first use).

    Set it as `drafter.options.policy` for a drafter that was never calibrated; it then starts from a neutral expectation.
    """
    config, expectation = drafter.config, None
    if config.expected_acceptance is not None:
        persistence = {} if config.acceptance_persistence is None else {"persistence": config.acceptance_persistence}
        expectation = Expectation(config.expected_acceptance, **persistence)
    return LookaheadScheduler(
        step_rates or step_rates_of(target, drafter, max_sequences),
        expectation,
        reads_survival=drafter.confidence_head is not None,
    )


def policy_of(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    max_sequences: int = 1,
    step_rates: StepRates | None = None,
    call: GenerationConfig | None = None,
) -> tuple[Policy, int]:
    """A fresh policy for up to `max_sequences` at once, and the most tokens drafted for one sequence in a round.

    From the drafter's options, else a confidence threshold of its generation config, else the scheduler where it is calibrated.
    A drafter that was never calibrated drafts whole blocks for as long as any of them is of use. call: of the `generate()` call,
    whose `num_assistant_tokens` and `assistant_confidence_threshold` come first.

    Raises:
        ValueError: options that mean nothing, a `num_assistant_tokens` that is no whole number from 0.
    """
    drafter.options.check()
    most = drafter.config.num_draft_tokens
    asked, threshold = (
        _asked(name, call, drafter) for name in ("num_assistant_tokens", "assistant_confidence_threshold")
    )
    if asked is not None and (type(asked) is not int or asked < 0):
        raise ValueError(f"num_assistant_tokens must be a whole number of at least 0, got {asked!r}.")
    cap = most if asked is None else min(asked, most)
    policy = drafter.options.policy
    if policy is None and threshold:
        policy = ConfidenceThreshold(threshold)
    if policy is None and cap and drafter.config.is_calibrated:
        try:
            policy = scheduled(target, drafter, step_rates, max_sequences)
        # Whatever a target of its own kind raises.
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.warning_once(
                f"The step rates of {type(target).__name__} can't be measured ({type(error).__name__}: {error}), so every "
                "round drafts a whole block. Set drafter.options.step_rates to a table of your own to have it scheduled."
            )
    if policy is None:
        policy = GuardedLength(cap) if cap else FixedLength(0)
    return checked(policy, drafter).fresh(), cap


def _asked(name: str, call: GenerationConfig | None, drafter: DSparkDraftModel) -> Any:
    """What the call asks for, else the drafter; transformers fills every call with its own defaults, which ask for nothing."""
    value = None if call is None else getattr(call, name)
    if value in (None, GenerationConfig._get_default_generation_params()[name]):
        value = getattr(drafter.generation_config, name)
    return value


def checked(policy: Policy, drafter: DSparkDraftModel) -> Policy:
    """Refuse a policy that reads what the drafter has not."""
    if policy.reads_survival and drafter.confidence_head is None:
        raise ValueError(
            f"{type(policy).__name__} needs a drafter with a confidence head, and this one has none. Use another policy."
        )
    return policy
