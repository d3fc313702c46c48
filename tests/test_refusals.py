"""What `generate(assistant_model=drafter)` does not serve is refused with one clear error each."""

from __future__ import annotations

import pytest
from conftest import make_drafter, prompt_ids
from transformers import GenerationMixin, T5Config, T5ForConditionalGeneration

import dspark_hf
from dspark_hf.decoding import hook


def test_unknown_transformers_is_refused_by_name(monkeypatch, target, drafter):
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)
    hook._install_refusal()
    with pytest.raises(ValueError, match=r"transformers >=5\.17"):
        target.generate(prompt_ids(), assistant_model=drafter)
    assert target.generate(prompt_ids(), max_new_tokens=2).shape[1] == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 30}, "vocab_size 30"),
        ({"hidden_size": 40}, "hidden_size 40"),
        ({"target_layer_ids": [0, 3], "num_target_layers": None}, "layer"),
        ({"target_layer_ids": [0, 9], "num_target_layers": None}, "can't be tapped"),
    ],
    ids=["vocabulary", "hidden", "last-layer", "missing-layer"],
)
def test_drafter_for_another_target(target, change, message):
    drafter = make_drafter(target, bind=False, **change)
    with pytest.raises(ValueError, match=message):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_batches_and_beams_are_refused(target, drafter):
    with pytest.raises(ValueError, match="one sequence"):
        target.generate(prompt_ids().expand(2, -1), max_new_tokens=4, assistant_model=drafter)
    with pytest.raises(ValueError, match=r"[Bb]eam|Greedy"):
        target.generate(prompt_ids(), max_new_tokens=4, num_beams=2, assistant_model=drafter)
    with pytest.raises(ValueError, match="cache"):
        target.generate(prompt_ids(), max_new_tokens=4, use_cache=False, assistant_model=drafter)


def test_encoder_decoder_is_refused(drafter):
    config = T5Config(vocab_size=24, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(config).generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)


def test_settings_out_of_range(target, drafter):
    drafter.generation_config.num_assistant_tokens = -1
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)
    with pytest.raises(ValueError, match="threshold"):
        dspark_hf.ConfidenceThreshold(1.5)
    with pytest.raises(ValueError, match="length"):
        dspark_hf.FixedLength(-1)


def test_threshold_without_a_confidence_head(target):
    drafter = make_drafter(target, enable_confidence_head=False)
    drafter.generation_config.assistant_confidence_threshold = 0.5
    with pytest.raises(ValueError, match="confidence head"):
        target.generate(prompt_ids(), max_new_tokens=4, assistant_model=drafter)
