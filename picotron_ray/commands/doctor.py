"""``picotron-ray doctor``: whether machines, cluster and storage will carry a run."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from picotron_ray.launch import AsJson, Overrides, reported

FAILED = 3
SomeConfig = Annotated[
    str | None,
    typer.Argument(help="a YAML file or a recipe, whose storage and folders are used; left out: defaults"),
]


def doctor(
    config: SomeConfig = None,
    overrides: Overrides = None,
    drill: Annotated[
        bool, typer.Option(help="also train for seconds, kill a worker, verify (two minutes at most)")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check ports, Ray's authentication, memory folder, limits, clocks, storage, NCCL, GPUs; then a drill.

    On this machine, or on all nodes of the cluster that RAY_ADDRESS names. One line each, with the mend; exit
    code 3 where something failed. Nothing is left behind.

    Example: picotron-ray doctor quickstart --no-drill
    """
    with reported(as_json):
        from picotron_ray.runtime.doctor.examine import examine
        from picotron_ray.runtime.doctor.finding import lines
        from picotron_ray.runtime.driver.follow_run import without_rays_messages
        from picotron_ray.runtime.driver.resolve_job import resolve_words

        job = resolve_words(config or "tiny", overrides or []).job
        findings, terminal = [], sys.stdout
        with without_rays_messages():
            for part in examine(job, config is not None, drill):
                findings += part
                if not as_json:
                    print("\n".join(lines(part)), file=terminal, flush=True)
    failed = any(found.status == "failed" for found in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [found.plain() for found in findings]}), flush=True)
    if failed:
        raise typer.Exit(FAILED)
