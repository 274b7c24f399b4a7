"""The server's answers, asked as any ASGI server asks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.dashboard import app as pages
from picotron_ray.runtime.dashboard import doors
from picotron_ray.runtime.dashboard.access import HEADERS, Access
from picotron_ray.runtime.dashboard.app import PageServer, read_static
from picotron_ray.runtime.dashboard.watch import Watch
from tests.support.runs.page_facts import SCRIPT, store_run

TOKEN = "open-sesame"


class Browser:
    """Asks a page's application without a network."""

    def __init__(self, watch: Watch) -> None:
        self.server = PageServer(watch)
        self._app = self.server.app(Access(TOKEN))

    def ask(
        self, method: str, path: str, body: bytes = b"", token: str = TOKEN, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of an answer."""
        return asyncio.run(self._ask(method, path, body, token, headers))

    async def _ask(self, method: str, path: str, body: bytes, token: str, headers: dict[str, str]) -> Any:
        path, _, query = path.partition("?")
        given = {"host": "localhost:8270", "authorization": f"Bearer {token}", **headers}
        scope = {
            "type": "http", "method": method, "path": path, "query_string": query.encode(), "raw_path": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "http_version": "1.1", "scheme": "http", "server": ("localhost", 8270), "root_path": "",
        }  # fmt: skip
        sent: list[dict[str, Any]] = []
        asked = iter([{"type": "http.request", "body": body}])

        async def receive() -> dict[str, Any]:
            return next(asked, {"type": "http.disconnect"})

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], head, b"".join(part.get("body", b"") for part in sent[1:])


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    store_run(tmp_path)
    watch = Watch(str(tmp_path / "told"))
    yield Browser(watch)
    watch.close()


def test_the_shell_comes_without_a_token_and_says_nothing_of_the_run(browser: Browser) -> None:
    status, head, body = browser.ask("GET", "/", token="")
    assert status == 200
    assert "told" not in body.decode()
    assert {name.lower(): value for name, value in HEADERS.items()}.items() <= head.items()
    for name in re.findall(rb'(?:src|href)="/static/([^"]+)"', body):
        assert browser.ask("GET", f"/static/{name.decode()}", token="")[0] == 200


def test_nothing_else_comes_without_the_token(browser: Browser) -> None:
    for method, path in (
        *(("GET", path) for path in ("/api/run", "/api/stream", "/api/ranks", "/api/logs", "/api/nothing")),
        ("POST", "/api/press"),
    ):
        status, head, body = browser.ask(method, path, token="wrong")
        assert (status, b"told" in body) == (401, False), path
        assert head["content-security-policy"] == HEADERS["Content-Security-Policy"]


def test_files_outside_the_packages_own_are_not_served(browser: Browser) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/app.py", "/etc/passwd", "/static/"):
        assert browser.ask("GET", path)[0] == 404, path


def test_the_run_comes_with_the_token(browser: Browser) -> None:
    status, _, body = browser.ask("GET", "/api/run")
    found = json.loads(body)
    assert status == 200
    assert found["head"]["run"] == "told"
    assert SCRIPT in [event["text"] for event in found["events"]["events"]]
    assert "</script>" in body.decode()  # data, of a type that no browser runs


def test_rows_and_wrong_words(browser: Browser) -> None:
    assert len(json.loads(browser.ask("GET", "/api/ranks?from=1&count=5")[2])["rows"]) == 1
    assert json.loads(browser.ask("GET", "/api/ranks?from=x&count=-3")[2])["ranks"] == 2
    status, _, body = browser.ask("GET", "/api/logs?level=loud")
    assert status == 400
    assert "loud" in json.loads(body)["error"]


def test_the_stream_begins_with_all_sections(browser: Browser) -> None:
    status, head, body = browser.ask("GET", "/api/stream")
    assert status == 200
    assert head["content-type"].startswith("text/event-stream")
    assert browser.server._streams == 0
    names = set(re.findall(rb"^event: (\w+)$", body, re.M))
    assert names <= {name.encode() for name in json.loads(browser.ask("GET", "/api/run")[2])}


def test_more_streams_than_allowed_are_refused(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_STREAMS", 0)
    assert browser.ask("GET", "/api/stream")[0] == 503


def press(browser: Browser, **words: Any) -> tuple[int, dict[str, Any]]:
    status, _, body = browser.ask("POST", "/api/press", json.dumps(words).encode())
    return status, json.loads(body)


def test_buttons_of_a_run_that_is_over_do_nothing(browser: Browser) -> None:
    status, said = press(browser, button="stop")
    assert (status, "does not go on here" in said["error"]) == (400, True)
    assert press(browser, button="explode")[0] == 400
    assert press(browser, button=1)[0] == 400
    assert browser.ask("POST", "/api/press", b"{")[0] == 400
    assert browser.ask("POST", "/api/press", b"x" * 5000)[0] == 400
    assert browser.ask("GET", "/api/press")[0] == 405


class Living:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def request(self, what: str) -> None:
        self.asked.append(what)


def test_buttons_ask_the_coordinator() -> None:
    living = Living()
    assert "commit" in doors.press("r", living, "checkpoint", {})
    assert "stops" in doors.press("r", living, "stop", {})
    assert living.asked == ["checkpoint", "stop"]
    with pytest.raises(ConfigError, match="saw 'when'"):
        doors.press("r", living, "stop", {"when": "now"})


def test_buttons_are_offered_while_the_run_goes_on() -> None:
    assert all(door["enabled"] for door in doors.offered(True, "running"))
    assert not any(door["enabled"] for door in doors.offered(True, "finished"))
    assert not any(door["enabled"] for door in doors.offered(False, "running"))


def test_the_pages_script_makes_no_markup_of_text() -> None:
    for name, (data, _) in read_static().items():
        for word in (
            b"innerHTML",
            b"outerHTML",
            b"insertAdjacentHTML",
            b"document.write",
            b"eval(",
            b"Function(",
        ):
            assert word not in data, (name, word)
        assert b"http://" not in data.replace(b"http://www.w3.org/", b""), name
        assert b"https://" not in data, name
    assert b" style=" not in read_static()["index.html"][0]
