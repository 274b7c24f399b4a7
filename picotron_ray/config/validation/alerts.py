"""Rules between keys of ``alerts`` and others."""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from re import findall

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.alerts import ALERT_RULES, FIGURES
from picotron_ray.config.schema.job import JobConfig


def _nearest(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"


def _rules(job: JobConfig) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, rule in enumerate(job.alerts.rules):
        at = f"alerts.rules.{index}"
        if rule.rule in seen:
            yield Problem(f"{at}.rule", f"saw {rule.rule!r} twice; name each rule once")
        seen.add(rule.rule)
        known = rule.rule in ALERT_RULES
        if rule.figure is None and not known:
            hint = _nearest(rule.rule, ALERT_RULES)
            yield Problem(f"{at}.rule", f"saw {rule.rule!r}, which is no rule, {hint}")
        elif rule.figure is None and (rule.above is not None or rule.below is not None):
            yield Problem(at, "saw above or below without a figure; a known rule has a threshold")
        elif rule.figure is not None and known:
            yield Problem(f"{at}.rule", f"saw {rule.rule!r}, a known rule, with a figure; take another name")
        elif rule.figure is not None and rule.figure not in FIGURES:
            hint = _nearest(rule.figure, FIGURES)
            yield Problem(f"{at}.figure", f"saw {rule.figure!r}, which no window has, {hint}")
        elif rule.figure is not None and (
            (rule.above is None) == (rule.below is None) or rule.threshold is not None
        ):
            yield Problem(at, f"a rule over {rule.figure} needs either above or below, and no threshold")


def _names(job: JobConfig) -> Iterator[Problem]:
    alerts = job.alerts
    own = [rule.rule for rule in alerts.rules if rule.figure is not None]
    known = (*ALERT_RULES, *own, "unusual")
    off = {rule.rule for rule in alerts.rules if not rule.enabled}
    for index, act in enumerate(alerts.act):
        if act.rule not in known:
            yield Problem(
                f"alerts.act.{index}.rule",
                f"saw {act.rule!r}, which is no rule, {_nearest(act.rule, known)}",
                ("alerts.rules",),
            )
        elif act.rule in off:
            yield Problem(
                f"alerts.act.{index}.rule",
                f"saw {act.rule!r}, which alerts.rules turns off; turn it on, or drop this",
                ("alerts.rules",),
            )
    for index, silence in enumerate(alerts.silences):
        if silence.rule not in (*known, "*"):
            hint = _nearest(silence.rule, known)
            key = f"alerts.silences.{index}.rule"
            yield Problem(key, f"saw {silence.rule!r}, which is no rule, {hint}", ("alerts.rules",))
        if silence.until is not None and not _is_date(silence.until):
            text = f"saw {silence.until!r}, which is no date, expected one in UTC such as 2026-12-01T08:00Z"
            yield Problem(f"alerts.silences.{index}.until", text)


def _is_date(text: str) -> bool:
    """Whether a time of the schema's form is one of the calendar."""
    year, month, day, hour, minute, *second = map(int, findall(r"\d+", text))
    days = monthrange(year, month)[1] if year and 1 <= month <= 12 else 0
    return 1 <= day <= days and hour < 24 and minute < 60 and all(part < 60 for part in second)


REWINDS = ("nan", "loss-spike", "gradient-exploding")
"""Rules whose findings older weights may answer."""
PLACES = ("straggler",)
"""Rules whose findings name a node; the figures of the others are of the whole run."""


def _acts(job: JobConfig) -> Iterator[Problem]:
    named = [act.rule for act in job.alerts.act]
    for index, act in enumerate(job.alerts.act):
        at = f"alerts.act.{index}"
        if named.index(act.rule) != index:
            yield Problem(f"{at}.rule", f"saw {act.rule!r} twice; a rule has one thing done")
        if act.do == "rewind" and act.rule not in REWINDS:
            text = f"saw rewind for {act.rule}, which older weights do not mend; expected a rule of"
            yield Problem(f"{at}.do", f"{text} {', '.join(REWINDS)}")
        if act.do == "quarantine" and act.rule not in PLACES:
            text = f"saw quarantine for {act.rule}, which names no node; expected a rule of"
            yield Problem(f"{at}.do", f"{text} {', '.join(PLACES)}")
    if job.alerts.act and job.telemetry.interval_s is None:
        text = "saw telemetry.interval_s=null, so that no rule sees anything; give an interval, or drop it"
        yield Problem("alerts.act", text, ("telemetry.interval_s",))


def _sinks(job: JobConfig) -> Iterator[Problem]:
    for index, sink in enumerate(job.alerts.sinks):
        given = [name for name in ("url", "url_env", "url_file") if getattr(sink, name) is not None]
        if len(given) != 1:
            saw = " and ".join(given) or "none"
            yield Problem(
                f"alerts.sinks.{index}", f"saw {saw} of url, url_env and url_file, expected exactly one"
            )
        if sink.kind == "slack" and sink.url is not None:
            text = "a Slack address is a secret: give it by url_env or url_file"
            yield Problem(f"alerts.sinks.{index}.url", text)
        elif sink.url is not None and not sink.url.startswith(("http://", "https://")):
            text = "expected an address that begins with http:// or https://"  # it may be a secret: not told
            yield Problem(f"alerts.sinks.{index}.url", text)
        elif sink.url is not None and "@" in sink.url:
            text = "saw an address with credentials: give it by url_env or url_file"
            yield Problem(f"alerts.sinks.{index}.url", text)


RULES = (_rules, _names, _acts, _sinks)
"""A list of rules, each from a job to its problems."""
