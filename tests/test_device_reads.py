"""How often a round reads the device back: what an accelerator would have to be waited for."""

from contextlib import contextmanager

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from test_losslessness import SCHEDULERS, check_distribution, rates
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from dspark_hf import ConfidenceThreshold, Expectation, FixedLength, LookaheadScheduler
from dspark_hf.decoding.speculative import Speculation
from dspark_hf.scheduling.policy import SequenceState

TOP = 5  # candidates of a position, where not all are
_READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2")


class Counter(TorchDispatchMode):
    """Counts reads of tensors by the host (on a CPU all can be seen but copies), and softmaxes over the vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.on, self.reads, self.softmaxes = vocab, True, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.reads += self.on and (name in _READS or by_mask)
        self.softmaxes += self.on and name == "_softmax" and args[0].shape[-1] in (self.vocab, TOP)
        return function(*args, **(kwargs or {}))

    @contextmanager
    def counting(self, monkeypatch, target):
        """In our own code alone: what the target's forward reads, plain decoding reads too."""
        forward = target.forward

        def uncounted(*args, **kwargs):
            self.on = False
            try:
                return forward(*args, **kwargs)
            finally:
                self.on = True

        # These read the memory of a CPU tensor without an operation.
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))
        monkeypatch.setattr(target, "forward", uncounted)
        with self:
            yield

    def _counted(self, method):
        def counted(tensor, *args, **kwargs):
            self.reads += self.on
            return method(tensor, *args, **kwargs)

        return counted


def reads_by_round(target, drafter, monkeypatch, **arguments) -> tuple[list[int], int]:
    """Reads of each round after the first, and softmaxes of the whole generation."""
    counter, marks, one_round = Counter(target.config.vocab_size), [], Speculation.round

    def marked(self, *args, **kwargs):
        before = counter.reads
        result = one_round(self, *args, **kwargs)
        marks.append(counter.reads - before)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Speculation, "round", marked)
        with counter.counting(patch, target):
            target.generate(prompt_ids(6), max_new_tokens=20, assistant_model=drafter, **arguments)
    return marks[1:], counter.softmaxes


def costs() -> LookaheadScheduler:
    """Draws long blocks and sometimes cuts them."""
    return LookaheadScheduler(rates(1.0, 1.1, 1.2, 1.3, 1.4, draft=0.01), Expectation([0.8] * 4))


@pytest.mark.parametrize(
    ("policy", "arguments", "top", "wanted"),
    [
        (None, {}, None, 1),  # what was accepted
        (None, {"repetition_penalty": 1.2}, TOP, 1),
        (ConfidenceThreshold(0.3), {}, TOP, 2),  # and the confidences
        (costs(), {"repetition_penalty": 1.2}, None, 2),  # copies from the text are looked for, too
    ],
    ids=["default", "penalty", "threshold", "scheduled"],
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_reads_of_a_round(policy, arguments, top, wanted, do_sample, monkeypatch):
    target = make_target(seed=2)
    target.generation_config.eos_token_id = 99  # looked for, never found
    torch.manual_seed(5)
    drafter = make_drafter(target, seed=3)
    drafter.options.policy, drafter.options.top_candidates = policy, top
    drafter.options.deferred_admission, drafter.options.skinny_linear = True, False
    reads, softmaxes = reads_by_round(target, drafter, monkeypatch, do_sample=do_sample, **arguments)
    assert len(reads) > 2
    assert max(reads) == wanted, reads
    assert (softmaxes > 0) == do_sample
    assert sum(drafter.last_generation.drafted) > 0


@pytest.mark.parametrize(
    "policy", [ConfidenceThreshold(0.5), ConfidenceThreshold(0.2, cumulative=True), SCHEDULERS["lookahead"]]
)
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_asking_later_gives_the_same_block(policy, head):
    lengths = set()
    for seed in range(6):
        target = make_target(seed=seed)
        drafter = make_drafter(target, head, seed=20 + seed, block_size=3)
        top = 5 if seed % 2 else None
        features = torch.randn(2, 4, 64, dtype=drafter.dtype, generator=torch.Generator().manual_seed(seed))
        ids = torch.cat([prompt_ids(4, seed=seed), prompt_ids(4, seed=seed + 90)])
        blocks = []
        for deferred in (False, True):
            policy.plan([SequenceState(i, depth=3, limit=3) for i in range(2)])
            settings = {"admission": policy, "deferred": deferred, "top_candidates": top}
            blocks.append(drafter.draft(ids, features, DynamicCache(), **settings))
        now, later = blocks
        lengths.add(now.token_ids.shape[1])
        # Alone or with another row, a row's numbers are the same but for rounding.
        for here, there in zip(now.survival, later.survival):
            assert here == pytest.approx(there, rel=1e-9)
        for name in ("token_ids", "logits", "confidence_logits", "num_admitted"):
            torch.testing.assert_close(getattr(now, name), getattr(later, name))
    assert len(lengths) > 1


def test_a_block_that_processors_end_is_the_same(target):
    """Where no candidate is allowed drafting ends, after the policy was asked about that position."""

    def nothing_after_two(ids, scores):
        return scores if ids.shape[1] < 7 else torch.full_like(scores, float("-inf"))

    drafter = make_drafter(target)
    features = torch.randn(1, 4, 64, dtype=drafter.dtype, generator=torch.Generator().manual_seed(1))
    blocks = []
    for deferred in (False, True):
        settings = {
            "admission": ConfidenceThreshold(0.0),
            "logits_processor": nothing_after_two,
            "deferred": deferred,
        }
        blocks.append(drafter.draft(prompt_ids(5), features, DynamicCache(), **settings))
    now, later = blocks
    assert now.token_ids.shape == (1, 2)
    assert torch.equal(now.token_ids, later.token_ids)
    assert torch.equal(now.num_admitted, later.num_admitted)
    assert now.survival == later.survival
    assert len(now.survival[0]) == 3


@pytest.mark.parametrize(
    ("policy", "arguments", "top"),
    [
        (ConfidenceThreshold(0.5), {}, None),
        (ConfidenceThreshold(0.35, cumulative=True), {"top_k": 3, "repetition_penalty": 1.3}, None),
        (ConfidenceThreshold(0.5), {}, 2),
        (SCHEDULERS["lookahead"], {"temperature": 0.8}, None),
    ],
    ids=["threshold", "cumulative-penalty", "threshold-top", "lookahead"],
)
def test_sampled_distribution_is_exact_when_asked_later(policy, arguments, top, monkeypatch):
    check_distribution(policy, arguments, make_drafter, False, monkeypatch, top_candidates=top, deferred_admission=True)


def test_criteria_end_the_text_where_plain_decoding_ends():
    """transformers' own are tested on the host; a user's is still asked after every token."""
    for seed in range(5):
        target = make_target(seed=seed, vocab_size=12)
        drafter, ids = make_drafter(target, seed=60 + seed), prompt_ids(5, 12, seed)
        seen: dict[bool, list[int]] = {False: [], True: []}
        texts = []
        for fast in (False, True):

            def criterion(input_ids, scores, lengths=seen[fast], **kwargs):
                lengths.append(input_ids.shape[1])
                return torch.full((1,), input_ids.shape[1] > 21, dtype=torch.bool)

            criteria = [
                EosTokenCriteria(torch.tensor(11) if seed == 4 else [seed, 11]),
                MaxLengthCriteria(19 + seed),
                criterion,
            ]
            settings = {"max_new_tokens": 30, "do_sample": False, "stopping_criteria": StoppingCriteriaList(criteria)}
            texts.append(target.generate(ids, assistant_model=drafter if fast else None, **settings))
        assert torch.equal(*texts)
        assert seen[False] == seen[True]


def test_a_fixed_length_needs_no_reading(target, monkeypatch):
    drafter = make_drafter(target)
    features = torch.randn(1, 4, 64, dtype=drafter.dtype)
    counter = Counter(24)
    with monkeypatch.context() as patch, counter.counting(patch, target):
        block = drafter.draft(prompt_ids(5), features, DynamicCache(), admission=FixedLength(2), deferred=True)
    assert block.token_ids.shape == (1, 2)
    assert counter.reads == 0
