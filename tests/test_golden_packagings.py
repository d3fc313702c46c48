"""Golden data of speculators and z-lab: inference over two rounds, the training forward, z-lab's decoding loop."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GOLDEN, GOLDEN_PACKAGINGS, needs_packagings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel, FixedLength, generate_batch
from dspark_hf.scheduling.batch import PerRequest
from dspark_hf.training.step import Batch, DraftTrainingStep, make_blocks

pytestmark = needs_packagings
# Whatever lies there: other seeds and combinations are picked up.
FOLDERS = sorted(f.parent.name for f in GOLDEN_PACKAGINGS.glob("*/golden.safetensors"))


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "target_qwen3", dtype=torch.float32).eval()


def load(name: str, target) -> DSparkDraftModel:
    drafter = DSparkDraftModel.from_pretrained(GOLDEN_PACKAGINGS / name).eval()
    drafter.bind_target(target)
    return drafter


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FOLDERS)
def test_two_rounds_of_inference(name, target):
    golden = load_file(GOLDEN_PACKAGINGS / name / "golden.safetensors")
    drafter, cache, draft_cache = load(name, target), None, None
    first = drafter.config.block_size - drafter.config.num_draft_tokens
    for r in ("r1", "r2"):
        want = {key.removeprefix(f"eval.{r}."): value for key, value in golden.items() if key.startswith(f"eval.{r}.")}
        inputs = {"context_hidden_states": want["context_hidden"], "position_ids": want["position_ids"]}
        with torch.no_grad():
            close(drafter.embed(want["draft_input_ids"]), want["noise_embedding"])
            output = drafter(input_ids=want["draft_input_ids"], cache=cache, **inputs)
        cache = output.cache
        close(output.last_hidden_state, want["block_hidden"])
        if "base_logits" in want:
            close(output.logits, want["base_logits"])
        for i, layer in enumerate(cache.layers):
            if (keys := want.get(f"cache.{i}.key")) is not None:  # a sliding layer of z-lab's keeps its window alone
                close(layer.keys[:, :, -keys.shape[2] :], keys)
                close(layer.values[:, :, -keys.shape[2] :], want[f"cache.{i}.value"])
        block = drafter.draft(want["draft_input_ids"][:, 0], cache=draft_cache, **inputs)
        draft_cache = block.cache
        # speculators' files have what slot 0 yields too, where it proposes nothing.
        unused = want["greedy_tokens"].shape[1] - drafter.config.num_draft_tokens
        assert unused in (0, first)
        assert torch.equal(block.token_ids, want["greedy_tokens"][:, unused:])
        close(block.logits, want["logits"][:, unused:])
        if "confidence_logits" in want:
            close(block.confidence_logits, want["confidence_logits"][:, unused:])


def rows_of(train: dict[str, torch.Tensor], document: int, name: str) -> torch.Tensor:
    return train[name][:, train["document_ids"][0] == document]


@pytest.mark.parametrize("name", [n for n in FOLDERS if n.startswith("speculators")])
def test_training_forward(name, target):
    """Each packed document on its own: the blocks' hidden states and the heads with the previous tokens given."""
    golden = load_file(GOLDEN_PACKAGINGS / name / "golden.safetensors")
    train = {key.removeprefix("train."): value for key, value in golden.items() if key.startswith("train.")}
    drafter = load(name, target)
    step = DraftTrainingStep(drafter)
    first = drafter.config.block_size - drafter.config.num_draft_tokens
    checked = 0
    for document in (0, 1):
        places = (train["document_ids"][0] == document).nonzero().flatten()
        ids, mask = rows_of(train, document, "input_ids"), rows_of(train, document, "loss_mask")
        chosen = [
            i
            for i, (anchor, keep) in enumerate(
                zip(train["anchor_positions"].tolist(), train["block_keep_mask"].tolist())
            )
            if keep and anchor in places
        ]
        anchors = (train["anchor_positions"][chosen] - places[0])[None]
        hidden = rows_of(train, document, "target_hidden_states")
        batch = Batch(ids, mask, hidden, hidden[..., : drafter.config.hidden_size], torch.zeros(ids.shape))
        blocks = make_blocks(drafter.config, ids, mask, anchors, torch.ones_like(anchors, dtype=torch.bool))
        assert torch.equal(blocks.input_ids[0], train["draft_input_ids"][chosen])
        with torch.no_grad():
            ours = step.block_hidden(batch, blocks)[0]
            close(ours, train["backbone_hidden"][chosen])
            close(drafter.compute_logits(ours), train["base_logits"][chosen])
            # The last label has no successor in the block.
            labels = (
                train["prev_token_ids"][chosen][:, 1 + first :]
                if "prev_token_ids" in train
                else blocks.labels[0][:, 1:]
            )
            labels = torch.cat([labels, labels[:, :1]], dim=1)
            logits, confidence = step.heads(ours, ids[0][anchors[0]], labels)
        close(logits, train["draft_logits"][chosen][:, first:])
        if "confidence_pred" in train:
            close(confidence, train["confidence_pred"][chosen][:, first:])
        checked += len(chosen)
    assert checked == int(train["block_keep_mask"].sum())


def zlab_runs():
    file = GOLDEN_PACKAGINGS / "zlab_e2e.json"
    runs = json.loads(file.read_text())["runs"] if file.is_file() else []
    return [r for r in runs if (GOLDEN_PACKAGINGS / r["drafter"]).is_dir()]


@pytest.mark.parametrize("run", zlab_runs(), ids=lambda r: f"{r['drafter']}-{r['prompt_index']}-{r['stop_token_ids']}")
def test_decoding_loop(run, target):
    prompts = json.loads((GOLDEN_PACKAGINGS / "zlab_e2e.json").read_text())["prompts"]
    drafter = DSparkDraftModel.from_pretrained(GOLDEN_PACKAGINGS / run["drafter"])
    ids = torch.tensor([prompts[run["prompt_index"]]["prompt_ids"]])
    output = target.generate(
        ids,
        assistant_model=drafter,
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=run["stop_token_ids"],
        pad_token_id=0,
    )
    assert output[0].tolist() == run["output_ids"]
    stats = drafter.last_generation
    assert stats.new_tokens == run["num_output_tokens"]
    # A drafter that is good for nothing is parked, z-lab's loop drafts always; and z-lab's last blocks are shorter inputs.
    accepted = sum(n - 1 for n in run["acceptance_lengths"])
    if accepted > 10:
        assert abs(stats.rounds - len(run["acceptance_lengths"])) <= 1


@pytest.mark.parametrize(
    ("folder", "target_name", "prompts_file"),
    [
        (GOLDEN_PACKAGINGS / "e2e_trained/zlab_dflash_nested", "target_qwen3", GOLDEN_PACKAGINGS / "zlab_e2e.json"),
        (GOLDEN / "e2e_trained/deepspec_gemma4", "target_gemma4", GOLDEN / "e2e.json"),
    ],
    ids=["zlab", "gemma4"],
)
def test_batch_engine_accepts_as_much(folder, target_name, prompts_file):
    """The engine attends by itself: windows, causal blocks and Gemma's unscaled attention must come out the same."""
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / target_name, dtype=torch.float32).eval()
    drafter = DSparkDraftModel.from_pretrained(folder).eval()
    record = json.loads(prompts_file.read_text())
    prompts = [p["prompt_ids"] for p in record.get("prompts") or record["targets"][target_name]]
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    drafter.admission = FixedLength(drafter.config.num_draft_tokens)
    alone = []
    for ids in prompts:
        output = target.generate(torch.tensor([ids]), assistant_model=drafter, **settings)
        alone.append((output[0, len(ids) :].tolist(), drafter.last_generation.accepted))
    policy = PerRequest(FixedLength(drafter.config.num_draft_tokens))
    together = generate_batch(
        target, drafter, [torch.tensor(ids) for ids in prompts], engine={"policy": policy}, **settings
    )
    assert [(o.token_ids, o.stats.accepted) for o in together] == alone
    assert sum(sum(accepted) for _, accepted in alone) > 30
