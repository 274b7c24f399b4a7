"""Text for people while a run goes on and when it ends. Formatting only; figures come from ``status``."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from picotron_ray.coordinator.term_begin import BEFORE
from picotron_ray.debug.rank_record import named
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.driver.waiting import WaitLines, readiness

PLAIN_INTERVAL_S = 5.0
"""Without a terminal, a progress line at most this often."""
RECENT = 8
"""Events shown under the live table."""
REMEMBERED = 1000
"""Events that are known again when a restarted coordinator recalls them."""
PAUSE_S = 1.0
"""Time without a launch from which on a run's end is told as after its begin."""
ENDS = {"storage": "ended for want of storage", "fenced": "was fenced off by another claim"}
"""How a run ended, where the status is no verb."""
_STEP = re.compile(r"step (\d+)")
_NODE_ID = re.compile(r"\b[0-9a-f]{56}\b")
_STYLES = {"warning": "yellow", "error": "bold red"}


class OwnConsole(Console):
    """Console whose reader may go away: rich would end the process without a word."""

    def on_broken_pipe(self) -> None:
        """Raise on; called while the error is handled."""
        raise


def console(as_json: bool) -> Console:
    """Console for people: stdout, or stderr where stdout is JSON; it keeps its stream if others redirect."""
    return OwnConsole(file=sys.stderr if as_json else sys.stdout, highlight=False)


def number(value: float | None, form: str = ".4f") -> str:
    """A figure, or a dash where there is none yet."""
    return "-" if value is None else format(value, form)


def beside_loss(seen: dict[str, Any]) -> str:
    """Say what a held-out loss is to be compared with, by a status or a summary."""
    if "eval_loss_before" in seen:
        return f"before adaptation {number(seen['eval_loss_before'])}"
    return f"bigram {number(seen.get('baseline_loss'))}"


def set_losses(told: dict[str, Any]) -> list[str]:
    """Say the loss of each held-out set beside, from a run's status or summary."""
    return [f"{name} {number(loss)}" for name, loss in (told.get("eval_sets") or {}).items()]


def progress_line(status: dict[str, Any]) -> str:
    """One line: step, loss, tokens/s, layout, members."""
    parts = [f"step {status['step']}/{status['steps']}", f"loss {number(status['loss'])}"]
    if status.get("eval_loss") is not None:
        parts.append(f"eval_loss {number(status['eval_loss'])} ({beside_loss(status)})")
        parts += set_losses(status)
    parts.append(f"{number(status['tokens_per_s'], ',.0f')} tokens/s")
    where = f"{status['layout'] or '-'} on {len(status['members'])} workers"
    parts.append(f"{where} in {status['precision']}" if status.get("precision") else where)
    parts += filter(None, [readiness(status)])
    return f"[{status['state']}] " + "  ".join(parts)


def event_line(event: dict[str, Any]) -> str:
    """``HH:MM:SS level text`` in local time; the level only where it is more than information."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["t"]))
    level = "" if event["level"] == "info" else f"{event['level']}: "
    return f"{clock} {level}{_NODE_ID.sub(lambda found: found[0][:8], event['text'])}"


def metrics_lines(status: dict[str, Any]) -> list[str]:
    """Addresses of the run's metrics; nothing where none are served."""
    served = status.get("metrics")
    if not served:
        return []
    lines = [f"metrics of {who[:16]}: http://{at}/metrics" for who, at in sorted(served["endpoints"].items())]
    return [*lines, f"all of them, for Prometheus' file_sd_configs: {served['file']}"]


def telemetry_lines(status: dict[str, Any]) -> list[str]:
    """Parts of a step, the largest first; nothing before the first figures."""
    told = status.get("telemetry")
    if not told:
        return []
    step_s = told["step_s"]["mean"]
    shares = {phase: window["mean"] / step_s for phase, window in told["phase_s"].items() if step_s}
    parts = [f"{phase} {share:.0%}" for phase, share in sorted(shares.items(), key=lambda part: -part[1])]
    shown = ", ".join(part for part in parts if not part.endswith(" 0%"))
    lines = [f"a step takes {step_s:.3g} s over the last {told['steps']} steps: {shown}"]
    if not told.get("waits_seen", True):
        lines.append("not measured: what forward and backward wait for, and which replicas are slow")
    return lines


def held_lines(status: dict[str, Any]) -> list[str]:
    """Say that a tool holds all ranks, and whom a debugger is attached to; nothing where they train."""
    pages = status.get("pages", {}).values()
    held = [page["step"] for page in pages if page["phase"] == "hold"]
    run = status["run"]
    found = f"`picotron-ray debug ls {run}` says by what, `picotron-ray debug continue {run}` ends it"
    lines = [f"held after step {max(held)}: {found}"] if held else []
    if debugged := sorted(page["rank"] for page in pages if page.get("debugged")):
        lines.append(f"a debugger is attached to {named(debugged)}: where it stops, all wait for it")
    return lines


def worker_lines(status: dict[str, Any]) -> list[str]:
    """The workers of the present generation by rank, with the process of each where its page is known."""
    lines = []
    for rank, worker in enumerate(status["members"]):
        page = status["pages"].get(worker)
        where = f", process {page['pid']}, {page['phase']} of step {page['step'] + 1}" if page else ""
        lines.append(f"rank {rank}: {worker}{where}")
    return lines


def submission_lines(seen: dict[str, Any]) -> list[str]:
    """The Ray jobs whose drivers started or followed a run, from its status or summary."""
    ids = [entry["submission_id"] for entry in seen.get("submissions", ())]
    return [f"submitted as {', '.join(ids)}"] if ids else []


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The end of a run in a few lines."""
    lines = [*_outcome_lines(summary), *submission_lines(summary)]
    baseline = f"baseline_loss {number(summary.get('baseline_loss'))} (bigram entropy of the same data)"
    beside = f"({beside_loss(summary)})" if "eval_loss_before" in summary else baseline
    speed = f"{number(summary.get('tokens_per_s'), ',.0f')} tokens/s"
    lines.append(f"eval_loss {number(summary.get('eval_loss'))}  {beside}  {speed}")
    if sets := set_losses(summary):
        lines.append(f"held-out sets: {', '.join(sets)}")
    measured = [one for one in summary.get("generations", ()) if one.get("measured_s")]
    if measured:
        last = measured[-1]
        figures = f"{last['measured_s']:.3g} s, by the planner {last['predicted_s']:.3g} s"
        lines.append(f"a step of {last['layout']} took {figures}")
    for failure in summary.get("failures", ()):
        source = failure["restored_from"] or "nothing"
        if failure["kind"] == FailureKind.NUMERICS and not failure["restored_from"]:
            continue  # the end of the run, which has said so
        what = f"{failure['kind']} of {failure['target']} at step {failure['step']}"
        if failure.get("recovered_s") is None:
            lines.append(f"not survived: {what}: its launch ended before another step")
            continue
        lines.append(
            f"survived {what}: back in {failure['recovered_s']:.2f} s, {failure['lost_steps']} steps lost,"
            f" restored from {source}"
        )
    commits = [entry["step"] for entry in summary.get("checkpoints", ())]
    ledger = summary.get("ledger")
    if ledger:
        lines.append(
            f"{len(commits)} commits, the newest of step {max(commits, default='-')}; {ledger['samples']}"
            f" samples fed, {ledger['lost']} lost, {ledger['repeated']} repeated"
            + (f", {ledger['skipped']} without an update" if ledger.get("skipped") else "")
            + (f"; {ledger['passed_over']} passed over" if ledger.get("passed_over") else "")
        )
    return lines


def _outcome_lines(summary: dict[str, Any]) -> list[str]:
    """Lines on a run's end, and why where that does not say it."""
    run, detail = summary["run"], str(summary.get("detail") or "")
    if detail.endswith(BEFORE):
        at = detail.partition(":")[0]
        return [f"run {run} had finished at {at} before; nothing to do (a larger `steps` goes on)"]
    wall_s = summary["wall_s"]
    paused = wall_s - summary.get("lived_s", wall_s) >= PAUSE_S  # also by a launch that only commits
    again = paused or len({record["term"] for record in summary.get("generations", ())}) > 1
    took = f", {wall_s:.1f} s after it first began" if again else f" in {wall_s:.1f} s"
    seen, verb = summary["steps"], ENDS.get(summary["status"], summary["status"])
    committed = _STEP.fullmatch(detail)  # where that says all, the run ended at the step that it names
    step = seen if committed is None else int(committed[1])
    where = f" at step {step}{took}" if seen or summary["status"] != "fenced" else ""  # refused as it began
    lines = [f"run {run} {verb}{where}"]
    if step < seen:
        lines.append(f"steps up to {seen}, of an earlier launch, are not committed: they are trained again")
    return lines if committed is not None or not detail else [*lines, f"because: {detail}"]


def table(status: dict[str, Any]) -> Table:
    """Name and figure of everything a live view shows."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    held_out = f"held-out {number(status.get('eval_loss'))}, {beside_loss(status)}"
    rows = {
        "run": f"{status['run']} ({status['state']}, generation {status['generation'] or '-'})",
        "step": f"{status['step']} of {status['steps']}",
        "loss": f"{number(status['loss'])}   {held_out}",
        "speed": f"{number(status['tokens_per_s'], ',.0f')} tokens/s",
        "layout": str(status["layout"] or "-"),
        "members": " ".join(status["members"]) or "-",
    }
    rows["jobs"] = " ".join(submission_lines(status)) or "-"
    for name, value in rows.items():
        grid.add_row(name, Text(value))
    return grid


def status_lines(seen: dict[str, Any]) -> list[str]:
    """Lines of ``status`` for a run that goes on, is being started, or has ended."""
    if "launcher" in seen:
        who = f" by process {seen['launcher']}" if seen["launcher"] else ""
        return [f"[starting] run {seen['run']} is being launched{who}; it has no coordinator yet"]
    if seen.get("gone"):
        return [end_line(seen), *(summary_lines(seen["summary"]) if seen["summary"] else ())]
    return [
        progress_line(seen),
        *held_lines(seen),
        *telemetry_lines(seen),
        *worker_lines(seen),
        *submission_lines(seen),
        *metrics_lines(seen),
        *map(event_line, seen["events"]),
    ]


def end_line(end: dict[str, Any]) -> str:
    """One line: a run does not go on, and what a launch of it would do."""
    if end["summary"]:
        return f"run {end['run']} has ended already"
    at = end["committed"]
    again = "begins anew" if at is None else f"goes on from the commit of step {at}"
    if end.get("missing"):
        again = "is refused while they are missing, unless it is to `--begin-anew`"
    return f"run {end['run']} has ended already: {end['detail']}; another launch {again}"


def _over_before(status: dict[str, Any]) -> bool:
    """Whether a launch finds all its steps committed: it makes no progress that a line could show."""
    step, steps = status["step"], status["steps"]
    return bool(step > steps or (status["state"] == "starting" and step == steps))


class ProgressView:
    """Display of statuses as they come: a live table on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._recent: deque[Text] = deque(maxlen=RECENT)
        self._told: deque[str] = deque(maxlen=REMEMBERED)
        self._live = (
            Live(console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
            if console.is_terminal
            else None
        )
        self._shown_step, self._shown_at_s = -1, 0.0
        self._waits, self._said_s = WaitLines(), time.monotonic()

    def __enter__(self) -> ProgressView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """One line that stays."""
        self._said_s = time.monotonic()
        if self._live:
            self._recent.append(Text(text, style))
        else:
            self._console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)

    def show(self, status: dict[str, Any]) -> None:
        """New events, then the state."""
        self._events(status)
        if self._live:
            self._live.update(Group(table(status), *self._recent))
            return
        now = time.monotonic()
        due = (status["generation"] and now - self._shown_at_s >= PLAIN_INTERVAL_S) or status["done"]
        due = due and not _over_before(status)
        if due and status["step"] != self._shown_step:
            self._shown_step, self._shown_at_s = status["step"], now
            self.say(progress_line(status))
        elif text := self._waits.due(status, self._said_s):
            self.say(text)

    def _events(self, status: dict[str, Any]) -> None:
        for event in status["events"]:
            known = event["text"] in self._told and event["seq"] <= status["recalled"]
            if known or (status["done"] and event["kind"] == status["state"]):
                continue  # the end is told by the lines that follow it
            self._told.append(event["text"])
            self.say(event_line(event), _STYLES.get(event["level"], ""))
