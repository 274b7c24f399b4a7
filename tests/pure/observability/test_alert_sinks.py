"""Sinks of alerts against real HTTP servers: one that answers, refuses, hangs, redirects, or is away."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.alerts import AlertSinkConfig
from picotron_ray.observability.alerts import sinks
from picotron_ray.observability.alerts.finding import AlertFinding
from picotron_ray.observability.alerts.messages import alertmanager, slack, webhook
from picotron_ray.observability.alerts.sinks import AlertSink, SinkAddressError, address_of

FOUND = AlertFinding(
    rule="straggler",
    key="",
    severity="warning",
    said="one rank computes longer: straggler_ratio is 1.8, above 1.3 <&>",
    where="rank 3 on node abc",
    since_s=1_700_000_000.0,
    at_s=1_700_000_060.0,
    generation="1.2",
    step=900,
    evidence={"straggler_ratio": 1.8},
    advice="look at that rank's node",
    rank=3,
    node="abc",
)
SECRET = "T0KEN"


class Receiver:
    """An HTTP server that answers as told, and keeps what it got."""

    def __init__(self) -> None:
        self.answer, self.hang_s, self.got = 200, 0.0, []  # type: ignore[var-annotated]
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.path, json.loads(body)))
                time.sleep(receiver.hang_s)
                self.send_response(receiver.answer)
                if 300 <= receiver.answer < 400:
                    self.send_header("Location", f"http://127.0.0.1:{receiver.port}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(sinks, "FIRST_WAIT_S", 0.02)
    made = Receiver()
    yield made
    made.close()


def sink(port: int, told: list[str], kind: str = "webhook", **changes: Any) -> AlertSink:
    url = f"http://127.0.0.1:{port}/hook/{SECRET}"
    config = AlertSinkConfig.model_validate({"kind": kind, "url_env": "HOOK", "timeout_s": 0.3, **changes})
    return AlertSink(f"alerts.sinks.0 ({kind})", config, url, "essays", told.append)


def until(done: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_findings_arrive_as_json(receiver: Receiver) -> None:
    told: list[str] = []
    one = sink(receiver.port, told)
    one.send(FOUND)
    one.finish(10.0)
    ((path, body),) = receiver.got
    assert path == f"/hook/{SECRET}"
    assert (body["run"], body["rule"], body["state"]) == ("essays", "straggler", "firing")
    assert (one.sent, one.dropped, told) == (1, 0, [])


def test_slack_gets_text_and_alertmanager_its_api() -> None:
    text = slack("essays", FOUND)["text"]
    assert text.startswith("[warning] run essays: straggler (rank 3 on node abc)")
    assert "&lt;&amp;&gt;" in text
    (alert,) = alertmanager("essays", FOUND)
    assert alert["labels"]["alertname"] == "straggler"
    assert alert["startsAt"] == "2023-11-14T22:13:20.000Z"
    assert "endsAt" not in alert
    from dataclasses import replace

    (over,) = alertmanager("essays", replace(FOUND, resolved=True))
    assert (over["labels"], over["endsAt"]) == (alert["labels"], "2023-11-14T22:14:20.000Z")
    assert webhook("essays", FOUND)["evidence"] == {"straggler_ratio": 1.8}


@pytest.mark.parametrize(
    ("answer", "hang_s", "tries"),
    [(500, 0.0, sinks.TRIES), (200, 5.0, sinks.TRIES), (302, 0.0, 1), (404, 0.0, 1)],
)
def test_a_receiver_that_refuses_is_tried_within_bounds_dropped_counted_and_told_once(
    receiver: Receiver, answer: int, hang_s: float, tries: int
) -> None:
    receiver.answer, receiver.hang_s = answer, hang_s
    told: list[str] = []
    one = sink(receiver.port, told)
    began = time.monotonic()
    one.send(FOUND)
    assert time.monotonic() - began < 2.0, "sending waits for nobody, also where the receiver hangs for 5 s"
    until(lambda: one.dropped)
    one.send(FOUND)
    until(lambda: one.dropped == 2)
    assert len(receiver.got) == 2 * tries
    assert {path for path, _ in receiver.got} == {f"/hook/{SECRET}"}, "no redirect is followed"
    assert len(told) == 1
    assert SECRET not in told[0]
    receiver.answer, receiver.hang_s = 200, 0.0
    one.send(FOUND)
    until(lambda: one.sent)
    one.finish(1.0)
    assert "takes findings again; 2 were dropped" in told[1]


def test_a_receiver_that_is_away_costs_nothing_but_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "FIRST_WAIT_S", 0.02)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told: list[str] = []
    one = sink(port, told)
    for _ in range(500):
        one.send(FOUND)
    until(lambda: one.dropped > 400)
    began = time.monotonic()
    one.finish(0.3)
    assert time.monotonic() - began < 3.0
    assert all(SECRET not in words for words in told)


def test_what_is_silenced_or_too_light_is_not_sent(receiver: Receiver) -> None:
    from dataclasses import replace

    one = sink(receiver.port, [], least="critical")
    one.send(FOUND)
    one.send(replace(FOUND, severity="critical", silenced=True))
    one.send(replace(FOUND, severity="critical"))
    one.finish(10.0)
    assert [body["severity"] for _, body in receiver.got] == ["critical"]


def test_alertmanager_hears_again_of_what_fires(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(sinks, "REPEAT_S", 0.05)
    one = sink(receiver.port, [], kind="alertmanager")
    one.send(FOUND)
    until(lambda: len(receiver.got) >= 3)
    one.send(replace(FOUND, resolved=True))
    until(lambda: "endsAt" in receiver.got[-1][1][0])
    count = len(receiver.got)
    time.sleep(0.5)
    assert len(receiver.got) == count
    assert receiver.got[0][0].endswith("/api/v2/alerts")
    one.finish(1.0)


def test_addresses_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    def config(**given: str) -> AlertSinkConfig:
        return AlertSinkConfig.model_validate({"kind": "webhook", **given})

    file = tmp_path / "url"
    file.write_text("https://hooks/x\n")
    assert address_of(config(url_env="HOOK"), {"HOOK": "http://h"}) == "http://h"
    assert address_of(config(url_file=str(file))) == "https://hooks/x"
    assert address_of(config(url="http://plain")) == "http://plain"
    for given, environment in (
        (config(url_env="HOOK"), {}),
        (config(url_env="HOOK"), {"HOOK": f"ftp://{SECRET}"}),
        (config(url_file=str(tmp_path / "none")), {}),
        (config(url_file=str(tmp_path)), {}),
    ):
        with pytest.raises(SinkAddressError) as caught:
            address_of(given, environment)
        assert SECRET not in str(caught.value)


def test_what_is_over_is_not_repeated_though_its_end_found_no_room(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    monkeypatch.setattr(sinks, "MOST_WAITING", 1)
    monkeypatch.setattr(sinks, "REPEAT_S", 0.05)
    receiver.hang_s = 0.5
    one = sink(receiver.port, [], kind="alertmanager")
    one.send(FOUND)
    until(lambda: receiver.got)
    one.send(replace(FOUND, rule="disk"))  # waits
    one.send(replace(FOUND, resolved=True))  # finds no room
    assert one.dropped == 1
    receiver.hang_s = 0.0
    until(lambda: [body for _, body in receiver.got].count(receiver.got[-1][1]) > 2)
    repeated = [body[0]["labels"]["alertname"] for _, body in receiver.got[2:]]
    assert set(repeated) == {"disk"}
    one.finish(1.0)
