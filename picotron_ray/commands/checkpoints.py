"""``picotron-ray checkpoints`` and ``ledger``: they take the config, which says where stored data is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from picotron_ray.commands.output import emit, table
from picotron_ray.launch import AsJson, Config, Overrides, reported

checkpoints = typer.Typer(no_args_is_help=True, help="What is committed in storage.")
ledger = typer.Typer(no_args_is_help=True, help="Which samples were fed.")
EMPTY = "nothing is committed"


@checkpoints.command("ls")
def checkpoints_list(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Every commit that is kept, oldest first.

    Example: picotron-ray checkpoints ls quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import storage_commands

        table(storage_commands.list_commits(_job(config, overrides)), as_json, EMPTY)


@checkpoints.command("verify")
def checkpoints_verify(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Read every commit and compare all digests; exit code 4 where one is damaged.

    Example: picotron-ray checkpoints verify quickstart --json
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import storage_commands

        rows = storage_commands.verify_commits(_job(config, overrides))
        table(rows, as_json, EMPTY)
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

        table([storage_commands.collect_garbage(_job(config, overrides), force)], as_json)


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
            emit(keys) if as_json else print(yaml.safe_dump({"model": keys}, sort_keys=False).rstrip())
            return
        done = hf_import.import_hf(_job(config, overrides), folder)
        text = f"run {done['run']}: step 0 is committed, {done['tensors']} tensors from {folder}"
        note = f"\nnote: {done['note']}" if "note" in done else ""
        emit(done) if as_json else print(text + note)


@checkpoints.command("export-hf")
def checkpoints_export(
    config: Config,
    folder: Annotated[Path, typer.Option("--to", help="new or empty folder")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="of the commit; default: the newest")] = None,
    dtype: Annotated[str, typer.Option(help="of the tensors: float32 or bfloat16")] = "float32",
    shard_gib: Annotated[float, typer.Option(min=0.001, help="most GiB per file")] = 4.0,
    weights: Annotated[str, typer.Option(help="trained, or ema: their moving average")] = "trained",
    adapter: Annotated[bool, typer.Option("--adapter", help="LoRA's matrices alone, for PEFT")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commit as a Hugging Face checkpoint that transformers loads; what LoRA trained is merged in.

    Example: picotron-ray checkpoints export-hf quickstart --to ./exported --dtype bfloat16
    """
    with reported(as_json):
        from picotron_ray.errors import ConfigError
        from picotron_ray.runtime.run_storage import hf_export

        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"--dtype: saw {dtype}, expected float32 or bfloat16")
        if weights not in ("trained", "ema"):
            raise ConfigError(f"--weights: saw {weights}, expected trained or ema")
        job, most = _job(config, overrides), int(shard_gib * 2**30)
        done = hf_export.export_hf(job, folder, step, dtype, most, weights, adapter=adapter)
        text = f"run {done['run']}: step {done['step']} is in {folder}, {done['files']} files of tensors"
        text += f", with the data's tokenizer, blake3 {done['tokenizer']}" if "tokenizer" in done else ""
        emit(done) if as_json else print(text)


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
            emit(found)
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
