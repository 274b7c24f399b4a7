"""Line coverage of groups of packages against the limits in pyproject.toml, after a run of all tests.

pytest-cov has combined the data of all processes by then. A run of a part of the tests prints the
figures and enforces nothing.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "picotron_ray"


def line_coverage(data_file: str, folders: list[Path]) -> float:
    """Percent of the executable lines under ``folders`` that ran; 100 where there are none."""
    import coverage

    measured = coverage.Coverage(data_file=data_file, config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    total = missed = 0
    for folder in folders:
        for source in sorted(folder.rglob("*.py")):
            _, lines, _, missing, _ = measured.analysis2(str(source))
            total, missed = total + len(lines), missed + len(missing)
    return 100.0 * (total - missed) / total if total else 100.0


def check(data_file: str, limits: dict[str, float]) -> list[tuple[str, float, float]]:
    """(group, percent, limit) of every group; a group is package names, or ``all``."""
    figures = []
    for group, limit in limits.items():
        folders = [PACKAGE] if group == "all" else [PACKAGE / name for name in group.split()]
        figures.append((group, line_coverage(data_file, folders), float(limit)))
    return figures


def _was_complete(config: pytest.Config) -> bool:
    default = config.getoption("markexpr") in config.getini("addopts")
    chosen = config.getoption("keyword") or not default or config.getoption("lf", False)
    return not chosen and config.args == config.getini("testpaths")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    plugin = session.config.pluginmanager.getplugin("_cov")
    controller: Any = getattr(plugin, "cov_controller", None)
    if controller is None or not session.items:
        return
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["picotron"]["coverage"]
    session.config.stash[FIGURES] = check(controller.cov.config.data_file, limits)
    short = any(seen < limit for _, seen, limit in session.config.stash[FIGURES])
    if short and _was_complete(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


FIGURES = pytest.StashKey[list[tuple[str, float, float]]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for group, seen, limit in config.stash.get(FIGURES, []):
        verdict = "ok" if seen >= limit else "BELOW THE LIMIT"
        terminalreporter.line(f"line coverage of {group}: {seen:.1f} % (at least {limit:.0f} %): {verdict}")
