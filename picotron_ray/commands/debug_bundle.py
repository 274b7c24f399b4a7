"""``picotron-ray debug bundle NAME``: everything that a bug report needs, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from picotron_ray.commands.logs import RunOrAddress
from picotron_ray.commands.output import emit
from picotron_ray.launch import AsJson, reported


def bundle(
    run: RunOrAddress,
    to: Annotated[
        Path | None, typer.Option("--to", help="the file to write, a zip; left out: NAME-bundle.zip")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write config, status, events, failures, stacks, logs, versions and environment of a run into a zip.

    Secrets are cut out of all of it. It works for a run that is over, too, from its storage alone.

    Example: picotron-ray debug bundle quickstart --to report.zip
    """
    with reported(as_json):
        from picotron_ray.runtime.driver.bundle import write_bundle

        told = write_bundle(run, to)
        if as_json:
            emit(told)
            return
        for name, why in told["missing"].items():
            print(f"{name} is not in it: {why}")
        print(f"run {told['run']}: {len(told['files'])} parts, {told['bytes']:,} bytes in {told['file']}")
