"""``picotron-ray metrics``: the metrics that a run serves."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from picotron_ray.commands.output import table
from picotron_ray.launch import AsJson


def metrics(
    grafana: Annotated[bool, typer.Option("--grafana", help="a dashboard for Grafana's import")] = False,
    as_json: AsJson = False,
) -> None:
    """Print every metric that a run serves, or (--grafana) a dashboard of them.

    Example: picotron-ray metrics --grafana
    """
    from picotron_ray.observability.catalogue import CATALOGUE

    if grafana:
        from picotron_ray.observability.dashboard import dashboard as made

        print(json.dumps(made(), indent=None if as_json else 1))
        return
    rows = [
        {"metric": m.name, "kind": m.kind, "labels": list(m.all_labels), "of": m.server, "means": m.help}
        for m in CATALOGUE.values()
    ]
    table(rows, as_json)
