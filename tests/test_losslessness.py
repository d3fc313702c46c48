"""The output is the target's own: greedy token for token, sampled exactly in distribution."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict

import pytest
import torch
from conftest import make_drafter, make_eagle3, make_target, prompt_ids
from scipy.stats import chisquare
from transformers import LogitsProcessorList

from dspark_hf import (
    ConfidenceThreshold,
    Expectation,
    FixedLength,
    GuardedLength,
    LaggedScheduler,
    LookaheadScheduler,
    StepRates,
    ThroughputScheduler,
)
from dspark_hf.decoding import acceptance
from dspark_hf.decoding.acceptance import verify_block, verify_chosen
from dspark_hf.model import sampler_dspark


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_greedy_is_token_identical_on_random_pairs(head):
    for seed in range(14):
        target = make_target(seed=seed, vocab_size=12)
        drafter = make_drafter(
            target,
            head,
            seed=100 + seed,
            sample_from_anchor=seed % 3 != 0,
            draft_vocab_size=8 if seed % 4 == 0 else None,
            confidence_head_with_markov=seed % 2 == 0,
            layer_types=["full_attention", "sliding_attention"] if seed % 5 == 0 else None,
            sliding_window=3 if seed % 5 == 0 else None,
        )
        ids = prompt_ids(5 + seed % 4, 12, seed)
        plain = target.generate(ids, max_new_tokens=30, do_sample=False)
        fast = target.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=drafter)
        assert torch.equal(plain, fast), f"seed {seed}"


def test_greedy_is_token_identical_with_an_eagle3_drafter():
    for seed in range(8):
        target = make_target(seed=seed, vocab_size=12)
        drafter = make_eagle3(target, seed=100 + seed, draft_vocab_size=8 if seed % 4 == 0 else None)
        ids = prompt_ids(5 + seed % 4, 12, seed)
        plain = target.generate(ids, max_new_tokens=30, do_sample=False)
        fast = target.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=drafter)
        assert torch.equal(plain, fast), f"seed {seed}"


class Enumerator:
    """Goes through every outcome of the random decisions of a function, depth first, with its probability."""

    def __init__(self) -> None:
        self.script: list[int] = []

    def choose(self, probs: list[float]) -> int:
        if self.at == len(self.trace):
            options = [i for i, p in enumerate(probs) if p > 0]
            picked = options[0] if self.at >= len(self.script) else self.script[self.at]
            self.trace.append((picked, options))
        picked = self.trace[self.at][0]
        self.at += 1
        self.weight *= probs[picked]
        return picked

    def draw_tokens(self, probs, generator=None):
        assert probs.numel() == probs.shape[-1], "one row at a time"
        return torch.tensor(self.choose(probs.flatten().tolist())).view(probs.shape[:-1])

    def flip(self, probs, generator=None):
        outcome = torch.zeros(probs.shape, dtype=torch.bool)
        for k, p in enumerate(probs.flatten().tolist()):
            outcome.view(-1)[k] = stands = self.choose([1 - p, p]) == 1
            if not stands:
                break  # what comes after a rejection is never looked at
        return outcome

    def outcomes(self, run):
        while True:
            self.trace, self.at, self.weight = [], 0, 1.0
            yield run(), self.weight
            while self.trace:
                picked, options = self.trace.pop()
                later = [i for i in options if i > picked]
                if later:
                    self.script = [p for p, _ in self.trace] + [later[0]]
                    break
            else:
                return


def enumerate_draws(monkeypatch) -> Enumerator:
    """From now on every random decision of drafting and acceptance is the enumerator's."""
    enumerator = Enumerator()
    for module in (acceptance, sampler_dspark):
        monkeypatch.setattr(module, "draw_tokens", enumerator.draw_tokens)
    monkeypatch.setattr(acceptance, "flip", enumerator.flip)
    return enumerator


def exact_distribution(target, ids, horizon, arguments):
    """The target's distribution of the next `horizon` tokens, from its forward alone."""
    processors = target._get_logits_processor(target._prepare_generation_config(None, **arguments)[0], ids.shape[1])
    distribution = {}
    for tokens in itertools.product(range(target.config.vocab_size), repeat=horizon):
        text, weight = ids, 1.0
        for token in tokens:
            with torch.no_grad():
                scores = target(input_ids=text).logits[:, -1]
            weight *= float(processors(text, scores).softmax(-1)[0, token])
            text = torch.cat([text, torch.tensor([[token]])], dim=1)
        distribution[tokens] = weight
    return distribution


def rates(*seconds, draft: float = 0.0) -> StepRates:
    """A table that live rounds don't change, so that every run of an enumeration decides alike."""
    rows = list(range(1, len(seconds) + 1))
    table = StepRates(rows, [1], [list(seconds)], [[0.0] * len(rows)], [draft] * len(rows), 0.0)
    table.live = False
    return table


# Vocabulary 4 and such costs that each of these sometimes cuts, parks or pads.
SCHEDULERS = {
    "throughput": ThroughputScheduler(rates(1.0, 1.35, 1.4)),
    "throughput-padded": ThroughputScheduler(rates(1.0, 1.6, 1.3)),
    "lagged": LaggedScheduler(rates(1.0, 1.3, 1.9)),
    "lagged-by-one": LaggedScheduler(rates(1.0, 1.3, 1.9), lag=1),
    "lookahead": LookaheadScheduler(rates(1.0, 1.4, 1.5), Expectation([0.6, 0.5], 0.5)),
    "lookahead-padded": LookaheadScheduler(rates(1.0, 1.6, 1.3), Expectation([0.6, 0.5], 0.5)),
    "guarded": GuardedLength(2, patience=1),
    # One rejection convinces it, so that it parks within the horizon.
    "lookahead-parking": LookaheadScheduler(rates(1.0, 1.2, 1.4, draft=0.2), Expectation([0.6, 0.5], information=0.1)),
}


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        (FixedLength(2), {}),
        (FixedLength(3), {"temperature": 0.7, "top_p": 0.9}),
        (ConfidenceThreshold(0.5), {}),
        (ConfidenceThreshold(0.35, cumulative=True), {"top_k": 3, "repetition_penalty": 1.3}),
        *((policy, {"temperature": 0.8}) for policy in SCHEDULERS.values()),
    ],
    ids=["fixed", "fixed-warped", "threshold", "cumulative-penalty", *SCHEDULERS],
)
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_sampled_distribution_is_exact(policy, arguments, reduced, monkeypatch):
    """Vocabulary 4, horizon 3: every outcome of drafting and acceptance, through generate() itself."""
    check_distribution(policy, arguments, make_drafter, reduced, monkeypatch)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_sampled_distribution_is_exact_with_eagle3(reduced, monkeypatch):
    check_distribution(FixedLength(3), {"temperature": 0.7, "top_p": 0.9}, make_eagle3, reduced, monkeypatch)


@pytest.mark.parametrize(
    "arguments", [{}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.2}], ids=["pure", "warped"]
)
def test_sampled_distribution_is_exact_with_copies(arguments, monkeypatch):
    """A prompt that repeats itself, and costs at which a copy beats the drafter's block."""
    scheduler = LookaheadScheduler(rates(1.0, 1.05, 1.1, draft=0.3), Expectation([0.2, 0.2]))
    prompt = torch.tensor([[3, 1, 2, 3, 2, 2, 3, 3, 2, 3]])
    check_distribution(scheduler, arguments, make_drafter, False, monkeypatch, prompt, copies=True)


@pytest.mark.parametrize("make", [make_drafter, make_eagle3])
def test_sampled_distribution_is_exact_with_a_window(make, monkeypatch):
    """Smaller than the prompt, so that tokens are dropped from the start and in every round."""
    windowed = functools.partial(make, context_window=2, context_sinks=1)
    check_distribution(FixedLength(2), {"temperature": 0.8}, windowed, False, monkeypatch, prompt_ids(9, 4, 9))


def check_distribution(policy, arguments, make, reduced, monkeypatch, ids=None, copies=False, **attributes):
    padding = policy in (SCHEDULERS["throughput-padded"], SCHEDULERS["lookahead-padded"])
    vocab, horizon = 4, 4 if padding or policy is SCHEDULERS["lookahead-parking"] else 3
    target = make_target(seed=5, vocab_size=vocab, num_hidden_layers=3, initializer_range=0.2)
    drafter = make(
        target,
        seed=6,
        block_size=3,
        target_layer_ids=[0, 1],
        num_hidden_layers=1,
        draft_vocab_size=2 if reduced else None,
    )
    for name, value in ({"policy": policy, "acceptance": "rejection"} | attributes).items():
        setattr(drafter.options, name, value)
    if padding:
        drafter.generation_config.num_assistant_tokens = 1  # so that two rows are padded to three
    drafter.options.skinny_linear = False
    ids = prompt_ids(4, vocab, 9) if ids is None else ids
    length = ids.shape[1]
    arguments = {"do_sample": True, "top_k": 0} | arguments
    wanted = exact_distribution(target, ids, horizon, arguments)

    enumerator = enumerate_draws(monkeypatch)

    def run():
        return target.generate(ids, max_new_tokens=horizon, assistant_model=drafter, **arguments)[0, length:]

    found, drafted, parked, padded = defaultdict(float), 0, 0, 0
    for tokens, weight in enumerator.outcomes(run):
        found[tuple(tokens.tolist())] += weight
        stats = drafter.last_generation
        drafted += stats.copied if copies else sum(stats.drafted)
        parked += stats.parked_rounds
        padded += sum(r.rows > r.drafted + 1 for r in stats.history)
    assert drafted > 0
    if policy is SCHEDULERS["lookahead-parking"]:
        assert parked > 0
    if padding:
        assert padded > 0
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    for tokens, probability in wanted.items():
        assert found[tokens] == pytest.approx(probability, abs=1e-9)


def test_verification_of_two_drafted_tokens_is_exact(monkeypatch):
    """Drafting two tokens and verifying them gives the target's distribution of what is committed first."""
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.rand(1, n, 4, dtype=torch.float64, generator=generator).softmax(-1) for n in (2, 3))
    enumerator = enumerate_draws(monkeypatch)

    def run():
        tokens = torch.cat([enumerator.draw_tokens(draft[:, k]) for k in range(2)])
        result = verify_block(tokens, draft[0], target[0])
        return [*tokens[: int(result.num_accepted)].tolist(), int(result.next_token)]

    first, second = defaultdict(float), defaultdict(float)
    for text, weight in enumerator.outcomes(run):
        first[text[0]] += weight
        if len(text) > 1:
            second[text[0], text[1]] += weight
    for token in range(4):
        assert first[token] == pytest.approx(float(target[0, 0, token]), abs=1e-12)
        committed = sum(second[token, other] for other in range(4))
        for other in range(4):
            assert second[token, other] == pytest.approx(committed * float(target[0, 1, other]), abs=1e-12)


def test_greedy_verification_is_the_one_hot_case():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        drafted = torch.randint(0, 3, (4,), generator=generator)
        chosen = torch.randint(0, 3, (5,), generator=generator)
        one_hot = torch.nn.functional.one_hot
        probabilistic = verify_block(drafted, one_hot(drafted, 3).double(), one_hot(chosen, 3).double())
        greedy = verify_chosen(drafted, chosen)
        assert torch.equal(greedy.num_accepted, probabilistic.num_accepted)
        assert torch.equal(greedy.next_token, probabilistic.next_token)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [{"temperature": 0.8}, {"top_k": 5}, {"top_p": 0.8}], ids=["temperature", "top_k", "top_p"]
)
def test_sampled_runs_pass_a_chi_square_test(arguments):
    vocab, horizon, runs = 8, 2, 1700
    target = make_target(seed=11, vocab_size=vocab, num_hidden_layers=3, dtype=torch.float32, initializer_range=0.2)
    drafter = make_drafter(target, seed=12, target_layer_ids=[0, 1], num_hidden_layers=1, block_size=3)
    ids = prompt_ids(4, vocab, 13)
    arguments = {"do_sample": True, "top_k": 0} | arguments
    wanted = exact_distribution(target, ids, horizon + 1, arguments)
    torch.manual_seed(17)
    counts = defaultdict(int)
    for _ in range(runs):
        output = target.generate(ids, max_new_tokens=horizon + 1, assistant_model=drafter, **arguments)
        counts[tuple(output[0, 4:].tolist())] += 1
    likely = [tokens for tokens, p in wanted.items() if p * runs >= 5]
    observed = [counts[tokens] for tokens in likely]
    expected = [wanted[tokens] * runs for tokens in likely]
    rest = max(runs - sum(expected), 1e-9)
    if rest > 1:
        observed.append(runs - sum(observed))
        expected.append(rest)
    expected = [e * runs / sum(expected) for e in expected]
    assert all(counts[tokens] == 0 for tokens, p in wanted.items() if p == 0)
    assert chisquare(observed, expected).pvalue > 0.001


def test_processors_see_every_prefix():
    """A LogitsProcessorList with a stateful processor sees every prefix it would see when decoding plainly."""

    class Recorder:
        def __init__(self):
            self.seen = set()

        def __call__(self, input_ids, scores):
            self.seen.add(tuple(input_ids[0].tolist()))
            return scores

    target = make_target(seed=2, vocab_size=12)
    drafter, ids = make_drafter(target, seed=3), prompt_ids(5, 12)
    plain, fast = Recorder(), Recorder()
    target.generate(ids, max_new_tokens=12, do_sample=False, logits_processor=LogitsProcessorList([plain]))
    target.generate(
        ids, max_new_tokens=12, do_sample=False, logits_processor=LogitsProcessorList([fast]), assistant_model=drafter
    )
    assert plain.seen <= fast.seen
