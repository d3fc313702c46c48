"""Training: text, features, draft vocabulary, resume, a full disk, what is refused, and that it learns."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer, prompt_ids
from tiny_targets import make_hybrid, make_vision_target

from dspark_hf import DSparkDraftModel
from dspark_hf.loading.chat_template import messages_of
from dspark_hf.loading.files import reserve_space
from dspark_hf.loading.pairs import Target
from dspark_hf.training import pipeline
from dspark_hf.training import trainer as trainer_module
from dspark_hf.training.corpus import (
    Answer,
    AnswerPlan,
    Prompt,
    coverage_of,
    covering_size,
    decode_answers,
    frequent_tokens,
    load_prompts,
    plan_answers,
    read_answers,
    write_answers,
)
from dspark_hf.training.features import FeatureStore, check_logits, compute_features
from dspark_hf.training.pipeline import default_target_layers, run_training
from dspark_hf.training.recipe import TrainOptions
from dspark_hf.training.step import DraftTrainingStep, collate, draw_anchors, make_blocks
from dspark_hf.training.trainer import Trainer


def small_options(folder: Path, **settings) -> TrainOptions:
    """A run of seconds, in `folder`."""
    small = {
        "num_layers": 1,
        "block_size": 4,
        "markov_rank": 4,
        "target_layers": (0, 2),
        "steps": 3,
        "batch_size": 2,
        "num_anchors": 4,
        "max_new_tokens": 20,
        "slots": 4,
    }
    return TrainOptions(output=folder / "drafter", work_dir=folder / "work", **small | settings)


def write_prompts(folder: Path, count: int = 8) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"w{6 + i} w{7 + i}"}) for i in range(count)))
    return file


def make_answers(target, count: int = 8, length: int = 24) -> list[Answer]:
    answers = []
    for seed in range(count):
        ids = prompt_ids(4 + seed % 3, seed=seed)
        output = target.generate(ids, max_new_tokens=length, do_sample=False)
        answers.append(Answer("all", ids[0].tolist(), output[0, ids.shape[1] :].tolist()))
    return answers


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_answers_are_what_generate_says(family):
    """In the batch engine, and one at a time where it can't serve the target."""
    make = make_hybrid if family == "falcon_h1" else make_target
    target = make(family, dtype=torch.float32)
    target.generation_config.eos_token_id = 5
    plans = [AnswerPlan(i, Prompt("all", tuple(prompt_ids(3 + i % 5, seed=i)[0].tolist()))) for i in range(9)]
    results = list(decode_answers(target, plans, max_new_tokens=12, num_slots=3))
    assert sorted(plan.key for plan, _ in results) == list(range(9))
    for plan, response_ids in results:
        ids = torch.tensor([plan.prompt.input_ids])
        plain = target.generate(ids, max_new_tokens=12, do_sample=False)
        assert response_ids == plain[0, ids.shape[1] :].tolist()


def test_an_answer_ends_with_the_targets_context():
    target = make_target(dtype=torch.float32, max_position_embeddings=16)
    plan = AnswerPlan(0, Prompt("all", tuple(prompt_ids(10)[0].tolist())), 0.8)
    ((_, response_ids),) = decode_answers(target, [plan], max_new_tokens=50, num_slots=1)
    assert len(response_ids) == 6


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "falcon_h1", "lfm2"])
def test_features_are_the_targets_hidden_states(family):
    make = make_target if family == "llama" else make_hybrid
    target = make(family, dtype=torch.float32)
    answers = make_answers(target, 5, 12)
    features = compute_features(target, answers, [-1, 0, 2])
    for answer, got in zip(answers, features):
        ids = torch.tensor([answer.input_ids + answer.response_ids])
        output = target(input_ids=ids, output_hidden_states=True)
        states = output.hidden_states
        wanted = torch.cat([states[0], states[1], states[3]], dim=-1)[0]
        torch.testing.assert_close(got.context, wanted, atol=1e-5, rtol=1e-4)
        start = len(answer.input_ids)
        torch.testing.assert_close(got.log_norm[start:], output.logits[0, start:].logsumexp(-1), atol=1e-4, rtol=1e-4)


def test_a_target_that_scales_its_logits_is_refused_by_name():
    check_logits(make_hybrid("granite", dtype=torch.float32))
    check_logits(make_target("gemma3", dtype=torch.float32, final_logit_softcapping=5.0))
    scaled = make_hybrid("granite", dtype=torch.float32, logits_scaling=4.0)
    with pytest.raises(ValueError, match="GraniteMoeHybridForCausalLM scales its logits"):
        check_logits(scaled)


def test_feature_store_is_bounded_and_read_back(tmp_path):
    target = make_target(dtype=torch.float32)
    answers = make_answers(target, 6, 12)
    whole = FeatureStore(tmp_path, answers, target, [0, 2], 10**9)
    whole.fill()
    assert whole.missing_tokens() == 0
    again = FeatureStore(tmp_path, answers, target, [0, 2], 10**9)
    assert again.missing_tokens() == 0
    small = FeatureStore(tmp_path / "small", answers, target, [0, 2], whole.num_bytes // 2)
    small.fill()
    assert 0 < small.num_bytes <= whole.num_bytes // 2
    for a, b in zip(again.get(range(6)), small.get(range(6))):
        torch.testing.assert_close(a.context.float(), b.context.float(), atol=2e-2, rtol=2e-2)
    assert FeatureStore(tmp_path, answers[:5], target, [0, 2], 10**9).missing_tokens() > 0


def test_anchors_and_labels():
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1]])
    anchors, keep = draw_anchors(loss_mask, 20, torch.Generator().manual_seed(0))
    assert anchors[keep].tolist() == [2, 3, 4, 7, 8]
    ids = torch.arange(10)[None] + 3
    for anchor_first in (True, False):
        drafter = make_drafter(make_target(), sample_from_anchor=anchor_first)
        blocks = make_blocks(drafter.config, ids, loss_mask, anchors, keep)
        width = 4 if anchor_first else 3
        assert blocks.labels.shape[-1] == width
        assert blocks.labels[0, 0].tolist() == [6, 7, 8, 9][:width]
        assert blocks.valid[0, 0].tolist() == [True, True, True, False][:width]


@pytest.mark.parametrize("anchor_first", [True, False])
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_teacher_forcing_is_what_drafting_does(head, anchor_first):
    """On a block whose labels are the drafter's own tokens, training and drafting have the same logits."""
    target = make_target()
    drafter = make_drafter(target, head, sample_from_anchor=anchor_first)
    text = prompt_ids(6)
    features = torch.randn(1, 16, 64, dtype=torch.float64)
    block = drafter.draft(text[:, -1], features[:, :5])
    tokens = torch.cat([text[0], block.token_ids[0]]).tolist()
    tokens += [2] * (16 - len(tokens))
    answer = Answer("all", tokens[:5], tokens[5:])
    feature = compute_features(target, [answer], [0, 2])[0]
    feature = type(feature)(features[0], feature.last_hidden.double(), feature.log_norm)
    batch = collate([answer], [feature], torch.device("cpu"))
    step = DraftTrainingStep(drafter)
    blocks = make_blocks(drafter.config, batch.input_ids, batch.loss_mask, torch.tensor([[5]]), torch.tensor([[True]]))
    hidden = step.block_hidden(batch, blocks)[0]
    logits, confidence = step.heads(hidden, blocks.input_ids[0, :, 0], blocks.labels[0])
    torch.testing.assert_close(logits, block.logits)
    torch.testing.assert_close(confidence, block.confidence_logits)


def test_training_learns_and_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "_CHECKPOINT_EVERY", 8)
    target = make_target(dtype=torch.float32)
    answers = make_answers(target)

    def trainer(folder: str, steps: int = 16) -> Trainer:
        drafter = make_drafter(target, seed=4, min_block_size=2)
        drafter.markov_head.markov_w2.weight.data.zero_()
        options = small_options(tmp_path / folder, num_anchors=6, learning_rate=3e-3)
        store = FeatureStore(options.folder, answers, target, [0, 2], 10**9)
        return Trainer(drafter, store, options, steps, held_out=[3])

    straight = trainer("straight")
    before = straight.evaluate()
    straight.run()
    after = straight.evaluate()
    assert after.accept_length > before.accept_length
    log = [json.loads(line) for line in (tmp_path / "straight/work/training_log.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in log if "learning_rate" in line] == pytest.approx([3e-3, 7.95e-4])

    killed = trainer("killed")
    original = killed._train_step

    def stop_at_twelve(progress):
        if killed.step == 12:
            raise KeyboardInterrupt
        original(progress)

    killed._train_step = stop_at_twelve
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    resumed = trainer("killed")
    assert resumed.resume()
    assert resumed.step == 12
    resumed.run()
    for (name, a), b in zip(straight.drafter.named_parameters(), resumed.drafter.parameters()):
        torch.testing.assert_close(a, b, msg=name, atol=0, rtol=0)
    with pytest.raises(ValueError, match=r"other settings \(steps 16, now 20\).*--restart"):
        trainer("killed", steps=20).resume()


def test_prompt_files(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "w5 w6", "domain": "math"},
        {"turns": ["w7", "w8"]},
        {"messages": [{"role": "user", "content": "w9"}]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    prompts = load_prompts(file, make_tokenizer())
    assert [p.input_ids for p in prompts] == [(2, 5, 6, 3, 4), (2, 7, 3, 4), (2, 9, 3, 4)]
    assert [p.domain for p in prompts] == ["math", "all", "all"]
    file.write_text('{"prompt": "w5"}\n{"prompt": ')
    with pytest.raises(ValueError, match="line 2"):
        load_prompts(file, make_tokenizer())
    with pytest.raises(ValueError, match="no prompt found"):
        messages_of({"text": "w5"}, "here")
    with pytest.raises(OSError, match="No such file"):
        load_prompts(tmp_path / "missing", make_tokenizer())


def test_answers_are_spread_over_domains_and_temperatures(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"w{5 + i}", "domain": "many"} for i in range(6)] + [{"prompt": "w20", "domain": "few"}]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    prompts = load_prompts(file, make_tokenizer())
    plans = plan_answers(prompts, 12, (0.0, 0.6))
    assert [p.prompt.domain for p in plans].count("few") == 6
    few = [p.temperature for p in plans if p.prompt.domain == "few"]
    assert few.count(0.0) == 1  # a greedy answer is always the same
    assert plan_answers(prompts, 5, (0.0, 0.6)) == plans[:5]
    assert len(plan_answers(prompts, 50, (0.0,))) == 7


def test_answers_file_survives_a_kill(tmp_path):
    target = make_target(dtype=torch.float32)
    target.generation_config.eos_token_id = 5
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"w{6 + i}"}) for i in range(5)))
    plans = plan_answers(load_prompts(file, make_tokenizer()), 5, (0.0, 0.8))
    answers = tmp_path / "answers.jsonl"
    write_answers(target, plans, answers, max_new_tokens=10, num_slots=2)
    whole = {json.loads(line)["key"]: line for line in answers.read_text().splitlines()}
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:2]) + lines[2][:20])
    write_answers(target, plans, answers, max_new_tokens=10, num_slots=2)
    assert {json.loads(line)["key"]: line for line in answers.read_text().splitlines()} == whole
    with pytest.raises(ValueError, match="needs 'input_ids'"):
        read_answers([file])


def test_default_layers_are_those_of_the_published_drafters():
    assert default_target_layers(36) == (1, 9, 17, 25, 33)
    assert default_target_layers(40) == (1, 10, 19, 28, 37)
    for depth in range(2, 12):
        layers = default_target_layers(depth)
        assert all(0 <= i < depth - 1 for i in layers)
        assert len(set(layers)) == len(layers)


def test_going_on_with_another_drafter_is_refused(tmp_path):
    target = make_target(dtype=torch.float32)
    answers = make_answers(target, 6, 12)

    def trainer(layers=(0, 2), first_token=2, **overrides):
        drafter = make_drafter(target, draft_vocab_size=10, target_layer_ids=list(layers), **overrides)
        drafter.set_draft_vocabulary(torch.arange(10) + first_token)
        drafter.bind_target(target)
        options = small_options(tmp_path)
        return Trainer(drafter, FeatureStore(options.folder, answers, target, layers, 1 << 20), options, 2)

    trainer().save_state()
    assert trainer().resume()
    for changed, name in (
        ({"layers": (1, 2)}, "target_layer_ids"),
        ({"num_hidden_layers": 1}, "num_hidden_layers"),
        ({"block_size": 3}, "block_size"),
        ({"first_token": 3}, "draft vocabulary"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*--restart"):
            trainer(**changed).resume()


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "falcon_h1", "bamba", "lfm2", "llava"])
def test_whole_pipeline(family, tmp_path):
    if family == "llama":
        model = make_target(dtype=torch.float32)
    elif family == "llava":
        model = make_vision_target(family, dtype=torch.float32).model
    else:
        model = make_hybrid(family, dtype=torch.float32)
    model.generation_config.eos_token_id = 3
    prompts = write_prompts(tmp_path)
    options = small_options(
        tmp_path,
        prompts=(prompts,),
        temperatures=(0.0, 0.9),
        num_answers=16,
        draft_vocab_size=16,
        steps=5,
        min_block_size=2,
    )
    target = Target("tiny", model, make_tokenizer())
    said: list[str] = []
    report = run_training(target, options, say=said.append)
    assert report.steps == 5
    assert any("Estimate" in line for line in said)
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32)
    assert drafter.config.target_model_name_or_path == "tiny"
    ids = prompt_ids()
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(plain, model.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter))
    assert run_training(target, options, say=said.append).held_out == report.held_out  # nothing is done twice


def test_nothing_of_the_users_is_removed_or_overwritten(tmp_path):
    options = small_options(tmp_path, restart=True)
    for folder in (options.folder, options.output):
        folder.mkdir()
        (folder / "mine.txt").write_text("keep")
    (options.folder / "answers.jsonl").write_text("old")
    pipeline.prepare_folders(options)
    assert (options.folder / "mine.txt").is_file()
    assert not (options.folder / "answers.jsonl").exists()
    report = pipeline.TrainReport("output", 0, 0, 0, 0.0, 24, 1.0, trainer_module.Evaluation([], 1.0))
    pipeline.save_drafter(make_drafter(make_target()), options, report)
    assert (options.output / "mine.txt").is_file()
    assert (options.output / "model.safetensors").is_file()
    pipeline.prepare_folders(options)  # a drafter's folder may be replaced
    make_target(dtype=torch.float32).save_pretrained(options.output)
    with pytest.raises(ValueError, match="another model"):
        pipeline.prepare_folders(options)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": math.nan}, "--learning-rate must be above 0 and finite, got nan"),
        ({"learning_rate": -1.0}, "--learning-rate must be above 0 and finite, got -1"),
        ({"epochs": 0.0}, "--epochs must be above 0"),
        ({"temperatures": (0.5, -0.1)}, "--temperatures must be at least 0 and finite, got -0.1"),
        ({"temperatures": ()}, "--temperatures must be one or more"),
        ({"num_answers": 0}, "--num-answers must be at least 1"),
        ({"feature_cache_gb": math.inf}, "--feature-cache-gb must be at least 0 and finite"),
        ({"method": "medusa"}, "--method must be one of dspark, dflash, eagle3, got 'medusa'"),
        ({"markov_head": "lstm"}, "--markov-head must be one of none, vanilla, gated, rnn"),
        ({"min_block_size": 5}, r"--min-block-size must be between 1 and --block-size \(4\), got 5"),
        ({"draft_vocab_coverage": 1.1}, "--draft-vocab-coverage must be above 0 and at most 1, got 1.1"),
        ({"draft_vocab_coverage": 0.0}, "--draft-vocab-coverage must be above 0"),
        ({"draft_vocab_coverage": 0.9, "draft_vocab_size": 8}, "exclude each other"),
        ({"draft_vocab_coverage": 0.9, "init_from": Path()}, "leave one out"),
        ({"init_from": Path("nowhere")}, "no folder nowhere"),
        ({"prompts": (Path("nowhere"),)}, "No such file: nowhere"),
        ({"prompts": ()}, "Nothing to train on"),
    ],
)
def test_options_are_checked_before_anything_else(settings, message, tmp_path):
    options = small_options(tmp_path, **{"prompts": (write_prompts(tmp_path),)} | settings)
    with pytest.raises((ValueError, OSError), match=message):
        run_training(Target("tiny", make_target(dtype=torch.float32), make_tokenizer()), options)
    assert not options.folder.exists()


def test_every_option_has_help():
    import dataclasses

    assert all(option.metadata["help"] for option in dataclasses.fields(TrainOptions))


# -- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """A disk whose free bytes are told; `None` is the real one."""
    free: dict[str, int | None] = {"bytes": None}
    reserve, usage = os.posix_fallocate, shutil.disk_usage

    def fallocate(descriptor, offset, length):
        if free["bytes"] is not None and length > free["bytes"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=free["bytes"] or usage(path).free))
    return free


@pytest.mark.parametrize(
    ("room", "what", "finished"),
    [
        (2_000, "kept features", {"answers.jsonl"}),
        (1_000_000, "a checkpoint", {"answers.jsonl", "features.bf16", "features.key", "training_log.jsonl"}),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(room, what, finished, disk, tmp_path):
    model = make_target(dtype=torch.float32)
    options = small_options(tmp_path, prompts=(write_prompts(tmp_path),))
    target = Target("tiny", model, make_tokenizer())
    disk["bytes"] = room
    with pytest.raises(OSError, match=rf"No room for {what}.* GB are needed, .* GB are free"):
        run_training(target, options, say=lambda line: None)
    assert {file.name for file in options.folder.iterdir()} <= finished
    assert not options.output.exists()
    disk["bytes"] = None
    assert run_training(target, options, say=lambda line: None).steps == 3


def test_a_disk_that_fills_up_while_training(disk, tmp_path, monkeypatch):
    """The next checkpoint's room is taken when the last one is written, and the run goes on from that one."""
    monkeypatch.setattr(trainer_module, "_CHECKPOINT_EVERY", 1)
    target = make_target(dtype=torch.float32)
    answers, options = make_answers(target), small_options(tmp_path)

    def trainer() -> Trainer:
        store = FeatureStore(options.folder, answers, target, [0, 2], 10**9)
        return Trainer(make_drafter(target), store, options, 3)

    stopped = trainer()
    evaluate = stopped._log_evaluation
    stopped._log_evaluation = lambda progress: (evaluate(progress), disk.update(bytes=1000))
    with pytest.raises(OSError, match="No room for a checkpoint"):
        stopped.run()
    assert not stopped.state_file.with_suffix(".tmp").exists()
    disk["bytes"] = None
    resumed = trainer()
    assert resumed.resume() and resumed.step == 1


def test_a_drafter_that_finds_no_room_leaves_no_folder(disk, tmp_path):
    options = small_options(tmp_path)
    disk["bytes"] = 1000
    report = pipeline.TrainReport("output", 0, 0, 0, 0.0, 24, 1.0, trainer_module.Evaluation([], 1.0))
    with pytest.raises(OSError, match="No room for the drafter"):
        pipeline.save_drafter(make_drafter(make_target()), options, report)
    assert not list(tmp_path.iterdir())


def test_space_where_none_can_be_taken(disk, tmp_path, monkeypatch):
    """Free space is compared; what a file holds counts, and stays as it was."""
    file = tmp_path / "file"
    file.write_bytes(b"held")
    monkeypatch.delattr(os, "posix_fallocate")
    disk["bytes"] = 100
    reserve_space(file, 104, "it")
    with pytest.raises(OSError, match="No room for it"):
        reserve_space(file, 105, "it")
    assert file.read_bytes() == b"held"
    with pytest.raises(OSError, match="No room for it"):
        reserve_space(tmp_path / "new", 105, "it")
    assert not (tmp_path / "new").exists()


# -- the draft vocabulary --------------------------------------------------------------------------------------------


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


def test_training_by_coverage(tmp_path):
    """The drafter has the size that covers the share, the report says so, and the record keeps it."""
    model = make_target(dtype=torch.float32, vocab_size=200)
    answers = tmp_path / "answers.jsonl"
    lines = [{"domain": "all", "input_ids": [5, 6], "response_ids": [7, 8, 9, 7, 8, 9, 7, 8 + i]} for i in range(4)]
    lines.append({"domain": "all", "input_ids": [5], "response_ids": list(range(100, 164))})
    answers.write_text("\n".join(map(json.dumps, lines)))
    options = small_options(tmp_path, answers=(answers,), draft_vocab_coverage=0.9, steps=1)
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
