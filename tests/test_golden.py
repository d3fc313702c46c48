"""Golden data of DeepSpec, speculators and z-lab: two rounds of inference, training, their decoding loops, and the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, GOLDEN_PACKAGINGS, needs_golden, needs_packagings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import ConfidenceThreshold, DSparkDraftModel, FixedLength, generate_batch
from dspark_hf.training.step import Batch, DraftTrainingStep, LossWeights, draw_anchors, make_blocks, position_weights
from dspark_hf.training.unroll import EAGLE3_LOSS, UnrolledTrainingStep, unroll

pytestmark = needs_golden
FORMS = (
    "qwen3_vanilla",
    "qwen3_gated",
    "qwen3_rnn",
    "qwen3_nomarkov",
    "dflash_qwen3",
    "gemma4",
    "gemma4_separate_v",
)
DEEPSPEC = [GOLDEN / f"deepspec_{form}" for form in FORMS]
# Whatever lies there: other seeds and combinations are picked up.
PACKAGINGS = sorted(file.parent for file in GOLDEN_PACKAGINGS.glob("*/golden.safetensors"))


@pytest.fixture(scope="module")
def targets():
    names = ("target_qwen3", "target_gemma4")
    return {name: AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval() for name in names}


def load(folder: Path, targets=None) -> DSparkDraftModel:
    """DeepSpec's bring embedding and LM head; those of the other packagings are bound to the target."""
    drafter = DSparkDraftModel.from_pretrained(folder).eval()
    if drafter.embed_tokens is None:
        drafter.bind_target(targets["target_qwen3"])
    return drafter


def golden(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    stored = load_file(folder / "golden.safetensors")
    return {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("folder", [*DEEPSPEC, *PACKAGINGS], ids=lambda folder: folder.name)
def test_two_rounds_of_inference(folder, targets):
    drafter, cache, draft_cache = load(folder, targets), None, None
    first = drafter.config.block_size - drafter.config.num_draft_tokens
    for r in ("r1", "r2"):
        want = golden(folder, f"eval.{r}.")
        inputs = {"context_hidden_states": want["context_hidden"], "position_ids": want["position_ids"]}
        with torch.no_grad():
            if "noise_embedding" in want:
                close(drafter.embed(want["draft_input_ids"]), want["noise_embedding"])
            output = drafter(input_ids=want["draft_input_ids"], cache=cache, **inputs)
        cache = output.cache
        close(output.last_hidden_state, want["block_hidden"])
        if "base_logits" in want:
            close(output.logits, want["base_logits"])
        for i, layer in enumerate(cache.layers):
            if (keys := want.get(f"cache.{i}.key")) is not None:
                # A sliding layer of z-lab's keeps its window alone.
                assert keys.shape == layer.keys.shape or drafter.config.layer_types[i] == "sliding_attention"
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
        assert int(block.num_admitted) == block.token_ids.shape[1]


def training(folder: Path) -> tuple[dict[str, torch.Tensor], dict, DSparkDraftModel]:
    """What the released code saw and computed, and a drafter whose embedding and LM head are frozen."""
    drafter = load(folder)
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(False)
    return golden(folder, "train."), json.loads((folder / "golden.json").read_text())["train"], drafter


@pytest.mark.parametrize("folder", DEEPSPEC, ids=lambda folder: folder.name)
def test_training_losses_and_gradients(folder):
    train, scalars, drafter = training(folder)
    torch.manual_seed(scalars["anchor_seed"])
    anchors, keep = draw_anchors(train["loss_mask"], 8)
    assert torch.equal(anchors, train["anchor_positions"])
    assert torch.equal(keep, train["block_keep_mask"].bool())
    log_norm = drafter.compute_logits(train["target_last_hidden_states"]).logsumexp(-1).detach()
    parts = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")
    batch = Batch(*(train[part] for part in parts), log_norm)
    blocks = make_blocks(drafter.config, batch.input_ids, batch.loss_mask, anchors, keep)
    assert torch.equal(blocks.masks["full_attention"], train["dense_mask"].bool())
    assert torch.equal(blocks.position_ids, train["draft_position_ids"])
    assert torch.equal(blocks.valid, train["eval_mask"].bool())
    assert torch.equal(blocks.labels[blocks.valid], train["target_ids"][blocks.valid])
    want = scalars["loss_weights"]
    torch.testing.assert_close(position_weights(blocks.valid, want["loss_decay_gamma"]), train["loss_weight_mask"])

    kinds = ("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma")
    weights = LossWeights(*(want[kind] for kind in kinds))
    step = DraftTrainingStep(drafter, weights)
    with torch.no_grad():
        hidden = step.block_hidden(batch, blocks)
    close(hidden[keep], train["backbone_hidden"][keep])
    losses = step(batch, anchors, keep).losses
    losses.total.backward()
    names = {"cross_entropy": "ce_loss", "l1": "l1_loss", "confidence": "confidence_loss", "total": "total_loss"}
    for ours, theirs in names.items():
        if ours != "l1" or want["l1_loss_alpha"]:
            assert float(getattr(losses, ours).detach()) == pytest.approx(scalars[theirs], rel=1e-4)
    norms = {k: float(p.grad.norm()) for k, p in drafter.named_parameters() if p.grad is not None}
    assert norms == pytest.approx(scalars["grad_norm_per_parameter"], rel=1e-3)


EAGLE3 = GOLDEN / "deepspec_eagle3_qwen3"


def test_eagle3_two_rounds_of_inference():
    want, drafter, cache = golden(EAGLE3, "eval."), load(EAGLE3), None
    for r, features, end in (("r1", "prefill", 12), ("r2", "update", 15)):
        block = drafter.draft(want["sequence_ids"][:, :end], want[f"{features}.target_hidden"], cache)
        cache = block.cache
        assert torch.equal(block.token_ids, want[f"{r}.verify_input_ids"][:, 1:])
        close(block.logits, want[f"{r}.logits"])
        close(cache.layers[0].keys, want[f"{r}.before.cache.0.key"])
        close(cache.layers[0].values, want[f"{r}.before.cache.0.value"])


def test_eagle3_training_loss_and_gradients():
    train, scalars, drafter = training(EAGLE3)
    ids = train["input_ids"]
    rows = torch.arange(ids.shape[1]).expand_as(ids)  # the released recipe unrolls from every position
    hidden = unroll(drafter, ids, train["target_hidden_states"], rows, 7)
    valid = torch.stack([train[f"step{k}.position_mask"].bool() for k in range(7)], dim=-1)
    for k in range(7):
        used, want = valid[..., k], train[f"step{k}.hidden_states"]
        close(hidden[:, :, k][used], want[used])
        close(drafter.compute_logits(drafter.norm(hidden[:, :, k][used])), train[f"step{k}.draft_logits"][used])
    probs = train["target_logits"].softmax(-1)
    ahead = torch.stack([torch.nn.functional.pad(probs, (0, 0, 0, k + 1))[:, k + 1 :] for k in range(7)], dim=2)
    step = UnrolledTrainingStep(drafter, EAGLE3_LOSS)
    losses = step.losses(hidden.flatten(0, 1), ahead.flatten(0, 1), valid.flatten(0, 1), ids.numel())
    losses.total.backward()
    assert float(losses.total.detach()) == pytest.approx(scalars["total_loss"], rel=1e-5)
    norms = {k: float(p.grad.norm()) for k, p in drafter.named_parameters() if p.grad is not None}
    assert norms == pytest.approx(scalars["grad_norm_per_parameter"], rel=1e-4)


@needs_packagings
@pytest.mark.parametrize(
    "folder", [f for f in PACKAGINGS if f.name.startswith("speculators")], ids=lambda folder: folder.name
)
def test_training_forward_of_packed_documents(folder, targets):
    """Each packed document on its own: the blocks' hidden states and the heads with the previous tokens given."""
    train, drafter = golden(folder, "train."), load(folder, targets)
    step = DraftTrainingStep(drafter)
    first = drafter.config.block_size - drafter.config.num_draft_tokens
    anchor_of, kept = train["anchor_positions"], train["block_keep_mask"].bool()
    checked = 0
    for document in (0, 1):
        inside = train["document_ids"][0] == document
        start = int(inside.nonzero()[0])
        chosen = [i for i in range(len(anchor_of)) if kept[i] and inside[anchor_of[i]]]
        ids, mask, hidden = (train[part][:, inside] for part in ("input_ids", "loss_mask", "target_hidden_states"))
        anchors = (anchor_of[chosen] - start)[None]
        batch = Batch(ids, mask, hidden, hidden[..., : drafter.config.hidden_size], torch.zeros(ids.shape))
        blocks = make_blocks(drafter.config, ids, mask, anchors, torch.ones_like(anchors, dtype=torch.bool))
        assert torch.equal(blocks.input_ids[0], train["draft_input_ids"][chosen])
        previous = train.get("prev_token_ids")
        with torch.no_grad():
            ours = step.block_hidden(batch, blocks)[0]
            close(ours, train["backbone_hidden"][chosen])
            close(drafter.compute_logits(ours), train["base_logits"][chosen])
            labels = blocks.labels[0][:, 1:] if previous is None else previous[chosen][:, 1 + first :]
            labels = torch.cat([labels, labels[:, :1]], dim=1)  # the last label has no successor in the block
            logits, confidence = step.heads(ours, ids[0][anchors[0]], labels)
        close(logits, train["draft_logits"][chosen][:, first:])
        if "confidence_pred" in train:
            close(confidence, train["confidence_pred"][chosen][:, first:])
        checked += len(chosen)
    assert checked == int(kept.sum())


# -- whole texts -----------------------------------------------------------------------------------------------------


def record(file: Path) -> dict:
    return json.loads(file.read_text()) if file.is_file() else {"runs": []}


def prompts_of(stored: dict, target: str) -> list[list[int]]:
    return [p["prompt_ids"] for p in (stored["targets"][target] if "targets" in stored else stored["prompts"])]


def runs() -> list:
    """Every run of the two packages' own loops: (folder, target, prompt, what was recorded)."""
    params = []
    for root, file in ((GOLDEN, "e2e.json"), (GOLDEN_PACKAGINGS, "zlab_e2e.json")):
        stored = record(root / file)
        for run in stored["runs"]:
            target = run.get("target", "target_qwen3")
            ids = prompts_of(stored, target)[run["prompt_index"]]
            name = f"{run['drafter']}-{run.get('confidence_threshold')}-{run['prompt_index']}-{run['stop_token_ids']}"
            params.append(pytest.param(root / run["drafter"], target, ids, run, id=name))
    return [param for param in params if param.values[0].is_dir()]


@pytest.mark.parametrize(("folder", "target", "ids", "run"), runs())
def test_decoding_loop(folder, target, ids, run, targets):
    drafter = DSparkDraftModel.from_pretrained(folder)
    if run.get("confidence_threshold"):  # the reference never backs off
        drafter.options.policy = ConfidenceThreshold(run["confidence_threshold"], patience=None)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": run["stop_token_ids"], "pad_token_id": 0}
    output = targets[target].generate(torch.tensor([ids]), assistant_model=drafter, **settings)
    assert output[0].tolist() == run["output_ids"]
    stats, lengths = drafter.last_generation, run["acceptance_lengths"]
    assert stats.new_tokens == run["num_output_tokens"]
    if "accepted_draft_lengths" in run:
        # DeepSpec's loop drafts full blocks to the end and cuts; ours shortens the last blocks, which may save a round.
        assert len(lengths) - 1 <= stats.rounds <= len(lengths)
        assert stats.rounds < len(lengths) or sum(stats.accepted) <= sum(run["accepted_draft_lengths"])
    elif sum(lengths) - len(lengths) > 10:
        # z-lab's drafts always, where ours backs off from a drafter that is good for nothing; and its last blocks are shorter.
        assert abs(stats.rounds - len(lengths)) <= 1


@needs_packagings
@pytest.mark.parametrize(
    ("folder", "target_name", "file"),
    [
        (GOLDEN_PACKAGINGS / "e2e_trained/zlab_dflash_nested", "target_qwen3", GOLDEN_PACKAGINGS / "zlab_e2e.json"),
        (GOLDEN / "e2e_trained/deepspec_gemma4", "target_gemma4", GOLDEN / "e2e.json"),
    ],
    ids=["zlab", "gemma4"],
)
def test_batch_engine_accepts_as_much(folder, target_name, file, targets):
    """The engine attends by itself: windows, causal blocks and Gemma's unscaled attention must come out the same."""
    target, drafter, prompts = targets[target_name], load(folder, targets), prompts_of(record(file), target_name)
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    drafter.options.policy = FixedLength(drafter.config.num_draft_tokens)
    alone = []
    for ids in prompts:
        output = target.generate(torch.tensor([ids]), assistant_model=drafter, **settings)
        alone.append((output[0, len(ids) :].tolist(), drafter.last_generation.accepted))
    policy = FixedLength(drafter.config.num_draft_tokens)
    requests = [torch.tensor(ids) for ids in prompts]
    together = generate_batch(target, drafter, requests, engine={"policy": policy}, **settings)
    assert [(o.token_ids, o.stats.accepted) for o in together] == alone
    assert sum(sum(accepted) for _, accepted in alone) > 30
