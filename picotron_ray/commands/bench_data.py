"""``picotron-ray bench`` of data: packing and curricula."""

from __future__ import annotations

from typing import Annotated

import typer

from picotron_ray.commands.bench_output import JsonFile, result, say, writing


def bench_packing(
    rounds: Annotated[int, typer.Option(min=1, help="each with both sides once")] = 10,
    hidden: Annotated[int, typer.Option(min=4, help="size of the model's hidden state")] = 256,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second of packed rows, against batches padded to the longest of 8 documents.

    Example: picotron-ray bench packing --rounds 3
    """
    with writing(json_file):
        from picotron_ray.bench.data import packing

        found = packing.bench(rounds, hidden, say)
        result(found, packing.lines(found), json_file)


def bench_curriculum(
    seeds: Annotated[int, typer.Option(min=1, help="runs of each order")] = 5,
    steps: Annotated[int, typer.Option(min=20, help="of a run at most")] = 1500,
    json_file: JsonFile = None,
) -> None:
    """Tokens until a target loss on sums with carries: short sums first, against uniform order.

    Example: picotron-ray bench curriculum --seeds 1 --steps 400
    """
    with writing(json_file):
        from picotron_ray.bench.data import curriculum

        found = curriculum.bench(seeds, steps, say)
        result(found, curriculum.lines(found), json_file)
