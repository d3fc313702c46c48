"""The doctor: its checks on tiny pairs, the probe against drafting itself, and what the first use of a pair warns of."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GOLDEN, GOLDEN_PACKAGINGS, make_drafter, make_target, make_tokenizer, needs_packagings
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from dspark_hf import DSparkConfig, DSparkDraftModel, StepRates
from dspark_hf.decoding.checks import likely_mistakes
from dspark_hf.decoding.hook import check_pair
from dspark_hf.decoding.target import TargetTaps
from dspark_hf.doctor import findings
from dspark_hf.doctor.examine import examine
from dspark_hf.doctor.findings import FAILED, OK, PROBED, SKIPPED, SPEED, WARNING, Report
from dspark_hf.doctor.probe import ProbeResult, Reading, probe, probe_texts, readings
from dspark_hf.loading.pairs import Target
from dspark_hf.training.corpus import Answer

FITTING = ["versions", "packaging", "vocabulary and width", "tapped layers", "tokenizer"]
NAMES = [*FITTING, "rope in the config", "shared weights", "cache", "memory", *PROBED, SPEED]


def as_target(model) -> Target:
    return Target("tiny", model, make_tokenizer(model.config.get_text_config().vocab_size))


def greedy_texts(model, prompts, new_tokens: int = 40) -> list[Answer]:
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    outputs = [model.generate(torch.tensor([ids]), **settings)[0].tolist() for ids in prompts]
    return [Answer("all", ids, output[len(ids) :]) for ids, output in zip(prompts, outputs)]


def examined(target, folder, **settings) -> Report:
    """Without speed, on one short answer."""
    given = target if isinstance(target, Target) else as_target(target)
    return examine(given, str(folder), speed=False, **{"texts": greedy_texts(given.model, [[5, 6, 7]])} | settings)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list:
    """The options that name a tiny target and its drafter, in folders."""
    folder, target = tmp_path_factory.mktemp("pair"), make_target(dtype=torch.float32)
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    return ["--target", folder / "target", "--drafter", folder / "drafter"]


def test_json(pair, run):
    """Random weights: everything fits, and next to nothing is accepted."""
    code, out, _ = run("doctor", "--json", *pair)
    report = json.loads(out)
    found = {check["name"]: check for check in report["checks"]}
    assert list(found) == NAMES
    assert code == (0 if report["healthy"] else 1)
    assert report["healthy"] == all(check["status"] != FAILED for check in report["checks"])
    assert {found[name]["status"] for name in (*FITTING, "shared weights", "cache")} == {OK}
    assert found["packaging"]["details"]["packaging"] == "dspark-hf"
    assert len(found["acceptance"]["details"]["accepted_by_drafted"]) == 4
    assert found[SPEED]["details"]["ratio"] > 0
    target, memory = make_target(dtype=torch.float32), found["memory"]["details"]
    assert memory["target_bytes"] == pytest.approx(sum(p.nbytes for p in target.parameters()), rel=0.01)
    # float32, 4 and 2 layers, keys and values of 2 heads of 8
    assert memory["target_cache_bytes"] == 1000 * 4 * 4 * 2 * 2 * 8
    assert memory["drafter_cache_bytes"] == 1000 * 4 * 2 * 2 * 2 * 8


def test_table(pair, run):
    code, out, _ = run("doctor", "--no-speed", *pair)
    assert all(name in out for name in NAMES)
    assert "not asked for" in out
    assert ("Healthy" in out) == (code == 0)


def test_missing_drafter_is_bad_input(pair, run):
    code, _, err = run("doctor", *pair[:2], "--drafter", "nowhere")
    assert code == 2
    assert "No drafter at nowhere" in err


def test_another_vocabulary(pair, run, tmp_path):
    make_drafter(make_target(vocab_size=30)).save_pretrained(tmp_path)
    code, out, _ = run("doctor", "--json", *pair[:2], "--drafter", tmp_path)
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 1
    assert found["vocabulary and width"]["status"] == FAILED
    assert "vocab_size 30" in found["vocabulary and width"]["found"]
    assert {found[name]["status"] for name in (*PROBED, SPEED)} == {SKIPPED}


# -- checks without drafting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [[0, 3], [0, 9]], ids=["last", "missing"])
def test_layers_that_can_not_be_tapped(target, tmp_path, layers):
    make_drafter(target, target_layer_ids=layers, num_target_layers=None, bind=False).save_pretrained(tmp_path)
    check = examined(target, tmp_path).check("tapped layers")
    assert check.status == FAILED
    assert str(layers[1:]) in check.found


def test_a_drafter_that_is_refused_when_it_is_loaded(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"target_layer_ids": [0, 3]}))
    check = examined(target, tmp_path).check("packaging")
    assert check.status == FAILED
    assert "last one can't be tapped" in check.found


def test_tokenizers_and_special_tokens(target, tmp_path):
    def check(settings, tokenizer_size):
        make_drafter(target, **settings).save_pretrained(tmp_path)
        if tokenizer_size:
            make_tokenizer(tokenizer_size).save_pretrained(tmp_path)
        made = examined(target, tmp_path).check("tokenizer")
        return made.status, made.found

    status, found = check({"pad_token_id": 5}, None)
    assert (status, "pad token is 5" in found) == (WARNING, True)
    assert check({}, 24)[0] == OK
    status, found = check({}, 30)
    assert (status, "6 of 30 tokens" in found) == (WARNING, True)


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
    check = examined(target, tmp_path).check("shared weights")
    sizes = {"embedding": 24 * 32 * 8, "LM head": 24 * 32 * 8}
    assert check.status == (OK if equal else WARNING)
    assert check.details == {"dropped": sizes if equal else {}, "kept": {} if equal else sizes}


def test_a_drafter_of_another_form_is_not_probed(target, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark_hf.doctor.examine.BLOCK_FORMS", ("gemma4",))
    make_drafter(target).save_pretrained(tmp_path)
    report = examined(target, tmp_path)
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
def test_the_probe_says_what_drafting_does(head, fill_in):
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
            chance = torch.minimum(probs[anchor], block.logits[0, 0].float().softmax(-1)).sum()
            assert float(probabilities[i, 0]) == pytest.approx(float(chance), abs=1e-5)
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
    kinds = [other.kind for other in result.others]
    assert kinds == ["layout", "taps", *["rope"] * 3]  # one layer higher would be the last one


def test_readings_differ_in_one_thing(target):
    drafter = make_drafter(target, block_size=1, target_layer_ids=[-1, 1])
    own, *others = readings(target, drafter)
    assert own.kind == "configured"
    assert [other.kind for other in others] == ["taps", *["rope"] * 3]  # a block of one has one layout
    assert others[0].target_layer_ids == (0, 2)
    assert {other.rope_parameters["rope_theta"] for other in others[1:]} == {1e4, 1e5, 5e6}


def test_answers_come_from_the_target():
    given = as_target(make_target(dtype=torch.float32))
    given.model.generation_config.eos_token_id = None
    texts = probe_texts(given)
    ids = torch.tensor([texts[0].input_ids])
    plain = given.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    assert plain[0, ids.shape[1] :].tolist() == texts[0].response_ids
    assert {text.domain for text in texts} == {"math", "code", "chat"}


def test_nothing_to_probe_on(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    report = examined(target, tmp_path, texts=[Answer("all", [5, 6], [3])])
    assert report.verdict() == "Not healthy: acceptance."
    assert "too few" in report.check("acceptance").found
    assert report.check(SPEED).status == SKIPPED


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
    found = (top.sample_from_anchor, list(top.target_layer_ids), top.rope_parameters["rope_theta"])
    assert found == (right.sample_from_anchor, right.target_layer_ids, right.rope_parameters["rope_theta"])


# -- what is made of it ----------------------------------------------------------------------------------------------


def statuses(accepted: float, others: dict[str, tuple[str, float, float]], coverage: float = 1.0) -> dict:
    """The checks of a probe whose other readings, by name, have a kind, a gain and its standard error."""

    def reading(kind, name, acceptance, accepted, *gain):
        rows = [torch.full((10, 4), acceptance)], [torch.full((10,), accepted)]
        return Reading(kind, name, True, (0, 2), {}, *rows, *gain)

    configured = reading("configured", "as configured", 0.4, accepted)
    compared = [reading(kind, name, 0.4 + gain, 1.0, gain, error) for name, (kind, gain, error) in others.items()]
    return {c.name: c for c in findings.probed(ProbeResult(configured, compared, coverage, 100))}


FILL_IN, UNSURE = ("layout", 0.1, 0.01), ("layout", 0.1, 0.035)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"fill-in": FILL_IN, "up": ("taps", -0.1, 0.01)}, [FAILED, OK, SKIPPED]),
        # A lesser gain may be surer, and still be only a shadow of the greater one.
        ({"fill-in": UNSURE, "theta": ("rope", 0.01, 0.002)}, [FAILED, SKIPPED, WARNING]),
        ({"fill-in": UNSURE, "theta": ("rope", 0.001, 0.002)}, [OK, SKIPPED, OK]),
    ],
    ids=["a better reading", "the greatest gain first", "nothing clear"],
)
def test_other_readings(others, expected):
    found = statuses(1.0, others)
    assert [found[name].status for name in PROBED[1:4]] == expected
    if expected[0] == FAILED:
        assert "fill-in fits these weights better" in found["anchor layout"].found
        assert "sample_from_anchor" in found["anchor layout"].advice


def test_next_to_nothing():
    assert statuses(1.0, {})["acceptance"].status == OK
    nothing = statuses(0.01, {"fill-in": ("layout", -0.1, 0.01)})["acceptance"]
    assert nothing.status == FAILED
    assert "under every reading" in nothing.found
    assert "fill-in" in statuses(0.01, {"fill-in": FILL_IN})["acceptance"].advice


@pytest.mark.parametrize(("coverage", "status"), [(0.97, OK), (0.8, WARNING), (0.3, FAILED)])
def test_coverage_of_the_draft_vocabulary(coverage, status):
    assert statuses(1.0, {}, coverage)["draft vocabulary"].status == status


def test_speed():
    rates = StepRates([1, 2, 3], [128], [[0.1, 0.1, 0.3]], [[0.0] * 3], [0.01, 0.02], 0.0)
    check = findings.speed_check(rates, [0.5, 0.6])
    assert check.status == OK
    assert check.details["draft_tokens"] == 1
    assert check.details["ratio"] == pytest.approx(1.5 * 0.1 / 0.11)
    assert findings.speed_check(rates, [0.01, 0.02]).status == WARNING


def test_numbers_that_json_lacks():
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
