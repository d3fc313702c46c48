"""Exported folders in the `speculators` package itself (`make test-speculators`, an environment of its own)."""

from __future__ import annotations

import pytest
import torch
from conftest import make_drafter, make_target

from dspark_hf.publishing.convert import convert

pytestmark = pytest.mark.speculators
speculators = pytest.importorskip("speculators", reason="needs `make test-speculators`'s environment")


def package_block(folder, anchor: int, ids: torch.Tensor, hidden: torch.Tensor):
    """The package's model, its hidden states [1, block, d] and base logits of the one block at `anchor`."""
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = speculators.SpeculatorModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()
    mask = torch.zeros_like(ids)
    mask[:, anchor] = 1
    with torch.no_grad():
        states, logits, *_ = model._backbone_forward(
            hidden, ids, mask, hidden[..., : model.hidden_size], torch.zeros_like(ids), max_anchors=1
        )
    return model, states, logits


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"draft_vocab_size": 9},
        {"sample_from_anchor": False, "draft_vocab_size": 9},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "sliding_window_non_causal": True},
        {"sample_from_anchor": False, "enable_confidence_head": False},
    ],
    ids=["full", "reduced", "fill-in", "sliding", "non-causal", "dflash"],
)
def test_same_draft_logits(tmp_path, head, settings):
    target = make_target("qwen3", dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    drafter = make_drafter(target, head, **settings)
    drafter.save_pretrained(tmp_path / "ours")
    convert(str(tmp_path / "ours"), tmp_path / "there", "speculators", str(tmp_path / "target"))
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 24, (1, 24), generator=generator)
    hidden = torch.randn(1, 24, 64, generator=generator)
    anchor, first = 10, 0 if drafter.config.sample_from_anchor else 1
    ours = drafter.draft(ids[:, anchor], hidden[:, :anchor])
    model, states, logits = package_block(tmp_path / "there", anchor, ids, hidden)
    before = torch.cat([ids[:, anchor : anchor + 1]] * (1 + first) + [ours.token_ids[:, :-1]], dim=1)
    markov = getattr(model, "markov_head", None)
    with torch.no_grad():
        embedding = None if markov is None else markov.prev_embeddings(before)
        if markov is not None:
            logits = logits + markov.block_bias(prev_token_ids=before, hidden_states=states, prev_emb=embedding)
        torch.testing.assert_close(ours.logits, logits[:, first:], atol=1e-4, rtol=0)
        if getattr(model, "confidence_head", None) is not None:
            with_markov = model.config.confidence_head_with_markov and embedding is not None
            features = torch.cat([states, embedding], dim=-1) if with_markov else states
            confidence = model.confidence_head(features)[:, first:]
            torch.testing.assert_close(ours.confidence_logits, confidence, atol=1e-4, rtol=0)
    # and what the package draws from its logits is what we propose
    proposed = logits[:, first:].argmax(-1)
    assert torch.equal(proposed + (0 if model.d2t is None else model.d2t[proposed]), ours.token_ids)
