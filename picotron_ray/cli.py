"""``picotron-ray``: everything that a user does from a shell. Heavy imports happen inside the commands.

Commands that look at stored data (``checkpoints``, ``ledger``) take the config, which says where that is;
commands that speak to a run that goes on take its name.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from picotron_ray import launch
from picotron_ray.commands import config, orders, run, story
from picotron_ray.commands.alerts import alerts
from picotron_ray.commands.bench import benchmarks
from picotron_ray.commands.checkpoints import checkpoints, ledger
from picotron_ray.commands.dashboard import dashboard
from picotron_ray.commands.data import data
from picotron_ray.commands.debug import debug
from picotron_ray.commands.doctor import doctor
from picotron_ray.commands.evaluate import evaluate
from picotron_ray.commands.generate import generate
from picotron_ray.commands.logs import logs
from picotron_ray.commands.metrics import metrics
from picotron_ray.commands.one_line_errors import OneLineGroup
from picotron_ray.commands.plan import analyse, plan
from picotron_ray.commands.probe import probe
from picotron_ray.commands.profile import profile
from picotron_ray.commands.top import top

app = typer.Typer(
    cls=OneLineGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a language model on whatever GPUs there are; take any away, bring others back.",
)
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(ledger, name="ledger")
app.add_typer(alerts, name="alerts")
app.add_typer(benchmarks, name="bench")
app.add_typer(data, name="data")
app.add_typer(debug, name="debug")
app.command("train")(launch.train)
app.command("doctor")(doctor)
app.command("plan")(plan)
app.command("analyse")(analyse)
app.command("probe")(probe)
app.command("validate")(config.validate)
app.command("config-schema")(config.config_schema)
app.command("status")(run.status)
app.command("logs")(logs)
app.command("stop")(run.stop)
app.command("dashboard")(dashboard)
app.command("metrics")(metrics)
app.command("report")(story.report)
app.command("runs")(story.runs)
app.command("generate")(generate)
app.command("evaluate")(evaluate)
app.command("top")(top)
app.command("profile")(profile)
app.command("checkpoint-now")(run.checkpoint_now)
app.command("pause")(orders.pause)
app.command("resume")(orders.resume)
app.command("resize")(orders.resize)
app.command("drain")(orders.drain)
app.command("nodes")(orders.nodes)

COMMANDS = "picotron_ray.commands"
"""Entry points of packages that bring commands of their own, as sweeps do: a Typer app each, by its name."""


def _add_commands_of_other_packages() -> None:
    found = {entry.name: entry for entry in entry_points(group=COMMANDS)}
    for name, entry in sorted(found.items()):
        app.add_typer(entry.load(), name=name)


def main() -> None:
    """Entry point of the console script."""
    _add_commands_of_other_packages()
    app()


if __name__ == "__main__":
    main()
