"""Rounds of several drafters on one text of the target's, without verifying them one by one.

Axes: P prompt tokens, n answer tokens, S = P + n - 1 tokens the target reads, K drafted tokens, V vocabulary.

Speculative decoding leaves the text's distribution as it is, so the text may come first and the rounds after it, given the
text. Greedy, a drafted token is accepted where it is the text's. Sampled, let q be what x_k is drawn from, p the target's
distribution and y_k the text's token, all tokens before it accepted. Real decoding has P(x_k = v, accepted) =
min(p(v), q(v)) and y_k ~ p, so given y_k = v the draft is accepted, and then x_k = v, with probability min(1, q(v) / p(v)).
Given a rejection, x_k ~ (q - p)+ normalised, independent of y_k; the rest of the block is drawn after it as ever. Drawing
accordingly gives text, drafts and acceptances jointly the distribution that real decoding gives them (paper §2.1). A test
enumerates both. All drafters meet the same texts, which takes out of their comparison what is chance in the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..decoding import acceptance
from ..decoding.candidate_generator import DSparkCandidateGenerator
from ..decoding.noise import Noise
from ..decoding.target import TargetTaps
from ..decoding.tuned_pair import tuned
from ..engine.engine import BatchEngine
from ..engine.request import Prepared, prepare
from ..loading.chat_template import encode_messages
from ..loading.pairs import Target
from ..model.modeling_dspark import DSparkDraftModel
from ..model.sampler_dspark import scores_dtype
from .completion import check_length, using_policy
from .prompt_sets import Conversation
from .questions import DecodingOptions
from .rounds import AnsweredTurn, Journal, Sample, fault, fingerprint, next_turn, rounded, settings_of, turn_seed

# Added to a turn's seed, which drew its text: acceptance is to be independent of how that was drawn.
_OWN_DRAWS = 1 << 31


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
    engine = BatchEngine(target.model)
    messages = {i: list(c.messages) for i, c in enumerate(conversations) if i not in journal.done}
    turns: dict[int, list[AnsweredTurn]] = {index: [] for index in messages}
    requests: dict[int, AnsweredTurn] = {}
    total, done = len(conversations), len(journal.done)
    with tqdm(desc=description, unit="prompt", total=total, initial=done, disable=None) as bar:

        def close(index: int) -> None:
            journal.add(turns.pop(index))
            bar.update()

        def ask(index: int) -> None:
            turn = AnsweredTurn(index, len(turns[index]))
            turns[index].append(turn)
            try:
                turn.prompt_ids = encode_messages(target.tokenizer, messages[index])
                check_length(target.model, len(turn.prompt_ids), options.max_new_tokens)
                seed = turn_seed(options, index, turn.turn)
                requests[engine.add(turn.prompt_ids, seed=seed, **options.arguments)] = turn
            except ValueError as error:
                turn.error = fault(turn, error)
                close(index)

        for index in messages:
            ask(index)
        while engine.num_unfinished:
            for output in engine.step():
                turn = requests.pop(output.id)
                index, later = turn.index, conversations[turn.index].later_turns
                if output.error is not None:
                    turn.error = fault(turn, output.error)
                    close(index)
                    continue
                turn.answer_ids = output.token_ids
                if turn.turn == len(later):
                    close(index)
                else:
                    messages[index] = next_turn(target, messages[index], turn.answer_ids, later[turn.turn])
                    ask(index)
    texts: dict[int, list[AnsweredTurn]] = {}
    for turn in journal.records:
        texts.setdefault(turn.index, []).append(turn)
    return texts


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

    `policy` is one that decides from the block alone (`completion.block_policy`).

    Raises:
        ValueError: a file holds rounds with other settings, or on other texts.
    """
    journals = {}
    for name, model in drafters.items():
        about = {"drafter": fingerprint(model), "policy": policy, "replayed": True}
        settings = settings_of(target, conversations, options, **about)
        journals[name] = Journal(Sample, files[name], settings, conversations)
        if any(r.text != texts[r.index][r.turn].digest for r in journals[name].records):
            raise ValueError(
                f"{files[name]} holds rounds on other texts than these. Remove it, or give another folder."
            )
    for index, conversation in enumerate(tqdm(conversations, desc=description, unit="prompt", disable=None)):
        missing = {name: model for name, model in drafters.items() if index not in journals[name].done}
        samples: dict[str, list[Sample]] = {name: [] for name in missing}
        for turn in texts[index] if missing else ():
            read, failure = None, turn.error
            if failure is None:
                try:
                    read = read_text(target, turn, list(missing.values()), options)
                except (ValueError, RuntimeError) as error:
                    failure = fault(turn, error)
            for name, model in missing.items():
                if any(s.error is not None for s in samples[name]):
                    continue  # the rest of a conversation with a failed turn is left out
                sample = Sample(
                    index, turn.turn, conversation.domain, conversation.source, error=failure, text=turn.digest
                )
                samples[name].append(sample)
                if read is None:
                    continue
                try:
                    with using_policy(policy, target.model, model):
                        seed = turn_seed(options, index, turn.turn)
                        sample.rounds, sample.logits = replay(target, model, read, seed)
                    sample.tokens = read.num_answer
                except (ValueError, RuntimeError) as error:
                    sample.error = fault(sample, error)
        for name, new in samples.items():
            journals[name].add(new)
    return {name: journal.records for name, journal in journals.items()}


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
    prepared = prepare(model, ids[:, : len(turn.prompt_ids)], None, None, None, options.arguments)
    layer_ids = sorted({i for drafter in drafters for i in drafter.config.target_layer_ids})
    length = len(turn.answer_ids) if prepared.config.do_sample else 1
    keep = {"logits_to_keep": length} if model._supports_logits_to_keep() else {}
    read = ids[:, :-1]  # nothing follows the last token
    with tuned(model, drafters[0]), TargetTaps(model, layer_ids) as taps:
        logits = model(input_ids=read, use_cache=False, **keep).logits[0, -length:]
        features = dict(zip(layer_ids, taps.take(drafters[0].device).chunk(len(layer_ids), dim=-1)))
    probs = None
    if prepared.config.do_sample:
        scores = acceptance.process_rows(prepared.processors, read, logits.to(scores_dtype(logits)))
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
        if acceptance.flip(ratio.clamp(max=1.0)[None], self.generator):
            return torch.full_like(scores, float("-inf")).index_fill(1, token[None], 0.0)
        rejected = (draft - target).clamp(min=0.0)
        # Where rounding leaves nothing of the difference the two distributions are the same.
        return rejected.log()[None] if rejected.sum() > 0 else scores


def replay(
    target: Target, drafter: DSparkDraftModel, text: ReadText, seed: int
) -> tuple[list[tuple[int, int]], list[list[float]]]:
    """The rounds that `drafter` would have had on `text`: (drafted, accepted) of each, and its confidence logits.

    seed: the one that drew the text."""
    generator, noise = torch.Generator(drafter.device).manual_seed(seed + _OWN_DRAWS), None
    processors: Any = text.prepared.processors
    if text.prepared.config.do_sample and drafter.options.acceptance == "rejection":
        processors = TextGuided(text, generator)
    elif text.prepared.config.do_sample:
        noise = Noise(torch.Generator(target.model.device).manual_seed(seed), target.model.device)
        noise.at(0, text.probs.shape[-1])  # type: ignore[union-attr]
        noise.advance()
    candidates = DSparkCandidateGenerator(
        drafter,
        target.model,
        text.prepared.config,
        processors,
        generator,
        noise,
    )
    features = torch.cat([text.features[i].to(drafter.device) for i in drafter.config.target_layer_ids], dim=-1)
    candidates.observe(features[:, : text.num_prompt])
    length, end = text.num_prompt + 1, text.token_ids.shape[1]  # the prefill gives the first token
    rounds, logits = [], []
    with tuned(target.model, drafter):
        while length < end:
            proposal = candidates.propose(text.token_ids[:, :length])
            drafted = proposal.token_ids.tolist()
            pairs = zip(drafted, text.token_ids[0, length:].tolist())
            accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            committed = min(accepted + 1, end - length)
            if noise is not None:
                noise.advance(committed)
            candidates.observe(features[:, length - 1 : length - 1 + committed])
            rounds.append((len(drafted), accepted))
            logits.append(rounded(proposal.confidence_logits()))
            length += committed
    return rounds, logits
