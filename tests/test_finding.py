"""Which drafter belongs to which target: names, folders, loaded models, and what is said where none is known."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer

from dspark_hf import DSparkDraftModel
from dspark_hf.loading import pairs
from dspark_hf.loading.chat_template import read_jsonl
from dspark_hf.loading.pairs import (
    DEFAULT_DRAFTER,
    DEFAULT_TARGET,
    KnownDrafter,
    find_drafter,
    known_drafters,
    load_drafter,
)
from dspark_hf.publishing.convert import convert

ROOT = Path(__file__).parents[1]
QWEN4, QWEN8, QWEN14 = (f"deepseek-ai/dspark_qwen3_{size}_block7" for size in ("4b", "8b", "14b"))
GEMMA = "deepseek-ai/dspark_gemma4_12b_block7"
QWEN4_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


COPIES = {
    QWEN4: """Qwen/Qwen3-4B Qwen3-4B qwen/qwen3-4b Qwen/Qwen3-4B-AWQ Qwen/Qwen3-4B-FP8 Qwen/Qwen3-4B-GGUF
        Qwen/Qwen3-4B-MLX-4bit Qwen/Qwen3-4B-MLX-bf16 JunHowie/Qwen3-4B-GPTQ-Int4 unsloth/Qwen3-4B-unsloth-bnb-4bit
        unsloth/Qwen3-4B-bnb-4bit bartowski/Qwen_Qwen3-4B-GGUF models/Qwen3-4B-Q4_K_M.gguf
        models/Qwen3-4B-UD-IQ2_XXS.gguf mlx-community/Qwen3-4B-8bit mlx-community/Qwen3-4B-4bit-DWQ
        RedHatAI/Qwen3-4B-quantized.w4a16""",
    QWEN8: """RedHatAI/Qwen3-8B-FP8-dynamic RedHatAI/Qwen3-8B-FP8_dynamic RedHatAI/Qwen3-8B-FP8-BLOCK nvidia/Qwen3-8B-FP4
        nvidia/Qwen3-8B-NVFP4 pytorch/Qwen3-8B-INT8-INT4 Intel/Qwen3-8B-int4-AutoRound-inc""",
    QWEN14: "Qwen/Qwen3-14B someone/Qwen3-14B-exl3-4.25bpw someone/Qwen3-14B-GPTQ-4bit-128g",
    GEMMA: "google/gemma-4-12B-it google/gemma-4-12B-it-qat-q4_0-gguf unsloth/gemma-4-12b-it-GGUF",
    DEFAULT_DRAFTER: "HuggingFaceTB/SmolLM2-135M-Instruct HuggingFaceTB/SmolLM2-135M-Instruct-GGUF",
}
OTHERS = """Qwen/Qwen3-4B-Base unsloth/Qwen3-4B-Base-bnb-4bit Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-4B-Thinking-2507-FP8
    unsloth/Qwen3-4B-128K-GGUF Qwen/Qwen3-4B-SafeRL Qwen/Qwen3-Embedding-4B Qwen/Qwen3-VL-4B-Instruct
    huihui-ai/Huihui-Qwen3-4B-abliterated deepseek-ai/DeepSeek-R1-0528-Qwen3-8B Qwen/Qwen3-0.6B Qwen/Qwen3-4Bit
    Qwen/Qwen3-48B Qwen/Qwen2.5-14B google/gemma-4-12B google/gemma-4-12B-pt-it google/gemma-3-12b-it
    HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-360M-Instruct Qwen3-4B/checkpoint-7 Qwen/Qwen3-4B-AWQ-mine
    deepseek-ai/dspark_qwen3_4b_block7"""


@pytest.mark.parametrize(
    ("name", "drafter"), [(n, drafter) for drafter, names in COPIES.items() for n in names.split()]
)
def test_quantised_copies_have_the_same_drafter(name, drafter):
    assert find_drafter(name).drafter == drafter


@pytest.mark.parametrize("name", [*OTHERS.split(), ""])
def test_other_models_have_none(name):
    with pytest.raises(ValueError, match="No drafter is known") as refused:
        find_drafter(name)
    assert f"dspark-hf train --target {name or 'TARGET'} --prompts" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_list_is_sound():
    assert len({k.target for k in known_drafters()}) == len(known_drafters()) == 5
    for known in known_drafters():
        assert [k for k in known_drafters() if k.has_name(known.target)] == [known]
        assert known.drafter == DEFAULT_DRAFTER or known.drafter.count("/") == 1
    ours = json.loads((ROOT / "model_cards" / DEFAULT_DRAFTER / "config.json").read_text())
    known = find_drafter(DEFAULT_TARGET)
    assert ours["target_model_name_or_path"] == known.target
    assert (ours["vocab_size"], ours["target_hidden_size"], ours["num_target_layers"]) == (
        known.vocab_size,
        known.hidden_size,
        known.num_hidden_layers,
    )


def folder_of(path: Path, config: dict) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_folders_by_their_name(tmp_path):
    assert find_drafter(folder_of(tmp_path / "Qwen3-4B-AWQ", QWEN4_CONFIG)).drafter == QWEN4
    cached = tmp_path / "models--Qwen--Qwen3-4B" / "snapshots" / ("0" * 40)
    assert find_drafter(str(folder_of(cached, QWEN4_CONFIG))).drafter == QWEN4
    (tmp_path / "link").symlink_to(tmp_path / "Qwen3-4B-AWQ")
    assert find_drafter(tmp_path / "link").drafter == QWEN4
    nested = {"model_type": "gemma4_unified", "text_config": {"model_type": "gemma4_unified_text"}}
    nested["text_config"] |= {"hidden_size": 3840, "num_hidden_layers": 48, "vocab_size": 262144}
    assert find_drafter(folder_of(tmp_path / "gemma-4-12b-it", nested)).drafter == GEMMA


def test_tokens_may_have_been_added(tmp_path):
    assert find_drafter(folder_of(tmp_path / "Qwen3-4B", QWEN4_CONFIG | {"vocab_size": 152064})).drafter == QWEN4
    with pytest.raises(ValueError, match="shape is another"):
        find_drafter(folder_of(tmp_path / "fewer" / "Qwen3-4B", QWEN4_CONFIG | {"vocab_size": 151000}))


def test_name_and_shape_must_agree(tmp_path):
    wrong = folder_of(tmp_path / "Qwen3-4B", QWEN4_CONFIG | {"hidden_size": 1024})
    with pytest.raises(ValueError, match=r"name is that of Qwen/Qwen3-4B, its shape is another"):
        find_drafter(wrong)
    with pytest.raises(ValueError, match="shape is another"):
        find_drafter(folder_of(tmp_path / "x" / "Qwen3-4B", QWEN4_CONFIG | {"model_type": "llama"}))


def test_a_shape_alone_is_only_a_hint(tmp_path):
    folder = folder_of(tmp_path / "mine", QWEN4_CONFIG | {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ValueError, match=f"shape is that of Qwen/Qwen3-4B.*{QWEN4}"):
        find_drafter(folder)
    with pytest.raises(ValueError, match="shape is that of Qwen/Qwen3-4B"):
        find_drafter(folder_of(tmp_path / "Qwen3-4B-Base", QWEN4_CONFIG))


def test_the_name_that_a_config_states(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(pairs.logger, "propagate", True)
    config = QWEN4_CONFIG | {"quantization_config": {"quant_method": "awq"}, "_name_or_path": "/data/Qwen3-4B"}
    with caplog.at_level(logging.WARNING):
        assert find_drafter(folder_of(tmp_path / "mine", config)).drafter == QWEN4
    assert "is taken for Qwen/Qwen3-4B" in caplog.text
    base = folder_of(tmp_path / "other", config | {"_name_or_path": "Qwen/Qwen3-4B-Base"})
    with pytest.raises(ValueError, match="No drafter is known"):
        find_drafter(base)
    smaller = folder_of(tmp_path / "smaller", config | {"hidden_size": 1024})
    with pytest.raises(ValueError, match="No drafter is known"):
        find_drafter(smaller)


# -- for_target and --drafter auto, with a tiny known pair -----------------------------------------------------------


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Folders of a tiny target and its drafter, which is in the list."""
    target = make_target(dtype=torch.float32)
    target.generation_config.eos_token_id = None
    target.save_pretrained(tmp_path / "Tiny-1B")
    make_tokenizer().save_pretrained(tmp_path / "Tiny-1B")
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    entry = KnownDrafter("me/Tiny-1B", str(tmp_path / "drafter"), "dspark", "mit", "tiny", "llama", 32, 4, 24)
    monkeypatch.setattr(pairs, "known_drafters", lambda: (entry,))
    return tmp_path


def test_for_target(known):
    from transformers import AutoModelForCausalLM

    ours = DSparkDraftModel.from_pretrained(known / "drafter")
    model = AutoModelForCausalLM.from_pretrained(known / "Tiny-1B")
    for target in ("me/Tiny-1B", "you/tiny-1b-GPTQ-Int4", known / "Tiny-1B", model):
        drafter = DSparkDraftModel.for_target(target)
        assert torch.equal(drafter.fc.weight, ours.fc.weight)
    assert DSparkDraftModel.for_target(model, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_drafter(target=model).fc.weight.equal(ours.fc.weight)
    with pytest.raises(ValueError, match="this model"):  # made here, so that nothing says which it is
        DSparkDraftModel.for_target(make_target())


def test_for_target_finds_the_default_pair():
    drafter = DSparkDraftModel.for_target(DEFAULT_TARGET, dtype="auto")
    assert drafter.config.target_model_name_or_path == DEFAULT_TARGET
    assert drafter.dtype == torch.bfloat16


def test_for_target_where_the_drafter_is_not_to_be_had():
    for arguments in ({}, {"local_files_only": True}):
        with pytest.raises(OSError, match=f"hf download {QWEN4}$"):
            DSparkDraftModel.for_target("Qwen/Qwen3-4B-AWQ", **arguments)
    with pytest.raises(OSError, match=f"hf download {QWEN4} --revision v2$"):
        DSparkDraftModel.for_target("Qwen/Qwen3-4B", revision="v2")
    with pytest.raises(OSError, match=f"hf download {QWEN4}$"):
        DSparkDraftModel.from_pretrained(QWEN4)


def test_for_target_without_the_package(monkeypatch):
    monkeypatch.setattr(DSparkDraftModel, "_load_for_target", None)
    with pytest.raises(ImportError, match="pip install dspark-hf"):
        DSparkDraftModel.for_target(DEFAULT_TARGET)


@pytest.mark.parametrize("flag", [[], ["--drafter", "auto"]], ids=["default", "auto"])
@pytest.mark.parametrize("command", ["generate", "batch", "race", "bench", "profile", "calibrate", "eval"])
def test_auto_is_the_known_drafter(command, flag, known, run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"w5 w{6 + i}", "domain": "chat"}) for i in range(4)))
    options = {
        "generate": ["--prompt", "w5", "--max-new-tokens", 4],
        "batch": ["--prompts", prompts, "--max-new-tokens", 4],
        "race": ["--prompt", "w5", "--max-new-tokens", 4],
        "bench": ["--prompts", prompts, "--max-new-tokens", 4, "--limit", 1],
        "profile": ["--max-rows", 2, "--depths", 8, "--sweeps", 1],
        "calibrate": ["--prompts", prompts, "--max-new-tokens", 8],
        "eval": ["--prompts", prompts, "--max-new-tokens", 8, "--report", tmp_path / "report"],
    }[command]
    code, _, err = run(command, "--target", known / "Tiny-1B", *options, *flag)
    assert code == 0, err
    if command == "calibrate":  # into the found drafter's own folder
        assert "confidence_temperatures" in (known / "drafter" / "config.json").read_text()
    if command == "eval":
        assert str(known / "drafter") in (tmp_path / "report" / "eval.json").read_text()


@pytest.mark.parametrize("command", ["generate", "batch", "race", "bench", "profile", "calibrate", "eval", "serve"])
def test_unknown_target_is_refused_before_it_is_loaded(command, known, run, tmp_path):
    (known / "Tiny-1B").rename(known / "Tiny-1B-Base")
    (known / "Tiny-1B-Base" / "model.safetensors").unlink()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "w5"}))
    more = {"generate": ["--prompt", "w5"], "batch": ["--prompts", prompts]}.get(command, [])
    if command == "serve":
        for module in ("fastapi", "uvicorn", "prometheus_client"):
            pytest.importorskip(module)
        with socket.create_server(("127.0.0.1", 0)) as free:
            more = ["--port", free.getsockname()[1]]
    code, _, err = run(command, "--target", known / "Tiny-1B-Base", *more)
    assert code == 2
    assert "shape is that of me/Tiny-1B" in err
    assert f"dspark-hf train --target {known / 'Tiny-1B-Base'} --prompts prompts.jsonl --output my-drafter" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [("./nowhere", "No target at ./nowhere"), ("someone/unheard-of", "hf download someone/unheard-of")],
)
def test_auto_for_a_target_that_is_not_there(target, message, run):
    code, _, err = run("generate", "--prompt", "w5", "--target", target)
    assert (code, message in err) == (2, True)


@pytest.mark.parametrize("drafter", [[], ["--drafter", "DIR"]], ids=["auto", "named"])
@pytest.mark.parametrize("packaging", ["dspark", "deepspec", "speculators"])
def test_a_drafter_as_target_is_refused(packaging, drafter, known, run):
    folder = known / "drafter"
    if packaging != "dspark":
        convert(str(folder), known / packaging, packaging, str(known / "Tiny-1B"))
        folder = known / packaging
    named = [known / "drafter" if part == "DIR" else part for part in drafter]
    code, _, err = run("generate", "--prompt", "w5", "--target", folder, *named)
    assert code == 2
    assert "is a drafter" in err and "not a target" in err
    assert len(err.strip().splitlines()) == 1


def test_prompts_that_are_not_utf_8(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "hé"}\n'.encode() + '{"prompt": "hé"}\n'.encode("latin-1"))
    lines = read_jsonl(file)
    assert next(lines) == (1, {"prompt": "hé"})
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 2: not UTF-8"):
        next(lines)


def test_found_drafter_that_does_not_fit_is_refused(known, monkeypatch, run):
    entry = replace(pairs.known_drafters()[0], drafter=str(known / "other"))
    make_drafter(make_target(vocab_size=30)).save_pretrained(known / "other")
    monkeypatch.setattr(pairs, "known_drafters", lambda: (entry,))
    code, _, err = run("generate", "--prompt", "w5", "--target", known / "Tiny-1B")
    assert (code, "vocab_size 30" in err) == (2, True)


def test_drafters_command(run):
    code, out, _ = run("drafters")
    assert code == 0
    assert "Qwen/Qwen3-4B" in out and DEFAULT_DRAFTER in out
    code, out, _ = run("drafters", "--json")
    assert [entry["target"] for entry in json.loads(out)] == [k.target for k in known_drafters()]
    code, out, _ = run("drafters", "--help")
    assert "Example: dspark-hf drafters" in out


def test_the_list_is_in_the_wheel(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "dspark_hf", tmp_path / "dspark_hf", ignore=shutil.ignore_patterns("__pycache__"))
    wheel = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(tmp_path)]
    done = subprocess.run([sys.executable, *wheel], capture_output=True, text=True, timeout=150)
    if "setuptools" in done.stderr:
        pytest.skip("no setuptools here that builds this package")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert "dspark_hf/loading/known_drafters.json" in wheel.namelist()
