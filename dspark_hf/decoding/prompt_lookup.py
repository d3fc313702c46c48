"""Prompt lookup: where the text's last tokens stand earlier, what followed them is proposed.

Such a proposal has no randomness, so what it was drawn from is one-hot and the acceptance rule exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..scheduling.acceptance_estimate import CopyEstimate

_ORDER = 2  # tokens that must agree at least
_MOST_PLACES = 8  # the last places of a pair of tokens that are compared
_LONGEST_MATCH = 32
MOST_TOKENS = 16  # copied a round


@dataclass(frozen=True)
class Copy:
    """A proposal: tokens, and how many before them agree with the earlier ones."""

    tokens: list[int]
    match: int


class PromptLookup:
    """The committed text of one generation, indexed by pairs of tokens. `banned` ids are never proposed."""

    def __init__(self, banned: Collection[int] = ()) -> None:
        self.estimate = CopyEstimate()
        self._banned = frozenset(banned)
        self._text: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = defaultdict(list)  # after which a pair's next token stands

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Sequence[int], learn: bool = True) -> None:
        """Append committed tokens; with `learn` they also show how copies of them would have fared."""
        for token in tokens:
            if learn:
                place, match = self._find()
                if match:
                    self.estimate.learn(match, self._text[place] == token)
            if len(self._text) >= _ORDER:  # the pair is of use from here on, as something follows it
                self._places[self._text[-2], self._text[-1]].append(len(self._text))
            self._text.append(token)

    def propose(self, limit: int) -> Copy | None:
        """Up to `limit` tokens that followed the longest earlier run like the text's end; `None` where there is none."""
        place, match = self._find()
        tokens: list[int] = []
        while match and len(tokens) < limit:
            # A copy that reaches the text's end goes on with what it has copied.
            at = place + len(tokens)
            token = self._text[at] if at < len(self._text) else tokens[at - len(self._text)]
            if token in self._banned:
                break
            tokens.append(token)
        return Copy(tokens, match) if tokens else None

    def survival(self, copy: Copy) -> list[float]:
        """(a_1, a_2, ...) of its tokens."""
        return self.estimate.survival(copy.match, len(copy.tokens))

    def _find(self) -> tuple[int, int]:
        """Where the token after the longest (then latest) run like the text's end stands, and the run's length; 0 for none."""
        text, best, where = self._text, 0, 0
        if len(text) < _ORDER:
            return 0, 0
        for place in reversed(self._places.get((text[-2], text[-1]), ())[-_MOST_PLACES:]):
            match, most = _ORDER, min(place, _LONGEST_MATCH)
            while match < most and text[place - 1 - match] == text[-1 - match]:
                match += 1
            if match > best:
                best, where = match, place
        return where, best
