"""Admission policies by name, for commands that compare them.

Owns: the names, setting a policy for a while. Does not own: the policies (`scheduling`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from transformers import PreTrainedModel

from ..decoding.candidates import scheduled
from ..decoding.profiling import step_rates_of
from ..model.modeling_dspark import DSparkDraftModel
from ..model.sampler_dspark import Admission
from ..scheduling.admission import ConfidenceThreshold, FixedLength, LaggedScheduler, ThroughputScheduler

OWN = "own"
NAMES = "own, full, fixed:N, threshold:T, throughput, lagged, lookahead, no-lookup"


def check_policy(name: str) -> None:
    """Refuse a name that `make_policy` would, before anything is loaded."""
    if _numbered_policy(name) is None and name not in NAMES.split(", "):
        raise ValueError(f"There is no policy {name!r}. Allowed: {NAMES}.")


def check_confidences(name: str, drafters: Mapping[str, DSparkDraftModel]) -> None:
    """Refuse a policy that reads confidences where one of the drafters, by label, gives none."""
    if not isinstance(_numbered_policy(name), ConfidenceThreshold) and name not in ("throughput", "lagged"):
        return
    for label, drafter in drafters.items():
        if drafter.confidence_head is None:
            raise ValueError(
                f"The policy {name} reads confidences, and the drafter {label} has no confidence head. Take full, fixed:N or "
                "lookahead."
            )


def reads_block_alone(name: str) -> bool:
    """Whether the named policy decides from the block alone, not from measured times or earlier rounds."""
    return name == "full" or _numbered_policy(name) is not None


def _numbered_policy(name: str) -> FixedLength | ConfidenceThreshold | None:
    kind, _, number = name.partition(":")
    try:
        if kind == "fixed":
            return FixedLength(int(number))
        if kind == "threshold":
            return ConfidenceThreshold(float(number))
    except ValueError as error:
        raise ValueError(f"Policy {name!r}: {error} Write for example fixed:3 or threshold:0.4.") from None
    return None


def make_policy(name: str, target: PreTrainedModel, drafter: DSparkDraftModel) -> Admission:
    """The policy of a name: full (all γ tokens), fixed:3, threshold:0.4, throughput (Algorithm 1), lagged, lookahead.

    no-lookup is lookahead without copies from the text (`using_policy` turns them off).

    Raises:
        ValueError: another name, or a number that is not allowed.
    """
    check_policy(name)
    if (numbered := _numbered_policy(name)) is not None:
        return numbered
    if name == "full":
        return FixedLength(drafter.config.num_draft_tokens)
    if name == "throughput":
        return ThroughputScheduler(step_rates_of(target, drafter))
    if name == "lagged":
        return LaggedScheduler(step_rates_of(target, drafter))
    return scheduled(target, drafter)


@contextmanager
def using_policy(name: str, target: PreTrainedModel, drafter: DSparkDraftModel, lookup: bool = True) -> Iterator[None]:
    """Decode with the named policy inside the block ("own": as the drafter is set), without copies from the text where `lookup`
    is false; afterwards all is as before."""
    config, length = drafter.generation_config, drafter.config.num_draft_tokens
    before = drafter.admission, config.num_assistant_tokens, drafter.lookup_drafts
    if name != OWN:
        policy = make_policy(name, target, drafter)
        # A fixed length's block is made no longer than it needs to be.
        config.num_assistant_tokens = min(policy.length, length) if isinstance(policy, FixedLength) else length
        drafter.admission = policy
    drafter.lookup_drafts = before[2] and lookup and name != "no-lookup"
    try:
        yield
    finally:
        drafter.admission, config.num_assistant_tokens, drafter.lookup_drafts = before
