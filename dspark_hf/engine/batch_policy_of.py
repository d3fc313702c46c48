"""The batch policy of a drafter as it is set.

Owns: turning a drafter's single-request policy into one for many requests. Does not own: the policies (`scheduling`).
"""

from __future__ import annotations

from transformers import PreTrainedModel

from ..decoding.candidates import policy_of
from ..model.modeling_dspark import DSparkDraftModel
from ..model.sampler_dspark import Admission
from ..scheduling.admission import LaggedScheduler, ThroughputScheduler
from ..scheduling.batch import BatchLagged, BatchPolicy, BatchThroughput, PerRequest
from ..scheduling.batch_lookahead import BatchLookahead
from ..scheduling.lookahead import LookaheadScheduler
from ..scheduling.step_costs import StepRates
from .profiling import batch_rates_of


def batch_policy_of(
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    step_rates: StepRates | None,
    max_sequences: int,
) -> tuple[BatchPolicy, int]:
    """The policy that the drafter's settings ask for, and the most tokens drafted for one request in one step.

    A calibrated drafter gets the lookahead, with `step_rates` or this machine's table (measured at first use).
    """

    def rates_of(target: PreTrainedModel, drafter: DSparkDraftModel) -> StepRates:
        return step_rates or batch_rates_of(target, drafter, max_sequences)

    single = policy_of(target, drafter, rates_of)
    return for_many(single.admission), single.cap


def for_many(policy: Admission) -> BatchPolicy:
    """The form of a single-request policy for a whole batch; one that has none decides for each request by itself."""
    if isinstance(policy, LookaheadScheduler):
        return BatchLookahead(policy.step_rates, policy.expectation, policy.reads_survival)
    if isinstance(policy, ThroughputScheduler):
        return BatchThroughput(policy.step_rates)
    if isinstance(policy, LaggedScheduler):
        return BatchLagged(policy.step_rates, policy.lag)
    return PerRequest(policy)


def check_policy(policy: BatchPolicy | None, drafter: DSparkDraftModel) -> None:
    """Refuse a policy that asks for what the drafter has not."""
    if policy is not None and policy.reads_survival and drafter.confidence_head is None:
        name = type(policy.policy if isinstance(policy, PerRequest) else policy).__name__
        raise ValueError(f"{name} needs a drafter with a confidence head, and this one has none.")
