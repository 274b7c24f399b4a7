"""Report of a run as one HTML page that loads nothing: from its account, curves, events and windows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from picotron_ray.observability.goodput import CAUSES, FAILURE_CAUSES
from picotron_ray.observability.report.svg import Mark, Span, line_chart, stacked_bar, timeline
from picotron_ray.observability.windows import TelemetryWindow, series

MOST_ROWS = 200
"""Rows of a table; of more, the newest."""
MOST_SPANS = 40
"""Generations of the timeline; of more, the newest."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content policy of the page, by which a browser refuses whatever it would load."""
Account = Mapping[str, Any]


def report_page(
    account: Account,
    config: Mapping[str, Any],
    curve: Sequence[tuple[int, float, float]],
    events: Sequence[Mapping[str, Any]],
    windows: Sequence[TelemetryWindow],
) -> str:
    """Return the page.

    Args:
        account: as `runtime.run_storage.run_account` makes it.
        curve: step, time and loss of steps; where there are none, the loss is that of the windows.
        events: of the run, oldest first.
    """
    title = f"Run {account['run']}"
    began_s = account["began_at_s"] or 0.0
    sections = [
        ("Summary", _summary(account)),
        ("Loss", _loss(account, curve, windows)),
        ("Generations over time", _timeline(account, began_s)),
        ("Audited goodput", _goodput(account)),
        ("Failures and recoveries", _failures(account)),
        ("Layouts", _layouts(account)),
        ("Speed and memory", _windows(windows, began_s)),
        ("Ledger", _ledger(account)),
        ("Events", _events(events)),
        ("Environment", _environment(account, config)),
    ]
    body = "".join(_section(head, content) for head, content in sections)
    style = files("picotron_ray.observability.report").joinpath("style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f'<body><a class="skip" href="#main">Skip to the report</a><header><h1>{escape(title)}</h1>'
        f'<p class="note">{escape(_made(account))}</p></header><main id="main">{body}</main></body></html>\n'
    )


def _section(head: str, content: str) -> str:
    name = head.lower().replace(" ", "-")
    empty = '<p class="note">Nothing is known of this.</p>'
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(head)}</h2>{content or empty}</section>'
    )


def _made(account: Account) -> str:
    newest = account["updated_s"]
    as_of = f"as of {_clock(newest)}" if newest else "without any sign of life"
    return f"From {account['storage']}, {as_of}."


def _summary(account: Account) -> str:
    seconds = account["seconds"]
    rows = {
        "State": account["state"],
        "Step": f"{account['step']} of {account['steps'] or '?'}",
        "Loss": _figure(account["loss"], ".4f"),
        "Held-out loss": _figure(account["eval_loss"], ".4f"),
        **{f"Loss on {name}": _figure(loss, ".4f") for name, loss in account.get("eval_sets", {}).items()},
        "Bigram baseline": _figure(account["baseline_loss"], ".4f"),
        "Goodput": _figure(account["goodput"], ".1%"),
        "Wall time": duration(account["wall_s"]),
        "Of it paused": duration(seconds["paused"]),
        "Failures": str(len(account["failures"])),
        "Generations": str(len(account["generations"])),
        "Commits": str(len(account["checkpoints"])),
        "Began": _clock(account["began_at_s"]) if account["began_at_s"] else "-",
    }
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in rows.items())
    problems = "".join(f"<li>{escape(line)}</li>" for line in account["complaints"])
    told = f"<p>Not read:</p><ul>{problems}</ul>" if problems else ""
    return f"<dl>{listed}</dl>{told}"


def _loss(
    account: Account, curve: Sequence[tuple[int, float, float]], windows: Sequence[TelemetryWindow]
) -> str:
    points = [(float(step), loss) for step, _, loss in curve]
    if len(points) < 2:
        points = [(w.figures["step"], w.figures["loss"]) for w in windows if "loss" in w.figures]
    marks = [
        *(
            Mark(one["step"], "commit", "·", f"commit of step {one['step']}")
            for one in account["checkpoints"]
        ),
        *(_change(one, one["start_step"]) for one in account["generations"][1:]),
        *(_failure_mark(one, one["step"]) for one in account["failures"]),
    ]
    chart = line_chart("Loss by step", [("loss", points)], marks, y_label="nats per token")
    key = (
        '<p class="note">F: a failure. G: a generation begins. Dots: commits.'
        " Each mark says more where a pointer rests on it; the tables below list them.</p>"
    )
    return chart and chart + key


def _commits(account: Account) -> list[int]:
    return [int(one["step"]) for one in account["checkpoints"]]


def _change(generation: Mapping[str, Any], x: float) -> Mark:
    name = f"{generation['term']}.{generation['n']}"
    text = f"generation {name}, {generation['layout']} on {generation['workers']}: {generation['reason']}"
    return Mark(x, "change", "G", text)


def _failure_mark(failure: Mapping[str, Any], x: float) -> Mark:
    return Mark(x, "failure", "F", f"{failure['kind']} of {failure['target']} at step {failure['step']}")


def _timeline(account: Account, began_s: float) -> str:
    known = [one for one in account["generations"] if one["began_at_s"]]
    end_s = account["wall_s"]
    starts = [one["began_at_s"] - began_s for one in known]
    spans = [
        Span(
            start,
            max(start, following),
            f"{one['layout']} on {one['workers']}",
            f"generation {one['term']}.{one['n']}, {one['layout']} on {one['workers']} workers, steps"
            f" {one['start_step']} to {one['end_step']}: {one['reason']}",
        )
        for one, start, following in zip(known, starts, [*starts, end_s][1:], strict=True)
    ]
    marks = [_failure_mark(one, one["detected_s"]) for one in account["failures"]]
    shown = spans[-MOST_SPANS:]
    if shown:
        marks = [mark for mark in marks if mark.x >= shown[0].start]
    note = f'<p class="note">The newest {MOST_SPANS} of {len(spans)}.</p>' if len(spans) > MOST_SPANS else ""
    return timeline("Generations over time", shown, marks, "seconds since the run began") + note


def _goodput(account: Account) -> str:
    seconds, wall_s = account["seconds"], account["wall_s"]
    if not wall_s:
        return ""
    bar = stacked_bar(
        "Wall time by cause", [(cause, seconds[cause]) for cause in CAUSES if seconds[cause] > 0]
    )
    rows = [
        [cause, f"{seconds[cause]:.1f}", f"{seconds[cause] / wall_s:.2%}"]
        for cause in CAUSES
        if seconds[cause]
    ]
    total = sum(seconds.values())
    rows.append(["all of it", f"{total:.1f}", f"{total / wall_s:.2%}"])
    return bar + table(
        "Seconds of the wall time by cause; each second has one.", ["cause", "seconds", "share"], rows, {1, 2}
    )


def _failures(account: Account) -> str:
    rows = [
        [
            one["kind"],
            one["target"],
            str(one["step"]),
            f"{one['detected_s']:.1f}",
            *(f"{one[f'{cause}_s']:.2f}" for cause in FAILURE_CAUSES),
            str(one["lost_steps"]),
            one["restored_from"] or "-",
            "-" if one["recovered_s"] is None else f"{one['recovered_s']:.2f}",
        ]
        for one in account["failures"][-MOST_ROWS:]
    ]
    if not rows:
        return "<p>There was none.</p>"
    heads = ["kind", "target", "step", "at s", *FAILURE_CAUSES, "lost steps", "from", "back after"]
    told = table("Failures, with the seconds that each one cost.", heads, rows, {2, 3, 4, 5, 6, 7, 8, 9, 11})
    rungs = [
        [one["rung"], str(one["count"]), f"{one['mean_s']:.2f}", str(one["lost_steps"])]
        for one in account["recoveries"]
    ]
    return told + (
        table("Recoveries by rung.", ["from", "count", "mean s", "lost steps"], rungs, {1, 2, 3})
        if rungs
        else ""
    )


def _layouts(account: Account) -> str:
    rows = [
        [
            f"{one['term']}.{one['n']}",
            one["layout"],
            str(one["workers"]),
            f"{one['start_step']} to {one['end_step']}",
            one["reason"],
            _figure(one["predicted_s"], ".3g"),
            _figure(one["measured_s"], ".3g"),
        ]
        for one in account["generations"][-MOST_ROWS:]
    ]
    heads = ["generation", "layout", "workers", "steps", "why", "planned s", "measured s"]
    return table("Generations and their layouts.", heads, rows, {2, 5, 6}) if rows else ""


def _windows(windows: Sequence[TelemetryWindow], began_s: float) -> str:
    def line(name: str, label: str) -> tuple[str, list[tuple[float, float]]]:
        return label, [(at_s - began_s, value) for at_s, value in series(windows, name)]

    phases = {"forward_s": "forward", "backward_s": "backward", "reduce_s": "exposed communication"}
    step = [line(name, label) for name, label in {"step_s": "step", **phases}.items()]
    charts = [
        line_chart("Tokens per second", [line("tokens_per_s", "tokens/s")], x_label="seconds"),
        line_chart("Seconds of a step", step, x_label="seconds"),
        line_chart("Slowest rank over the median", [line("straggler_ratio", "ratio")], x_label="seconds"),
        line_chart("Most memory of a rank", [line("peak_bytes", "bytes")], x_label="seconds"),
    ]
    heads = ("Tokens per second", "Seconds of a step", "Slowest rank over the median", "Peak memory, bytes")
    drawn = (f"<h3>{head}</h3>{chart}" for head, chart in zip(heads, charts, strict=True) if chart)
    return "".join(drawn)


def _ledger(account: Account) -> str:
    proof = account["ledger"]
    if not proof:
        return (
            "<p>The run has no summary of its ledger yet: <code>picotron-ray ledger verify</code> checks what"
            " is committed against the data.</p>"
        )
    checked = "digests of the tokens, made again from the data" if proof["checked"] == "tokens" else "rows"
    text = (
        f"{proof['samples']} samples fed, {proof['lost']} lost, {proof['repeated']} repeated,"
        f" {len(proof['wrong'])} wrong; {proof['passed_over']} passed over. Checked by {checked}."
    )
    return f"<p>{escape(text)}</p>"


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    rows = [[_clock(one["t"]), one["level"], one["kind"], one["text"]] for one in events[-MOST_ROWS:]]
    if not rows:
        return ""
    return table(f"The newest {len(rows)} of {len(events)}.", ["time", "level", "kind", "what"], rows, set())


def _environment(account: Account, config: Mapping[str, Any]) -> str:
    flat = dict(account["environment"])
    flat |= flat.pop("environment", None) or {}
    rows = [[key, str(value)] for key, value in sorted(flat.items())]
    text = escape(json.dumps(config, indent=1))
    return (
        table("Where the newest launch ran.", ["what", "value"], rows, set())
        + f"<details><summary>Config of the newest launch</summary><pre tabindex='0'>{text}</pre></details>"
    )


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> str:
    """Return a table; ``numbers``: columns that hold figures."""

    def cell(at: int, text: str) -> str:
        return f"<td{' class=n' if at in numbers else ''}>{escape(text)}</td>"

    head = "".join(
        f'<th scope="col"{" class=n" if at in numbers else ""}>{escape(text)}</th>'
        for at, text in enumerate(heads)
    )
    body = "".join(f"<tr>{''.join(cell(at, text) for at, text in enumerate(row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def duration(seconds: float) -> str:
    """Return a time in the units that people use.

    >>> duration(0.5), duration(75), duration(90_000)
    ('0.5 s', '1 min 15 s', '1 d 1 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds else "0 s"
    for size, unit, below, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = int(seconds % size // below)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{seconds:.0f} s"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
