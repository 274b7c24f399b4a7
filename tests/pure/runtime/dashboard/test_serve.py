"""The command's refusals, each before anything is served."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from collections.abc import Callable
from http.client import BadStatusLine
from pathlib import Path

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.dashboard import agent_figures, serve
from picotron_ray.runtime.dashboard.agent_figures import MOST_NODES, NodeScrapes, read_metrics
from tests.support.runs.page_facts import store_run

runner = CliRunner()


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = runner.invoke(app, ["dashboard", "anything", "--port", str(port)])
    assert done.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; name a free port" in done.stderr


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        serve.bind("192.0.2.1", 0)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    done = runner.invoke(app, ["dashboard", "anything", "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"].endswith("(in a checkout: pip install -e '.[dashboard]')")


def test_an_unknown_run_ends_the_command() -> None:
    done = runner.invoke(app, ["dashboard", "nobody-knows", "--port", "0"])
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "http" not in done.stdout


def test_once_prints_the_page_and_ends(tmp_path: Path) -> None:
    store_run(tmp_path)
    done = runner.invoke(app, ["dashboard", str(tmp_path / "told"), "--once"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["head"]["step"] == 20


def test_the_token_is_in_the_fragment_alone() -> None:
    page = serve.ServedPage("127.0.0.1", serve.bind("127.0.0.1", 0))
    base, _, fragment = page.url.partition("#")
    page.listener.close()
    assert fragment == f"token={page.token}"
    assert page.token not in base
    assert page.token not in repr(page)


def test_an_open_address_is_warned_of_and_its_name_is_known() -> None:
    assert serve.warnings("127.0.0.1") == serve.warnings("::1") == []
    assert "without TLS" in serve.warnings("0.0.0.0")[0]
    with serve.bind("127.0.0.1", 0) as listener:
        assert serve.ServedPage("10.0.0.7", listener, ["Box"]).access().hosts == {"10.0.0.7", "box"}


def test_few_nodes_are_asked_for_their_memory() -> None:
    figures = NodeScrapes(ask=lambda address: "")
    figures.of({f"n{at}": f"host:{at}" for at in range(4096)} | {"coordinator": "x"}, ["n4000"])
    assert len(figures._addresses) == MOST_NODES + 1
    assert figures._addresses[:2] == ("x", "host:4000")
    figures.close()
    with pytest.raises(ValueError):
        read_metrics(["{{{ not metrics"])
    assert read_metrics(["\n", ""]) == {"workers": {}, "gpus": []}, "an endpoint that has none yet"


def test_figures_of_nodes_outlive_odd_answers_and_are_not_shown_once_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A port that was somebody else's by then ended the thread, and its last figures stayed."""
    monkeypatch.setattr(agent_figures, "INTERVAL_S", 0.01)
    good = 'picotron_worker_memory_bytes{node="n",worker="w0",class="weights"} 5\n'
    answers: list[Exception | str] = [good]

    def ask(address: str) -> str:
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def until(done: Callable[[], bool]) -> None:
        limit = time.monotonic() + 30
        while not done():
            assert time.monotonic() < limit
            time.sleep(0.01)

    scrapes = NodeScrapes(ask)
    scrapes.of({"n": "127.0.0.1:1"}, [])
    until(lambda: bool(scrapes.newest))
    answers[0] = BadStatusLine("SSH-2.0")
    until(lambda: scrapes.newest == {})
    answers[0] = 'picotron_worker_memory_bytes{node="n"} 5\n'
    time.sleep(0.1)
    answers[0] = good
    until(lambda: bool(scrapes.newest))
    scrapes.close()
