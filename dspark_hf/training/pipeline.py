"""From prompts to a Hub-ready drafter: the stages of `dspark-hf train`, each of which goes on where it was stopped."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..decoding.target import eos_ids
from ..loading.files import move_files, refuse_other_models, reserve_space
from ..loading.pairs import Target
from ..model.configuration_dspark import DSparkConfig
from ..model.modeling_dspark import DSparkDraftModel
from .corpus import (
    Answer,
    coverage_of,
    covering_size,
    frequent_tokens,
    invent_prompts,
    load_prompts,
    missing_answers,
    plan_answers,
    read_answers,
    write_answers,
)
from .features import FeatureStore, check_logits, compute_features
from .recipe import DRAFT_VOCAB_SIZE, TrainOptions
from .trainer import Evaluation, Trainer, mixed_precision

_HELD_OUT = 0.02  # share of the answers
_WORK_FILES = (
    *("invented_prompts.jsonl", "answers.jsonl", "features.key", "features.bf16"),
    *("training_state.pt", "training_state.tmp", "training_log.jsonl"),
)
_NORM_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")  # the families' names for it


@dataclass(frozen=True)
class TrainReport:
    """What came of a run: token counts, seconds by stage, the draft vocabulary and the share of the answers' tokens that it
    covers, held-out acceptance."""

    output: str
    answers: int
    answer_tokens: int
    steps: int
    training_seconds: float
    draft_vocab_size: int
    draft_vocab_coverage: float
    held_out: Evaluation


def default_target_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` layers spread from the second to the fourth from the end, as the published drafters have them."""
    if num_layers < 2:
        raise ValueError(f"A target of {num_layers} decoder layer can't be tapped: its last layer is not allowed.")
    count = min(count, num_layers - 1)
    if num_layers < 6 or count == 1:
        return tuple(range(num_layers - 1 - count, num_layers - 1))
    return tuple(sorted({round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)}))


def drafter_config(target: PreTrainedModel, options: TrainOptions, name: str, vocab: int | None = None) -> DSparkConfig:
    """A drafter's config for this target: its widths, heads and rope, the options' depth and heads, `vocab` draft tokens.

    The methods differ here and in the loss alone: DFlash has the fill-in layout and no heads, Eagle3 one layer of its own form.
    """
    is_dspark, is_eagle3 = options.method == "dspark", options.method == "eagle3"
    fill_in = int(options.method == "dflash")  # the anchor's slot proposes nothing, so a block has one slot more
    shortest = options.min_block_size
    text = target.config.get_text_config()
    record = text.to_dict()
    head_dim = record.get("head_dim") or text.hidden_size // text.num_attention_heads
    rope = record.get("rope_parameters") or {}
    if vocab is None:
        vocab = DRAFT_VOCAB_SIZE if options.draft_vocab_size is None else options.draft_vocab_size
    layers = options.target_layers or default_target_layers(text.num_hidden_layers)
    return DSparkConfig(
        vocab_size=text.vocab_size,
        draft_vocab_size=min(vocab or text.vocab_size, text.vocab_size),
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=options.num_layers or (1 if is_eagle3 else 3),
        layer_form="eagle3" if is_eagle3 else "qwen3",
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=next((record[name] for name in _NORM_EPS if name in record), 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
        block_size=options.block_size + fill_in,
        min_block_size=None if shortest is None else shortest + fill_in,
        sample_from_anchor=not fill_in,
        mask_token_id=_mask_token(target),
        target_layer_ids=list(layers),
        num_target_layers=text.num_hidden_layers,
        markov_head_type=options.markov_head if is_dspark else "none",
        markov_rank=options.markov_rank,
        enable_confidence_head=is_dspark,
        num_anchors=options.num_anchors,
        pad_token_id=text.pad_token_id,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        target_model_name_or_path=name,
    )


def _mask_token(target: PreTrainedModel) -> int:
    """The last id that no text ends with; its embedding only marks positions still to be drafted."""
    banned = eos_ids(target)
    return next(i for i in reversed(range(target.config.get_text_config().vocab_size)) if i not in banned)


def working_copy(target: PreTrainedModel) -> PreTrainedModel:
    """The target as it makes answers and features: in bf16 where the device multiplies that faster."""
    if target.dtype != torch.float32 or mixed_precision(target.device) == "no":
        return target
    return copy.deepcopy(target).to(torch.bfloat16)


def make_answers(target: Target, worker: PreTrainedModel, options: TrainOptions, say=print) -> list[Answer]:
    """Answers from the given files and those made here, which are kept in the working folder."""
    files = list(options.answers)
    prompts = [p for file in options.prompts for p in load_prompts(file, target.tokenizer)]
    if options.invented_prompts:
        path = options.folder / "invented_prompts.jsonl"
        prompts += invent_prompts(
            worker, target.tokenizer, options.invented_prompts, path, num_slots=options.slots, seed=options.seed
        )
    if prompts:
        plans = plan_answers(prompts, options.num_answers or len(prompts), options.temperatures)
        own = options.folder / "answers.jsonl"
        if missing := missing_answers(plans, own):
            say(f"{len(missing)} answers to make, of at most {options.max_new_tokens} tokens.")
        write_answers(
            worker, plans, own, max_new_tokens=options.max_new_tokens, num_slots=options.slots, seed=options.seed
        )
        files.append(own)
    return read_answers(files)


def estimate(worker: PreTrainedModel, store: FeatureStore, trainer: Trainer) -> str:
    """What the stages to come will take, from one measured batch of features and two training steps."""
    sample = list(store.answers[:4])
    start = time.monotonic()
    compute_features(worker, sample, store.layer_ids)
    per_token = (time.monotonic() - start) / sum(len(a.input_ids) + len(a.response_ids) for a in sample)
    steps = trainer.steps - trainer.step
    return (
        f"Estimate: features {per_token * store.missing_tokens() / 60:.0f} min and {store.num_bytes / 1e9:.1f} GB of disk, "
        f"training {trainer.seconds_per_step() * steps / 60:.0f} min for {steps} steps."
    )


def prepare_folders(options: TrainOptions) -> None:
    """Make the working folder, without an earlier run's files where `restart` is set; nothing else is touched.

    Raises:
        ValueError: the output folder holds another model, which the drafter would overwrite.
    """
    refuse_other_models(options.output, "--output")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.restart:
        for name in _WORK_FILES:
            (options.folder / name).unlink(missing_ok=True)


def run_training(target: Target, options: TrainOptions, say=print) -> TrainReport:
    """All stages; each goes on where an earlier run was stopped. `say` prints a line to the user."""
    options.check()
    check_logits(target.model)
    prepare_folders(options)
    torch.manual_seed(options.seed)
    config = drafter_config(target.model, options, target.name)
    earlier = None if options.init_from is None else load_earlier(config, options.init_from)
    worker = working_copy(target.model)
    answers = make_answers(target, worker, options, say)
    answer_tokens = sum(len(a.response_ids) for a in answers)
    say(f"{len(answers)} answers, {answer_tokens:,} answer tokens.")
    if options.draft_vocab_coverage is not None:
        size = covering_size(answers, options.draft_vocab_coverage, config.vocab_size)
        config = drafter_config(target.model, options, target.name, size)

    drafter = DSparkDraftModel(config).to(target.model.device)
    if earlier is not None:
        drafter.load_state_dict(earlier.state_dict())
    elif config.has_reduced_vocab:
        count = len(drafter.draft_token_ids())
        drafter.set_draft_vocabulary(frequent_tokens(answers, count, config.vocab_size))
    vocabulary = drafter.draft_token_ids()
    coverage = coverage_of(answers, vocabulary)
    say(f"Draft vocabulary of {len(vocabulary)} tokens covers {coverage:.2%} of the answers.")
    drafter.bind_target(target.model)
    held_out = _held_out(len(answers))
    store = FeatureStore(
        options.folder, answers, worker, config.target_layer_ids or (), int(options.feature_cache_gb * 1e9)
    )
    steps = options.steps or math.ceil(options.epochs * (len(answers) - len(held_out)) / options.batch_size)
    trainer = Trainer(drafter, store, options, steps, held_out)
    if trainer.resume():
        say(f"Going on from step {trainer.step} of {steps}.")
    if trainer.step < steps:
        say(estimate(worker, store, trainer))
        store.fill()
        trainer.run()
    report = TrainReport(
        output=options.output.name,
        answers=len(answers),
        answer_tokens=answer_tokens,
        steps=steps,
        training_seconds=trainer.seconds,
        draft_vocab_size=len(vocabulary),
        draft_vocab_coverage=coverage,
        held_out=trainer.evaluate(),
    )
    save_drafter(drafter, options, report)
    return report


# What must be alike to go on from an earlier drafter's weights.
_SHAPE = "vocab_size draft_vocab_size hidden_size target_hidden_size intermediate_size num_hidden_layers head_dim"
_HEADS = "num_attention_heads num_key_value_heads markov_head_type markov_rank enable_confidence_head"
_MEANING = "confidence_head_with_markov rope_parameters layer_types sample_from_anchor target_layer_ids mask_token_id"
_FAMILY = "layer_form full_attention_causal embedding_scale output_scale"
_SAME_FOR_INIT = f"{_SHAPE} {_HEADS} {_MEANING} {_FAMILY} block_size has_own_embeddings has_own_lm_head".split()


def load_earlier(config: DSparkConfig, folder: Path) -> DSparkDraftModel:
    """The drafter to go on from.

    Raises:
        ValueError: its config differs from the new one's in what decides the weights' shapes or meaning.
    """
    earlier = DSparkDraftModel.from_pretrained(folder, dtype=torch.float32)
    for name in _SAME_FOR_INIT:
        theirs, ours = getattr(earlier.config, name), getattr(config, name)
        if theirs != ours:
            raise ValueError(
                f"--init-from {folder}: its {name} is {theirs}, the new drafter's {ours}. Give the same options as for it."
            )
    return earlier


def save_drafter(drafter: DSparkDraftModel, options: TrainOptions, report: TrainReport) -> None:
    """Write the Hub-ready files (weights in bf16) under a temporary name, then put each in its place."""
    temporary = options.output.with_name(options.output.name + ".tmp")
    if options.draft_tokens is not None:
        drafter.generation_config.num_assistant_tokens = options.draft_tokens
    recipe = {k: v for k, v in asdict(options).items() if k not in ("output", "work_dir", "restart")}
    recipe |= {k: [Path(file).name for file in recipe[k]] for k in ("prompts", "answers")}
    recipe["init_from"] = options.init_from and options.init_from.name
    record = {"target": drafter.config.target_model_name_or_path, "options": recipe, "report": asdict(report)}
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        weights = drafter.to(torch.bfloat16).state_dict().values()
        size = sum(w.numel() * w.element_size() for w in weights)
        reserve_space(temporary / "model.safetensors", size + (1 << 20), "the drafter")
        drafter.save_pretrained(temporary)
        (temporary / "training.json").write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
        move_files(temporary, options.output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _held_out(count: int) -> list[int]:
    """Evenly spread answers, so that every domain has some."""
    wanted = min(max(round(count * _HELD_OUT), 1), 256, count - 1)
    return [round(i * count / wanted) for i in range(wanted)] if wanted else []
