"""Training states of a simulation as real bytes: slot files of a history, and what a commit of it must hold.

A state is two small tensors. ``fast`` differs for every step of every generation. ``slow`` takes one of a few
values by turns, so chunks of it are shared by commits, needed by none for a while, and needed again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from blake3 import blake3

from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import PAGE, SlotHeader
from picotron_ray.checkpoint.snapshot.slot_reader import open_slot
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.slots import SimSlot, StepHistory
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard

ROWS = 60
SLOW_STEPS, SLOW_VALUES = 9, 3
TENSORS = ("fast", "slow")


def content(tensor: str, history: StepHistory, step: int) -> np.ndarray:
    """All rows of a tensor, as bytes."""
    seed = repr(history) if tensor == "fast" else f"slow {step // SLOW_STEPS % SLOW_VALUES}"
    return np.frombuffer(blake3(f"{tensor} {seed}".encode()).digest(length=8 * ROWS), dtype=np.uint8)


def ledger(history: StepHistory) -> tuple[str, ...]:
    """A line for each step, which names the generation that did it."""
    return tuple(
        json.dumps({"step": step, "generation": [generation.term, generation.n]})
        for generation, first, last in history
        for step in range(first + 1, last + 1)
    )


def history_of(lines: list[str]) -> StepHistory:
    """The history that ledger lines tell."""
    found: list[tuple[m.GenerationId, int, int]] = []
    for line in map(json.loads, lines):
        generation, step = m.GenerationId(*line["generation"]), int(line["step"])
        if found and found[-1][0] == generation and found[-1][2] == step - 1:
            found[-1] = generation, found[-1][1], step
        else:
            found.append((generation, step - 1, step))
    return tuple(found)


def _span(first: int, last: int, parts: int, index: int) -> tuple[int, int]:
    size = last - first
    return first + size * index // parts, first + size * (index + 1) // parts


def write_slot(path: Path, held: SimSlot, layout: Layout) -> None:
    """Write a simulated slot as a real one; a corrupt one has a flipped byte in its body."""
    info = held.info
    shards, parts = [], []
    for part in info.fragments:
        low, high = _span(*_span(0, ROWS, layout.state_groups, part.group), part.count, part.index)
        if high == low:
            continue
        for tensor in TENSORS:
            shards.append(Shard(tensor, "float64", (ROWS,), Box((low,), (high - low,))))
            parts.append(content(tensor, held.history, info.step)[8 * low : 8 * high])
    header = SlotHeader(
        info.generation.term,
        info.generation.n,
        info.step,
        info.rank,
        tuple((part.group, part.index, part.count) for part in info.fragments),
        layout.to_dict(),
        info.step,
        ledger(held.history),
    )
    slot = SlotFile.create(path, 4 * PAGE)
    slot.write(header, shards, parts, pinned=True)
    slot.close()
    if held.corrupt:
        at = open_slot(path).shards[0].offset
        with path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
