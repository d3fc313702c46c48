"""The doctor: its checks on tiny pairs, the probe against drafting itself, and what the first use of a pair warns of."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GOLDEN, GOLDEN_PACKAGINGS, make_drafter, make_target, make_tokenizer, needs_packagings
from dspark_hf.decoding.targets import TargetTaps
from test_cli import names, pair, run  # noqa: F401
from transformers import AutoModelForCausalLM, DynamicCache

from dspark_hf import DSparkConfig, DSparkDraftModel, StepRates
from dspark_hf.decoding.checks import likely_mistakes
from dspark_hf.decoding.hook import check_pair
from dspark_hf.doctor import findings
from dspark_hf.doctor.examine import examine
from dspark_hf.doctor.probe import Agreement, Comparison, ProbeResult, Reading, probe, probe_texts, readings
from dspark_hf.doctor.report import FAILED, OK, SKIPPED, WARNING, Report, verdict
from dspark_hf.loading.pairs import Target
from dspark_hf.training.corpus import Answer

NAMES = [
    "versions",
    "packaging",
    "vocabulary and width",
    "tapped layers",
    "tokenizer",
    "rope in the config",
    "shared weights",
    "cache",
    "memory",
    "acceptance",
    "anchor layout",
    "tap offset",
    "rope base",
    "draft vocabulary",
    "speculation pays",
]


def as_target(model) -> Target:
    return Target("tiny", model, make_tokenizer(model.config.get_text_config().vocab_size))


def greedy_texts(model, prompts, new_tokens: int = 40) -> list[Answer]:
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    outputs = [model.generate(torch.tensor([ids]), **settings)[0].tolist() for ids in prompts]
    return [Answer("all", ids, output[len(ids) :]) for ids, output in zip(prompts, outputs)]


def statuses(report) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


# -- the command -----------------------------------------------------------------------------------------------------


def test_json(pair, monkeypatch, capsys):  # noqa: F811
    """Random weights: everything fits, and next to nothing is accepted."""
    code, out, _ = run(monkeypatch, capsys, "doctor", "--json", *names(pair))
    report = json.loads(out)
    assert [check["name"] for check in report["checks"]] == NAMES
    found = {check["name"]: check for check in report["checks"]}
    assert code == (0 if report["healthy"] else 1)
    assert report["healthy"] == all(check["status"] != FAILED for check in report["checks"])
    for name in (
        "versions",
        "packaging",
        "vocabulary and width",
        "tapped layers",
        "tokenizer",
        "shared weights",
        "cache",
    ):
        assert found[name]["status"] == OK
    assert found["packaging"]["details"]["packaging"] == "dspark-hf"
    assert len(found["acceptance"]["details"]["accepted_by_drafted"]) == 4
    assert found["speculation pays"]["details"]["ratio"] > 0
    target, memory = make_target(dtype=torch.float32), found["memory"]["details"]
    assert memory["target_bytes"] == pytest.approx(sum(p.nbytes for p in target.parameters()), rel=0.01)
    # float32, 4 and 2 layers, keys and values of 2 heads of 8
    assert memory["target_cache_bytes"] == 1000 * 4 * 4 * 2 * 2 * 8
    assert memory["drafter_cache_bytes"] == 1000 * 4 * 2 * 2 * 2 * 8


def test_table(pair, monkeypatch, capsys):  # noqa: F811
    code, out, _ = run(monkeypatch, capsys, "doctor", "--no-speed", *names(pair))
    assert all(name in out for name in NAMES)
    assert "not asked for" in out
    assert ("Healthy" in out) == (code == 0)


def test_missing_drafter_is_bad_input(pair, monkeypatch, capsys):  # noqa: F811
    code, _, err = run(monkeypatch, capsys, "doctor", *names(pair, drafter="nowhere"))
    assert code == 2
    assert "No drafter at nowhere" in err


def test_another_vocabulary(pair, monkeypatch, capsys, tmp_path):  # noqa: F811
    make_drafter(make_target(vocab_size=30)).save_pretrained(tmp_path)
    code, out, _ = run(monkeypatch, capsys, "doctor", "--json", *names(pair, drafter=tmp_path))
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 1
    assert found["vocabulary and width"]["status"] == FAILED
    assert "vocab_size 30" in found["vocabulary and width"]["found"]
    assert {found[name]["status"] for name in (*findings.PROBED, "speculation pays")} == {SKIPPED}


# -- checks without drafting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [[0, 3], [0, 9]], ids=["last", "missing"])
def test_layers_that_can_not_be_tapped(target, tmp_path, layers):
    make_drafter(target, target_layer_ids=layers, num_target_layers=None, bind=False).save_pretrained(tmp_path)
    check = examine(as_target(target), str(tmp_path), speed=False).check("tapped layers")
    assert check.status == FAILED
    assert str(layers[1:]) in check.found


def test_a_drafter_that_is_refused_when_it_is_loaded(target, tmp_path):
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"target_layer_ids": [0, 3]}))
    report = examine(as_target(target), str(tmp_path))
    assert not report.is_healthy
    assert report.check("packaging").status == FAILED
    assert "last one can't be tapped" in report.check("packaging").found


def test_tokenizers_and_special_tokens(target, tmp_path):
    make_drafter(target, pad_token_id=5).save_pretrained(tmp_path)
    given = as_target(target)
    texts = greedy_texts(target, [[5, 6, 7]])
    check = examine(given, str(tmp_path), speed=False, texts=texts).check("tokenizer")
    assert check.status == WARNING
    assert "pad token is 5" in check.found
    make_drafter(target).save_pretrained(tmp_path)
    given.tokenizer.save_pretrained(tmp_path)
    assert examine(given, str(tmp_path), speed=False, texts=texts).check("tokenizer").status == OK
    make_tokenizer(30).save_pretrained(tmp_path)
    check = examine(given, str(tmp_path), speed=False, texts=texts).check("tokenizer")
    assert check.status == WARNING
    assert "6 of 30 tokens" in check.found


@pytest.mark.parametrize("equal", [True, False])
def test_copies_of_embedding_and_head(target, tmp_path, equal):
    drafter = make_drafter(target, has_own_embeddings=True, bind=False)
    for ours, theirs in (
        (drafter.embed_tokens, target.get_input_embeddings()),
        (drafter.lm_head, target.get_output_embeddings()),
    ):
        with torch.no_grad():
            ours.weight.copy_(theirs.weight if equal else theirs.weight + 1)
    drafter.save_pretrained(tmp_path)
    texts = greedy_texts(target, [[5, 6, 7]])
    check = examine(as_target(target), str(tmp_path), speed=False, texts=texts).check("shared weights")
    sizes = {"embedding": 24 * 32 * 8, "LM head": 24 * 32 * 8}
    assert check.status == (OK if equal else WARNING)
    assert check.details == {"dropped": sizes if equal else {}, "kept": {} if equal else sizes}


def test_a_drafter_of_another_form_is_not_probed(target, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark_hf.doctor.examine.BLOCK_FORMS", ("gemma4",))
    make_drafter(target).save_pretrained(tmp_path)
    report = examine(as_target(target), str(tmp_path))
    assert report.is_healthy
    assert report.check("acceptance").found == "only for block drafters"


MISTAKES = {
    "depth": ({"num_target_layers": 6}, "6 layers"),
    "eos": ({"eos_token_id": [7, 9]}, "end with token 7, 9"),
    "mask": ({"mask_token_id": 3}, "mask token 3"),
    "pad": ({"mask_token_id": 0}, "mask token 0 is also the padding"),
    "rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "rope base is 10000"),
    "name": ({"target_model_name_or_path": "them/Other-7B"}, "trained for them/Other-7B"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_likely_mistakes(case, caplog):
    change, message = MISTAKES[case]
    target = make_target("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    target.config._name_or_path = "us/Model-1B-bnb-4bit"
    target.generation_config.eos_token_id = 3
    good = {"num_target_layers": 4, "eos_token_id": 3, "target_model_name_or_path": "our/model-1b"}
    assert likely_mistakes(target, make_drafter(target, **good)) == []
    drafter = make_drafter(target, **good | change, bind=False)
    (mistake,) = likely_mistakes(target, drafter)
    assert message in mistake.found
    from transformers.utils import logging

    logging.get_logger("dspark_hf").warning_once.cache_clear()
    logging.enable_propagation()
    try:
        for _ in range(3):
            check_pair(target, drafter)
    finally:
        logging.disable_propagation()
    assert [message in record.getMessage() for record in caplog.records] == [True]


@needs_packagings
def test_no_mistakes_in_the_golden_pairs():
    targets = {
        kind: AutoModelForCausalLM.from_pretrained(GOLDEN / f"target_{kind}", dtype=torch.float32)
        for kind in ("qwen3", "gemma4")
    }
    folders = [f.parent for root in (GOLDEN, GOLDEN_PACKAGINGS) for f in root.rglob("config.json")]
    folders = [f for f in folders if "eagle3" not in f.name and not f.name.startswith("target_")]
    assert len(folders) > 15
    for folder in folders:
        drafter = DSparkDraftModel.from_pretrained(folder)
        assert likely_mistakes(targets["gemma4" if "gemma4" in folder.name else "qwen3"], drafter) == [], folder


# -- the probe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill_in", [False, True])
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_the_probe_tells_what_drafting_does(head, fill_in):
    """A tiny vocabulary, so that random drafts are accepted often enough."""
    target = make_target(vocab_size=6)
    drafter = make_drafter(target, head, sample_from_anchor=not fill_in, draft_vocab_size=4)
    texts = greedy_texts(target, [[2, 3, 4], [5, 3, 2, 2], [4, 4]], 60)
    configured = probe(target, drafter, texts).configured
    checked = 0
    for text, probabilities, accepted in zip(texts, configured.probabilities, configured.accepted):
        ids = torch.tensor([text.input_ids + text.response_ids])
        with torch.no_grad(), TargetTaps(target, drafter.config.target_layer_ids) as taps:
            probs = target(input_ids=ids).logits[0].float().softmax(-1)[:, drafter.draft_token_ids()]
            features = taps.take()
        for i, anchor in enumerate(range(len(text.input_ids), ids.shape[1] - 1, 3)):
            block = drafter.draft(ids[:, anchor], features[:, :anchor], DynamicCache())
            answer = ids[0, anchor + 1 : anchor + 1 + block.token_ids.shape[1]]
            right = (block.token_ids[0, : len(answer)] == answer).long().cumprod(0)
            assert int(accepted[i]) == int(right.sum())
            stood = torch.minimum(probs[anchor], block.logits[0, 0].float().softmax(-1)).sum()
            assert float(probabilities[i, 0]) == pytest.approx(float(stood), abs=1e-5)
            checked += int(right.sum())
    assert checked > 3
    assert configured.accepted_tokens == pytest.approx(float(torch.cat(configured.accepted).double().mean()))
    lengths = configured.prefix_lengths()
    assert lengths == sorted(lengths) and len(lengths) == drafter.config.num_draft_tokens


def test_the_probe_leaves_the_drafter_as_it_was(target, drafter):
    before, rotary = drafter.config.to_dict(), drafter.rotary_emb
    result = probe(target, drafter, greedy_texts(target, [[5, 6, 7]]))
    assert drafter.config.to_dict() == before
    assert drafter.rotary_emb is rotary
    assert not drafter.training
    kinds = [other.reading.kind for other in result.others]
    assert kinds == ["layout", "taps", *["rope"] * 3]  # one layer higher would be the last one


def test_answers_come_from_the_target(target):
    given = as_target(make_target(dtype=torch.float32))
    given.model.generation_config.eos_token_id = None
    texts = probe_texts(given)
    ids = torch.tensor([texts[0].input_ids])
    plain = given.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    assert plain[0, ids.shape[1] :].tolist() == texts[0].response_ids
    assert {text.domain for text in texts} == {"math", "code", "chat"}


def test_nothing_to_probe_on(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    report = examine(as_target(target), str(tmp_path), texts=[Answer("all", [5, 6], [3])])
    assert report.check("acceptance").status == FAILED
    assert "too few" in report.check("acceptance").found
    assert statuses(report)["speculation pays"] == SKIPPED


GOLDEN_DRAFTERS = [
    GOLDEN / "e2e_trained" / "deepspec_qwen3_vanilla",
    GOLDEN / "e2e_trained" / "deepspec_qwen3_rnn",
    GOLDEN_PACKAGINGS / "e2e_trained" / "zlab_dflash",
    GOLDEN_PACKAGINGS / "e2e_trained" / "zlab_dflash_nested",
]


@pytest.fixture(scope="module")
def golden_pair():
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "target_qwen3", dtype=torch.float32).eval()
    prompts = json.loads((GOLDEN / "e2e.json").read_text())["targets"]["target_qwen3"]
    return target, greedy_texts(target, [p["prompt_ids"] for p in prompts])


@needs_packagings
@pytest.mark.parametrize("change", ["none", "layout", "taps", "rope"])
@pytest.mark.parametrize("folder", GOLDEN_DRAFTERS, ids=lambda folder: folder.name)
def test_the_right_reading_of_trained_drafters(folder, change, golden_pair):
    """A hundred tokens are too few to be sure of a wrong reading, but the right one is the best of all."""
    target, texts = golden_pair
    right = DSparkConfig.from_pretrained(folder)
    changes = {
        "none": {},
        "layout": {"sample_from_anchor": not right.sample_from_anchor},
        "taps": {"target_layer_ids": [i - 1 for i in right.target_layer_ids]},
        "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    }[change]
    drafter = DSparkDraftModel.from_pretrained(folder, **changes).eval()
    drafter.bind_target(target)
    result = probe(target, drafter, texts)
    top = max(result.others, key=lambda other: other.gain)
    if change == "none":
        assert result.best is None
        assert top.gain < 0
        return
    assert top.gain > 0
    found = (
        top.reading.sample_from_anchor,
        list(top.reading.target_layer_ids),
        top.reading.rope_parameters["rope_theta"],
    )
    assert found == (right.sample_from_anchor, right.target_layer_ids, right.rope_parameters["rope_theta"])


# -- what is made of it ----------------------------------------------------------------------------------------------


def result_of(accepted: float, others: dict[str, tuple[str, float, float]], coverage: float = 1.0) -> ProbeResult:
    """A probe whose other readings, by name, have a kind, a gain and its standard error."""
    reading = Reading("configured", "as configured", True, (0, 2), {"rope_theta": 1e6})
    agreement = Agreement(reading, [torch.full((10, 4), 0.4)], [torch.full((10,), accepted)])
    compared = [
        Comparison(Reading(kind, name, True, (0, 2), {}), 0.4 + gain, 1.0, gain, error, gain > 3.5 * error)
        for name, (kind, gain, error) in others.items()
    ]
    return ProbeResult(agreement, compared, coverage, 100)


def probed(*args, **kwargs) -> dict:
    return {check.name: check for check in findings.probed(result_of(*args, **kwargs))}


def test_a_better_reading_fails_and_is_named():
    found = probed(1.0, {"fill-in": ("layout", 0.1, 0.01), "up": ("taps", -0.1, 0.01)})
    assert (found["anchor layout"].status, found["tap offset"].status) == (FAILED, OK)
    assert "fill-in fits these weights better" in found["anchor layout"].found
    assert "sample_from_anchor" in found["anchor layout"].advice
    assert found["rope base"].status == SKIPPED


def test_what_is_further_off_goes_first():
    """A lesser gain may be surer, and still be only a shadow of the greater one."""
    found = probed(1.0, {"fill-in": ("layout", 0.1, 0.035), "rope_theta 5": ("rope", 0.01, 0.002)})
    assert (found["anchor layout"].status, found["rope base"].status) == (FAILED, WARNING)
    found = probed(1.0, {"fill-in": ("layout", 0.1, 0.035), "rope_theta 5": ("rope", 0.001, 0.002)})
    assert (found["anchor layout"].status, found["rope base"].status) == (OK, OK)


def test_next_to_nothing():
    assert probed(1.0, {})["acceptance"].status == OK
    nothing = probed(0.01, {"fill-in": ("layout", -0.1, 0.01)})["acceptance"]
    assert nothing.status == FAILED
    assert "under every reading" in nothing.found
    assert "fill-in" in probed(0.01, {"fill-in": ("layout", 0.1, 0.01)})["acceptance"].advice


@pytest.mark.parametrize(("coverage", "status"), [(0.97, OK), (0.8, WARNING), (0.3, FAILED)])
def test_coverage_of_the_draft_vocabulary(coverage, status):
    assert probed(1.0, {}, coverage)["draft vocabulary"].status == status


def test_speed():
    rates = StepRates([1, 2, 3], [128], [[0.1, 0.1, 0.3]], [[0.0] * 3], [0.01, 0.02], 0.0)
    check = findings.speed(rates, [0.5, 0.6])
    assert check.status == OK
    assert check.details["draft_tokens"] == 1
    assert check.details["ratio"] == pytest.approx(1.5 * 0.1 / 0.11)
    assert findings.speed(rates, [0.01, 0.02]).status == WARNING


def test_readings_differ_in_one_thing(target):
    drafter = make_drafter(target, block_size=1, target_layer_ids=[-1, 1])
    own, *others = readings(target, drafter)
    assert own.kind == "configured"
    assert [other.kind for other in others] == ["taps", *["rope"] * 3]  # a block of one has one layout
    assert others[0].target_layer_ids == (0, 2)
    assert {other.rope_parameters["rope_theta"] for other in others[1:]} == {1e4, 1e5, 5e6}


def test_the_verdict_names_what_failed(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    report = examine(as_target(target), str(tmp_path), texts=[Answer("all", [5, 6], [3])])
    assert verdict(report) == "Not healthy: acceptance."


def test_numbers_that_json_lacks(monkeypatch):
    """A drafter whose weights are not numbers, one short answer: no standard errors, no probabilities."""
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    torch.nn.init.constant_(drafter.norm.weight, float("nan"))
    result = probe(target, drafter, [Answer("a", [5, 6, 7], [8, 9, 10, 11])])
    report = Report("target", "drafter", findings.probed(result))
    details = json.loads(json.dumps(report.to_dict(), allow_nan=False))["checks"][1]["details"]
    assert details["configured"] is None
    assert details["others"][0]["standard_error"] is None
    assert not report.is_healthy
