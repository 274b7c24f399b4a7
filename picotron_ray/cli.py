"""``picotron-ray``: everything that a user does from a shell. Heavy imports happen inside the commands.

Commands that look at stored data (``checkpoints``, ``ledger``) take the config, which says where that is;
commands that speak to a run that goes on take its name.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from picotron_ray import launch
from picotron_ray.bench_commands import benchmarks
from picotron_ray.doctor_command import doctor
from picotron_ray.errors import PicotronError
from picotron_ray.launch import AsJson, Config, Overrides, reported
from picotron_ray.plan_command import analyse, plan
from picotron_ray.probe_command import probe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a language model on whatever GPUs there are; take any away, bring others back.",
)
checkpoints = typer.Typer(no_args_is_help=True, help="What is committed in storage.")
ledger = typer.Typer(no_args_is_help=True, help="Which samples were fed.")
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(ledger, name="ledger")
app.add_typer(benchmarks, name="bench")
app.command("train")(launch.train)
app.command("doctor")(doctor)
app.command("plan")(plan)
app.command("analyse")(analyse)
app.command("probe")(probe)

Run = Annotated[str, typer.Argument(help="name of a run")]


def _emit(value: Any) -> None:
    print(json.dumps(value), flush=True)


@app.command()
def validate(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="also compare with the run of that name in storage")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the resolved config, or one line per mistake (exit code 2) and the step that refused it.

    A model of the user's own is built, in a process of its own.

    Example: picotron-ray validate tiny steps=3
    """
    with reported(as_json), _naming_the_step(as_json):
        from picotron_ray.config.export import public_dict, to_yaml
        from picotron_ray.config.support.precision import outlook

        job = _judged_job(config, overrides)
        changed, notes = _compared(job) if resume else [], list(filter(None, [outlook(job)]))
        if as_json:
            found = {"valid": True, "config": public_dict(job), **({"notes": notes} if notes else {})}
            _emit({**found, **({"changed": changed} if resume else {})})
        else:
            lines = changed or [to_yaml(job).rstrip()]
            print("\n".join([*lines, *(f"# {note}" for note in notes)]))


def _judged_job(config: str, overrides: list[str] | None) -> Any:
    """The job as the user wrote it, once a launch's steps from words have taken it."""
    from picotron_ray.runtime.driver import resolve_job, submission

    written = resolve_job.resolve_words(config, overrides or [], submission=submission.current())
    resolve_job.resolve(written, resolve_job.FROM_WORDS)
    return written.job


@contextlib.contextmanager
def _naming_the_step(as_json: bool) -> Iterator[None]:
    """Name on stdout, beside the error's own lines, the step that refused; JSON has it anyway."""
    try:
        yield
    except PicotronError as error:
        if error.step and not as_json:
            print(f"# refused by step: {error.step}")
        raise


def _compared(job: Any) -> list[str]:
    """List the keys in which a stored run of that name differs; ConfigError where one may not."""
    from picotron_ray.runtime.driver import storage_commands

    return storage_commands.changed_keys(job)


@app.command("config-schema")
def config_schema(
    on_resume: Annotated[
        bool, typer.Option("--on-resume", help="which keys may change between two launches of a run")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the JSON Schema of a config, for editors (with --json on one line).

    Example: picotron-ray config-schema --json
    """
    if on_resume:
        from picotron_ray.config.resume import markdown, table

        _emit(dict(table())) if as_json else print(markdown(), end="")
        return
    from picotron_ray.config.json_schema import job_schema

    print(json.dumps(job_schema(), indent=None if as_json else 2))


@app.command()
def status(run: Run, as_json: AsJson = False) -> None:
    """Step, loss, layout, members and recent events of a run that goes on; how one ended that does not.

    Of one that is being launched it says that. One that has ended and keeps what storage did not take exits
    with 4, a name that was never launched here with 2.

    Example: picotron-ray status quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control
        from picotron_ray.runtime.driver.console import status_lines

        seen = control.status(run)
        _emit(seen) if as_json else print("\n".join(status_lines(seen)))


@app.command()
def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep reading until the run ends")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what the run's processes on this machine wrote, each line after its pid; it outlives the run.

    Example: picotron-ray logs quickstart --follow
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import run_logs

        for pid, line in run_logs.log_lines(run, follow):
            _emit({"pid": int(pid), "line": line}) if as_json else print(f"{pid}: {line}", flush=follow)


@app.command()
def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="kill it, without a commit")] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="as --now, and delete what storage could not take yet")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a run with a commit; also removes whatever a killed run left on this machine.

    What storage could not take is kept for the next launch, unless --discard says otherwise. The exit code
    is 0 where it stopped or finished, 4 where storage did not take its last state, 3 where it failed.

    Example: picotron-ray stop quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control
        from picotron_ray.runtime.driver.console import console, summary_lines

        code, summary = control.stop(run, now, console(as_json), discard)
        if as_json:
            _emit(summary or {"run": run, "status": "stopping" if code else "ended"})
        elif summary:
            print("\n".join(summary_lines(summary)))
    raise typer.Exit(code)


@app.command()
def dashboard(
    grafana: Annotated[bool, typer.Option("--grafana", help="a dashboard for Grafana's import")] = False,
    as_json: AsJson = False,
) -> None:
    """Print every metric that a run serves, or (--grafana) a dashboard of them.

    Example: picotron-ray dashboard --grafana
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
    _table(rows, as_json)


@app.command("checkpoint-now")
def checkpoint_now(
    run: Run,
    timeout_s: Annotated[float, typer.Option(help="longest wait for the commit")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Commit a checkpoint at the next step and wait until it is durable.

    Example: picotron-ray checkpoint-now quickstart --timeout-s 60
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import control

        step = control.checkpoint_now(run, timeout_s, partial(print, file=sys.stderr, flush=True))
        _emit({"run": run, "step": step}) if as_json else print(f"run {run}: step {step} is committed")


@checkpoints.command("ls")
def checkpoints_list(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Every commit that is kept, oldest first.

    Example: picotron-ray checkpoints ls quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import storage_commands

        _table(storage_commands.list_commits(_job(config, overrides)), as_json)


@checkpoints.command("verify")
def checkpoints_verify(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Read every commit and compare all digests; exit code 4 where one is damaged.

    Example: picotron-ray checkpoints verify quickstart --json
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import storage_commands

        rows = storage_commands.verify_commits(_job(config, overrides))
        _table(rows, as_json)
        if any(row["problems"] for row in rows):
            raise typer.Exit(4)


@checkpoints.command("gc")
def checkpoints_gc(
    config: Config,
    overrides: Overrides = None,
    as_json: AsJson = False,
    force: Annotated[
        bool, typer.Option("--force", help="also where the run seems to go on elsewhere, which ends it")
    ] = False,
) -> None:
    """Retire commits beyond retention and delete what nothing needs; refused while the run goes on.

    Example: picotron-ray checkpoints gc quickstart checkpoint.keep_last=2
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import storage_commands

        _table([storage_commands.collect_garbage(_job(config, overrides), force)], as_json)


@checkpoints.command("import-hf")
def checkpoints_import(
    folder: Annotated[Path, typer.Argument(help="Hugging Face checkpoint: config.json and safetensors")],
    config: Annotated[
        str | None, typer.Argument(help="the run to make; left out: print the model section it needs")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of Hugging Face step 0 of a new run; training then starts from it.

    Example: picotron-ray checkpoints import-hf ./SmolLM-135M smollm-135m name=tuned
    """
    with reported(as_json):
        import yaml

        from picotron_ray.runtime.run_storage import hf_import

        if config is None:
            keys = hf_import.model_section(folder)
            _emit(keys) if as_json else print(yaml.safe_dump({"model": keys}, sort_keys=False).rstrip())
            return
        done = hf_import.import_hf(_job(config, overrides), folder)
        text = f"run {done['run']}: step 0 is committed, {done['tensors']} tensors from {folder}"
        note = f"\nnote: {done['note']}" if "note" in done else ""
        _emit(done) if as_json else print(text + note)


@checkpoints.command("export-hf")
def checkpoints_export(
    config: Config,
    folder: Annotated[Path, typer.Option("--to", help="new or empty folder")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="of the commit; default: the newest")] = None,
    dtype: Annotated[str, typer.Option(help="of the tensors: float32 or bfloat16")] = "float32",
    shard_gib: Annotated[float, typer.Option(min=0.001, help="most GiB per file")] = 4.0,
    as_json: AsJson = False,
) -> None:
    """Write a commit as a Hugging Face checkpoint that transformers loads.

    Example: picotron-ray checkpoints export-hf quickstart --to ./exported --dtype bfloat16
    """
    with reported(as_json):
        from picotron_ray.errors import ConfigError
        from picotron_ray.runtime.run_storage import hf_export

        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"--dtype: saw {dtype}, expected float32 or bfloat16")
        done = hf_export.export_hf(_job(config, overrides), folder, step, dtype, int(shard_gib * 2**30))
        text = f"run {done['run']}: step {done['step']} is in {folder}, {done['files']} files of tensors"
        _emit(done) if as_json else print(text)


@ledger.command("verify")
def ledger_verify(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Recompute from the source data what the committed ledger says was fed; exit code 4 where it differs.

    Files that are not those of the run are refused by their fingerprint, exit code 2.

    Example: picotron-ray ledger verify quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import storage_commands

        found = storage_commands.verify_ledger(_job(config, overrides))
        if as_json:
            _emit(found)
        else:
            print(
                f"ledger of {found['steps']} steps: {found['samples']} samples, {found['lost']} lost,"
                f" {found['repeated']} repeated, {len(found['wrong'])} wrong"
                + (f"; {found['skipped']} fed without an update" if found["skipped"] else "")
                + (f"; {found['passed_over']} passed over by rewinds" if found["passed_over"] else "")
            )
            print("\n".join(found["wrong"]), end="\n" if found["wrong"] else "")
        if found["lost"] or found["repeated"] or found["wrong"]:
            raise typer.Exit(4)


def _job(config: str, overrides: list[str] | None) -> Any:
    from picotron_ray.runtime.driver.resolve_job import resolve_words

    return resolve_words(config, overrides or []).job


def _table(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows of equal keys: as one JSON list, or as aligned text."""
    if as_json:
        return _emit(rows)
    if not rows:
        return print("nothing is committed")
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return None


def _cell(value: Any) -> str:
    return ("; ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


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
