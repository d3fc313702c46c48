"""The CPU formulations of linear layers: the same numbers, chosen by measurement, and nothing left behind."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from torch import nn

from dspark_hf.linear import linear_choices, linear_forms, linear_layers
from dspark_hf.linear.linear_choices import ROWS
from dspark_hf.linear.linear_forms import EXACT_FORMS, ROUNDED_FORM, can_pack, units_of
from dspark_hf.linear.linear_layers import LinearLayers, linear_layers_of, tuned

needs_packing = pytest.mark.skipif(not can_pack(), reason="this torch has no oneDNN")


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


class Attention(nn.Module):
    """Three layers side by side, as transformers names them."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(24, size, bias=bias) for size in (16, 8, 8))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


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


@needs_packing
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


@needs_packing
def test_a_packed_copy_follows_its_weights():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    layers = always("packed")
    with torch.no_grad():
        for change in (lambda: None, lambda: layer.weight.mul_(2.0), lambda: layer.weight.data.add_(1.0)):
            change()
            wanted = layer(x)
            with layers.swapped([layer]):
                torch.testing.assert_close(layer(x), wanted)
        layer.weight = nn.Parameter(torch.randn(8, 8))
        wanted = layer(x)
        with layers.swapped([layer]):
            torch.testing.assert_close(layer(x), wanted)


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
    real = linear_layers.chosen_forms
    monkeypatch.setattr(
        linear_layers, "chosen_forms", lambda part, u, f, *a: forms.update({part: f}) or real(part, u, f, *a)
    )
    linear_layers_of(target, drafter)
    assert ("bfloat16" in forms["drafter"]) == can_pack() and "bfloat16" not in forms["target"]
    drafter.draft_precision = "float32"
    linear_layers_of(target, drafter)
    assert forms["drafter"] == forms["target"]
    drafter.packed_weights = False
    linear_layers_of(target, drafter)
    assert forms == {"target": ["stock", "transposed"], "drafter": ["stock", "transposed"]}
    drafter.skinny_linear = False
    assert not linear_layers_of(target, drafter).choices
    assert not linear_layers_of(make_target(), make_drafter(make_target())).choices  # float64


def test_no_copies_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(linear_layers.psutil, "virtual_memory", lambda: type("M", (), {"available": 1000})())
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

    monkeypatch.setattr(linear_layers, "filled_cache", failing)
    target = make_target(dtype=torch.float32)
    assert linear_layers_of(target, make_drafter(target)).choices.keys() == {"drafter"}


@pytest.mark.parametrize("form", ["transposed", pytest.param("packed", marks=needs_packing)])
def test_decoding_with_each_form(form):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    measured = linear_layers_of(target, drafter)
    measured.choices = {part: [form] * len(ROWS) for part in measured.choices}
    plain = target.generate(prompt_ids(), max_new_tokens=30, do_sample=False)
    fast = target.generate(prompt_ids(), max_new_tokens=30, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, fast)
    assert not any("forward" in vars(m) for m in (*target.modules(), *drafter.modules()))


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
def test_layers_side_by_side_share_one_product(bias, monkeypatch):
    attention, products = Attention(bias), []
    real = linear_layers.product
    monkeypatch.setattr(linear_layers, "product", lambda form, *a: products.append(form) or real(form, *a))
    with torch.no_grad(), always("packed").swapped([attention]):
        for shape in ((1, 4), (2, 3), (1, 1), (1, 4)):
            x = torch.randn(*shape, 24)
            got, count = attention(x), len(products)
            for part, layer in zip(got, (attention.q_proj, attention.k_proj, attention.v_proj)):
                torch.testing.assert_close(part, nn.functional.linear(x, layer.weight, layer.bias))
                assert part.is_contiguous()
            assert products[-1] == "packed" and len(products) == count
    assert products == ["packed"] * 4
    assert not any("forward" in vars(m) for m in attention.modules())


@needs_packing
def test_layers_side_by_side_with_other_inputs_are_right(monkeypatch):
    attention = Attention()
    a, b = torch.randn(1, 3, 24), torch.randn(1, 3, 24)

    def right(layer, x):
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight))

    with torch.no_grad(), always("packed").swapped([attention]):
        right(attention.k_proj, b)  # without queries, as for a drafter's context
        for _ in range(3):
            right(attention.q_proj, a)
            right(attention.k_proj, b)  # another input than the queries'
            right(attention.v_proj, a)
            right(attention.v_proj, a)  # twice
        right(attention.q_proj, a)
        a = a + 1.0
        right(attention.k_proj, a)


def test_layers_that_differ_are_not_side_by_side():
    attention = Attention()
    attention.k_proj = nn.Linear(20, 8, bias=False)
    assert [len(unit) for unit in units_of(attention)] == [1, 1, 1]
    attention = Attention()
    attention.v_proj.register_forward_hook(lambda *a: None)
    assert units_of(attention) == [(attention.q_proj,), (attention.k_proj,)]
    assert units_of(Attention().double()) == []
    attention = Attention()
    shared = units_of(nn.Sequential(attention, attention.q_proj))
    assert sorted(map(id, (m for unit in shared for m in unit))) == sorted(map(id, attention.children()))


@needs_packing
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


@needs_packing
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
    drafter.draft_precision = "int8"
    with pytest.raises(ValueError, match="draft_precision must be 'float32' or 'bfloat16', got 'int8'"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


@needs_packing
def test_a_drafter_with_packed_copies_can_be_copied(tmp_path):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    layers = linear_layers_of(target, drafter)
    layers._copies.get((target.lm_head,), "packed")
    again = copy.deepcopy(drafter)
    assert again.linear_layers.choices == layers.choices
    drafter.save_pretrained(tmp_path)


@needs_packing
def test_left_to_autocast():
    layer, x = nn.Linear(24, 10), torch.randn(1, 4, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = layer(x)
        with always("packed").swapped([layer]):
            assert torch.equal(layer(x), wanted)


@needs_packing
def test_a_layer_may_be_called_by_keyword_and_any_weight_counts():
    attention = Attention()
    layer, x = attention.q_proj, torch.randn(1, 4, 24)
    layers = always("packed")
    with torch.no_grad():
        for change in (lambda: None, lambda: layer.weight.data[1, 1:].mul_(3.0)):
            change()
            wanted = layer(x)
            with layers.swapped([attention]):
                torch.testing.assert_close(layer(input=x), wanted)
