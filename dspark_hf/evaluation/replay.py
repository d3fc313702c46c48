"""Rounds of several drafters on one text of the target's, without verifying them one by one.

Owns: decoding the target's own texts once, replaying every drafter's rounds against them.
Does not own: what a round is (`decoding.loop`), drafting (`decoding.candidates`), files of records (`samples`).
Axes: P prompt tokens, n answer tokens, S = P + n - 1 tokens the target reads, K drafted tokens, V vocabulary.

Speculative decoding leaves the text's distribution as it is, so the text may come first and the rounds after it, given the
text. Greedy, a drafted token stands where it is the text's. Sampled, let q be what x_k is drawn from, p the target's
distribution and y_k the text's token, all tokens before it standing. Real decoding has P(x_k = v, accepted) =
min(p(v), q(v)) and y_k ~ p, so given y_k = v the draft is accepted, and then x_k = v, with probability min(1, q(v) / p(v)).
Given a rejection, x_k ~ (q - p)+ normalised, independent of y_k; the rest of the block is drawn after it as ever. Drawing
accordingly gives text, drafts and acceptances jointly the distribution that real decoding gives them (paper §2.1). A test
enumerates both. All drafters meet the same texts, which takes out of their comparison what is chance in the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from ..decoding import sampling
from ..decoding.candidates import DSparkCandidateGenerator, policy_of
from ..decoding.draft_context import DraftContext
from ..decoding.targets import TargetTaps
from ..decoding.tuned_pair import tuned
from ..engine.engine import BatchEngine
from ..engine.sequence import Prepared, RequestOutput, prepare
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from ..model.sampler_dspark import scores_dtype
from .acceptance import fingerprint, turn_seed
from .completion import DecodingOptions, check_length, sampling_settings
from .policy_names import using_policy
from .prompt_sets import Conversation
from .samples import AnsweredTurn, Journal, Sample, settings_of

logger = logging.get_logger(__name__)
_OWN_DRAWS = (
    1 << 31
)  # added to a turn's seed, which drew its text: acceptance is to be independent of how that was drawn


# -- the target's texts ----------------------------------------------------------------------------------------------


def decode_texts(
    target: Target,
    conversations: Sequence[Conversation],
    options: DecodingOptions,
    file: Path | None = None,
    description: str = "texts",
) -> dict[int, list[AnsweredTurn]]:
    """The target's answers to every turn, by conversation, decoded plainly and many at once; with `file`, resumable.

    Raises:
        ValueError: a target that the batch engine can't serve; `file` was written with other settings.
    """
    journal = Journal(AnsweredTurn, file, settings_of(target, conversations, options), conversations)
    _TextDecoder(target, conversations, options, journal).run(description)
    texts: dict[int, list[AnsweredTurn]] = {}
    for turn in journal.records:
        texts.setdefault(turn.index, []).append(turn)
    return texts


class _TextDecoder:
    """Conversations in the batch engine: a later turn is added when the one before it is answered."""

    def __init__(self, target, conversations, options, journal: Journal[AnsweredTurn]) -> None:
        self.target, self.conversations, self.options, self.journal = target, conversations, options, journal
        self.engine = BatchEngine(target.model)
        self.messages: dict[int, list[dict[str, str]]] = {}
        self.turns: dict[int, list[AnsweredTurn]] = {}
        self.asked: dict[int, int] = {}  # conversation of each request

    def run(self, description: str) -> None:
        open_ones = [i for i in range(len(self.conversations)) if i not in self.journal.done]
        total, done = len(self.conversations), len(self.journal.done)
        with tqdm(desc=description, unit="prompt", total=total, initial=done, disable=None) as self.bar:
            for index in open_ones:
                self.messages[index], self.turns[index] = list(self.conversations[index].messages), []
                self._ask(index)
            while self.engine.num_unfinished:
                for output in self.engine.step():
                    self._answered(self.asked.pop(output.id), output)

    def _ask(self, index: int) -> None:
        turn = AnsweredTurn(index, len(self.turns[index]))
        self.turns[index].append(turn)
        try:
            turn.prompt_ids = encode_messages(self.target.tokenizer, self.messages[index])
            check_length(self.target.model, len(turn.prompt_ids), self.options.max_new_tokens)
            request = self.engine.add(
                turn.prompt_ids,
                seed=turn_seed(self.options, index, turn.turn),
                max_new_tokens=self.options.max_new_tokens,
                **sampling_settings(self.options),
            )
            self.asked[request] = index
        except ValueError as error:
            turn.error = _told(turn, error)
            self._close(index)

    def _answered(self, index: int, output: RequestOutput) -> None:
        turn, later = self.turns[index][-1], self.conversations[index].later_turns
        if output.error is not None:
            turn.error = _told(turn, output.error)
            self._close(index)
            return
        turn.answer_ids = output.token_ids
        if turn.turn == len(later):
            self._close(index)
            return
        text = self.target.tokenizer.decode(turn.answer_ids, skip_special_tokens=True)
        self.messages[index] += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": later[turn.turn]},
        ]
        self._ask(index)

    def _close(self, index: int) -> None:
        self.journal.add(self.turns.pop(index))
        self.bar.update()


def _told(record: AnsweredTurn | Sample, error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    logger.warning(f"Prompt {record.index + 1}, turn {record.turn + 1} failed: {text}")
    return text


# -- replaying -------------------------------------------------------------------------------------------------------


def replay_all(
    target: Target,
    drafters: Mapping[str, DSparkDraftModel],
    conversations: Sequence[Conversation],
    texts: Mapping[int, Sequence[AnsweredTurn]],
    options: DecodingOptions,
    policy: str,
    files: Mapping[str, Path | None],
    description: str = "eval",
) -> dict[str, list[Sample]]:
    """Rounds of every drafter, by its name, as `collect` gives them but for the seconds; resumable with `files`.

    `policy` is one that decides from the block alone (`policies.reads_block_alone`).

    Raises:
        ValueError: a file holds rounds with other settings, or on other texts.
    """
    journals = {
        name: Journal(
            Sample,
            files[name],
            settings_of(target, conversations, options, drafter=fingerprint(model), policy=policy, replayed=True),
            conversations,
        )
        for name, model in drafters.items()
    }
    for name, journal in journals.items():
        if any(r.text != texts[r.index][r.turn].digest for r in journal.records):
            raise ValueError(
                f"{files[name]} holds rounds on other texts than these. Remove it, or give another folder."
            )
    for index, conversation in enumerate(tqdm(conversations, desc=description, unit="prompt", disable=None)):
        missing = {name: model for name, model in drafters.items() if index not in journals[name].done}
        samples: dict[str, list[Sample]] = {name: [] for name in missing}
        for turn in texts[index] if missing else ():
            record, fault = None, turn.error
            if fault is None:
                try:
                    record = read_text(target, turn, list(missing.values()), options)
                except (ValueError, RuntimeError) as error:
                    fault = _told(turn, error)
            for name, model in missing.items():
                if any(s.error is not None for s in samples[name]):
                    continue  # the rest of a conversation with a failed turn is left out
                place = (index, turn.turn, conversation.domain, conversation.source)
                sample = Sample(*place, error=fault, text=turn.digest)
                samples[name].append(sample)
                if record is not None:
                    with using_policy(policy, target.model, model):
                        _replay_into(sample, target, model, record, turn_seed(options, index, turn.turn))
        for name, new in samples.items():
            journals[name].add(new)
    return {name: journal.records for name, journal in journals.items()}


def _replay_into(sample: Sample, target: Target, drafter: DSparkDraftModel, record: ReadText, seed: int) -> None:
    try:
        sample.rounds, sample.logits = replay(target, drafter, record, seed)
        sample.tokens = record.num_answer
    except (ValueError, RuntimeError) as error:
        sample.error = _told(sample, error)


@dataclass(frozen=True)
class ReadText:
    """A text as the target reads it: token ids [1, P + n], features of each layer [1, S, d_target], probs [n, V] of the answer's
    tokens (`None` where decoding is greedy)."""

    prepared: Prepared
    token_ids: torch.LongTensor
    features: dict[int, torch.Tensor]
    probs: torch.Tensor | None

    @property
    def num_prompt(self) -> int:
        return self.prepared.input_ids.shape[1]

    @property
    def num_answer(self) -> int:
        return self.token_ids.shape[1] - self.num_prompt


@torch.no_grad()
def read_text(
    target: Target, turn: AnsweredTurn, drafters: Sequence[DSparkDraftModel], options: DecodingOptions
) -> ReadText:
    """One forward of the target over prompt and answer, for all of these drafters."""
    model = target.model
    ids = torch.tensor([turn.prompt_ids + turn.answer_ids], device=model.device)
    settings = {"max_new_tokens": options.max_new_tokens} | sampling_settings(options)
    prepared = prepare(model, ids[:, : len(turn.prompt_ids)], None, None, None, settings)
    layer_ids = sorted({i for drafter in drafters for i in drafter.config.target_layer_ids})
    length = len(turn.answer_ids) if prepared.config.do_sample else 1
    keep = {"logits_to_keep": length} if model._supports_logits_to_keep() else {}
    read = ids[:, :-1]  # nothing follows the last token
    with tuned(model, drafters[0]), TargetTaps(model, layer_ids) as taps:
        logits = model(input_ids=read, use_cache=False, **keep).logits[0, -length:]
        features = dict(zip(layer_ids, taps.take(drafters[0].device).chunk(len(layer_ids), dim=-1)))
    probs = None
    if prepared.config.do_sample:
        scores = sampling.process_rows(prepared.processors, read, logits.to(scores_dtype(logits)))
        probs = scores.softmax(-1)
    return ReadText(prepared, ids, features, probs)


@dataclass(frozen=True)
class TextGuided:
    """A logits processor that makes a draft be drawn as it was in a decoding that ended with this very text.

    After a prefix of the text it puts all probability on the text's next token, where that is accepted, or else gives what a
    rejected token is drawn from; off the text it leaves the drafter's distribution alone.
    """

    text: ReadText
    generator: torch.Generator

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids [1, L + k], scores [1, V]: of the token that follows them."""
        scores = self.text.prepared.processors(input_ids, scores)
        whole, length = self.text.token_ids.to(input_ids.device), input_ids.shape[1]
        if length >= whole.shape[1] or not torch.equal(input_ids, whole[:, :length]):
            return scores
        token = whole[0, length]
        draft = scores[0].softmax(-1)
        target = self.text.probs[length - self.text.num_prompt].to(draft)  # type: ignore[index]
        ratio = draft[token] / target[token].clamp(min=torch.finfo(draft.dtype).tiny)
        if sampling.flip(ratio.clamp(max=1.0)[None], self.generator):
            return torch.full_like(scores, float("-inf")).index_fill(1, token[None], 0.0)
        rejected = (draft - target).clamp(min=0.0)
        # Where rounding leaves nothing of the difference the two distributions are the same.
        return rejected.log()[None] if rejected.sum() > 0 else scores


def replay(
    target: Target, drafter: DSparkDraftModel, text: ReadText, seed: int
) -> tuple[list[tuple[int, int]], list[list[float]]]:
    """The rounds that `drafter` would have had on `text`: (drafted, accepted) of each, and its confidence logits.

    `seed` may be the one that drew the text."""
    generator = torch.Generator(drafter.device).manual_seed(seed + _OWN_DRAWS)
    processors = TextGuided(text, generator) if text.prepared.config.do_sample else text.prepared.processors
    candidates = DSparkCandidateGenerator(
        drafter,
        target.model,
        text.prepared.config,
        processors,  # type: ignore[arg-type]
        DraftContext(id(drafter)),
        generator,
        policy_of(target.model, drafter),
    )
    features = torch.cat([text.features[i].to(drafter.device) for i in drafter.config.target_layer_ids], dim=-1)
    candidates.observe(features[:, : text.num_prompt])
    length, end = text.num_prompt + 1, text.token_ids.shape[1]  # the prefill gives the first token
    rounds, logits = [], []
    with tuned(target.model, drafter):
        while length < end:
            candidates.plan(text.token_ids[:, :length])
            block = candidates.draft(text.token_ids[:, :length])
            drafted = [] if block is None else block.token_ids[0].tolist()
            accepted = _agreement(drafted, text.token_ids[0, length:].tolist())
            committed = min(accepted + 1, end - length)
            candidates.observe(features[:, length - 1 : length - 1 + committed])
            rounds.append((len(drafted), accepted))
            known = None if block is None else block.confidence_logits
            logits.append([] if known is None else [round(x, 4) for x in known[0].tolist()])
            length += committed
    return rounds, logits


def _agreement(drafted: Sequence[int], text: Sequence[int]) -> int:
    """How many drafted tokens stand."""
    count = 0
    for ours, theirs in zip(drafted, text):
        if ours != theirs:
            break
        count += 1
    return count
