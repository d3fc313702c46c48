"""Training: text, features, resume, and that it learns."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer, prompt_ids
from tiny_targets import make_hybrid, make_vision_target

from dspark_hf.loading.chat_template import messages_of
from dspark_hf.loading.pairs import Target
from dspark_hf.training.anchors import draw_anchors, make_blocks
from dspark_hf.training.batched_decode import TextRequest, decode_batched, supports_slots
from dspark_hf.training.features import FeatureStore, check_logits, compute_features
from dspark_hf.training.pipeline import TrainOptions, default_target_layers, run_training
from dspark_hf.training.prompts import load_prompts, plan_answers
from dspark_hf.training.responses import Answer, read_answers, write_answers
from dspark_hf.training.step import DraftTrainingStep, collate
from dspark_hf.training.trainer import Trainer, TrainingRecipe, learning_rate_at


def make_answers(target, count: int = 8, length: int = 24) -> list[Answer]:
    answers = []
    for seed in range(count):
        ids = prompt_ids(4 + seed % 3, seed=seed)
        output = target.generate(ids, max_new_tokens=length, do_sample=False)
        answers.append(Answer("all", ids[0].tolist(), output[0, ids.shape[1] :].tolist()))
    return answers


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_batched_decoding_is_greedy_decoding(family):
    target = make_target(family, dtype=torch.float32)
    requests = [TextRequest(i, prompt_ids(3 + i % 5, seed=i)[0].tolist(), 6 + i, 0.0) for i in range(9)]
    results = list(decode_batched(target, requests, eos_token_ids={5}, pad_token_id=0, num_slots=3, max_length=40))
    assert sorted(r.key for r in results) == list(range(9))
    for result in results:
        request = requests[result.key]
        ids = torch.tensor([request.input_ids])
        plain = target.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=5)
        assert result.response_ids == plain[0, ids.shape[1] :].tolist()
    assert target.config._attn_implementation != "dspark_slots"


def test_sliding_targets_do_not_use_slots():
    assert supports_slots(make_target("llama"))
    assert not supports_slots(make_target("gemma3"))


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


def test_training_learns_and_resumes_exactly(tmp_path):
    target = make_target(dtype=torch.float32)
    answers = make_answers(target)

    def trainer(folder: str, steps: int = 16) -> Trainer:
        drafter = make_drafter(target, seed=4)
        drafter.markov_head.markov_w2.weight.data.zero_()
        store = FeatureStore(tmp_path / folder, answers, target, [0, 2], 10**9)
        recipe = TrainingRecipe(
            steps=steps, batch_size=2, num_anchors=6, learning_rate=3e-3, checkpoint_every=8, block_sizes=(2, 4)
        )
        return Trainer(drafter, store, recipe, tmp_path / folder, held_out=[3])

    straight = trainer("straight")
    before = straight.evaluate()
    straight.run()
    after = straight.evaluate()
    assert after.accept_length > before.accept_length

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
    with pytest.raises(ValueError, match="another recipe"):
        trainer("killed", steps=20).resume()


def test_learning_rate():
    recipe = TrainingRecipe(steps=100, learning_rate=1.0, warmup=0.1)
    rates = [learning_rate_at(step, recipe) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] < 0.03


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
    plans = plan_answers(load_prompts(file, make_tokenizer()), 5, (0.0,))
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
        store = FeatureStore(tmp_path, answers, target, layers, 1 << 20)
        return Trainer(drafter, store, TrainingRecipe(steps=2, batch_size=2, num_anchors=2), tmp_path)

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
    from dspark_hf import DSparkDraftModel

    if family == "llama":
        model = make_target(dtype=torch.float32)
    elif family == "llava":
        model = make_vision_target(family, dtype=torch.float32).model
    else:
        model = make_hybrid(family, dtype=torch.float32)
    model.generation_config.eos_token_id = 3
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"w{6 + i} w{7 + i}"}) for i in range(8)))
    options = TrainOptions(
        prompts=(prompts,),
        output=tmp_path / "drafter",
        work_dir=tmp_path / "work",
        temperatures=(0.0, 0.9),
        max_new_tokens=20,
        num_answers=16,
        slots=4,
        draft_vocab_size=16,
        markov_rank=4,
        target_layers=(0, 2),
        steps=5,
        batch_size=2,
        num_anchors=4,
        num_layers=1,
        block_size=4,
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
    from dspark_hf.training import pipeline

    work, output = tmp_path / "work", tmp_path / "output"
    for folder in (work, output):
        folder.mkdir()
        (folder / "mine.txt").write_text("keep")
    (work / "answers.jsonl").write_text("old")
    options = TrainOptions(prompts=(), output=output, work_dir=work, restart=True)
    pipeline.prepare_folders(options)
    assert (work / "mine.txt").is_file()
    assert not (work / "answers.jsonl").exists()
    report = pipeline.TrainReport("output", 0, 0, 0, 0.0, 24, 1.0, pipeline.Evaluation([], 1.0))
    pipeline.save_drafter(make_drafter(make_target()), options, report)
    assert (output / "mine.txt").is_file()
    assert (output / "model.safetensors").is_file()
    pipeline.prepare_folders(options)  # a drafter's folder may be replaced
    make_target(dtype=torch.float32).save_pretrained(output)
    with pytest.raises(ValueError, match="another model"):
        pipeline.prepare_folders(options)
