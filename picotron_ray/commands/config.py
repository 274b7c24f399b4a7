"""``picotron-ray validate`` and ``config-schema``. Heavy imports happen inside the commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from picotron_ray.commands.output import emit
from picotron_ray.errors import PicotronError
from picotron_ray.launch import AsJson, Config, Overrides, reported


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
            emit({**found, **({"changed": changed} if resume else {})})
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

        emit(dict(table())) if as_json else print(markdown(), end="")
        return
    from picotron_ray.config.json_schema import job_schema

    print(json.dumps(job_schema(), indent=None if as_json else 2))
