"""``picotron-ray data``: what a run's steps feed, and what the data are like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from picotron_ray.commands.output import emit, table
from picotron_ray.launch import AsJson, Overrides, reported

data = typer.Typer(no_args_is_help=True, help="What steps feed, and what the data are like.")
Which = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="a config, or the name or address of a run that is stored"),
]


@data.command("show")
def data_show(
    config: Which,
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(help="which step")] = 1,
    rank: Annotated[int | None, typer.Option(help="only the rows of this rank's replica")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="show so many rows at most")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the very rows that a step feeds or fed: decoded, with their sources, documents and what counts.

    Text that counts in no loss is in brackets, but for the first token of a document, which never does. Rows
    of a committed step are compared with the ledger.

    Example: picotron-ray data show quickstart --step 812 --rank 3 --rows 2
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import data_commands

        found = data_commands.show_step(data_commands.job_of(config, overrides or []), step, rank, rows)
        emit(found) if as_json else print("\n".join(_shown(found)))


@data.command("score")
def data_score(
    config: Which,
    overrides: Overrides = None,
    by: Annotated[str, typer.Option(help="loss, gradient_norm or column")] = "loss",
    out: Annotated[Path, typer.Option(help="folder to write, for data.curriculum.scores")] = Path("scores"),
    run: Annotated[
        str | None, typer.Option(help="run whose commit scores the rows, for loss and gradient_norm")
    ] = None,
    step: Annotated[int | None, typer.Option(help="of that commit; left out: the newest")] = None,
    key: Annotated[str | None, typer.Option(help="column: key of a number in each record of jsonl")] = None,
    as_json: AsJson = False,
) -> None:
    """Score the difficulty of each training row, for a curriculum by what a model or a column says.

    Example: picotron-ray data score mine.yaml --by loss --run small --out scores
    """
    with reported(as_json):
        from picotron_ray.commands.bench_output import say
        from picotron_ray.runtime.driver import data_commands, score_command

        job = data_commands.job_of(config, overrides or [])
        table(score_command.score(job, by, out, run=run, step=step, key=key, say=say), as_json)


@data.command("stats")
def data_stats(config: Which, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Count documents, tokens, lengths, duplicates, held-out documents seen in training, and rows.

    Example: picotron-ray data stats quickstart data.source=text data.path=corpus/
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import data_commands

        found = data_commands.statistics(data_commands.job_of(config, overrides or []))
        emit(found) if as_json else print("\n".join(line for one in found for line in _counted(one)))


@data.command("prepare")
def data_prepare(
    config: Which,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="folder for the token files")] = ...,  # type: ignore[assignment]
    shards: Annotated[
        int | None, typer.Option(min=1, help="parts of each source, by whole files; else of some 64 MB")
    ] = None,
    dedupe: Annotated[bool, typer.Option(help="leave out documents that an earlier one equals")] = False,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="Ray cluster to use; else this machine's cores")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the config's text as token files (`data.source: memmap`) that train to the same rows.

    Killed, it goes on where it was when it is called again. Ends with the config's data section to use.

    Example: picotron-ray data prepare quickstart --out tokens --dedupe
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import data_commands, prepare_data, prepare_tasks

        job = data_commands.job_of(config, overrides or [])

        def say(line: dict[str, Any]) -> None:
            emit(line) if as_json else print(_progress(line), flush=True)

        run = prepare_tasks.on_ray(address) if address else prepare_tasks.on_this_machine
        found = prepare_data.prepare(job.data, out, shards, dedupe, run, say)
        emit(found) if as_json else print("\n".join(_prepared(found)))


def _progress(line: dict[str, Any]) -> str:
    if "part" in line:
        counts = f"{line['documents']:,} documents, {line['tokens']:,} tokens"
        return f"part {line['part']}: {counts}; {line['done']} of {line['parts']} parts are done"
    if "kept" in line:
        return f"{line['kept']} of {line['parts']} parts were there already"
    return f"joining {line['joining']} parts"


def _prepared(found: dict[str, Any]) -> list[str]:
    """Lines for people on what was prepared."""
    import yaml

    lines = []
    for name, source in found["sources"].items():
        parts = ", ".join(
            f"{source['tokens'][part]:,} tokens of {source['documents'][part]:,} documents {where}"
            for part, where in (("train", "to train on"), ("held_out", "held out"))
        )
        lines.append(f"{name}: {parts}; {source['duplicates']:,} duplicates left out")
        lines += [f"  {file}: xxh3_128 {digest}" for file, digest in source["digests"].items()]
    text = yaml.safe_dump({"data": found["data"]}, sort_keys=False, default_flow_style=None, width=100)
    return [*lines, "train from it with:", *text.rstrip().splitlines()]


def _counted(source: dict[str, Any]) -> list[str]:
    """Lines for people on one source's statistics."""
    lines = [f"{source['source']}: tokens {source['digest']}"]
    for name, title in (("train", "train"), ("held_out", "held out")):
        part = source[name]
        words = [f"{part['tokens']:,} tokens"]
        if part["documents"] is None:
            words.append("documents not known (data.end_token)")
        else:
            words.append(f"{part['documents']:,} documents, {part['duplicates']:,} of them duplicates")
        if part["counted_share"] is not None:
            words.append(f"{part['counted_share']:.1%} of the tokens count in the loss")
        lines.append(f"  {title}: {', '.join(words)}")
        if part["lengths"]:
            lengths = ", ".join(f"{key} {value:,}" for key, value in part["lengths"].items())
            lines.append(f"    tokens per document: {lengths}")
        if part["rows"] is not None:
            lines.append(f"    rows: {part['rows']:,}, {part['full']:.1%} full")
    if source["train"]["no_rows"]:
        lines.append(f"  no rows: {source['train']['no_rows']}")
    if source["overlap"] is not None:
        lines.append(f"  held-out documents that stand in train, too: {source['overlap']:,}")
    return lines


def _shown(found: dict[str, Any]) -> list[str]:
    """Lines for people."""
    if "samples" not in found:
        return [f"step {found['step']}: {found['ledger']}"]
    whose = "" if found["rank"] is None else f", rank {found['rank']} of {found['layout']}"
    stage = f", stage {found['stage']} of the curriculum" if found["stage"] else ""
    first, last = found["samples"]
    lines = [
        f"step {found['step']}{whose}: rows {first} to {last - 1}; of the whole step {found['tokens']}"
        f" tokens, {found['counted']} count in the loss, {found['padding_ratio']:.1%} is padding{stage}",
        f"ledger: {found['ledger']}",
    ]
    for row in found["rows"]:
        source = f" of {row['source']}" if row["source"] else ""
        lines.append(f"row {row['row']}: sample {row['sample']}{source}")
        lines += [f"  {_part(part)}" for part in row["parts"]]
    if found["left_off"]:
        lines.append(f"{found['left_off']} more rows")
    return lines


def _part(part: dict[str, Any]) -> str:
    where = f"{part['first']}..{part['last'] - 1}"
    if part["stream"] is None:
        return f"{where} padding"
    said = "".join(text if counts else f"[{text}]" for text, counts in part["texts"])
    return f"{where} token {part['stream']}: {said!r}"
