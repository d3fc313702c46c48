"""One text that is being generated: ids, settings, stopping, streaming, what the drafter has seen of it, its record.

Axes: L committed tokens, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from .draft_context import DraftContext
from .prompt_lookup import PromptLookup
from .ragged_cache import Slot
from .statistics import GenerationStats


@dataclass(frozen=True)
class Choice:
    """What the target made of a proposal, on the host already.

    path: nodes that are accepted. token_ids: those and the one that follows them; ids: the same as a tensor [len(path) + 1].
    raw, scores: the target's logits, and what became of them, [K + 1, V].
    """

    path: list[int]
    token_ids: list[int]
    ids: torch.LongTensor
    raw: torch.Tensor
    scores: torch.Tensor


class TextSequence:
    """input_ids: [1, L]. new_tokens: all that were appended, on the host. scores, logits: one [1, V] for each new token, where
    `config` asks for them. slot: its place in the ragged store, if that serves it; draft_context: what the drafter has seen of
    it, if there is one. lookup: for copies from the text. error: raised by a processor, criterion or streamer of its own.
    """

    draft_context: DraftContext = None  # type: ignore[assignment]
    slot: Slot | None = None

    def __init__(
        self,
        input_ids: torch.LongTensor,  # [1, L]
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        stats: GenerationStats,
        *,
        id: int = 0,
        generator: torch.Generator | None = None,
        draft_generator: torch.Generator | None = None,
    ) -> None:
        self.id, self.input_ids, self.config, self.processors = id, input_ids, config, processors
        self.streamer, self.stats = streamer, stats
        self.generator = generator
        self.draft_generator = draft_generator  # the same one, unless the drafter is on another device
        self.lookup: PromptLookup | None = None
        self.new_tokens: list[int] = []
        self.finished = False
        self.error: Exception | None = None
        # What transformers' own criteria say is known on the host; all others may read the device for every token.
        self._last_tokens: set[int] = set()
        self._max_length = math.inf
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._last_tokens.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria and not _may_warn(criterion):
                self._max_length = min(self._max_length, criterion.max_length)
            else:
                self._others.append(criterion)
        keep = config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if keep and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keep and config.output_logits else None

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    @property
    def do_sample(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def room(self) -> int:
        """Tokens that may be drafted before the text is as long as it may get; the target's own needs a place too."""
        return self.config.max_length - self.length - 1

    def commit(self, choice: Choice) -> int:
        """Append accepted tokens and the next one, one at a time as plain decoding would, until a criterion stops.

        Returns how many of the choice's path were appended. What a criterion or streamer raises is kept in `error`.
        """
        before = self.length
        whole = torch.cat([self.input_ids, choice.ids[None]], dim=1)
        try:
            for i, token in enumerate(choice.token_ids):
                if self.finished:
                    break
                self.input_ids = whole[:, : before + i + 1]
                self.new_tokens.append(token)
                self.stats.new_tokens += 1
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([token]))
                if self.scores is not None:
                    self.scores += (choice.scores[i : i + 1],)
                if self.logits is not None:
                    self.logits += (choice.raw[i : i + 1],)
                self.finished = self._stops(token)
        except Exception as error:
            self.error = error
        return min(len(choice.path), self.length - before)

    def _stops(self, token: int) -> bool:
        """Whether the text ends with `token`, its last one."""
        stops = token in self._last_tokens or self.length >= self._max_length
        if self._others:
            stops = bool(self._others(self.input_ids, self.scores).all()) or stops
        return stops


def _may_warn(criterion: MaxLengthCriteria) -> bool:
    """Whether it also reminds of a text that outgrows the model's context."""
    return criterion.max_position_embeddings is not None and criterion.max_length > criterion.max_position_embeddings
