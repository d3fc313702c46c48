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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ..loading.files import cache_folder, write_json

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
    target_seconds, target_spread: lower quartile and interquartile range of one target forward, [depths][rows].
    block_seconds: the drafter's parallel stage for at most K = 1..γ tokens, with base logits and the first confidence.
    draft_step_seconds: one step of the sequential loop. key: what the table holds for. live: whether rounds correct it;
    `False` makes sampled output repeatable with a seed.
    sequences: numbers of requests at once that were measured too, ascending from 2 (empty: a table for one at a time). For each:
    sequence_seconds, what a ragged forward takes beyond one of as many rows of one sequence; batch_block_seconds
    [sequences][K] and batch_step_seconds, as for one.
    """

    rows: list[int]
    depths: list[int]
    target_seconds: list[list[float]]
    target_spread: list[list[float]]
    block_seconds: list[float]
    draft_step_seconds: float
    key: dict[str, Any] = field(default_factory=dict)
    sequences: list[int] = field(default_factory=list)
    sequence_seconds: list[float] = field(default_factory=list)
    batch_block_seconds: list[list[float]] = field(default_factory=list)
    batch_step_seconds: list[float] = field(default_factory=list)

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
        batch = (self.sequence_seconds, self.batch_block_seconds, self.batch_step_seconds)
        if {len(column) for column in batch} != {len(self.sequences)} or sorted({1, *self.sequences})[
            1:
        ] != self.sequences:
            raise ValueError(
                f"StepRates: sequences must ascend from 2, with one entry each in the three batch columns; got {self.sequences}."
            )
        self.live = True
        self._speed = {"target": 1.0, "draft": 1.0}
        self._row_factor = [1.0] * len(self.rows)
        self._index = {b: i for i, b in enumerate(self.rows)}
        self._curves: dict[int, tuple[list[float], list[float]]] = {}  # of each depth: as measured, and padded
        self._sizes: tuple[int, ...] = ()
        self._stepped: dict[tuple[int, ...], StepRates] = {}

    @classmethod
    def of_target(cls, seconds: Mapping[int, float] | Sequence[float]) -> StepRates:
        """A table of the target alone at one depth: seconds for B = 1, 2, ... or by B; the drafter costs nothing."""
        by_rows = dict(seconds) if isinstance(seconds, Mapping) else dict(enumerate(seconds, start=1))
        line = list(by_rows.values())
        return cls(list(by_rows), [1], [line], [[0.0] * len(line)], [], 0.0)

    def stepped(self, sizes: tuple[int, ...]) -> StepRates:
        """This table for forwards of these numbers of rows alone (ascending from 1): n rows cost what the next of them do.

        The same one for the same sizes, so that what live rounds taught it stays.
        """
        if sizes not in self._stepped:
            lines = [
                [[_interpolate(self.rows, line, b) for b in sizes] for line in table]
                for table in (self.target_seconds, self.target_spread)
            ]
            table = replace(self, rows=list(sizes), target_seconds=lines[0], target_spread=lines[1])
            table._sizes = sizes
            self._stepped[sizes] = table
        self._stepped[sizes].live = self.live
        return self._stepped[sizes]

    # -- reading -----------------------------------------------------------------------------------------------------

    def measured(self, rows: int, depth: int) -> float:
        """Seconds of a forward of exactly `rows` tokens: the jagged curve, interpolated between measured B and depths."""
        return self._at(rows, depth, 0)

    def cost(self, rows: int, depth: int, sequences: int = 1) -> float:
        """Seconds of verifying `rows` tokens of `sequences` requests in all, `depth` their mean context.

        The least of all B' >= rows, since a forward may always be padded.
        """
        return self._at(rows, depth, 1) + self._sequence_cost(sequences)

    def _sequence_cost(self, sequences: int) -> float:
        if sequences < 2 or not self.sequences:
            return 0.0
        return _interpolate([1, *self.sequences], [0.0, *self.sequence_seconds], sequences) * self._speed["target"]

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

    def draft_cost(self, limit: float, steps: float, sequences: int = 1) -> float:
        """Seconds of drafting `steps` tokens in a block made for at most `limit`; 0 where nothing is drafted.

        For several `sequences` at once, `limit` is their mean (it may lie between two lengths) and `steps` those of the longest.
        """
        if limit == 0:
            return 0.0
        block, step = self._block_cost(self.block_seconds, limit), self.draft_step_seconds
        if sequences > 1 and self.sequences:
            counts = [1, *self.sequences]
            block = _interpolate(
                counts, [block, *(self._block_cost(b, limit) for b in self.batch_block_seconds)], sequences
            )
            step = _interpolate(counts, [step, *self.batch_step_seconds], sequences)
        return (block + steps * step) * self._speed["draft"]

    @staticmethod
    def _block_cost(seconds: Sequence[float], limit: float) -> float:
        if not seconds:
            return 0.0
        place = min(max(limit, 1.0), len(seconds)) - 1.0
        low = int(place)
        high = min(low + 1, len(seconds) - 1)
        return seconds[low] + (place - low) * (seconds[high] - seconds[low])

    def round_cost(self, limit: int, steps: int, rows: int, depth: int) -> float:
        """Seconds of a round that drafts `steps` tokens in a block for `limit` and verifies `rows` tokens in all."""
        return self.draft_cost(limit, steps) + self.cost(rows, depth)

    def _at(self, rows: int, depth: int, kind: int) -> float:
        rows = next((size for size in self._sizes if size >= rows), rows)
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
        self.correct_target(outcome.rows, outcome.verify_seconds, outcome.depth)
        if outcome.backlog <= _MOST_BACKLOG:
            self.correct_draft(outcome.draft_seconds, self.draft_cost(outcome.limit, outcome.drafted))

    def correct_target(self, rows: int, seconds: float, depth: int, sequences: int = 1) -> None:
        """One live forward of `rows` tokens took `seconds`."""
        if not self.live:
            return
        ratio = _bounded(seconds / (self.measured(rows, depth) + self._sequence_cost(sequences)))
        self._speed["target"] *= ratio**_GLOBAL_PACE
        # What one B costs beyond the whole machine's pace; it fades, since one B alone can't tell the two apart.
        for i, share in self._neighbours(rows):
            self._row_factor[i] = self._row_factor[i] ** (1.0 - _ROW_PACE * share) * ratio ** (_ROW_PACE * share)
        self._curves.clear()

    def _neighbours(self, rows: int) -> list[tuple[int, float]]:
        """The measured B by which the cost of `rows` is told, and each one's share."""
        if rows in self._index:
            return [(self._index[rows], 1.0)]
        high = bisect_right(self.rows, rows)
        if high == len(self.rows):
            return [(high - 1, 1.0)]
        share = (rows - self.rows[high - 1]) / (self.rows[high] - self.rows[high - 1])
        return [(high - 1, 1.0 - share), (high, share)]

    def correct_draft(self, seconds: float, expected: float) -> None:
        """One live draft took `seconds` where the table has `expected` (`draft_cost`)."""
        if self.live and expected > 0:
            self._speed["draft"] *= _bounded(seconds / expected) ** _GLOBAL_PACE

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
