"""From tokens to text as they come, ending before a stop string.

Owns: decoding piece by piece, holding back what may become a stop string, penalties by what was said.
Does not own: chat templates, HTTP.
Axes: V vocabulary, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"  # what a tokenizer puts for bytes that are no whole character yet


class TextStream:
    """One answer's text. `push` returns what can be shown now; `stopped` once a stop string was met."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, list(stops)
        self.text = ""  # all that was shown
        self.stopped = False
        self._held = ""  # decoded, not shown: it may be the start of a stop string
        self._tokens: list[int] = []
        self._start = self._shown = 0  # decoding begins at `_start`; tokens before `_shown` are text already

    def push(self, token_ids: Sequence[int]) -> str:
        """New tokens in, new text out."""
        if self.stopped:
            return ""
        self._tokens += token_ids
        before = self._decode(self._start, self._shown)
        text = self._decode(self._start, len(self._tokens))
        if text.endswith(_UNFINISHED) or len(text) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return self._show(text[len(before) :])

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._decode(self._start, len(self._tokens))[len(self._decode(self._start, self._shown)) :]
        shown = self._show(rest)
        if not self.stopped:
            shown += self._held
            self.text += self._held
        self._held = ""
        return shown

    def _decode(self, start: int, stop: int) -> str:
        return self.tokenizer.decode(self._tokens[start:stop], skip_special_tokens=True)

    def _show(self, new: str) -> str:
        self._held += new
        places = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            return self._release(min(places))
        overlap = max(
            (n for stop in self.stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0
        )
        return self._release(len(self._held) - overlap)

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self.text += shown
        return shown


class PenaltyProcessor(LogitsProcessor):
    """OpenAI's penalties: score - frequency · count - presence · (count > 0), counted in the answer alone."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """[1, L], [1, V] -> [1, V]"""
        said = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
