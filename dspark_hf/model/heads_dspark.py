"""The sequential heads and the confidence head (paper §3.1, eqs. 4 to 7).

Axes: B sequences (or blocks), γ drafted positions, r rank, d hidden size, V_d draft vocabulary.
This file travels with a checkpoint (`auto_map`), so it imports nothing else of the package.
"""

from __future__ import annotations

import torch
from torch import nn


class MarkovHead(nn.Module):
    """Vanilla Markov head: bias = W_2 W_1[x_{k-1}] (eq. 5). `markov_w1` is indexed by target ids, `markov_w2` by draft ids."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def step(
        self,
        previous_embedding: torch.Tensor,  # [B, r], W_1[x_{k-1}]
        hidden: torch.Tensor,  # [B, d], h_k
        state: torch.Tensor | None,  # [B, r], of the previous position; None at the first
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The latent of one position and the state after it; `project` turns latents into logit biases."""
        return previous_embedding, state

    def teacher_forced(
        self,
        previous_embeddings: torch.Tensor,  # [B, γ, r]
        hidden: torch.Tensor,  # [B, γ, d]
    ) -> torch.Tensor:
        """Latents of all positions of a block whose previous tokens are known. [B, γ, r]"""
        return self.step(previous_embeddings, hidden, None)[0]

    def project(self, latent: torch.Tensor, rows: torch.LongTensor | None = None) -> torch.Tensor:
        """Logit bias of latents, of the draft ids `rows` [..., N] alone where they are given. [..., r] -> [..., V_d or N]"""
        if rows is None:
            return self.markov_w2(latent)
        return (self.markov_w2.weight[rows] @ latent[..., None])[..., 0]


class GatedMarkovHead(MarkovHead):
    """The embedding is scaled by a sigmoid gate of [h_k ; W_1[x_{k-1}]]."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, previous_embedding, hidden, state):
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, previous_embedding], dim=-1)))
        return gate * previous_embedding, state


class RNNHead(MarkovHead):
    """A recurrent state over the drafted tokens (eq. 6); inputs [s ; W_1[x_{k-1}] ; h], outputs gate, candidate, output."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, previous_embedding, hidden, state):
        if state is None:
            state = torch.zeros_like(previous_embedding)
        joint = self.joint_proj(torch.cat([state, previous_embedding, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state

    def teacher_forced(self, previous_embeddings, hidden):
        latents, state = [], None
        for k in range(hidden.shape[-2]):
            latent, state = self.step(previous_embeddings[..., k, :], hidden[..., k, :], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


def make_markov_head(head_type: str, *sizes: int) -> MarkovHead | None:
    """The sequential head of a config's `markov_head_type`, `None` for "none"; `sizes` as [`MarkovHead`] takes them."""
    return None if head_type == "none" else MARKOV_HEADS[head_type](*sizes)


class ConfidenceHead(nn.Module):
    """Logit of c_k, the probability that x_k survives given that x_<k did (eq. 7). It never sees x_k."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, hidden: torch.Tensor, previous_embedding: torch.Tensor | None) -> torch.Tensor:
        """[..., d] and, with the Markov embedding, [..., r] -> [...]"""
        inputs = hidden if previous_embedding is None else torch.cat([hidden, previous_embedding], dim=-1)
        return self.proj(inputs).squeeze(-1)
