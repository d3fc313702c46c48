"""Checkpoints that are no drafter we read are refused by name, in Python and on the command line; no code of theirs is run."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer, prompt_ids
from safetensors.torch import load_file
from test_packagings import DEEPSPEC, TAPS, ZLAB, same_draft, write
from transformers import AutoConfig, AutoModel

from dspark_hf import DSparkDraftModel, cli
from dspark_hf.decoding import generation

DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dspark_block_size": 5,
    "dspark_noise_token_id": 1,
    "dspark_target_layer_ids": [58, 59, 60],
    "dspark_markov_rank": 512,
}
DFLASH2 = ZLAB | {"architectures": ["DFlash2DraftModel"], "dflash_config": TAPS | {"selector_rank": 8}}
OWN_CODE = (
    "from pathlib import Path\nPath(__file__).with_name('was_run').touch()\nPath({!r}).touch()\nclass Model: ...\n"
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target = make_target(dtype=torch.float32)
    target.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def generate(target_folder, monkeypatch, capsys):
    """`dspark-hf generate` with this drafter: (exit code, what it says)."""

    def run(drafter, target=target_folder) -> tuple[int, str]:
        arguments = ["generate", "--prompt", "w5", "--max-new-tokens", "3", "--target", target, "--drafter", drafter]
        monkeypatch.setattr(sys, "argv", ["dspark-hf", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as done:
            code = int(done.code or 0)
        return code, capsys.readouterr().err

    return run


def with_weights(folder, config: dict, kind: str, drafter: DSparkDraftModel):
    """A checkpoint with its weights in safetensors or pickled, whole or in shards."""
    write(folder, config, drafter)
    if kind == "safetensors":
        return folder
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if kind != "none":
        torch.save(tensors, folder / "pytorch_model.bin")
    if kind == "pickled shards":
        (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00001.bin")
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model-00001-of-00001.bin")}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        (DEEPSEEK_V4, "safetensors", "a DeepSeek-V4 checkpoint with an embedded drafter"),
        (DFLASH2, "safetensors", "a DFlash 2 drafter"),
        (DEEPSPEC, "pickled", r"pickle \(pytorch_model\.bin\).*safetensors\.torch\.save_file"),
        (DEEPSPEC, "pickled shards", r"pickle \(pytorch_model\.bin\.index\.json\).*in safetensors"),
        (DEEPSPEC, "none", r"no weights: neither model\.safetensors nor model\.safetensors\.index\.json"),
        (DEEPSPEC | {"architectures": ["SomeModel"], "markov_rank": None}, "none", "holds no weights"),
    ],
    ids=["deepseek-v4", "dflash-2", "pickled", "pickled-shards", "no-weights", "no-weights-by-taps"],
)
def test_refused_by_name(config, kind, message, tmp_path, generate):
    folder = with_weights(tmp_path / "x", config, kind, make_drafter(make_target()))
    with pytest.raises((ValueError, OSError), match=message):
        DSparkDraftModel.from_pretrained(folder)
    code, err = generate(folder)
    assert code == 2
    assert re.search(message, err)
    assert len(err.strip().splitlines()) == 1


def test_pickled_weights_of_our_own_form_are_refused_by_auto_model_too(tmp_path, target):
    make_drafter(target).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    AutoModel.from_pretrained(tmp_path)  # with both, the pickle is not looked at
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="which is not read because reading one can run code"):
        AutoModel.from_pretrained(tmp_path)


def test_what_the_refusal_of_a_pickle_says_to_do_works(tmp_path, target, monkeypatch):
    drafter = make_drafter(target)
    folder = with_weights(tmp_path / "x", DEEPSPEC, "pickled", drafter)
    with pytest.raises(OSError) as refused:
        DSparkDraftModel.from_pretrained(folder)
    line = str(refused.value).split("e.g. ")[1].split(", or ask for")[0]
    monkeypatch.chdir(folder)
    import safetensors.torch

    eval(line, {"safetensors": safetensors, "torch": torch})
    loaded = DSparkDraftModel.from_pretrained(folder)
    loaded.bind_target(target)
    same_draft(loaded, drafter)


def test_a_language_model_as_drafter(target_folder, generate):
    with pytest.raises(ValueError, match=r"a language model and no DSpark drafter.*LlamaForCausalLM"):
        DSparkDraftModel.from_pretrained(target_folder)
    code, err = generate(target_folder)
    assert code == 2
    assert "a language model and no DSpark drafter" in err


def test_a_language_model_as_assistant_is_transformers_own_business(target, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("our decoding loop was called")

    monkeypatch.setattr(generation, "speculative_decoding", never)
    assistant = make_target(seed=7)
    arguments = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(prompt_ids(), **arguments)
    assert torch.equal(plain, target.generate(prompt_ids(), assistant_model=assistant, **arguments))


# -- code that a checkpoint brings -----------------------------------------------------------------------------------


def bring_code(folder, **more) -> None:
    """Add code to a checkpoint that leaves a file when it is run, and an `auto_map` that names it."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "own_code.Model",
        "AutoModel": "own_code.Model",
        "AutoModelForCausalLM": "own_code.Model",
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    (folder / "own_code.py").write_text(OWN_CODE.format(str(folder / "was_run")))


@pytest.mark.parametrize("arguments", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}], ids=str)
@pytest.mark.parametrize("form", ["deepspec", "ours"])
def test_a_drafter_with_code_loads_without_running_it(form, arguments, tmp_path, target):
    drafter = make_drafter(target)
    folder = tmp_path / "x"
    drafter.save_pretrained(folder) if form == "ours" else write(folder, DEEPSPEC, drafter)
    bring_code(folder)
    loaded = DSparkDraftModel.from_pretrained(folder, **arguments)
    assert type(loaded) is DSparkDraftModel
    loaded.bind_target(target)
    same_draft(loaded, drafter)
    assert not (folder / "was_run").exists()


def test_the_code_would_be_seen_to_run(tmp_path, target, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write(tmp_path / "x", {"model_type": "foreign"}, make_drafter(target))
    bring_code(folder)
    with pytest.raises(AttributeError):  # the class in it can't load anything
        AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert (folder / "was_run").exists()


def test_an_unreadable_drafter_with_code_is_refused_without_running_it(tmp_path, target, generate):
    for name, config in (("unknown", {"model_type": "foreign"}), ("taps", {"model_type": "foreign"} | TAPS)):
        folder = write(tmp_path / name, config, make_drafter(target))
        bring_code(folder)
        for arguments in ({}, {"trust_remote_code": True}):
            with pytest.raises(ValueError, match=r"foreign.*\(auto_map\) is not run"):
                DSparkDraftModel.from_pretrained(folder, **arguments)
        code, err = generate(folder)
        assert (code, "is not run" in err) == (2, True)
        assert not (folder / "was_run").exists()


def test_a_target_that_needs_code_is_refused_without_asking(tmp_path, target_folder, generate, monkeypatch):
    def asked(*args):
        raise AssertionError("a question in the middle of a command")

    monkeypatch.setattr("builtins.input", asked)
    target = tmp_path / "target"
    target.mkdir()
    for file in target_folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    make_drafter(make_target(dtype=torch.float32)).save_pretrained(tmp_path / "drafter")
    bring_code(target)
    assert generate(tmp_path / "drafter", target)[0] == 0  # transformers knows this model itself
    bring_code(target, model_type="foreign", architectures=["Foreign"])
    code, err = generate(tmp_path / "drafter", target)
    assert code == 2
    assert "needs code of its own (auto_map), which is not run here" in err
    assert not (target / "was_run").exists()
