"""The training loop: AdamW on accelerate, exact resume, held-out acceptance.

Every batch is a function of (seed, step), so a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm
from transformers import get_cosine_with_min_lr_schedule_with_warmup_lr_rate

from ..loading.files import reserve_space
from ..model.modeling_dspark import DSparkDraftModel
from .features import FeatureStore
from .recipe import TrainOptions
from .step import Batch, DraftTrainingStep, LossWeights, StepOutput, collate, draw_anchors, expected_accept_length
from .unroll import EAGLE3_LOSS, UnrolledTrainingStep

# The losses of each method's released recipe.
LOSSES = {"dspark": LossWeights(), "dflash": LossWeights(1.0, 0.0, 0.0), "eagle3": EAGLE3_LOSS}
_WARMUP = 0.04  # share of the steps
_LOWEST_RATE = 0.02  # share of the peak, at the end of the cosine
_CLIP = 1.0  # of the gradients' norm
_CHECKPOINT_EVERY = 250  # steps
_HELD_OUT_ANCHORS = 32


@dataclass(frozen=True)
class Evaluation:
    """Held-out acceptance by position (1 - ½‖p_d - p_t‖_1 at temperature 1) and the τ it implies, bonus token included."""

    acceptance: list[float]
    accept_length: float


def mixed_precision(device: torch.device) -> str:
    """ "bf16" where the device multiplies it natively, else "no"."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    if device.type == "cpu":
        return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "no"
    return "no"


class Trainer:
    """Trains `drafter` (bound to its target) on `store` for `steps`; the answers in `held_out` are never trained on."""

    def __init__(
        self,
        drafter: DSparkDraftModel,
        store: FeatureStore,
        options: TrainOptions,
        steps: int,
        held_out: Sequence[int] = (),
    ) -> None:
        self.store, self.options, self.steps, self.held_out = store, options, steps, list(held_out)
        self.state_file = options.folder / "training_state.pt"
        self.train_indices = sorted(set(range(len(store.answers))) - set(held_out))
        if not self.train_indices:
            raise ValueError("No answers are left to train on: all of them are held out.")
        for own in (drafter.embed_tokens, drafter.lm_head):
            if own is not None:
                own.requires_grad_(False)
        self.drafter = drafter
        self.accelerator = Accelerator(mixed_precision=mixed_precision(drafter.device))
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
        self.schedule = get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
            optimizer, max(1, round(_WARMUP * steps)), steps, min_lr_rate=_LOWEST_RATE
        )
        step = UnrolledTrainingStep if drafter.config.is_autoregressive else DraftTrainingStep
        self.module, self.optimizer = self.accelerator.prepare(step(drafter, LOSSES[options.method]), optimizer)
        self.step = 0
        self.seconds = 0.0

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that goes on from it."""
        config = self.drafter.config.to_dict()
        for name in ("transformers_version", "_name_or_path", "dtype", "architectures"):
            config.pop(name, None)
        names = ("method", "batch_size", "num_anchors", "learning_rate", "seed")
        own = config | {name: getattr(self.options, name) for name in names} | {"steps": self.steps}
        return json.loads(json.dumps(own))

    def save_state(self) -> None:
        """Write everything that a resume needs, under a temporary name first."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "settings": self._settings(),
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        temporary = self._reserve()
        try:
            with temporary.open("r+b") as file:
                torch.save(state, file)
                file.truncate()
            os.replace(temporary, self.state_file)
        finally:
            temporary.unlink(missing_ok=True)

    def _reserve(self) -> Path:
        """The file that the next checkpoint is written to, with room for all of it: weights and AdamW's two averages."""
        temporary = self.state_file.with_suffix(".tmp")
        if self.accelerator.is_main_process:
            tensors = list(self.drafter.state_dict().values())
            numbers = [*tensors, *(p for p in self.drafter.parameters() if p.requires_grad for _ in range(2))]
            size = sum(t.numel() * t.element_size() + 4096 for t in numbers)  # with each tensor's records
            reserve_space(temporary, size + (1 << 20), "a checkpoint")
        return temporary

    def resume(self) -> bool:
        """Go on from the last checkpoint, if there is one.

        Raises:
            ValueError: the checkpoint was made with other settings, or for another drafter.
        """
        if not self.state_file.exists():
            return False
        state = torch.load(self.state_file, map_location="cpu", weights_only=True)
        own, earlier, d2t = self._settings(), state.get("settings", {}), self.drafter.d2t  # first versions lack them
        other = [f"{name} {earlier.get(name)}, now {own[name]}" for name in own if earlier.get(name) != own[name]]
        if not other and d2t is not None and not torch.equal(state["drafter"]["d2t"], d2t.cpu()):
            other = ["a draft vocabulary from other answers"]
        if other:
            raise ValueError(
                f"{self.state_file} was made with other settings ({'; '.join(other)}). Use the same ones, another --output, or "
                "--restart to begin anew."
            )
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.seconds = state["step"], state["seconds"]
        return True

    # -- steps -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train from the current step to the last one; Ctrl-C leaves a checkpoint behind.

        Raises:
            OSError: no room for the next checkpoint; it is taken before the steps that lead there.
        """
        started, before = time.monotonic(), self.seconds
        temporary = self._reserve()
        progress = tqdm(total=self.steps, initial=self.step, desc="train", disable=not self.accelerator.is_main_process)
        try:
            while self.step < self.steps:
                self._train_step(progress)
                self.step += 1
                self.seconds = before + time.monotonic() - started
                progress.update()
                if self.step % _CHECKPOINT_EVERY == 0 or self.step == self.steps:
                    self.save_state()
                    self._log_evaluation(progress)
                    if self.step < self.steps:
                        self._reserve()
        except KeyboardInterrupt:
            self.save_state()
            raise
        finally:
            progress.close()
            temporary.unlink(missing_ok=True)

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
        rate = self.schedule.get_last_lr()[0]
        output = self._forward(self._batch(self._pick(self.step)), self._generator(self.step))
        self.accelerator.backward(output.losses.total)
        self.accelerator.clip_grad_norm_(self.module.parameters(), _CLIP)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.step % 10 == 0:
            losses, valid = output.losses, output.valid
            acceptance = ((losses.acceptance * valid).sum(0) / valid.sum(0).clamp(min=1)).tolist()
            names = ("total", "cross_entropy", "l1", "confidence")
            scalars = {name: float(getattr(losses, name).detach()) for name in names}
            progress.set_postfix_str(f"loss {scalars['total']:.3f} acceptance {_shown(acceptance, 2)}")
            self._log({"step": self.step, "learning_rate": rate, "acceptance": acceptance} | scalars)

    def _forward(self, batch: Batch, generator: torch.Generator, block_size: int | None = None) -> StepOutput:
        anchors, keep = draw_anchors(batch.loss_mask.cpu(), self.options.num_anchors, generator)
        config = self.drafter.config
        if block_size is None and config.min_block_size:
            block_size = int(torch.randint(config.min_block_size, config.block_size + 1, (1,), generator=generator))
        device = batch.input_ids.device
        with self.accelerator.autocast():
            return self.module(batch, anchors.to(device), keep.to(device), block_size)

    def _generator(self, step: int) -> torch.Generator:
        seed = (self.options.seed * 1_000_003 + step) * 4099 + self.accelerator.process_index
        return torch.Generator().manual_seed(seed)

    def _pick(self, step: int) -> list[int]:
        """The answers of one step: each epoch goes through all of them in a new order."""
        size = self.options.batch_size * self.accelerator.num_processes
        first = step * size + self.accelerator.process_index * self.options.batch_size
        total = len(self.train_indices)
        picked = []
        for n in range(first, first + self.options.batch_size):
            order = torch.randperm(total, generator=torch.Generator().manual_seed(self.options.seed + n // total))
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
        for start in range(0, len(self.held_out), self.options.batch_size):
            batch = self._batch(self.held_out[start : start + self.options.batch_size])
            anchors, keep = draw_anchors(batch.loss_mask.cpu(), _HELD_OUT_ANCHORS, torch.Generator().manual_seed(start))
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
            f"step {self.step}: held-out acceptance {_shown(result.acceptance, 3)}, accepted length {result.accept_length:.3f}",
            file=sys.stderr,
        )

    def _log(self, record: dict) -> None:
        if self.accelerator.is_main_process:
            with (self.options.folder / "training_log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _shown(acceptance: Sequence[float], digits: int) -> str:
    return " ".join(f"{a:.{digits}f}" for a in acceptance)
