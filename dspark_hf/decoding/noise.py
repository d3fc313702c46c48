"""The noise of a sampled text: what plain decoding draws for each token, drawn ahead and kept (docs/exactness.md).

`torch.multinomial(probs, 1)` is argmax(probs / e), with e of V exponential numbers from the generator. Here e belongs to a
position of the text, so that the target's token is a function of context and noise alone, whatever was drafted.

Axes: V vocabulary.
"""

from __future__ import annotations

from collections import deque

import torch


class Noise:
    """Of the positions behind a text's end, drawn in their order.

    generator: of the text; torch's own of `device` by default.
    """

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        self._generator, self._device = generator, device
        self._vocab_size = 0
        self._ahead: deque[torch.Tensor] = deque()  # [V] each
        self._states = deque([self._state()])  # of the generator, before each of them and behind the last

    def at(self, position: int, vocab_size: int | None = None) -> torch.Tensor:
        """Of one position, 0 being that of the next token; V is known from the first call on. [V]"""
        self._vocab_size = vocab_size or self._vocab_size
        while len(self._ahead) <= position:
            numbers = torch.empty(1, self._vocab_size, device=self._device)
            self._ahead.append(numbers.exponential_(generator=self._generator)[0])
            self._states.append(self._state())
        return self._ahead[position]

    def advance(self, count: int = 1) -> None:
        """So many tokens were appended."""
        self.at(count - 1)
        for _ in range(count):
            self._ahead.popleft()
            self._states.popleft()

    def rewind(self) -> None:
        """Leave the generator as plain decoding of the same tokens would; what was drawn ahead is forgotten."""
        if self._ahead:
            self._set_state(self._states[0])
            self._ahead.clear()
            self._states = deque([self._states[0]])

    def _state(self) -> torch.Tensor:
        if self._generator is not None:
            return self._generator.get_state()
        if self._device.type == "cpu":
            return torch.get_rng_state()
        module = torch.get_device_module(self._device)
        return module.get_rng_state() if self._device.type == "mps" else module.get_rng_state(self._device)

    def _set_state(self, state: torch.Tensor) -> None:
        if self._generator is not None:
            self._generator.set_state(state)
        elif self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            module = torch.get_device_module(self._device)
            module.set_rng_state(state, *([] if self._device.type == "mps" else [self._device]))


def choose(scores: torch.Tensor, noise: torch.Tensor) -> torch.LongTensor:
    """The token of each row that `torch.multinomial` would draw with that noise; -1 where its scores are NaN. [K, V] -> [K]"""
    probs = scores.softmax(-1)
    tokens = (probs / noise).argmax(-1)
    return torch.where(probs.gather(-1, tokens[:, None])[:, 0].isnan(), -1, tokens)
