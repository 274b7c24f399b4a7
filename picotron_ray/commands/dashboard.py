"""``picotron-ray dashboard``: the live page of a run."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from picotron_ray.commands.output import emit
from picotron_ray.launch import AsJson, reported

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME|URL", help="a run, or its address in storage: s3://bucket/runs/NAME, ./runs/NAME"
    ),
]
PORT = 8270


def dashboard(
    run: Run = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="to listen on; 0: any that is free")] = PORT,
    host: Annotated[
        str, typer.Option(help="address to listen on; as it is, this machine alone is served")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="a further name by which browsers may ask, such as a proxy's"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print the page's content as JSON, and end")] = False,
    grafana: Annotated[bool, typer.Option("--grafana", help="moved: see the command metrics")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a page of a run that goes on, is over, or is dead: map, curves, timeline, logs, buttons.

    Prints the address to open, which carries a token. The page of a run that goes on follows it; one that is
    over or dead is read from storage alone.

    Example: picotron-ray dashboard quickstart
    """
    if grafana or run is None:
        _moved(grafana, as_json)
        return
    with reported(as_json):
        from picotron_ray.runtime.dashboard import serve

        if once:
            _print_once(run)
            return
        serve.refuse_missing_extra()
        page = serve.ServedPage(host, serve.bind(host, port), allow_host or ())
        for line in serve.warnings(host):
            print(f"warning: {line}", file=sys.stderr)
        told = {"run": run, "url": page.url, "host": host, "port": page.port, "token": page.token}
        serve.serve(run, page, lambda: emit(told) if as_json else print(f"run {run}: {page.url}", flush=True))


def _print_once(run: str) -> None:
    from picotron_ray.runtime.dashboard.watch import Watch

    watch = Watch(run)
    print(json.dumps(watch.sections(), allow_nan=False), flush=True)
    watch.close()


def _moved(grafana: bool, as_json: bool) -> None:
    """Do what this command did before it served the page."""
    from picotron_ray.commands.metrics import metrics

    words = "picotron-ray metrics --grafana" if grafana else "picotron-ray metrics"
    print(f"note: this is `{words}` now; `picotron-ray dashboard NAME` serves a run's page", file=sys.stderr)
    metrics(grafana=grafana, as_json=as_json)
