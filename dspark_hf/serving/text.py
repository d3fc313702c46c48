"""From tokens to text as they come: in whole characters, and ending before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

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
        new = self._new_text()
        if not new or new.endswith(_UNFINISHED):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return self._show(new)

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        shown = self._show(self._new_text())
        return shown if self.stopped else shown + self._release(len(self._held))

    def _new_text(self) -> str:
        """What the tokens that are no text yet add to it; decoded with those before them, which decide about spaces."""
        before, all_ = (
            self.tokenizer.decode(self._tokens[self._start : stop], skip_special_tokens=True)
            for stop in (self._shown, len(self._tokens))
        )
        return all_[len(before) :]

    def _show(self, new: str) -> str:
        self._held += new
        places = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            shown, self._held = self._release(min(places)), ""
            return shown
        starts = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
        overlap = max((len(start) for start in starts if self._held.endswith(start)), default=0)
        return self._release(len(self._held) - overlap)

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self.text += shown
        return shown
