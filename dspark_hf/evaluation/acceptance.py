"""How drafts fare on real prompts: decoding them, keeping every round, figures by domain and source.

Owns: collecting rounds, acceptance figures, the threshold sweep. Does not own: the records and their file (`samples`),
calibration's fit (`scheduling.calibration`), pictures (`plots`), the page (`html`).
Axes: N rounds, γ positions. τ counts tokens committed per round, bonus token included (paper eq. 1).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers.utils import logging

from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from ..scheduling.calibration import survival
from .completion import DecodingOptions, check_length, timed_generate
from .intervals import Bootstrap, interval
from .policy_names import using_policy
from .prompt_sets import Conversation
from .samples import Journal, Sample, settings_of

logger = logging.get_logger(__name__)
EVERYTHING, MACRO = "all", "macro"  # names of groups, beside domains and sources
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))


@dataclass(frozen=True)
class Rounds:
    """Rounds with full blocks: raw confidence logits [N, γ], how many tokens of each block stood [N]."""

    logits: np.ndarray
    accepted: np.ndarray

    def __len__(self) -> int:
        return len(self.accepted)


def full_rounds(samples: Iterable[Sample], length: int) -> Rounds:
    """The rounds that drafted all `length` tokens and have confidences."""
    pairs = [
        (logits, accepted)
        for sample in samples
        for (drafted, accepted), logits in zip(sample.rounds, sample.logits)
        if drafted == length and len(logits) == length
    ]
    return Rounds(np.array([p[0] for p in pairs]).reshape(-1, length), np.array([p[1] for p in pairs], dtype=int))


def collect(
    target: Target,
    drafter: DSparkDraftModel,
    conversations: Sequence[Conversation],
    options: DecodingOptions,
    policy: str = "full",
    file: Path | None = None,
    description: str = "eval",
) -> list[Sample]:
    """Decode every turn of every conversation and keep its rounds; with `file`, go on where an earlier run stopped.

    A turn that fails is kept with its error, and the rest of its conversation is left out; another run tries it again.

    Raises:
        ValueError: `file` was written with other settings.
    """
    settings = settings_of(target, conversations, options, drafter=fingerprint(drafter), policy=policy)
    journal = Journal(Sample, file, settings, conversations)
    for index, conversation in enumerate(tqdm(conversations, desc=description, unit="prompt", disable=None)):
        if index in journal.done:
            continue
        with using_policy(policy, target.model, drafter, lookup=False):  # the drafter is judged
            journal.add(_answer(target, drafter, index, conversation, options))
    return journal.records


def _answer(
    target: Target, drafter: DSparkDraftModel, index: int, conversation: Conversation, options: DecodingOptions
) -> list[Sample]:
    messages, samples = list(conversation.messages), []
    turns: list[str | None] = [None, *conversation.later_turns]
    for number, turn in enumerate(turns):
        if turn is not None:
            messages = [*messages, {"role": "user", "content": turn}]
        sample = Sample(index, number, conversation.domain, conversation.source)
        samples.append(sample)
        try:
            ids = encode_messages(target.tokenizer, messages)
            check_length(target.model, len(ids), options.max_new_tokens)
            seeded = replace(options, seed=turn_seed(options, index, number))
            answer, sample.seconds = timed_generate(target.model, ids, seeded, assistant_model=drafter)
        except (ValueError, RuntimeError) as error:
            sample.error = f"{type(error).__name__}: {error}"
            logger.warning(f"Prompt {index + 1}, turn {number + 1} failed: {sample.error}")
            break
        stats = drafter.last_generation
        sample.tokens, sample.parked = len(answer), stats.parked_rounds
        sample.rounds = [(r.drafted, r.accepted) for r in stats.history]
        sample.logits = [
            [] if r.confidence_logits is None else [round(x, 4) for x in r.confidence_logits[0].tolist()]
            for r in stats.history
        ]
        text = target.tokenizer.decode(answer, skip_special_tokens=True)
        messages = [*messages, {"role": "assistant", "content": text}]
    return samples


def turn_seed(options: DecodingOptions, index: int, turn: int) -> int:
    """Starts the draws of one turn of one conversation, whatever was decoded before it."""
    return options.seed + 1000 * index + turn


def fingerprint(drafter: DSparkDraftModel) -> str:
    """Tells this drafter from another one, and from itself before more training or calibration."""
    config = {k: v for k, v in drafter.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    weights = [float(p.detach().cpu().double().sum()) for p in drafter.parameters()]
    settings = [config, weights, drafter.top_candidates]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def acceptance_figures(samples: Sequence[Sample], length: int) -> dict[str, Any]:
    """Figures of a group of samples; `acceptance_by_position` is conditional: of x_k, given that x_<k stood."""
    good = [s for s in samples if s.error is None]
    rounds = [r for s in good for r in s.rounds]
    drafted, accepted = sum(d for d, _ in rounds), sum(a for _, a in rounds)
    count, seconds = max(len(rounds), 1), sum(s.seconds for s in good)
    reached = [sum(d > k and a >= k for d, a in rounds) for k in range(length)]
    stood = [sum(a > k for _, a in rounds) for k in range(length)]
    return {
        "samples": len(good),
        "failed": len(samples) - len(good),
        "rounds": len(rounds),
        "tokens": sum(s.tokens for s in good),
        "tokens_per_second": sum(s.tokens for s in good) / seconds if seconds else 0.0,
        "accept_length": sum(max(s.tokens - 1, 0) for s in good) / count if rounds else 1.0,
        "acceptance_by_position": [a / r if r else None for a, r in zip(stood, reached)],
        "rounds_by_position": reached,
        "drafted_per_round": drafted / count,
        "verified_per_round": drafted / count,  # nothing above the cut is drafted, so all of it is verified
        "accepted_per_round": accepted / count,
        "wasted_per_round": (drafted - accepted) / count,
        "acceptance_rate": accepted / drafted if drafted else None,
        "parked_share": sum(s.parked for s in good) / count,
    }


def by_source(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each source, named `domain/source`, or `domain` alone where the domain is its only source.

    A domain that is called as a group of several domains keeps its source in the name.
    """
    sources: dict[str, set[str]] = {}
    for s in samples:
        sources.setdefault(s.domain, set()).add(s.source)
    groups: dict[str, list[Sample]] = {}
    for s in samples:
        is_group = s.domain in (EVERYTHING, MACRO) and len(sources) > 1
        name = s.domain if sources[s.domain] == {s.domain} and not is_group else f"{s.domain}/{s.source}"
        groups.setdefault(name, []).append(s)
    return dict(sorted(groups.items()))


def groups_of(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each domain, of each source in it, and all."""
    groups = by_source(samples)
    for domain in {s.domain for s in samples} - {EVERYTHING, MACRO}:
        groups[domain] = [s for s in samples if s.domain == domain]
    return dict(sorted(groups.items())) | {EVERYTHING: list(samples)}


def grouped(samples: Sequence[Sample], length: int) -> dict[str, dict[str, Any]]:
    """Figures of each group, with a confidence interval of τ (`None` where there are too few prompts)."""
    good = [s for s in samples if s.error is None]
    bootstrap = Bootstrap(good)
    answered = groups_of(good)
    return {
        name: acceptance_figures(group, length)
        | {"accept_length_interval": interval(bootstrap.accept_lengths(answered.get(name, [])))}
        for name, group in groups_of(samples).items()
    }


def threshold_sweep(rounds: Rounds, drafter: DSparkDraftModel) -> list[dict[str, float]]:
    """What each confidence threshold would have cut from these full blocks (paper Fig. 5): acceptance rate, τ, verified."""
    config = drafter.config
    a = survival(rounds.logits, config.confidence_temperatures, config.confidence_shifts)
    confidence = a / np.concatenate([np.ones((len(a), 1)), np.maximum(a[:, :-1], 1e-12)], axis=1)
    sweep = []
    for threshold in THRESHOLDS:
        admitted = (confidence >= threshold).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(rounds.accepted, admitted)
        verified = float(admitted.sum())
        sweep.append(
            {
                "threshold": threshold,
                "acceptance_rate": float(accepted.sum()) / verified if verified else 1.0,
                "accept_length": 1.0 + float(accepted.mean()),
                "verified_per_round": float(admitted.mean()),
            }
        )
    return sweep
