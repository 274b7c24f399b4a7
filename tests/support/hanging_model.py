"""A model as a user might bring it, which makes its run stand still once a file says how."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANK = 1
"""That does otherwise than the others."""


class Hanging(nn.Module):
    """A small model; its rank ``RANK`` does what the file ``plant`` names, while that is there."""

    def __init__(self, folder: str, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.inner = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary)
        self.plant = Path(folder) / "plant"

    def forward(self, tokens: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == RANK and self.plant.exists():
            globals()[self.plant.read_text()]()
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


def mismatch() -> None:
    gathered = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.ones(3))  # planted: mismatch


def deadlock() -> None:
    dist.recv(torch.empty(7), 0)  # planted: deadlock


def late() -> None:
    while True:
        time.sleep(1.0)  # planted: late


def hanging(folder: str, vocabulary: int = 264, hidden: int = 16) -> nn.Module:
    """What ``model.builder: hanging_model:hanging`` builds."""
    return Hanging(folder, vocabulary, hidden)
