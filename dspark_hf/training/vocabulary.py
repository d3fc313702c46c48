"""Which tokens a drafter proposes from: the most frequent ones of the target's answers.

Owns: counting the answers' tokens, how many of them cover a share of the text. Does not own: storing the choice
(`modeling_dspark`).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch

from .responses import Answer

_MULTIPLE = 64  # sizes that matrix products like


def _frequency(answers: Sequence[Answer]) -> collections.Counter[int]:
    return collections.Counter(token for answer in answers for token in answer.response_ids)


def frequent_tokens(answers: Sequence[Answer], count: int, vocab_size: int) -> torch.LongTensor:
    """The `count` most frequent answer tokens, filled up with the lowest ids; ascending."""
    chosen = [token for token, _ in _frequency(answers).most_common(count)]
    seen = set(chosen)
    chosen += [i for i in range(vocab_size) if i not in seen][: count - len(chosen)]
    return torch.tensor(sorted(chosen))


def covering_size(answers: Sequence[Answer], coverage: float, vocab_size: int) -> int:
    """How many of the most frequent tokens make up a share `coverage` of the answers, rounded up to a multiple of 64.

    Raises:
        ValueError: a share that is not above 0 and at most 1.
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"The coverage of a draft vocabulary must be above 0 and at most 1, got {coverage}.")
    counts = [count for _, count in _frequency(answers).most_common()]
    total, covered, size = sum(counts), 0, 0
    while size < len(counts) and covered / total < coverage:
        covered += counts[size]
        size += 1
    return min(max(-(-size // _MULTIPLE), 1) * _MULTIPLE, vocab_size)


def coverage_of(answers: Sequence[Answer], tokens: torch.LongTensor) -> float:
    """Share of the answers' tokens that are among `tokens`."""
    frequency = _frequency(answers)
    return sum(frequency[token] for token in tokens.tolist()) / frequency.total()
