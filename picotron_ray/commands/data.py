"""``picotron-ray data``: what a run's steps feed, and what the data are like."""

from __future__ import annotations

from typing import Annotated, Any

import typer

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

    Text that counts in no loss is in brackets. Rows of a committed step are compared with the ledger.

    Example: picotron-ray data show quickstart --step 812 --rank 3 --rows 2
    """
    with reported(as_json):
        from picotron_ray.commands.output import emit
        from picotron_ray.runtime.driver import data_commands

        found = data_commands.show_step(data_commands.job_of(config, overrides or []), step, rank, rows)
        emit(found) if as_json else print("\n".join(_shown(found)))


@data.command("stats")
def data_stats(config: Which, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Count documents, tokens, lengths, duplicates, held-out documents seen in training, and rows.

    Example: picotron-ray data stats quickstart data.source=text data.path=corpus/
    """
    with reported(as_json):
        from picotron_ray.commands.output import emit
        from picotron_ray.runtime.driver import data_commands

        found = data_commands.statistics(data_commands.job_of(config, overrides or []))
        emit(found) if as_json else print("\n".join(line for one in found for line in _counted(one)))


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
        f"step {found['step']}{whose}: rows {first} to {last - 1}, {found['tokens']} tokens of the step,"
        f" {found['padding_ratio']:.1%} padding{stage}",
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
