"""The CPU formulations of linear layers: the same numbers, chosen by measurement, and nothing left behind."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from torch import nn

from dspark_hf import BatchEngine, FixedLength
from dspark_hf.decoding import tuned_pair
from dspark_hf.decoding.tuned_pair import linear_layers_of, see_changed_weights, tuned
from dspark_hf.engine import engine as engine_file
from dspark_hf.linear import linear_choices, linear_forms, linear_layers
from dspark_hf.linear.linear_forms import EXACT_FORMS, ROUNDED_FORM, arranged, can_pack
from dspark_hf.linear.linear_layers import ROWS, LinearLayers, fingerprint, follow_weights
from dspark_hf.linear.row_check import check_rows

needs_packing = pytest.mark.skipif(not can_pack(), reason="this torch has no oneDNN")


def can_round() -> bool:
    try:
        return can_pack() and arranged(ROUNDED_FORM, torch.ones(8, 8)) is not None
    except RuntimeError:
        return False


needs_rounding = pytest.mark.skipif(not can_round(), reason="this processor has no products in bfloat16")


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    """The layers of tiny models are left alone elsewhere."""
    monkeypatch.setattr(linear_forms, "_WORTHWHILE", 0)


@pytest.fixture(autouse=True)
def own_choices(monkeypatch, tmp_path, small_layers_too):
    """Measured anew in each test."""
    monkeypatch.setattr(linear_choices, "cache_folder", lambda: tmp_path)


def always(form: str, part: str = "target") -> LinearLayers:
    return LinearLayers({part: [form] * len(ROWS)})


@pytest.mark.parametrize("form", ["stock", "transposed", pytest.param("packed", marks=needs_packing)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 5), (2, 3), (1, 8), (3, 60), (7,), (1, 0)])
def test_same_numbers(form, bias, shape):
    layer = nn.Linear(24, 10, bias=bias)
    x = torch.randn(*shape, 24)
    with torch.no_grad():
        wanted = layer(x)
        with always(form).swapped([layer]):
            got = layer(x)
    torch.testing.assert_close(got, wanted)
    assert got.is_contiguous()


@needs_rounding
def test_bfloat16():
    layer, x = nn.Linear(24, 10).to(torch.bfloat16), torch.randn(1, 4, 24).to(torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
        with always("packed").swapped([layer]):
            torch.testing.assert_close(layer(x), wanted, atol=2e-2, rtol=2e-2)


def test_undone_afterwards_and_after_an_error():
    layer = nn.Linear(4, 4)
    layers = always("transposed")
    with torch.no_grad(), pytest.raises(RuntimeError), layers.swapped([layer]):
        assert "forward" in vars(layer)
        raise RuntimeError
    assert "forward" not in vars(layer)


def test_left_alone():
    class Own(nn.Linear):
        pass

    hooked, double, other = nn.Linear(4, 4), nn.Linear(4, 4).double(), Own(4, 4)
    hooked.register_forward_hook(lambda *a: None)
    plain = nn.Linear(4, 4)
    layers = always("transposed")
    with torch.no_grad(), layers.swapped([hooked, double, other, plain]):
        assert "forward" in vars(plain)
        assert all("forward" not in vars(layer) for layer in (hooked, double, other))
    with torch.no_grad(), always("transposed", "drafter").swapped([plain]):
        assert "forward" not in vars(plain)
    with layers.swapped([plain]):  # gradients are on: training is left alone
        assert "forward" not in vars(plain)


CHANGES = {
    "nothing": lambda weight: None,
    "in place": lambda weight: weight.mul_(2.0),
    "through data": lambda weight: weight.data.add_(1.0),
    "one number": lambda weight: weight.data[5, 3].add_(60.0),
    "sign of a row": lambda weight: weight.data[2].neg_(),
    "rows swapped": lambda weight: weight.data.copy_(weight.data[[1, 0, *range(2, len(weight))]]),
    "columns swapped": lambda weight: weight.data.copy_(weight.data[:, [2, 1, 0, *range(3, weight.shape[1])]]),
}


@needs_packing
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_rounding)])
def test_a_packed_copy_follows_its_weights(change, dtype):
    layer, x = nn.Linear(24, 8).to(dtype), torch.randn(2, 24).to(dtype)
    layers = always("packed")
    with torch.no_grad():
        for step in (lambda weight: None, change, change):
            before = fingerprint(layer.weight)
            step(layer.weight)
            assert follow_weights([layer]) == (fingerprint(layer.weight) != before)
            wanted = layer(x)
            with layers.swapped([layer]):
                torch.testing.assert_close(layer(input=x), wanted, atol=2e-2, rtol=2e-2)


@needs_packing
def test_a_packed_copy_follows_another_weight_also_while_it_is_in_use():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with torch.no_grad():
        with always("packed").swapped([layer]):
            for weight in (torch.randn(8, 8), torch.randn(8, 8)):
                layer(x)
                layer.weight = nn.Parameter(weight)
                assert follow_weights([layer])
                torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.bias))
        layer.weight = nn.Parameter(torch.randn(8, 8))  # and where nobody looked
        wanted = layer(x)
        with always("packed").swapped([layer]):
            torch.testing.assert_close(layer(x), wanted)


def in_form(target, drafter, form: str) -> None:
    layers = linear_layers_of(target, drafter)
    layers.choices = {part: [form] * len(ROWS) for part in ("target", "drafter")}


def greedy(target, drafter=None, **arguments) -> list[int]:
    return target.generate(prompt_ids(), max_new_tokens=30, do_sample=False, assistant_model=drafter)[0, 7:].tolist()


def hidden_change(weight: torch.Tensor) -> None:
    """Of all numbers but those that once were looked at as a sample."""
    flat = weight.data.view(-1)
    other = torch.arange(len(flat)) % (len(flat) // 256 | 1) != 0
    flat[other] += torch.randn(int(other.sum()))


@needs_packing
@pytest.mark.parametrize("change", [hidden_change, CHANGES["one number"], CHANGES["rows swapped"]])
@pytest.mark.parametrize("where", ["lm_head", "model.layers.1.mlp.down_proj"])
@pytest.mark.parametrize("with_engine", [False, True])
def test_any_change_of_the_targets_weights_is_seen(change, where, with_engine):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
    in_form(target, drafter, "packed")
    engine = BatchEngine(target, drafter, keep_finished=2)

    def fast() -> list[int]:
        if not with_engine:
            return greedy(target, drafter)
        engine.add(prompt_ids()[0], max_new_tokens=30, do_sample=False)
        return next(iter(engine.run())).token_ids

    before = greedy(target)
    assert fast() == before
    change(target.get_submodule(where).weight)
    after = greedy(target)
    assert after != before
    assert fast() == after


@needs_packing
def test_a_busy_engine_looks_at_the_weights_now_and_then(monkeypatch):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    drafter.options.policy = FixedLength(3)
    in_form(target, drafter, "packed")
    looks = []
    monkeypatch.setattr(tuned_pair, "follow_weights", lambda models: looks.append(models) or follow_weights(models))
    engine = BatchEngine(target, drafter)
    engine.add(prompt_ids()[0], max_new_tokens=30, do_sample=False)
    list(engine.run())
    assert len(looks) == 2  # once armed, once as the first request comes to an idle engine
    monkeypatch.setattr(engine_file, "_MAX_AGE", 0.0)
    engine.add(prompt_ids()[0], max_new_tokens=30, do_sample=False)
    list(engine.run())
    assert len(looks) >= 2 + engine.stats.rounds // 2


@pytest.mark.parametrize("with_bias", [False, True])
def test_cut_out_head_rows_follow_the_target(with_bias):
    target = make_target(dtype=torch.float32)
    if with_bias:
        target.lm_head.bias = nn.Parameter(torch.randn(24))
    drafter = make_drafter(target, draft_vocab_size=16)
    (rows,) = drafter.bound_heads()
    greedy(target, drafter)
    for parameter in target.lm_head.parameters():
        parameter.data[7] += 1.0
    with torch.inference_mode():
        see_changed_weights(target, drafter)
    assert drafter.bound_heads() == [rows] and not rows.weight.is_inference()
    for ours, theirs in zip(rows.parameters(), target.lm_head.parameters()):
        assert torch.equal(ours, theirs[drafter.draft_token_ids()])


class Together(nn.Linear):
    """What LLM.int8() and layers with one scale for all rows have in common."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        step = input.abs().max() / 127
        return super().forward((input / step).round() * step)


class Each(nn.Linear):
    """A scale for each row."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        step = input.abs().amax(-1, keepdim=True) / 127
        return super().forward((input / step).round() * step)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_whose_rows_depend_on_each_other_are_refused(dtype):
    target = make_target(dtype=dtype)
    drafter = make_drafter(target)
    up = target.model.layers[1].mlp.up_proj
    target.model.layers[1].mlp.up_proj = Each(up.in_features, up.out_features, bias=False, dtype=dtype)
    check_rows(target, dtype)
    target.model.layers[2].mlp.up_proj = Together(up.in_features, up.out_features, bias=False, dtype=dtype)
    for use in (lambda: greedy(target, drafter), lambda: BatchEngine(target, drafter)):
        with pytest.raises(ValueError, match="its Together layers give a row other results for several rows at once"):
            use()


@pytest.mark.parametrize("threshold", [1.0, 6.0])
def test_int8_layers_with_outlier_columns_are_refused(threshold, tmp_path):
    """Where the activations of one row are above the threshold the others' logits differ by more than rounding."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source = make_target(dtype=torch.float32, hidden_size=64, head_dim=16, intermediate_size=128)
    source.model.layers[0].input_layernorm.weight.data[3] = 20.0
    source.save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, dtype=torch.float32)
    drafter = make_drafter(target, bind=False).to(torch.float32)
    for use in (lambda: greedy(target, drafter), lambda: BatchEngine(target, drafter)):
        with pytest.raises(ValueError, match=r"Linear8bitLt layers.*llm_int8_threshold=0\.0"):
            use()


def test_choices_are_measured():
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    choices = linear_layers_of(target, drafter).choices
    assert choices.keys() == {"target", "drafter"}
    assert all(len(choice) == len(ROWS) for choice in choices.values())
    assert set(choices["target"]) <= set(EXACT_FORMS)
    assert set(choices["drafter"]) <= {*EXACT_FORMS, ROUNDED_FORM}
    assert not any("forward" in vars(m) for m in (*target.modules(), *drafter.modules()))


def test_choices_are_kept_and_a_damaged_file_is_measured_anew(monkeypatch, tmp_path):
    target = make_target(dtype=torch.float32)
    calls = []
    real = linear_choices.measure_forms
    monkeypatch.setattr(linear_choices, "measure_forms", lambda part, *a: calls.append(part) or real(part, *a))
    first = linear_layers_of(target, make_drafter(target))
    assert linear_layers_of(target, make_drafter(target)).choices == first.choices
    assert calls == ["target", "drafter"]
    for content in ("{", "[]", json.dumps({"choice": ["nonsense"] * len(ROWS)}), json.dumps({"choice": ["stock"]})):
        for file in tmp_path.rglob("*.json"):
            file.write_text(content)
        linear_layers_of(target, make_drafter(target))
    assert calls == ["target", "drafter"] * 5


def test_switches(monkeypatch):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    forms = {}
    real = tuned_pair.chosen_forms
    monkeypatch.setattr(
        tuned_pair, "chosen_forms", lambda part, m, f, *a: forms.update({part: f}) or real(part, m, f, *a)
    )
    linear_layers_of(target, drafter)
    assert ("bfloat16" in forms["drafter"]) == can_pack() and "bfloat16" not in forms["target"]
    drafter.options.draft_precision = "float32"
    linear_layers_of(target, drafter)
    assert forms["drafter"] == forms["target"]
    drafter.options.packed_weights = False
    linear_layers_of(target, drafter)
    assert forms == {"target": ["stock", "transposed"], "drafter": ["stock", "transposed"]}
    drafter.options.skinny_linear = False
    assert not linear_layers_of(target, drafter).choices
    assert not linear_layers_of(make_target(), make_drafter(make_target())).choices  # float64


def test_no_copies_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(tuned_pair.psutil, "virtual_memory", lambda: type("M", (), {"available": 1000})())
    target = make_target(dtype=torch.float32)
    choices = linear_layers_of(target, make_drafter(target)).choices
    assert not {"packed", "bfloat16"} & {form for choice in choices.values() for form in choice}


def test_a_product_that_the_processor_lacks_is_not_chosen(monkeypatch):
    def refused(form, weight):
        raise RuntimeError("no such products")

    monkeypatch.setattr(linear_layers, "arranged", refused)
    target = make_target(dtype=torch.float32)
    choices = linear_layers_of(target, make_drafter(target)).choices
    assert {form for choice in choices.values() for form in choice} <= {"stock", "transposed"}


def test_a_target_that_cannot_be_timed_is_left_as_it_is(monkeypatch):
    def failing(target, depth):
        raise TypeError("another kind of forward")

    monkeypatch.setattr(tuned_pair, "filled_cache", failing)
    target = make_target(dtype=torch.float32)
    assert linear_layers_of(target, make_drafter(target)).choices.keys() == {"drafter"}


@pytest.mark.parametrize("form", ["transposed", pytest.param("packed", marks=needs_packing)])
def test_decoding_with_each_form(form):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    in_form(target, drafter, form)
    plain = target.generate(prompt_ids(), max_new_tokens=30, do_sample=False)
    fast = target.generate(prompt_ids(), max_new_tokens=30, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, fast)
    assert not any("forward" in vars(m) for m in (*target.modules(), *drafter.modules()))


@needs_rounding
@pytest.mark.parametrize("bias", [True, False])
def test_rounded_products_are_close(bias):
    layer, x = nn.Linear(32, 12, bias=bias), torch.randn(1, 4, 32)
    layers = always("bfloat16", "drafter")
    with torch.no_grad():
        wanted = layer(x)
        with layers.swapped([layer]):
            torch.testing.assert_close(layer(x), wanted, rtol=0.0, atol=0.0)  # only a drafter's are rounded
        with layers.swapped([], [layer]):
            got = layer(x)
    assert got.dtype == torch.float32
    assert 0.0 < (got - wanted).abs().max() < 0.05


@needs_rounding
@pytest.mark.parametrize("draft_vocab_size", [None, 16])
def test_a_drafters_products_may_be_rounded_and_the_targets_never(draft_vocab_size):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target, draft_vocab_size=draft_vocab_size)
    linear_layers_of(target, drafter).choices["drafter"] = ["bfloat16"] * len(ROWS)
    ids = prompt_ids(9)
    with torch.no_grad():
        wanted, features = target(ids).logits, torch.randn(1, 4, 64)
        before = drafter.context_features(features)
        with tuned(target, drafter):
            torch.testing.assert_close(target(ids).logits, wanted, rtol=1e-5, atol=1e-5)
            after = drafter.context_features(features)
    assert 0.0 < (after - before).abs().max() < 0.2
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
        plain = target.generate(ids, max_new_tokens=30, **sampling)
        assert torch.equal(plain, target.generate(ids, max_new_tokens=30, assistant_model=drafter, **sampling))


def test_an_unknown_precision_is_refused():
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    drafter.options.draft_precision = "int8"
    with pytest.raises(ValueError, match="draft_precision must be 'bfloat16' or 'float32', got 'int8'"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


@needs_packing
def test_a_drafter_with_packed_copies_can_be_copied(tmp_path):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    in_form(target, drafter, "packed")
    wanted = greedy(target, drafter)
    assert greedy(target, copy.deepcopy(drafter)) == wanted
    drafter.save_pretrained(tmp_path)


@needs_packing
def test_left_to_autocast():
    layer, x = nn.Linear(24, 10), torch.randn(1, 4, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = layer(x)
        with always("packed").swapped([layer]):
            assert torch.equal(layer(x), wanted)
