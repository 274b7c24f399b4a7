"""Tokens until a target loss, with a curriculum and in uniform order, on sums with carries.

A document is a sum of two numbers of equally many digits, lowest digit first, and only its result counts in
the loss. Most sums are long. The curriculum feeds the shortest ones first (``difficulty: length``): how a
carry travels is learned where there is little else to learn. Both orders train the same model from the same
weights on the same documents, until the loss on held-out documents of all lengths lies below the target.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from picotron_ray.bench.common.machine import machine
from picotron_ray.bench.common.report import machine_line
from picotron_ray.bench.data.one_process import OneProcess, job_of

DIGITS, SHARES = (1, 2, 3), (1, 1, 8)
DOCUMENTS, BATCH, LENGTH = 20_000, 64, 14
TARGET, EVERY, STEPS = 0.3, 20, 1500
STAGES = (
    {"name": "one-digit", "difficulty": 0.1, "steps": 150},
    {"name": "two-digits", "difficulty": 0.2, "steps": 150},
    {"name": "all", "steps": 1},
)
ORDERS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "curriculum": {"difficulty": "length", "stages": STAGES},
}


def write_sums(path: Path, seed: int, count: int = DOCUMENTS) -> None:
    """Write sums as JSON lines: ``question`` and ``answer``."""
    pick, lines = random.Random(seed), []
    for _ in range(count):
        digits = pick.choices(DIGITS, SHARES)[0]
        one, other = (pick.randrange(10**digits) for _ in range(2))
        asked = f"{_reversed(one, digits)}+{_reversed(other, digits)}="
        lines.append(json.dumps({"question": asked, "answer": _reversed(one + other, digits + 1)}))
    path.write_text("\n".join(lines) + "\n")


def _reversed(number: int, digits: int) -> str:
    return f"{number:0{digits}d}"[::-1]


def tokens_to_target(order: str, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """Train until the target; returns the tokens fed, and the loss reached."""
    path = folder / f"sums-{seed}.jsonl"
    if not path.exists():
        write_sums(path, seed)
    data = {
        "source": "jsonl",
        "path": str(path),
        "loss_mask": True,
        "prompt_key": "question",
        "text_key": "answer",
        "batching": "packed",
        "max_batch_size": BATCH,
        "global_batch": BATCH,
        "sequence_length": LENGTH,
        "curriculum": ORDERS[order],
    }
    optimizer = {"learning_rate": 3e-3, "weight_decay": 0.0}
    job = job_of({"seed": seed, "steps": steps, "data": data, "optimizer": optimizer}, hidden=64)
    training, loss = OneProcess(job, folder / "cache"), float("inf")
    for step in range(1, steps + 1):
        training.train(training.batch(step))
        if step % EVERY == 0 and (loss := training.held_out(512)) < TARGET:
            break
    return {"tokens": training.tokens, "loss": loss, "reached": loss < TARGET}


def bench(seeds: int, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train every seed in both orders."""
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for seed in range(seeds):
            both = {order: tokens_to_target(order, seed, Path(folder), steps) for order in ORDERS}
            ratio = both["curriculum"]["tokens"] / both["uniform"]["tokens"]
            found.append({"seed": seed, **both, "ratio": ratio})
            say(f"seed {seed}: {_words(found[-1])}")
    ratios = [each["ratio"] for each in found]
    return {
        "machine": machine(),
        "target_nats": TARGET,
        "seeds": found,
        "median_ratio": statistics.median(ratios),
        "reached": all(each["curriculum"]["reached"] for each in found),
    }


def _words(found: dict[str, Any]) -> str:
    told = [
        f"{order} {found[order]['tokens']:,} tokens{'' if found[order]['reached'] else ' and not there'}"
        for order in ORDERS
    ]
    return f"{', '.join(told)}, ratio {found['ratio']:.3f}"


def lines(found: dict[str, Any]) -> list[str]:
    """Return the result for people."""
    return [
        machine_line(found),
        f"tokens until a held-out loss of {found['target_nats']} nats on sums with carries",
        *(f"  seed {each['seed']}: {_words(each)}" for each in found["seeds"]),
        f"curriculum over uniform order: {found['median_ratio']:.3f}, the median; an order that is not there"
        " counts what it was fed",
    ]
