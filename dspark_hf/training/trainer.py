"""The training loop: AdamW on accelerate, exact resume, held-out acceptance.

Owns: optimisation, learning-rate schedule, checkpoints, the progress bar and the log. Does not own: text and features
(`responses`, `features`), the step's forward (`step`), packaging the result (`package`).
Axes: γ positions.

Every batch is a function of (seed, step), so a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm
from transformers.utils import logging

from ..model.modeling_dspark import DSparkDraftModel
from .anchors import draw_anchors
from .features import FeatureStore
from .losses import LossWeights, expected_accept_length
from .step import Batch, DraftTrainingStep, StepOutput, collate
from .unroll import UnrolledTrainingStep

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class TrainingRecipe:
    """How to train. Lengths are in tokens, `warmup` is a share of `steps`, `block_sizes` the shortest and longest block."""

    steps: int
    batch_size: int = 8
    num_anchors: int = 32
    learning_rate: float = 1e-3
    warmup: float = 0.04
    final_learning_rate: float = 0.02  # share of learning_rate at the end of the cosine
    weight_decay: float = 0.01
    clip: float = 1.0
    block_sizes: tuple[int, int] | None = None
    loss_weights: LossWeights = field(default_factory=LossWeights)
    checkpoint_every: int = 250
    seed: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Held-out acceptance by position (1 - ½‖p_d - p_t‖_1 at temperature 1) and the τ it implies, bonus token included."""

    acceptance: list[float]
    accept_length: float


def _settings(drafter: DSparkDraftModel) -> str:
    """All of a drafter's config that a checkpoint must share with it, as JSON."""
    names = ("transformers_version", "_name_or_path", "dtype", "architectures")
    return json.dumps({key: value for key, value in drafter.config.to_dict().items() if key not in names})


def mixed_precision(device: torch.device) -> str:
    """ "bf16" where the device multiplies it natively, else "no"."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    if device.type == "cpu":
        return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "no"
    return "no"


def learning_rate_at(step: int, recipe: TrainingRecipe) -> float:
    """Linear warm-up, then a cosine down to `final_learning_rate` of the peak."""
    warmup = max(1, round(recipe.warmup * recipe.steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, recipe.steps - warmup)
    low = recipe.final_learning_rate
    return recipe.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """Trains `drafter` (bound to its target) on `store`; the answers in `held_out` are never trained on."""

    def __init__(
        self,
        drafter: DSparkDraftModel,
        store: FeatureStore,
        recipe: TrainingRecipe,
        work_dir: str | Path,
        held_out: Sequence[int] = (),
    ) -> None:
        self.store, self.recipe, self.held_out = store, recipe, list(held_out)
        self.work_dir = Path(work_dir)
        self.work_dir.mkdir(parents=True, exist_ok=True)
        hidden_out = set(held_out)
        self.train_indices = [i for i in range(len(store.answers)) if i not in hidden_out]
        if not self.train_indices:
            raise ValueError("No answers are left to train on: all of them are held out.")
        for own in (drafter.embed_tokens, drafter.lm_head):
            if own is not None:
                own.requires_grad_(False)
        self.drafter = drafter
        self.accelerator = Accelerator(mixed_precision=mixed_precision(drafter.device))
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
        )
        step = UnrolledTrainingStep if drafter.config.is_autoregressive else DraftTrainingStep
        module = step(drafter, recipe.loss_weights)
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.step = 0
        self.seconds = 0.0

    @property
    def state_file(self) -> Path:
        return self.work_dir / "training_state.pt"

    def save_state(self) -> None:
        """Write everything that a resume needs, under a temporary name first."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "recipe": json.dumps(asdict(self.recipe)),
            "config": _settings(self.drafter),
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        temporary = self.state_file.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.state_file)

    def resume(self) -> bool:
        """Go on from the last checkpoint, if there is one.

        Raises:
            ValueError: the checkpoint was made with another recipe, or for another drafter.
        """
        if not self.state_file.exists():
            return False
        state = torch.load(self.state_file, map_location="cpu", weights_only=True)
        if state["recipe"] != json.dumps(asdict(self.recipe)):
            raise ValueError(
                f"{self.state_file} was made with another recipe: {state['recipe']}. Use the same settings, another "
                "--output, or --restart to begin anew."
            )
        own, earlier = json.loads(_settings(self.drafter)), json.loads(state.get("config", "{}"))  # first runs lack it
        other = [
            f"{name} {earlier[name]}, now {own[name]}" for name in own if name in earlier and earlier[name] != own[name]
        ]
        d2t = self.drafter.d2t
        if not other and d2t is not None and not torch.equal(state["drafter"]["d2t"], d2t.cpu()):
            other = ["a draft vocabulary from other answers"]
        if other:
            raise ValueError(
                f"{self.state_file} was made for another drafter ({'; '.join(other)}). Use the same settings, another "
                "--output, or --restart to begin anew."
            )
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        return True

    def run(self) -> None:
        """Train from the current step to the last one; Ctrl-C leaves a checkpoint behind."""
        started, before = time.monotonic(), self.seconds
        progress = tqdm(
            total=self.recipe.steps, initial=self.step, desc="train", disable=not self.accelerator.is_main_process
        )
        try:
            while self.step < self.recipe.steps:
                self._train_step(progress)
                self.step += 1
                self.seconds = before + time.monotonic() - started
                progress.update()
                if self.step % self.recipe.checkpoint_every == 0 or self.step == self.recipe.steps:
                    self.save_state()
                    self._log_evaluation(progress)
        except KeyboardInterrupt:
            self.save_state()
            raise
        finally:
            progress.close()

    def seconds_per_step(self) -> float:
        """Measured on the second of two full-block forward and backward passes that change nothing."""
        seconds = 0.0
        for _ in range(2):
            start = time.monotonic()
            generator = self._generator(self.step)
            output = self._forward(self._batch(self._pick(self.step)), generator, self.drafter.config.block_size)
            self.accelerator.backward(output.losses.total)
            self.optimizer.zero_grad(set_to_none=True)
            seconds = time.monotonic() - start
        return seconds

    def _train_step(self, progress: tqdm) -> None:
        rate = learning_rate_at(self.step, self.recipe)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        generator = self._generator(self.step)
        output = self._forward(self._batch(self._pick(self.step)), generator)
        self.accelerator.backward(output.losses.total)
        self.accelerator.clip_grad_norm_(self.module.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.step % 10 == 0:
            acceptance = acceptance_by_position(output)
            progress.set_postfix_str(
                f"loss {float(output.losses.total.detach()):.3f} acceptance {' '.join(f'{a:.2f}' for a in acceptance)}"
            )
            self._log({"step": self.step, "learning_rate": rate, "acceptance": acceptance} | _scalars(output))

    def _forward(self, batch: Batch, generator: torch.Generator, block_size: int | None = None) -> StepOutput:
        anchors, keep = draw_anchors(batch.loss_mask.cpu(), self.recipe.num_anchors, generator)
        if block_size is None and self.recipe.block_sizes is not None:
            low, high = self.recipe.block_sizes
            block_size = int(torch.randint(low, high + 1, (1,), generator=generator))
        device = batch.input_ids.device
        with self.accelerator.autocast():
            return self.module(batch, anchors.to(device), keep.to(device), block_size)

    def _generator(self, step: int) -> torch.Generator:
        seed = (self.recipe.seed * 1_000_003 + step) * 4099 + self.accelerator.process_index
        return torch.Generator().manual_seed(seed)

    def _pick(self, step: int) -> list[int]:
        """The answers of one step: each epoch goes through all of them in a new order."""
        size = self.recipe.batch_size * self.accelerator.num_processes
        first = step * size + self.accelerator.process_index * self.recipe.batch_size
        total = len(self.train_indices)
        picked = []
        for n in range(first, first + self.recipe.batch_size):
            order = torch.randperm(total, generator=torch.Generator().manual_seed(self.recipe.seed + n // total))
            picked.append(self.train_indices[int(order[n % total])])
        return picked

    def _batch(self, indices: list[int]) -> Batch:
        answers = [self.store.answers[i] for i in indices]
        return collate(answers, self.store.get(indices), self.accelerator.device)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Acceptance on the held-out answers, with full blocks at fixed anchors."""
        total = torch.zeros(self.drafter.config.num_draft_tokens)
        count = torch.zeros_like(total)
        lengths, blocks = 0.0, 0
        for start in range(0, len(self.held_out), self.recipe.batch_size):
            batch = self._batch(self.held_out[start : start + self.recipe.batch_size])
            anchors, keep = draw_anchors(batch.loss_mask.cpu(), 32, torch.Generator().manual_seed(start))
            with self.accelerator.autocast():
                output = self.module(batch, anchors.to(self.drafter.device), keep.to(self.drafter.device))
            acceptance, valid = output.losses.acceptance.cpu(), output.valid.cpu()
            total += (acceptance * valid).sum(0)
            count += valid.sum(0)
            lengths += expected_accept_length(acceptance, valid) * len(valid)
            blocks += len(valid)
        return Evaluation((total / count.clamp(min=1)).tolist(), lengths / max(blocks, 1))

    def _log_evaluation(self, progress: tqdm) -> None:
        if not self.held_out:
            return
        result = self.evaluate()
        self._log({"step": self.step, "held_out": asdict(result)})
        progress.write(
            f"step {self.step}: held-out acceptance {' '.join(f'{a:.3f}' for a in result.acceptance)}, "
            f"accepted length {result.accept_length:.3f}",
            file=sys.stderr,
        )

    def _log(self, record: dict) -> None:
        if self.accelerator.is_main_process:
            with (self.work_dir / "training_log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def acceptance_by_position(output: StepOutput) -> list[float]:
    """Mean acceptance at each position of a step's blocks."""
    valid = output.valid
    return ((output.losses.acceptance * valid).sum(0) / valid.sum(0).clamp(min=1)).tolist()


def _scalars(output: StepOutput) -> dict[str, float]:
    losses = output.losses
    return {name: float(getattr(losses, name).detach()) for name in ("total", "cross_entropy", "l1", "confidence")}
