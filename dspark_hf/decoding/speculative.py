"""One round of speculative decoding for n sequences (paper §2.1, §3.2.2, §5.2). Start reading at `Speculation.round`.

`generate()` is n = 1 (`generation`), the engine n (`engine.engine`). Axes: n sequences, B rows of one forward of the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..scheduling.policy import Plan, Policy, RoundRecord, SequenceRecord, SequenceState
from .acceptance import accept
from .backend import Backend, Reading, Rows
from .drafting import Drafting
from .prompt_lookup import MOST_TOKENS, Copy, PromptLookup
from .proposal import Proposal
from .ragged_cache import is_out_of_memory
from .sequence import Choice, TextSequence
from .target import placeholder_ids

logger = logging.get_logger(__name__)


class Speculation:
    """Rounds of a target (behind `backend`) and a drafter, if there is one. cap: most tokens drafted for one sequence.

    make_room: called where a forward's memory runs out, with its rows and the error; gives the rows to go on with.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        backend: Backend,
        drafting: Drafting | None = None,
        policy: Policy | None = None,
        cap: int = 0,
        make_room: Callable[[list[Rows], Exception], list[Rows]] | None = None,
    ) -> None:
        self.target, self.backend, self.drafting, self.policy, self.cap = target, backend, drafting, policy, cap
        self.make_room = make_room
        # A cap below what the drafter can do is the user's, and holds for copies too.
        whole = drafting is None or cap >= drafting.drafter.config.num_draft_tokens
        self._most_copied = MOST_TOKENS if whole else cap
        self._placeholders = placeholder_ids(target)

    def round(self, sequences: Sequence[TextSequence], reading: Mapping[Any, Rows] | None = None) -> RoundRecord:
        """Plan, draft, schedule, verify, accept, keep and commit, learn.

        reading: pieces of prompts that share the forward; one that asks for logits has its first token with it. What a
        sequence's own processors, criteria or streamer raise is in its `error`; it is left out of the record.
        """
        reading, started = reading or {}, time.perf_counter()
        prefill_rows = sum(len(rows.token_ids) for rows in reading.values())
        lengths = {s: s.length for s in sequences}
        states, copies, plans = self._plan(sequences, prefill_rows)
        proposals = self._draft(sequences, plans, copies)
        drafted_at = time.perf_counter()

        scheduled = dict(zip(sequences, self._schedule(proposals)))
        rows = [_rows(s, proposal) for s, proposal in scheduled.items()] + list(reading.values())
        depth = sum(state.depth for state in states) // max(len(states), 1)
        rows, padding, readings = self._verify(rows, depth, pads=not reading)
        verified_at = time.perf_counter()

        accepted, replayed = self._commit(rows, readings, scheduled)
        if self.target.device.type != "cpu":  # it is waited for where the choice is read, so its forward ends here
            verified_at = time.perf_counter()

        seconds = drafted_at - started, verified_at - drafted_at
        records = []
        for s, state, plan, whole in zip(sequences, states, plans, proposals):
            committed, proposal = s.length - lengths[s], scheduled[s]
            if s.error is not None or not committed:  # it failed, or made room for the others
                continue
            of_sequence = SequenceRecord(
                id=s.id,
                depth=state.depth,
                planned=plan.tokens,
                parked=plan.parked,
                drafted=len(whole),
                verified=len(proposal),
                accepted=accepted[s],
                committed=committed,
                rows=len(proposal) + 1 + replayed + (padding if len(sequences) == 1 else 0),
                survival=proposal.survival,
                confidence_logits=whole.confidence_logits(),
                replayed=replayed,
                copied=plan.copied,
            )
            s.stats.count(of_sequence, *seconds)
            records.append(of_sequence)
        record = RoundRecord(
            sequences=records,
            rows=sum(len(row.token_ids) for row in rows) + padding + replayed,
            prefill_rows=prefill_rows,
            backlog=0 if self.drafting is None else self.drafting.backlog,
            draft_seconds=seconds[0],
            verify_seconds=seconds[1],
            seconds=time.perf_counter() - started,
            reading=len(reading),
        )
        if self.policy is not None and records:
            self.policy.learn(record)
        return record

    # -- the parts of a round ----------------------------------------------------------------------------------------

    def _plan(
        self, sequences: Sequence[TextSequence], prefill_rows: int
    ) -> tuple[list[SequenceState], list[Copy | None], list[Plan]]:
        """How far each sequence may draft, before any token exists; and what it could copy from its text instead."""
        states, copies = [], []
        for s in sequences:
            copy, limit = None, 0
            if self.policy is not None:
                started, room = time.perf_counter(), self.backend.room(s)
                copy = self._look_up(s, room)
                limit = max(min(room, self.cap), 0) if s.draft_context.num_kept else 0
                s.stats.scheduling_seconds += time.perf_counter() - started
            survival = () if copy is None or s.lookup is None else s.lookup.survival(copy)
            states.append(SequenceState(s.id, s.length - 1, limit, survival))
            copies.append(copy)
        if self.policy is None or not sequences:
            return states, copies, [Plan(0)] * len(states)
        started = time.perf_counter()
        plans = [
            plan if plan.copied or plan.tokens <= state.limit else replace(plan, tokens=state.limit)
            for plan, state in zip(self.policy.plan(states, prefill_rows), states, strict=True)
        ]
        for s in sequences:
            s.stats.scheduling_seconds += time.perf_counter() - started
        return states, copies, plans

    def _look_up(self, s: TextSequence, room: int) -> Copy | None:
        """What followed an earlier run like the text's end, where the policy can weigh it against a block."""
        if not (self.policy is not None and self.policy.weighs_copies and self.drafting is not None):
            return None
        if not self.drafting.options.lookup_drafts:
            return None
        if s.lookup is None:
            s.lookup = PromptLookup(self._placeholders)
        known = len(s.lookup)
        new = s.length - known
        # The device is not asked for what the host knows.
        tokens = s.new_tokens[-new:] if new <= len(s.new_tokens) else s.input_ids[0, known:].tolist()
        # Of the prompt it is not learned: what repeats there says little of what the target will repeat.
        s.lookup.extend(tokens, learn=known > 0)
        return s.lookup.propose(min(room, self._most_copied))

    def _draft(
        self, sequences: Sequence[TextSequence], plans: list[Plan], copies: Sequence[Copy | None]
    ) -> list[Proposal]:
        """What each sequence proposes; `plans` of blocks that could not be made become plain steps."""
        proposals = [_nothing(s) for s in sequences]
        if self.drafting is None or self.policy is None:
            return proposals
        try:
            limits = [0 if plan.copied else plan.tokens for plan in plans]
            with torch.inference_mode():
                proposals = self.drafting.draft(sequences, limits, self.policy)
            for s in sequences:
                s.stats.scheduling_seconds += self.drafting.policy_seconds
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning_once("There is too little memory for drafting; this round and maybe others decode plainly.")
            plans[:] = [plan if plan.copied else Plan(0) for plan in plans]
        for i, (s, plan, copy) in enumerate(zip(sequences, plans, copies)):
            if plan.copied and copy is not None:
                proposals[i] = Proposal.chain(s.input_ids.new_tensor(copy.tokens[: plan.tokens]), "copy")
        return proposals

    def _schedule(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """What is verified of each proposal: the nodes worth their rows."""
        if self.policy is None or not proposals:
            return list(proposals)
        counts = self.policy.schedule([p.survival for p in proposals], [len(p) for p in proposals])
        return [p if count == len(p) else p.cut(count) for p, count in zip(proposals, counts)]

    def _verify(self, rows: list[Rows], depth: int, pads: bool) -> tuple[list[Rows], int, list[Reading]]:
        """One forward over all rows; those that it had in the end, and how many idle ones."""
        count = sum(len(row.token_ids) for row in rows)
        rates = None if self.policy is None else self.policy.step_rates
        wanted = rates.padded_rows(count, depth) if rates is not None and pads else count
        padding = self.backend.padded(count, wanted) - count if pads else 0
        while rows:
            try:
                return rows, padding, self.backend.read(rows, padding)
            except Exception as error:
                if self.make_room is None or not is_out_of_memory(error):
                    raise
                rows = self.make_room(rows, error)
        return [], 0, []

    def _commit(
        self, rows: Sequence[Rows], readings: Sequence[Reading], proposals: Mapping[TextSequence, Proposal]
    ) -> tuple[dict[TextSequence, int], int]:
        """Accept and append; the cache keeps what the text has, also where an exception ends this half-way.

        Returns how many nodes of each proposal were appended, and the rows that were read again.
        """
        before = {row.sequence: row.sequence.length for row in rows}
        asked = [(row.sequence, reading.logits) for row, reading in zip(rows, readings) if row.keep]
        accepted: dict[TextSequence, int] = {}
        try:
            sequences = [s for s, _ in asked]
            of = [proposals[s] if s in proposals else _nothing(s) for s in sequences]
            for s, choice in zip(sequences, accept(sequences, of, [logits for _, logits in asked])):
                if isinstance(choice, Choice):
                    accepted[s] = s.commit(choice)
                else:
                    s.error = choice
        finally:
            paths = []
            for row, reading in zip(rows, readings):
                s = row.sequence
                count = s.length - before[s] if s in proposals else len(row.token_ids)
                paths.append(range(count))
                if reading.features is not None:
                    s.draft_context.add(reading.features[:, :count])
            replayed = self.backend.keep(paths)
        return accepted, replayed

    def first_token(self, s: TextSequence, logits: torch.Tensor) -> None:
        """The first token of a prompt that the backend has read by itself, by its logits [1, V]."""
        # Given as embeddings, it has no ids of its own.
        self._commit([Rows(s, s.input_ids.new_zeros(1), keep=1)], [Reading(logits, None)], {})


def _nothing(s: TextSequence) -> Proposal:
    return Proposal.chain(s.input_ids.new_zeros(0))


def _rows(s: TextSequence, proposal: Proposal) -> Rows:
    """The anchor and what is verified behind it."""
    return Rows(s, torch.cat([s.input_ids[0, -1:], proposal.token_ids]), keep=len(proposal) + 1)
