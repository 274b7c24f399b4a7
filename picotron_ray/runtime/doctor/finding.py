"""Findings of ``picotron-ray doctor``: one line each, with the mend, and a deadline for every check."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Status = Literal["ok", "warning", "failed", "skipped"]
NAMED = 4  # machines that a line names; of more it gives the number
WIDTH = 23  # of a check's name in a line
MARKS: dict[Status, str] = {"ok": "ok", "warning": "WARN", "failed": "FAIL", "skipped": "skip"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Fields:
        check: subject, such as ``"ulimits"``.
        status: ``"failed"`` breaks a run, ``"warning"`` may.
        seen: what was found.
        mend: what to do; empty where nothing is to be done.
        where: host that it holds for; empty: the command's own machine, or the cluster as a whole.
    """

    check: str
    status: Status
    seen: str
    mend: str = ""
    where: str = ""

    def plain(self) -> dict[str, str]:
        return asdict(self)


def timed(limit_s: float, work: Callable[..., T], *arguments: Any) -> T:
    """Do some work that may hang for ever, such as a call into a dead mount.

    It runs in a thread of its own, which is left behind where it does not end.

    Raises:
        TimeoutError: it did not end within ``limit_s`` seconds.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller raises it
            answer.set_exception(error)

    threading.Thread(target=run, name="doctor-check", daemon=True).start()
    return answer.result(limit_s)


def lines(findings: Iterable[Finding]) -> list[str]:
    """Lines for a terminal: equal findings of several machines share one."""
    same: dict[tuple[str, Status, str, str], list[str]] = defaultdict(list)
    for found in findings:
        same[found.check, found.status, found.seen, found.mend].append(found.where)
    return [
        f"{MARKS[status]:4}  {check:{WIDTH}}  {_hosts(hosts)}{seen}{f'; {mend}' if mend else ''}"
        for (check, status, seen, mend), hosts in same.items()
    ]


def _hosts(hosts: list[str]) -> str:
    named = [host for host in hosts if host]
    if not named:
        return ""
    return f"{', '.join(named) if len(named) <= NAMED else f'{len(named)} machines'}: "
