"""The step-rate table: what a forward costs on this machine (paper §3.2.2 SPS, design decision 5).

Owns: the measured table, reading costs from it, its slow correction by live rounds, its file.
Does not own: measuring (`decoding.profiling`), what is decided with it (`admission`).
Axes: B tokens in one forward of the target, `depth` tokens of context before them, K tokens drafted. Units: seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ..files import cache_folder, write_json

if TYPE_CHECKING:
    from .admission import RoundOutcome

logger = logging.get_logger(__name__)
_FORMAT = 1
_GLOBAL_PACE, _ROW_PACE = 0.1, 0.05  # share of a live deviation that one round takes over
_MOST_BACKLOG = 16  # a draft that first took in more context (a prompt, plain steps) says nothing of the usual one
_MOST_DEVIATION = 2.0  # one round counts at most as this much faster or slower than expected


@dataclass
class StepRates:
    """A measured table, with the live correction on top of it.

    rows: B of each column, ascending from 1. depths: context tokens of each line, ascending.
    target_seconds, target_spread: median and interquartile range of one target forward, [depths][rows].
    block_seconds: the drafter's parallel stage for at most K = 1..γ tokens, with base logits and the first confidence.
    draft_step_seconds: one step of the sequential loop. key: what the table holds for. live: whether rounds correct it;
    `False` makes sampled output repeatable with a seed.
    """

    rows: list[int]
    depths: list[int]
    target_seconds: list[list[float]]
    target_spread: list[list[float]]
    block_seconds: list[float]
    draft_step_seconds: float
    key: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        widths = {len(line) for line in (*self.target_seconds, *self.target_spread)}
        flat = [*(s for line in self.target_seconds for s in line), *self.block_seconds, self.draft_step_seconds]
        usable = (
            self.rows[:1] == [1]
            and sorted(set(self.rows)) == self.rows
            and len(self.depths) == len(self.target_seconds) == len(self.target_spread) > 0
            and sorted(set(self.depths)) == self.depths
            and widths == {len(self.rows)}
            and all(math.isfinite(s) and s >= 0 for s in flat)
            and all(s > 0 for line in self.target_seconds for s in line)
        )
        if not usable:
            raise ValueError(
                "StepRates: rows and depths must ascend, rows from 1, with a positive number of seconds for each pair; "
                f"got rows {self.rows} and depths {self.depths}."
            )
        self.live = True
        self._speed = {"target": 1.0, "draft": 1.0}
        self._row_factor = [1.0] * len(self.rows)
        self._index = {b: i for i, b in enumerate(self.rows)}
        self._curves: dict[int, tuple[list[float], list[float]]] = {}  # of each depth: as measured, and padded

    @classmethod
    def of_target(cls, seconds: Mapping[int, float] | Sequence[float]) -> StepRates:
        """A table of the target alone at one depth: seconds for B = 1, 2, ... or by B; the drafter costs nothing."""
        by_rows = dict(seconds) if isinstance(seconds, Mapping) else dict(enumerate(seconds, start=1))
        line = list(by_rows.values())
        return cls(list(by_rows), [1], [line], [[0.0] * len(line)], [], 0.0)

    # -- reading -----------------------------------------------------------------------------------------------------

    def measured(self, rows: int, depth: int) -> float:
        """Seconds of a forward of exactly `rows` tokens: the jagged curve, interpolated between measured B and depths."""
        return self._at(rows, depth, 0)

    def cost(self, rows: int, depth: int) -> float:
        """Seconds of verifying `rows` tokens: the least of all B' >= rows, since a forward may always be padded."""
        return self._at(rows, depth, 1)

    def padded_rows(self, rows: int, depth: int) -> int:
        """The B' >= rows whose forward is the cheapest; `rows` itself unless another is clearly cheaper.

        By the curve as it was measured in one go: live rounds tell more of the rows in use than of the others. Clearly is
        by 5 % at least, and by more than the spreads of both.
        """
        line = max(bisect_right(self.depths, depth) - 1, 0)
        curve, spread = self.target_seconds[line], self.target_spread[line]
        best = min((i for i, b in enumerate(self.rows) if b >= rows), key=lambda i: curve[i], default=None)
        if best is None:
            return rows
        own, noise = _interpolate(self.rows, curve, rows), _interpolate(self.rows, spread, rows) + spread[best]
        return self.rows[best] if own - curve[best] > max(0.05 * own, noise) else rows

    def draft_cost(self, limit: int, steps: int) -> float:
        """Seconds of drafting `steps` tokens in a block made for at most `limit`; 0 where nothing is drafted."""
        if limit == 0:
            return 0.0
        block = self.block_seconds[min(limit, len(self.block_seconds)) - 1] if self.block_seconds else 0.0
        return (block + steps * self.draft_step_seconds) * self._speed["draft"]

    def round_cost(self, limit: int, steps: int, rows: int, depth: int) -> float:
        """Seconds of a round that drafts `steps` tokens in a block for `limit` and verifies `rows` tokens in all."""
        return self.draft_cost(limit, steps) + self.cost(rows, depth)

    def _at(self, rows: int, depth: int, kind: int) -> float:
        low = min(max(bisect_right(self.depths, depth) - 1, 0), max(len(self.depths) - 2, 0))
        here = self._point(low, rows, kind)
        if len(self.depths) > 1:
            share = (depth - self.depths[low]) / (self.depths[low + 1] - self.depths[low])
            # Below the first depth the curve is taken as flat; beyond the last it goes on as steep as before.
            here += max(share, 0.0) * max(self._point(low + 1, rows, kind) - here, 0.0)
        return here * self._speed["target"]

    def _point(self, line: int, rows: int, kind: int) -> float:
        if line not in self._curves:
            exact = [s * f for s, f in zip(self.target_seconds[line], self._row_factor)]
            padded = list(exact)
            for i in reversed(range(len(padded) - 1)):
                padded[i] = min(padded[i], padded[i + 1])
            self._curves[line] = exact, padded
        curve = self._curves[line][kind]
        return curve[self._index[rows]] if rows in self._index else _interpolate(self.rows, curve, rows)

    # -- live correction ---------------------------------------------------------------------------------------------

    def observe(self, outcome: RoundOutcome) -> None:
        """Let one live round correct the table slowly; a whole machine that became slower is taken over faster.

        Nothing happens where `live` is `False`: decisions then depend on the stored table alone.
        """
        if not self.live:
            return
        rows = outcome.rows
        ratio = _bounded(outcome.verify_seconds / self.measured(rows, outcome.depth))
        self._speed["target"] *= ratio**_GLOBAL_PACE
        if rows in self._index:
            # What one B costs beyond the whole machine's pace; it fades, since one B alone can't tell the two apart.
            i = self._index[rows]
            self._row_factor[i] = self._row_factor[i] ** (1.0 - _ROW_PACE) * ratio**_ROW_PACE
            self._curves.clear()
        expected = self.draft_cost(outcome.limit, outcome.drafted)
        if expected > 0 and outcome.backlog <= _MOST_BACKLOG:
            self._speed["draft"] *= _bounded(outcome.draft_seconds / expected) ** _GLOBAL_PACE

    # -- file --------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Where the table of this key is kept."""
        return table_path(self.key)

    def save(self) -> Path:
        """Write the measured table (without the live correction) into the cache folder."""
        write_json({"format": _FORMAT, **asdict(self)}, self.path)
        return self.path


def table_path(key: Mapping[str, Any]) -> Path:
    """The file of a key: one table for each pair, device and set of versions."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "step_rates" / f"{digest}.json"


def load_step_rates(key: Mapping[str, Any]) -> StepRates | None:
    """The stored table of `key`; `None` where there is none, and with a warning where the file is damaged."""
    path = table_path(key)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("format") != _FORMAT or record["key"] != dict(key):
            raise ValueError("it was written for something else")
        return StepRates(**record)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning(f"The step-rate table {path} can't be used ({error}); it is measured anew.")
        return None


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """Straight lines between the points; beyond the last, at the mean cost per row from the first."""
    i = bisect_right(xs, x)
    if i == len(xs):
        slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0]) if len(xs) > 1 else 0.0
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    low, high = xs[i - 1], xs[i]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - low) / (high - low)


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _MOST_DEVIATION), _MOST_DEVIATION)
