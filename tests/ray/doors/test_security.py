"""One real run, looked at from outside: where it listens (SECURITY.md), and where a planted secret turns up.

Its processes are those that have the planted secret in their environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.runs.ray_runs import TINY

pytestmark = [pytest.mark.deep, pytest.mark.timeout(500)]
ROOT = Path(__file__).resolve().parents[3]
CANARY = "canary-7f3a91c2d4"
SECRETS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "HF_TOKEN",
    "SLACK_WEBHOOK_URL",
)
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
RAYS = ("gcs_server", "raylet/raylet", "runtime_env/agent", "dashboard/agent", "ray.util.client.server")
ROW = re.compile(r"^\| `([^`]+)` \| ([a-z ,]+) \|", re.MULTILINE)


@dataclass
class Seen:
    """What the run showed: listening sockets, and texts by the place where they were read."""

    sockets: set[tuple[str, str]]
    texts: dict[str, str]


def ours() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get("AWS_SECRET_ACCESS_KEY") == CANARY:
                yield process
        except (psutil.Error, OSError):
            continue


def owner(process: psutil.Process) -> str:
    """What a process is: a program of Ray's, or the actor that it calls itself after."""
    words = process.cmdline()
    text = " ".join(words)
    found = re.match(r"ray::(\w+)", text)
    if found:
        return f"ray::{found[1]}"
    scripts = [Path(word).name for word in words if word.endswith(".py")]
    program = scripts[0] if scripts else process.name()
    module = words[words.index("-m") + 1] if "-m" in words else program
    return next((part for part in RAYS if part in text), module)


def listening() -> set[tuple[str, str]]:
    """Owner and kind of address of each TCP socket that waits for connections."""
    found = set()
    for process in ours():
        try:
            for connection in process.net_connections("tcp"):
                ip = connection.laddr.ip if connection.laddr else ""
                if connection.status == psutil.CONN_LISTEN:
                    kind = "loopback" if ip in LOOPBACK else "all" if ip in ("0.0.0.0", "::") else "node"
                    found.add((owner(process), kind))
        except psutil.Error:
            continue
    return found


def texts_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file below a folder, by path, as text."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes().decode("latin-1")


def command(*words: str, env: dict[str, str]) -> str:
    run = [sys.executable, "-m", "picotron_ray.cli", *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=env, check=False)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("canary")
    env = {**os.environ, **dict.fromkeys(SECRETS, CANARY), "XDG_STATE_HOME": str(folder / "state")}
    env.pop("RAY_ADDRESS", None)
    job: dict[str, Any] = {**TINY, "name": "canary", "steps": 100_000, "trackers": [{"kind": "csv"}]}
    job |= {"storage": {"url": str(folder / "runs")}, "cluster": {**TINY["cluster"], "max_workers": 2}}
    job["trackers"][0]["folder"] = str(folder / "trackers")
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    launch = [sys.executable, "-m", "picotron_ray.launch", str(folder / "job.yaml"), "--json"]
    with (folder / "output").open("w") as output:
        driver = subprocess.Popen(launch, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        status = _status_at(20, env)
        sockets = listening()
        texts = {"status": json.dumps(status), "logs": command("logs", "canary", env=env)}
        texts |= dict(_while_it_runs(status))
        texts["stop"] = command("stop", "canary", env=env)
        driver.wait(120)
        texts["output"] = (folder / "output").read_text()
        texts |= {path: text for path, text in texts_of(folder) if not path.endswith("job.yaml")}
        yield Seen(sockets, texts)
    finally:
        command("stop", "canary", "--discard", env=env)
        driver.kill()
        driver.wait()
        for process in ours():
            process.kill()


def _status_at(step: int, env: dict[str, str]) -> dict[str, Any]:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        text = command("status", "canary", "--json", env=env)
        last = text.splitlines()[-1] if text else ""
        found: dict[str, Any] = json.loads(last) if last.startswith("{") else {}
        if found.get("step", 0) >= step:
            return found
        time.sleep(1)
    raise AssertionError(f"the run did not get to step {step}: {text}")


def _while_it_runs(status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Ray's own logs, and every page of metrics that a process of the run serves."""
    session = re.compile(r"--session[-_]dir=(\S+)")
    found = {m[1] for process in ours() if (m := session.search(" ".join(process.cmdline())))}
    for folder in found:
        yield from texts_of(Path(folder) / "logs")
    for number in set(re.findall(r"http://127\.0\.0\.1:(\d+)", json.dumps(status))):
        with urllib.request.urlopen(f"http://127.0.0.1:{number}/metrics", timeout=10) as reply:
            yield f"metrics at {number}", reply.read().decode()


def test_every_listening_socket_is_listed(seen: Seen) -> None:
    text = (ROOT / "SECURITY.md").read_text().partition("## Ports")[2]
    rows = {name: {word.strip() for word in kinds.split(",")} for name, kinds in ROW.findall(text)}
    assert seen.sockets, "nothing listens"
    unlisted = sorted((name, kind) for name, kind in seen.sockets if kind not in rows.get(name, set()))
    assert unlisted == []


def test_a_planted_secret_is_nowhere(seen: Seen) -> None:
    places = (
        "run.json",
        "summary.json",
        "/log/",
        "/manifests/",
        "/ledger/",
        "/trackers/",
        "events",
        "raylet",
        "output",
    )
    missing = [place for place in places if not any(place in path for path in seen.texts)]
    assert missing == [], "a place was not looked at"
    assert [path for path, text in seen.texts.items() if CANARY in text] == []


@pytest.mark.parametrize(
    "key", ["storage.url=s3://me:{}@bucket/x", "storage.endpoint_url=https://me:{}@host", "storage.secret={}"]
)
def test_a_secret_in_the_config_is_refused_and_not_echoed(key: str) -> None:
    said = command("validate", "quickstart", key.format(CANARY), env=dict(os.environ))
    assert key.partition("=")[0] in said
    assert CANARY not in said
