"""The table of step costs: what a round costs on this machine (paper §3.2.2, SPS), and its slow correction by live rounds.

Axes: B tokens in one forward of the target, `depth` tokens of context before them, K tokens drafted. Units: seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ..loading.files import cache_folder, write_json

if TYPE_CHECKING:
    from .policy import RoundRecord

logger = logging.get_logger(__name__)
_FORMAT = 1
_GLOBAL_PACE, _ROW_PACE = 0.1, 0.05  # share of a live deviation that one round takes over
_MOST_BACKLOG = 16  # context tokens a sequence: a draft that first took in more (a prompt, plain steps) is no usual one
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
        ascend = sorted({1, *self.sequences}) == [1, *self.sequences]
        if not ascend or {len(column) for column in batch} != {len(self.sequences)}:
            raise ValueError(
                f"StepRates: sequences must ascend from 2, with one entry each in the three batch columns; got {self.sequences}."
            )
        self.live = True
        self._target_pace = self._draft_pace = (
            1.0  # of live rounds: what the machine takes now, as a multiple of the table
        )
        self._row_pace = [1.0] * len(self.rows)
        self._curves: dict[int, tuple[list[float], list[float]]] = {}  # of each depth: as measured, and padded
        self._in_steps = False  # whether forwards have these numbers of rows alone
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
            table._in_steps = True
            self._stepped[sizes] = table
        self._stepped[sizes].live = self.live
        return self._stepped[sizes]

    # -- reading -----------------------------------------------------------------------------------------------------

    def measured(self, rows: int, depth: int) -> float:
        """Seconds of a forward of exactly `rows` tokens: the jagged curve, interpolated between measured B and depths."""
        return self._at(rows, depth, padded=False)

    def cost(self, rows: int, depth: int, sequences: int = 1) -> float:
        """Seconds of verifying `rows` tokens of `sequences` in all, `depth` their mean context.

        The least of all B' >= rows, since a forward may always be padded.
        """
        return self._at(rows, depth, padded=True) + self._sequence_cost(sequences)

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
        block, step = _block_cost(self.block_seconds, limit), self.draft_step_seconds
        if sequences > 1 and self.sequences:
            counts = [1, *self.sequences]
            blocks = [block, *(_block_cost(b, limit) for b in self.batch_block_seconds)]
            block = _interpolate(counts, blocks, sequences)
            step = _interpolate(counts, [step, *self.batch_step_seconds], sequences)
        return (block + steps * step) * self._draft_pace

    def blocks_cost(self, limits: Sequence[int], steps: int) -> float:
        """Seconds of drafting blocks for `limits` tokens (0: none for that sequence), `steps` drawn for the longest."""
        drafting = [n for n in limits if n]
        return self.draft_cost(sum(drafting) / len(drafting), steps, len(drafting)) if drafting else 0.0

    def round_cost(self, limit: int, steps: int, rows: int, depth: int) -> float:
        """Seconds of a round that drafts `steps` tokens in a block for `limit` and verifies `rows` tokens in all."""
        return self.draft_cost(limit, steps) + self.cost(rows, depth)

    def record_cost(self, record: RoundRecord) -> float:
        """Seconds that the table says a finished round took in drafter and target, without the prompts read beside it."""
        return self._drafted_cost(record) + self.cost(
            record.rows - record.prefill_rows, record.depth, len(record.sequences)
        )

    def _drafted_cost(self, record: RoundRecord) -> float:
        return self.blocks_cost([s.planned for s in record.blocks], max((s.drafted for s in record.blocks), default=0))

    def _sequence_cost(self, sequences: int) -> float:
        if sequences < 2 or not self.sequences:
            return 0.0
        return _interpolate([1, *self.sequences], [0.0, *self.sequence_seconds], sequences) * self._target_pace

    def _at(self, rows: int, depth: int, padded: bool) -> float:
        if self._in_steps:
            rows = next((b for b in self.rows if b >= rows), rows)
        low = min(max(bisect_right(self.depths, depth) - 1, 0), max(len(self.depths) - 2, 0))
        here = self._point(low, rows, padded)
        if len(self.depths) > 1:
            share = (depth - self.depths[low]) / (self.depths[low + 1] - self.depths[low])
            # Below the first depth the curve is taken as flat; beyond the last it goes on as steep as before.
            here += max(share, 0.0) * max(self._point(low + 1, rows, padded) - here, 0.0)
        return here * self._target_pace

    def _point(self, line: int, rows: int, padded: bool) -> float:
        if line not in self._curves:
            exact = [s * f for s, f in zip(self.target_seconds[line], self._row_pace)]
            falling = accumulate(reversed(exact), min)
            self._curves[line] = exact, list(falling)[::-1]
        return _interpolate(self.rows, self._curves[line][padded], rows)

    # -- live correction ---------------------------------------------------------------------------------------------

    def observe(self, record: RoundRecord) -> None:
        """Let one live round correct the table slowly; a whole machine that became slower is taken over faster.

        Nothing happens where `live` is `False`: decisions then depend on the stored table alone.
        """
        count = len(record.sequences)
        if not self.live or not count:
            return
        told = self.measured(record.rows, record.depth) + self._sequence_cost(count)
        ratio = _bounded(record.verify_seconds / told)
        self._target_pace *= ratio**_GLOBAL_PACE
        # What one B costs beyond the whole machine's pace; it fades, since one B alone can't tell the two apart.
        high = min(bisect_left(self.rows, record.rows), len(self.rows) - 1)
        low = high if self.rows[high] <= record.rows else high - 1
        share = (record.rows - self.rows[low]) / (self.rows[high] - self.rows[low]) if low < high else 1.0
        for i, part in {low: 1.0 - share, high: share}.items():
            self._row_pace[i] = self._row_pace[i] ** (1.0 - _ROW_PACE * part) * ratio ** (_ROW_PACE * part)
        self._curves.clear()
        drafted = self._drafted_cost(record)
        if drafted > 0 and record.backlog <= _MOST_BACKLOG * count:
            self._draft_pace *= _bounded(record.draft_seconds / drafted) ** _GLOBAL_PACE

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


def _block_cost(seconds: Sequence[float], limit: float) -> float:
    """Between the two lengths around `limit`; `seconds` are of blocks for 1, 2, ... tokens."""
    if not seconds:
        return 0.0
    place = min(max(limit, 1.0), len(seconds)) - 1.0
    low = int(place)
    high = min(low + 1, len(seconds) - 1)
    return seconds[low] + (place - low) * (seconds[high] - seconds[low])


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _MOST_DEVIATION), _MOST_DEVIATION)
