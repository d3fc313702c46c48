"""Choosing the draft vocabulary by what the answers hold."""

import json

import pytest
import torch
from conftest import make_target, make_tokenizer

from dspark_hf import DSparkDraftModel
from dspark_hf.loading.pairs import Target
from dspark_hf.training.pipeline import TrainOptions, run_training
from dspark_hf.training.responses import Answer
from dspark_hf.training.vocabulary import coverage_of, covering_size, frequent_tokens


def test_frequent_tokens():
    answers = [Answer("all", [1], [9, 9, 4, 4, 4, 11])]
    assert frequent_tokens(answers, 2, 24).tolist() == [4, 9]
    assert frequent_tokens(answers, 5, 24).tolist() == [0, 1, 4, 9, 11]
    assert coverage_of(answers, torch.tensor([4, 9])) == 5 / 6


def test_size_by_coverage():
    """200 tokens once each, a frequent one 800 times: half needs one token, 90 % needs 101, all need 201."""
    answers = [Answer("all", [1], [7] * 800), Answer("all", [1], list(range(1000, 1200)))]
    assert [covering_size(answers, share, 5000) for share in (0.5, 0.864, 0.9, 1.0)] == [64, 128, 128, 256]
    assert covering_size(answers, 0.863, 5000) == 64  # exactly what 64 tokens hold
    assert covering_size(answers, 1.0, 220) == 220
    for size, share in ((64, 0.863), (128, 0.927)):
        assert coverage_of(answers, frequent_tokens(answers, size, 5000)) == pytest.approx(share)
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            covering_size(answers, share, 5000)


def test_training_by_coverage(tmp_path):
    """The drafter has the size that covers the share, the report says so, and the record keeps it."""
    model = make_target(dtype=torch.float32, vocab_size=200)
    answers = tmp_path / "answers.jsonl"
    lines = [{"domain": "all", "input_ids": [5, 6], "response_ids": [7, 8, 9, 7, 8, 9, 7, 8 + i]} for i in range(4)]
    lines.append({"domain": "all", "input_ids": [5], "response_ids": list(range(100, 164))})
    answers.write_text("\n".join(map(json.dumps, lines)))
    options = TrainOptions(
        prompts=(),
        answers=(answers,),
        output=tmp_path / "drafter",
        work_dir=tmp_path / "work",
        draft_vocab_coverage=0.9,
        markov_rank=4,
        target_layers=(0, 2),
        steps=1,
        batch_size=2,
        num_anchors=4,
        num_layers=1,
        block_size=4,
    )
    said: list[str] = []
    report = run_training(Target("tiny", model, make_tokenizer()), options, say=said.append)
    assert report.draft_vocab_size == 64
    assert 0.9 <= report.draft_vocab_coverage < 1.0
    assert any("64 tokens" in line for line in said)
    drafter = DSparkDraftModel.from_pretrained(options.output)
    assert len(drafter.draft_token_ids()) == drafter.config.draft_vocab_size == 64
    record = json.loads((options.output / "training.json").read_text())
    assert record["report"]["draft_vocab_coverage"] == report.draft_vocab_coverage
    assert record["options"]["draft_vocab_coverage"] == 0.9
