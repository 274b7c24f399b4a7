"""The page in a browser: filled, without an error, closed to others, for everybody's eyes and hands."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import PHONE, WIDE, Visit, served, visit
from tests.support.runs.page_facts import store_run

FILLED = {
    "#figures dd": 12,
    "#chart-loss path.curve": 1,
    "#chart-loss circle.dot": 1,
    "#chart-loss .failure": 1,
    "#chart-tokens_per_s path.curve": 1,
    "#chart-goodput_ratio path.curve": 1,
    "#chart-mfu_ratio": 1,
    "#timeline rect": 2,
    "#generation-rows tr": 2,
    "#commit-rows tr": 2,
    "#findings li": 1,
    "#events li": 1,
    "#analysis dd": 4,
    "#doors button": 2,
    "#map-legend li": 1,
}
"""Least number of elements of each part of a page that is filled."""


def until(what: Callable[[], Any], said: Callable[[], object] = lambda: "", timeout_s: float = 30.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, said()
        time.sleep(0.2)


def check_filled(seen: Visit, **more: int) -> None:
    """Every chart, map, list and button is there, and none is empty."""
    wanted = FILLED | more

    def lacking() -> dict[str, int]:
        counts = {selector: seen.count(selector) for selector in wanted}
        return {selector: count for selector, count in counts.items() if count < wanted[selector]}

    until(lambda: not lacking(), lacking)
    drawn = "() => { const map = document.getElementById('map'); return map.getContext('2d') && map.height; }"
    assert seen.page.evaluate(drawn) > 5
    assert "name:" in seen.page.text_content("#yaml")


def check_for_everybody(seen: Visit) -> None:
    """No finding of axe-core in light and dark, wide and narrow; all by keyboard; a phone scrolls one way."""
    for scheme in ("light", "dark"):
        seen.page.emulate_media(color_scheme=scheme)
        for width, height in (WIDE, PHONE):
            seen.page.set_viewport_size({"width": width, "height": height})
            seen.page.wait_for_timeout(100)
            assert seen.violations() == [], (scheme, width)
            assert not seen.scrolls_sideways(), (scheme, width)
    assert seen.unreached() == []
    seen.page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})


def status_of(url: str, **headers: str) -> int:
    """Status with which a server answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def check_closed(told: dict[str, Any], seen: Visit) -> None:
    """Nothing of the run without the token, nor under a foreign name."""
    base = told["url"].partition("#")[0]
    own = {"Authorization": f"Bearer {told['token']}"}
    assert status_of(f"{base}api/run", **own) == 200
    assert status_of(f"{base}api/run") == status_of(f"{base}api/stream", Authorization="Bearer x") == 401
    assert status_of(f"{base}api/run", Host="evil.example", **own) == 421
    assert status_of(f"{base}api/run", Origin="http://evil.example", **own) == 403
    seen.page.evaluate("() => sessionStorage.clear()")
    seen.open(base)
    until(lambda: seen.text("#state") == "no access")
    assert not seen.page.is_visible("#page")
    assert told["run"].rpartition("/")[2] not in seen.page.content()
    seen.page.fill("#token", told["token"])
    seen.page.keyboard.press("Enter")
    until(lambda: seen.page.is_visible("#page"))


@pytest.mark.timeout(300)  # the first time Chromium is installed
def test_the_page_of_a_dead_run_in_a_browser(tmp_path: Path) -> None:
    store_run(tmp_path)
    with served(str(tmp_path / "told")) as told, visit() as seen:
        seen.open(told["url"])
        check_filled(seen)
        assert told["token"] not in seen.page.url
        assert seen.text("#state") == "cut-off"
        assert "<script>alert(1)</script>" in seen.text("#events")
        check_for_everybody(seen)
        assert seen.complaints == []
        check_closed(told, seen)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[str]:
    """Name of a run of two workers, of which one is killed; it goes on until the test ends."""
    name = "page-run"
    words = [
        f"name={name}", "steps=1000000", f"storage.url={tmp_path / 'store'}", "telemetry.interval_s=1",
        "checkpoint.interval_steps=200", "evaluate.interval_steps=200",
        "chaos=[{fault: kill, target: 'worker:1', step: 300, phase: forward}]",
    ]  # fmt: skip
    command(sys.executable, "-m", "picotron_ray.launch", "tiny", *words, "--detach")
    yield name
    picotron_ray("stop", name, "--now", "--discard")


def command(*words: str) -> str:
    """What a command prints, which must succeed."""
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return done.stdout


def picotron_ray(*words: str) -> str:
    """What a command of ours prints."""
    return command(sys.executable, "-m", "picotron_ray.cli", *words)


OF_A_RUN = {"#slow-rows tr": 2, "#log-lines li": 1, "#slow-rows rect": 4}
LIVE = {**OF_A_RUN, "#memory-rows tr": 2, "#memory-rows rect": 4, "#doors button:enabled": 2}


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_the_page_during_a_run_with_a_kill_and_from_its_storage(run: str, tmp_path: Path) -> None:
    with served(run) as told, visit() as seen:
        seen.open(told["url"])
        until(lambda: seen.count("#chart-loss .failure"), lambda: seen.text("#events"), 120)
        check_filled(seen, **LIVE)
        assert seen.text("#state") == "running"
        check_for_everybody(seen)
        _check_questions(seen)
        _check_checkpoint(seen, run)
        assert seen.complaints == []
        check_closed(told, seen)
        picotron_ray("stop", run, "--now")
        until(lambda: seen.text("#state") == "cut-off", lambda: seen.text("header"), 60)
        check_filled(seen, **OF_A_RUN)
        assert seen.count("#doors button:enabled") == 0
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}
    with served(str(tmp_path / "store" / run), env=elsewhere) as told, visit(PHONE, "dark") as seen:
        seen.open(told["url"])
        check_filled(seen, **OF_A_RUN)
        assert seen.text("#state") == "cut-off"
        check_for_everybody(seen)
        assert seen.complaints == []


def _check_questions(seen: Visit) -> None:
    """Rows of ranks and lines of logs come as they are asked for."""
    seen.page.click("#rank-details summary")
    until(lambda: seen.count("#rank-rows tr") == 2, lambda: seen.text("#rank-rows"))
    seen.page.fill("#log-rank", "0")
    seen.page.fill("#log-since", "1h")
    seen.page.click("#log-form button")
    until(lambda: "of the lines that pass" in seen.text("#log-said"), lambda: seen.text("#log-said"))
    seen.page.click("#log-newest")
    for axis in seen.page.eval_on_selector_all("#map-by option", "found => found.map((one) => one.value)"):
        seen.page.select_option("#map-by", axis)
        assert seen.count("#map-legend li") >= 1, axis


def _check_checkpoint(seen: Visit, run: str) -> None:
    """A button's commit is made, and shows."""
    before = json.loads(picotron_ray("status", run, "--json"))["committed"]
    seen.page.click("#door-checkpoint")
    until(lambda: "asked for" in seen.text("#said"), lambda: seen.text("#said"))
    until(lambda: json.loads(picotron_ray("status", run, "--json"))["committed"] > before)
    seen.page.click("#door-stop")
    until(lambda: seen.page.is_visible("#ask"))
    seen.page.keyboard.press("Escape")
    until(lambda: not seen.page.is_visible("#ask"))
