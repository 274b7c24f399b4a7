"""``picotron-ray alerts``: what is wrong with a run that goes on, and what is not to be told."""

from __future__ import annotations

from typing import Annotated

import typer

from picotron_ray.commands.output import emit, table
from picotron_ray.launch import AsJson, Config, Overrides, reported

alerts = typer.Typer(no_args_is_help=True, help="Findings of the rules over a run's telemetry.")
Run = Annotated[str, typer.Argument(help="name of a run")]
LONGEST_S = 365 * 86_400.0


@alerts.command("ls")
def ls(
    run: Run,
    every: Annotated[bool, typer.Option("--all", help="also what is over")] = False,
    as_json: AsJson = False,
) -> None:
    """List what fires now: rule, severity, where, since when, evidence, and what to do next.

    Example: picotron-ray alerts ls quickstart --all
    """
    with reported(as_json):
        from picotron_ray.runtime.driver.run_alerts import alert_lines, alerts_of

        found = alerts_of(run)
        emit(found) if as_json else print("\n".join(alert_lines(found, every)))


@alerts.command("silence")
def silence(
    run: Run,
    rule: Annotated[str, typer.Argument(help="name of a rule, or * for all")],
    span: Annotated[str, typer.Option("--for", help="how long: 90s, 30m, 2h, 1d")] = "1h",
    why: Annotated[str, typer.Option(help="why, for whoever looks")] = "",
    as_json: AsJson = False,
) -> None:
    """Silence a rule for a while: its findings are noted, and neither told nor acted on.

    Example: picotron-ray alerts silence quickstart straggler --for 2h --why "node 3 is known to be slow"
    """
    with reported(as_json):
        from picotron_ray.config.time_span import seconds_of
        from picotron_ray.errors import ConfigError
        from picotron_ray.runtime.driver.run_alerts import silence as silenced

        seconds = seconds_of(span) or 0.0
        if not 0 < seconds <= LONGEST_S:
            raise ConfigError(f"--for: saw {span!r}, expected up to a year, such as 90s, 30m, 2h or 1d")
        silenced(run, rule, seconds, why)
        told = {"run": run, "rule": rule, "seconds": seconds}
        emit(told) if as_json else print(f"run {run}: rule {rule} is silenced for {span}")


@alerts.command("unsilence")
def unsilence(
    run: Run,
    rule: Annotated[str, typer.Argument(help="name of a rule that is silenced, or * as it was given")],
    as_json: AsJson = False,
) -> None:
    """End a silence: what fires of the rule is told with the next window.

    One that the config gives comes back with another coordinator.

    Example: picotron-ray alerts unsilence quickstart straggler
    """
    with reported(as_json):
        from picotron_ray.runtime.driver.run_alerts import unsilence as unsilenced

        unsilenced(run, rule)
        emit({"run": run, "rule": rule}) if as_json else print(
            f"run {run}: the silence of rule {rule} is ended"
        )


@alerts.command("rules")
def rules(config: Config = "quickstart", overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the rules as a config has them: what each looks at, when it fires, and what it has done.

    Example: picotron-ray alerts rules quickstart
    """
    with reported(as_json):
        from picotron_ray.config.load import load_job
        from picotron_ray.runtime.driver.run_alerts import rule_rows

        table(rule_rows(load_job(config, overrides or [])), as_json)
