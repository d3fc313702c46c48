"""One text that is being generated: ids, settings, stopping, streaming, what the drafter has seen of it, its record.

Axes: L committed tokens, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from .draft_context import DraftContext
from .noise import Noise
from .processors import stateless_ones
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
    """acceptance: the rule for its drafts (`DraftingOptions`); the paper's needs processors without a memory.

    input_ids: [1, L]. noise: of a sampled text, by the same-text rule. has_memory: whether a processor may not be shown rows
    that are thrown away; draft_processors: the others, which shape drafts. new_tokens: all that were appended, on the host.
    scores, logits: one [1, V] for each new token, where `config` asks for them. slot: its place in the ragged store, if that
    serves it; draft_context: what the drafter has seen of it, if there is one. lookup: for copies from the text. error: raised
    by a processor, criterion or streamer of its own.
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
        acceptance: Literal["same_text", "rejection"] = "same_text",
    ) -> None:
        self.id, self.input_ids, self.config, self.processors = id, input_ids, config, processors
        self.streamer, self.stats = streamer, stats
        self.generator = generator
        self.draft_generator = draft_generator  # the same one, unless the drafter is on another device
        self.draft_processors = stateless_ones(processors)
        self.has_memory = len(self.draft_processors) < len(processors)
        is_coupled = self.do_sample and (acceptance == "same_text" or self.has_memory)
        self.noise = Noise(generator, input_ids.device) if is_coupled else None
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
                if self.noise is not None:
                    self.noise.advance()
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

    def ends_with(self, token: int, length: int) -> bool:
        """Whether transformers' own criteria end a text of `length` tokens with `token`."""
        return token in self._last_tokens or length >= self._max_length

    def _stops(self, token: int) -> bool:
        """Whether the text ends with `token`, its last one."""
        stops = self.ends_with(token, self.length)
        if self._others:
            stops = bool(self._others(self.input_ids, self.scores).all()) or stops
        return stops


def _may_warn(criterion: MaxLengthCriteria) -> bool:
    """Whether it also reminds of a text that outgrows the model's context."""
    return criterion.max_position_embeddings is not None and criterion.max_length > criterion.max_position_embeddings
