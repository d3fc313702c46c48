"""The CPU formulations of linear layers: the same numbers, chosen by measurement, and nothing left behind."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import make_drafter, make_target, prompt_ids
from torch import nn

from dspark_hf.decoding import linear_layers
from dspark_hf.decoding.linear_layers import FORMS, ROWS, LinearLayers, can_pack, linear_layers_of, measure_choices

needs_packing = pytest.mark.skipif(not can_pack(), reason="this torch has no oneDNN")


def layers_of(*modules: nn.Linear, form: str) -> LinearLayers:
    return LinearLayers({linear_layers._shape(m): [form] * len(ROWS) for m in modules})


@pytest.mark.parametrize("form", ["stock", "transposed", pytest.param("packed", marks=needs_packing)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 5), (2, 3), (1, 8), (3, 60), (7,), (1, 0)])
def test_same_numbers(form, bias, shape):
    layer = nn.Linear(24, 10, bias=bias)
    x = torch.randn(*shape, 24)
    with torch.no_grad():
        wanted = layer(x)
        with layers_of(layer, form=form).swapped([layer]):
            got = layer(x)
    torch.testing.assert_close(got, wanted)
    assert got.is_contiguous()


@needs_packing
def test_bfloat16():
    layer, x = nn.Linear(24, 10).to(torch.bfloat16), torch.randn(1, 4, 24).to(torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
        with layers_of(layer, form="packed").swapped([layer]):
            torch.testing.assert_close(layer(x), wanted, atol=2e-2, rtol=2e-2)


def test_undone_afterwards_and_after_an_error():
    layer = nn.Linear(4, 4)
    layers = layers_of(layer, form="transposed")
    with torch.no_grad(), pytest.raises(RuntimeError), layers.swapped([layer]):
        assert "forward" in vars(layer)
        raise RuntimeError
    assert "forward" not in vars(layer)


def test_left_alone():
    class Own(nn.Linear):
        pass

    hooked, double, other, unknown = nn.Linear(4, 4), nn.Linear(4, 4).double(), Own(4, 4), nn.Linear(4, 5)
    hooked.register_forward_hook(lambda *a: None)
    plain = nn.Linear(4, 4)
    layers = layers_of(plain, form="transposed")
    layers.choices["4x4+bias:float64"] = ["transposed"] * len(ROWS)
    with torch.no_grad(), layers.swapped([hooked, double, other, unknown, plain]):
        assert "forward" in vars(plain)
        assert all("forward" not in vars(layer) for layer in (hooked, double, other, unknown))
    with layers.swapped([plain]):  # gradients are on: training is left alone
        assert "forward" not in vars(plain)


@needs_packing
def test_a_packed_copy_follows_its_weights():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    layers = layers_of(layer, form="packed")
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
    modules = [nn.Linear(16, 16) for _ in range(3)]
    choice = measure_choices({"a": modules}, may_pack=can_pack())["a"]
    assert len(choice) == len(ROWS)
    assert set(choice) <= set(FORMS)
    assert "packed" not in measure_choices({"a": modules}, may_pack=False)["a"]


def test_choices_are_kept_and_a_damaged_file_is_measured_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(linear_layers, "cache_folder", lambda: tmp_path)
    target = make_target(dtype=torch.float32)
    calls = []
    real = linear_layers.measure_choices
    monkeypatch.setattr(linear_layers, "measure_choices", lambda *a: calls.append(a) or real(*a))
    first = linear_layers_of(target, make_drafter(target))
    assert linear_layers_of(target, make_drafter(target)).choices == first.choices
    assert len(calls) == 1
    file = next(tmp_path.rglob("*.json"))
    for content in ("{", "[]", json.dumps({"choices": {"24x32:float32": ["nonsense"]}})):
        file.write_text(content)
        linear_layers_of(target, make_drafter(target))
    assert len(calls) == 4


def test_switches(monkeypatch, tmp_path):
    monkeypatch.setattr(linear_layers, "cache_folder", lambda: tmp_path)
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    drafter.packed_weights = False
    assert not any("packed" in choice for choice in linear_layers_of(target, drafter).choices.values())
    drafter.skinny_linear = False
    assert not linear_layers_of(target, drafter).choices
    assert not linear_layers_of(make_target(), make_drafter(make_target())).choices  # float64


def test_no_copies_where_memory_is_short(monkeypatch, tmp_path):
    monkeypatch.setattr(linear_layers, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(linear_layers.psutil, "virtual_memory", lambda: type("M", (), {"available": 1000})())
    target = make_target(dtype=torch.float32)
    choices = linear_layers_of(target, make_drafter(target)).choices
    assert not any("packed" in choice for choice in choices.values())


@pytest.mark.parametrize("form", ["transposed", pytest.param("packed", marks=needs_packing)])
def test_decoding_with_each_form(form):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    measured = linear_layers_of(target, drafter)
    measured.choices = {shape: [form] * len(ROWS) for shape in measured.choices}
    plain = target.generate(prompt_ids(), max_new_tokens=30, do_sample=False)
    fast = target.generate(prompt_ids(), max_new_tokens=30, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, fast)
    assert not any("forward" in vars(m) for m in (*target.modules(), *drafter.modules()))


@needs_packing
def test_a_drafter_with_packed_copies_can_be_copied(tmp_path):
    target = make_target(dtype=torch.float32)
    drafter = make_drafter(target)
    layers = linear_layers_of(target, drafter)
    layers.packed(target.lm_head)
    again = copy.deepcopy(drafter)
    assert again.linear_layers.choices == layers.choices
    drafter.save_pretrained(tmp_path)
