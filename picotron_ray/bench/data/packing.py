"""Tokens per second of packed rows, against batches padded to their longest document.

Lengths are log-normal. The padded side takes documents in random order, ``DOCUMENTS`` at a time, and pads
them to the longest of these. Both sides train the same model, and only real tokens count. Rounds alternate;
the ratio is that within a round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from picotron_ray.bench.common.machine import machine
from picotron_ray.bench.common.report import machine_line
from picotron_ray.bench.data.one_process import OneProcess, job_of
from picotron_ray.data.batch import StepBatch

MEAN, SIGMA, ROW = 300, 1.0, 2048
DOCUMENTS, CORPUS = 8, 4000
END = 256
STEPS = 6
"""Of a side in a round."""


def document_lengths(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Draw log-normal lengths of a mean of `MEAN` tokens, at least 2, at most a row's."""
    drawn = np.random.default_rng(seed).lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return drawn.astype(np.int64).clip(2, ROW + 1)


def write_tokens(folder: Path) -> list[npt.NDArray[np.int64]]:
    """Write documents of random letters as token files; returns the training part, document by document."""
    rng, documents = np.random.default_rng(1), []
    for length in document_lengths(CORPUS).tolist():
        documents.append(np.append(rng.integers(97, 123, length - 1), END))
    train, held = documents[: CORPUS - 100], documents[CORPUS - 100 :]
    for name, part in (("train", train), ("held_out", held)):
        np.concatenate(part).astype(np.uint16).tofile(folder / f"{name}.bin")
        total = sum(map(len, part))
        np.ones(total, np.uint8).tofile(folder / f"{name}.mask")
    return train


def _padded(documents: list[npt.NDArray[np.int64]]) -> Iterator[StepBatch]:
    """Yield batches of documents in random order, padded to the longest one of each."""
    order, step = np.random.default_rng(2).permutation(len(documents)), 0
    for at in range(0, len(order) - DOCUMENTS + 1, DOCUMENTS):
        mine, step = [documents[number] for number in order[at : at + DOCUMENTS]], step + 1
        longest = max(map(len, mine))
        tokens = np.zeros((1, DOCUMENTS, longest), np.int64)
        counted = np.zeros((1, DOCUMENTS, longest - 1), np.bool_)
        for row, document in enumerate(mine):
            tokens[0, row, : len(document)] = document
            counted[0, row, : len(document) - 1] = True
        total = int(counted.sum())
        weights = np.ones((1, DOCUMENTS))
        yield StepBatch(step, tokens, weights, total, (0, DOCUMENTS), b"", counted, total)


def bench(rounds: int, hidden: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure both sides in turns."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        documents = write_tokens(folder)
        shared = {"source": "memmap", "path": name, "end_token": END, "sequence_length": ROW}
        ways: dict[str, dict[str, Any]] = {
            "packed": {"batching": "packed", "long_documents": "split", "global_batch": 1},
            "padded": {"loss_mask": True, "global_batch": DOCUMENTS},
        }
        sides = {
            side: OneProcess(job_of({"data": {**shared, **way}}, hidden), folder / "cache")
            for side, way in ways.items()
        }
        padded, steps = _padded(documents), dict.fromkeys(sides, 0)
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds + 1):  # the first one warms up
            for side, training in sides.items():
                fed, began = training.tokens, time.perf_counter()
                for _ in range(STEPS):
                    steps[side] += 1
                    training.train(next(padded) if side == "padded" else training.batch(steps[side]))
                rate = (training.tokens - fed) / (time.perf_counter() - began)
                if number:
                    rates[side].append(rate)
            if number:
                packed, other = (rates[side][-1] for side in ("packed", "padded"))
                say(f"round {number}: packed {packed:,.0f}, padded {other:,.0f} tokens/s")
    ratios = [one / other for one, other in zip(rates["packed"], rates["padded"], strict=True)]
    return {
        "machine": machine(),
        "hidden_size": hidden,
        "rounds": rounds,
        "tokens_per_s": {side: statistics.median(found) for side, found in rates.items()},
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the result for people."""
    packed, padded = (found["tokens_per_s"][side] for side in ("packed", "padded"))
    return [
        machine_line(found),
        f"documents of log-normal length (mean {MEAN}), rows of {ROW} tokens, hidden size"
        f" {found['hidden_size']}",
        f"packed rows {packed:,.0f} tokens/s, {DOCUMENTS} documents padded to the longest"
        f" {padded:,.0f} tokens/s",
        f"packed over padded: {found['median_ratio']:.2f}, median of {found['rounds']} rounds"
        f" ({min(found['ratios']):.2f} to {max(found['ratios']):.2f})",
    ]
