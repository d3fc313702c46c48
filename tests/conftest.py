"""Tiny random models for the fast tests, and where the golden data lies."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dspark_hf import DSparkConfig, DSparkDraftModel

SHARED = Path(os.environ.get("DSPARK_SHARED", Path(__file__).parents[2] / "shared"))
GOLDEN = SHARED / "golden"
GOLDEN_PACKAGINGS = SHARED / "golden_packagings"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"golden data is not at {GOLDEN}")

needs_packagings = pytest.mark.skipif(
    not (GOLDEN_PACKAGINGS.is_dir() and GOLDEN.is_dir()), reason=f"golden data is not at {GOLDEN_PACKAGINGS}"
)

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}


def make_target(family: str = "llama", vocab_size: int = 24, seed: int = 0, dtype=torch.float64, **overrides):
    """A tiny random target."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(vocab_size=vocab_size, **_COMMON | extra | overrides))
    return model.to(dtype).eval()


def make_drafter(target, head: str = "vanilla", seed: int = 1, bind: bool = True, **overrides) -> DSparkDraftModel:
    """A tiny random drafter for `target`, its sequential head not zero."""
    text = target.config.get_text_config()
    torch.manual_seed(seed)
    settings = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        "block_size": 4,
        "mask_token_id": 1,
        "target_layer_ids": [0, 2],
        "num_target_layers": text.num_hidden_layers,
        "markov_head_type": head,
        "markov_rank": 6,
        "pad_token_id": 0,
    }
    drafter = DSparkDraftModel(DSparkConfig(**settings | overrides))
    if drafter.markov_head is not None:
        torch.nn.init.normal_(drafter.markov_head.markov_w2.weight, std=0.5)
    drafter = drafter.to(target.dtype).eval()
    if drafter.config.has_reduced_vocab:
        drafter.set_draft_vocabulary(torch.arange(drafter.config.draft_vocab_size) + 2)
    if bind:
        drafter.bind_target(target)
    return drafter


def make_eagle3(target, **overrides) -> DSparkDraftModel:
    """A tiny random Eagle3 drafter for `target`."""
    form = {"layer_form": "eagle3", "num_hidden_layers": 1, "enable_confidence_head": False}
    return make_drafter(target, "none", **form | overrides)


def prompt_ids(length: int = 7, vocab_size: int = 24, seed: int = 3) -> torch.LongTensor:
    """A random prompt, [1, length]."""
    return torch.randint(2, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def make_tokenizer(vocab_size: int = 24) -> PreTrainedTokenizerFast:
    """Words w0, w1, ... with a chat template."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", eos_token="w3")
    fast.chat_template = (
        "{% for m in messages %}w2 {{ m['content'] }} w3 {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
    )
    return fast


def make_letter_tokenizer(vocab_size: int = 24) -> PreTrainedTokenizerFast:
    """Letters a, b, ...: what transformers' stop strings can work with."""
    tokenizer = Tokenizer(models.BPE({chr(97 + i): i for i in range(vocab_size)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a")


def run_with_package(code: str, *arguments, **environment) -> str:
    """What `code` prints in a process of its own that imports this package."""
    command = [sys.executable, "-c", "import sys\n" + textwrap.dedent(code), *map(str, arguments)]
    place = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    variables = os.environ | place | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def threads(request):
    """One thread for tiny models, where a second one only waits; all of them for the real pair."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if request.node.get_closest_marker("real") else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def linear_choices(tmp_path_factory):
    return tmp_path_factory.mktemp("linear_layers")


@pytest.fixture(autouse=True)
def own_cache(request, monkeypatch, tmp_path_factory, linear_choices):
    """What is measured of tiny models does not go into the user's cache."""
    if not request.node.get_closest_marker("real"):
        folder = tmp_path_factory.mktemp("cache")
        monkeypatch.setattr("dspark_hf.scheduling.step_costs.cache_folder", lambda: folder)
        monkeypatch.setattr("dspark_hf.linear.linear_choices.cache_folder", lambda: linear_choices)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line: exit code, output, errors."""
    from dspark_hf import cli

    def run_command(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dspark-hf", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out, captured.err

    return run_command


@pytest.fixture
def target():
    return make_target()


@pytest.fixture
def drafter(target):
    return make_drafter(target)
