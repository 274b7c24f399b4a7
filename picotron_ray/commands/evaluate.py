"""``picotron-ray evaluate``: tasks of a harness on a commit's model. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from picotron_ray.commands.generate import Step, Weights
from picotron_ray.commands.output import emit, table
from picotron_ray.commands.story import Which
from picotron_ray.launch import AsJson, reported


def evaluate(
    run: Which,
    tasks: Annotated[str, typer.Option(help="names of tasks of lm-eval, with commas between")],
    step: Step = None,
    weights: Weights = "trained",
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="examples before each question")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="documents of each task; default: all")] = None,
    include: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder with tasks of your own", exists=True)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run tasks of EleutherAI's lm-eval on a run's commit, in this process; it needs no cluster.

    Example: picotron-ray evaluate quickstart --tasks lambada_openai --limit 100
    """
    with reported(as_json):
        from picotron_ray.runtime.inference import lm_eval_adapter

        names = [name for name in tasks.split(",") if name]
        found = lm_eval_adapter.evaluate(run, names, step, weights, num_fewshot, limit, include)
        if as_json:
            return emit(found)
        print(f"run {found['run']}, step {found['step']}")
        rows = [
            {"task": task, "figure": name, "value": f"{value:.4f}"}
            for task, figures in found["results"].items()
            for name, value in figures.items()
        ]
        table(rows, as_json, "no figures")
    return None
