"""What the drafter is trained on: the target's tapped layers and last hidden state over each answer.

Axes: B sequences, S tokens, m tapped layers, d_target the target's hidden size, V vocabulary.

Only the last hidden state and log Σ exp(logits) are kept for each token, not V logits: the target's probabilities of any
part of the vocabulary follow from them through the LM head (paper §5.1, "hidden-state communication").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..decoding.target import TargetTaps
from ..loading.files import reserve_space
from .corpus import Answer


@dataclass(frozen=True)
class Features:
    """Of one answer, S = prompt and answer: context [S, m * d_target], last_hidden [S, d_target], log_norm [S] (float32)."""

    context: torch.Tensor
    last_hidden: torch.Tensor
    log_norm: torch.Tensor


def log_normaliser(target: PreTrainedModel, last_hidden: torch.Tensor, rows: int = 512) -> torch.Tensor:
    """log Σ_v exp(logit_v) of the target at each hidden state, in float32. [N, d_target] -> [N]"""
    head = target.get_output_embeddings()
    cap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
    parts = []
    for chunk in last_hidden.split(rows):
        logits = head(chunk).float()
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        parts.append(logits.logsumexp(-1))
    return torch.cat(parts) if parts else last_hidden.new_zeros(0, dtype=torch.float32)


@torch.inference_mode()
def check_logits(target: PreTrainedModel) -> None:
    """Refuse a target whose probabilities can't be had from its last hidden states and LM head alone.

    Raises:
        ValueError: its logits are scaled after the LM head (some Granite and Falcon-H1 models).
    """
    ids = torch.arange(2, 8, device=target.device)[None] % target.config.get_text_config().vocab_size
    hidden = target.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    wanted = target(input_ids=ids, use_cache=False).logits[0].float().logsumexp(-1)
    # Far above rounding in half precision, far below any scale in use.
    if not torch.allclose(log_normaliser(target, hidden), wanted, rtol=0.02, atol=0.1):
        raise ValueError(
            f"{type(target).__name__} scales its logits after the LM head, which training does not know yet: it has the "
            "target's probabilities from hidden states and LM head. Train for another target."
        )


@torch.inference_mode()
def compute_features(target: PreTrainedModel, answers: Sequence[Answer], layer_ids: Sequence[int]) -> list[Features]:
    """Run the target once over a batch of answers (right-padded; causal attention keeps the padding out)."""
    lengths = [len(a.input_ids) + len(a.response_ids) for a in answers]
    ids = torch.zeros(len(answers), max(lengths), dtype=torch.long)
    for row, answer in zip(ids, answers, strict=True):
        tokens = answer.input_ids + answer.response_ids
        row[: len(tokens)] = torch.tensor(tokens)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    with TargetTaps(target, layer_ids) as taps:
        output = target.base_model(
            input_ids=ids.to(target.device), attention_mask=mask.long().to(target.device), use_cache=False
        )
        context = taps.take()
    features = []
    for i, (answer, length) in enumerate(zip(answers, lengths, strict=True)):
        last_hidden = output.last_hidden_state[i, :length]
        start = len(answer.input_ids)  # the first anchor is the first answer token, its prediction starts there
        log_norm = last_hidden.new_zeros(length, dtype=torch.float32)
        log_norm[start:] = log_normaliser(target, last_hidden[start:])
        features.append(Features(context[i, :length], last_hidden, log_norm))
    return features


class FeatureStore:
    """Features of a list of answers, kept in bf16 in one file of at most `max_bytes`; the rest is computed on the fly.

    The file belongs to one (target, layers, answers): another combination in the same folder starts it anew.
    """

    def __init__(
        self,
        folder: str | Path,
        answers: Sequence[Answer],
        target: PreTrainedModel,
        layer_ids: Sequence[int],
        max_bytes: int,
    ) -> None:
        self.answers, self.target, self.layer_ids = answers, target, list(layer_ids)
        width = target.config.get_text_config().hidden_size
        self._widths = (len(self.layer_ids) * width, width)
        # The last row's log_norm is written last: where it is not zero, the answer is done.
        row = np.dtype([("hidden", np.uint16, (sum(self._widths),)), ("log_norm", np.float32)])
        self._row_bytes = row.itemsize
        lengths = np.array([len(a.input_ids) + len(a.response_ids) for a in answers])
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._kept = int(np.searchsorted(self._offsets, max_bytes // row.itemsize, side="right")) - 1
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        texts = [[a.input_ids, a.response_ids] for a in answers]
        identity = json.dumps([target.config._name_or_path, self.layer_ids, row.descr, texts])
        key = hashlib.sha256(identity.encode()).hexdigest()
        file, key_file = folder / "features.bf16", folder / "features.key"
        if not key_file.exists() or key_file.read_text() != key:
            key_file.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        # On a full disk, writing into a memory map of holes would kill the process without a word.
        reserve_space(file, max(self.num_bytes, row.itemsize), "kept features (see --feature-cache-gb)")
        self._rows = np.memmap(file, row, "r+", shape=max(int(self._offsets[self._kept]), 1))
        key_file.write_text(key)

    @property
    def num_bytes(self) -> int:
        """Size of the file on disk."""
        return int(self._offsets[self._kept]) * self._row_bytes

    def _missing(self) -> np.ndarray:
        """Answers of which the file has a place and no features."""
        return (self._rows["log_norm"][self._offsets[1 : self._kept + 1] - 1] == 0.0).nonzero()[0]

    def missing_tokens(self) -> int:
        """How many tokens of the file are still to be computed."""
        return int(np.diff(self._offsets)[self._missing()].sum())

    def fill(self, tokens_per_batch: int = 2048) -> None:
        """Compute what the file still lacks, with a progress bar; can be interrupted and continued."""
        missing = sorted(self._missing().tolist(), key=lambda i: self._offsets[i + 1] - self._offsets[i])
        with tqdm(total=self._kept, initial=self._kept - len(missing), desc="features", unit="text") as bar:
            for batch in self._batches(missing, tokens_per_batch):
                for i, features in zip(batch, self._compute(batch), strict=True):
                    self._write(i, features)
                bar.update(len(batch))

    def get(self, indices: Sequence[int]) -> list[Features]:
        """Features of some answers, read from the file or computed now."""
        absent = set(self._missing().tolist())
        missing = [i for i in indices if i >= self._kept or i in absent]
        computed = dict(zip(missing, self._compute(missing), strict=True)) if missing else {}
        for i in missing:
            if i < self._kept:
                self._write(i, computed[i])
        return [computed[i] if i in computed else self._read(i) for i in indices]

    def _batches(self, indices: list[int], tokens: int) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in indices:
            length = self._offsets[i + 1] - self._offsets[i]
            if batch and (len(batch) + 1) * length > tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _compute(self, indices: Sequence[int]) -> list[Features]:
        return compute_features(self.target, [self.answers[i] for i in indices], self.layer_ids)

    def _write(self, i: int, features: Features) -> None:
        rows = slice(self._offsets[i], self._offsets[i + 1])
        both = torch.cat([features.context, features.last_hidden], dim=-1).to(torch.bfloat16).cpu()
        self._rows["hidden"][rows] = both.view(torch.uint16).numpy()
        self._rows["log_norm"][rows] = features.log_norm.cpu().numpy()

    def _read(self, i: int) -> Features:
        rows = np.array(self._rows[self._offsets[i] : self._offsets[i + 1]])
        both = torch.from_numpy(rows["hidden"].copy()).view(torch.bfloat16)
        context, last_hidden = both.split(self._widths, dim=-1)
        return Features(context, last_hidden, torch.from_numpy(rows["log_norm"].copy()))
