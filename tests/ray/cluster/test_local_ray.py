"""The local Ray outlives its driver, is found again, and goes away whole, whatever was killed before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from picotron_ray.runtime.ray_cluster import connect, local_ray, processes, supervisor
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay, LocalRayError
from tests.support.runs.ray_jobs import free_port

DRIVER = """
import sys, ray
from picotron_ray.runtime.ray_cluster import connect, local_ray
connect.attach(local_ray.find("lifecycle"))

@ray.remote
class Counter:
    def __init__(self): self.count = 0
    def add(self):
        self.count += 1
        return self.count
    def end(self):
        local_ray.announce_end()

counter = Counter.options(name="counter", lifetime="detached", get_if_exists=True, num_cpus=0).remote()
print(ray.get(counter.add.remote()), flush=True)
if "end" in sys.argv:
    ray.get(counter.end.remote())
if "stay" in sys.argv:
    sys.stdin.read()
"""


def drive(*arguments: str) -> str:
    command = [sys.executable, "-c", DRIVER, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRay]:
    monkeypatch.delenv("RAY_AUTH_MODE")  # so that the token of our own making is used
    folder = tmp_path / "slots"
    folder.mkdir()
    (folder / "slot-0").write_bytes(b"x")
    ray = local_ray.start("lifecycle", cpus=1, gpus=0, folders=[folder])
    yield ray
    local_ray.stop(ray)


def assert_nothing_left(ray: LocalRay) -> None:
    assert processes.members(ray.mark, ray.session) == []
    assert not any(Path(folder).exists() for folder in ray.folders)
    assert local_ray.find("lifecycle") is None


def refusal(address: str) -> tuple[str, float]:
    """The line that an address gives, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(connect.ClusterError) as refused:
        connect.connect_to(address)
    return str(refused.value), time.monotonic() - began


def test_an_address_where_nothing_listens_is_told_within_5_s() -> None:
    """Ray itself would try again for many minutes, silently; answers alone were awaited for 20 s."""
    where = f"127.0.0.1:{free_port()}"
    line, took_s = refusal(where)
    assert line.startswith(f"no Ray answers at '{where}': Connection refused; start it")
    assert took_s < 5


def test_a_host_that_does_not_answer_is_told_within_5_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is looked for, and a connection that is neither taken nor refused, can take minutes."""
    line, took_s = refusal("no-such-host.invalid:6379")
    assert "no-such-host.invalid:6379" in line
    assert took_s < 5
    over = threading.Event()

    def hang(*_: object) -> None:
        over.wait(30)
        raise OSError("given up long ago")

    monkeypatch.setattr(connect.socket, "create_connection", hang)
    line, took_s = refusal("10.0.0.1:6379")
    over.set()
    assert line.startswith("no Ray answers at '10.0.0.1:6379': no connection within 2.5 s; start it")
    assert took_s < 5


def test_a_port_where_no_ray_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard's, say; what is silent may be a head that is just starting."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    line, took_s = refusal(f"127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    assert "what listens there answers as no Ray does; name the port of its head (6379" in line
    assert took_s < 5
    monkeypatch.setattr(connect, "ANSWER_S", 0.5)
    monkeypatch.setattr(connect, "PROBE_S", 0.5)
    with socket.create_server(("0.0.0.0", 0)) as silent:
        line, _ = refusal(f"127.0.0.1:{silent.getsockname()[1]}")
    assert "what listens there answers nothing within 0.5 s" in line
    assert "is no Ray's address" in refusal("http://h:8265")[0]
    assert "Ray Client cannot hold" in refusal("ray://h:10001")[0]


@pytest.mark.slow  # tests/ray/doors/test_launch.py goes through the same with a run
def test_outlives_a_killed_driver_and_stops_whole(ray: LocalRay) -> None:
    command = [sys.executable, "-c", DRIVER, "stay"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "1\n"
        driver.kill()
    assert drive() == "2", "the detached actor must have survived its driver"
    assert ray.alive
    stranger = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    program = f"import ray; ray.init({ray.address!r})"
    with pytest.raises(subprocess.TimeoutExpired) as refused:  # Ray keeps trying for 15 s
        subprocess.run([sys.executable, "-c", program], env=stranger, capture_output=True, timeout=5)
    assert b"InvalidAuthToken" in (refused.value.stderr or b"")

    assert Path(ray.temp_folder).stat().st_mode & 0o777 == 0o700, "its sockets are nobody else's"
    assert (local_ray.state_file("lifecycle").stat().st_mode & 0o777) == 0o600
    begin = time.monotonic()
    local_ray.stop(local_ray.find("lifecycle") or ray)
    assert time.monotonic() - begin < 8
    assert_nothing_left(ray)


@pytest.mark.slow  # tests/ray/doors/test_launch.py goes through the same with a run
def test_cleans_up_after_sigkill_of_everything_but_the_workers(ray: LocalRay) -> None:
    assert drive() == "1"
    actor = next(pid for pid in processes.members(ray.mark, ray.session) if b"Counter" in command_line(pid))
    for pid in processes.members(ray.mark, ray.session):
        if pid != actor:
            os.kill(pid, signal.SIGKILL)
    os.kill(actor, signal.SIGSTOP)  # it cannot notice that its raylet is gone
    wait_until(lambda: not ray.alive, 5)
    assert actor in processes.members(ray.mark, ray.session)
    again = local_ray.start("lifecycle", cpus=1, gpus=0)
    assert actor not in processes.members(ray.mark, ray.session)
    assert not Path(ray.folders[0]).exists()
    assert again.mark != ray.mark
    assert drive() == "1", "a new Ray knows nothing of the old one's actors"
    local_ray.stop(again)
    assert_nothing_left(again)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow  # tests/ray/doors/test_launch.py goes through the same with a run
def test_goes_away_by_itself_after_the_end_of_the_run(ray: LocalRay) -> None:
    assert drive("end") == "1"
    assert not ray.alive, "a launch that comes now must start another one"
    wait_until(lambda: not processes.members(ray.mark, ray.session), supervisor.LINGER_S + 15)
    assert_nothing_left(ray)


def test_a_ray_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    long = tmp_path / ("a-folder-too-long-for-a-socket-path" * 4)
    with pytest.raises(LocalRayError, match=r"the local Ray exited with 1: .*107 bytes"):
        local_ray.start("lifecycle", cpus=1, temp_folder=long)
    assert local_ray.find("lifecycle") is None


def test_a_folder_that_somebody_else_holds_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file, which is no folder of ours")
    with pytest.raises(LocalRayError, match=r"needs .*taken for itself"):
        local_ray.start("lifecycle", cpus=1, temp_folder=taken)


def test_a_stranger_process_is_no_member() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeper:
        # The pid of a dead Ray's leader, used again by somebody else's session.
        assert processes.members("no-such-mark", sleeper.pid) == []
        sleeper.kill()


LISTENS = """
import sys, time, ray
from picotron_ray.runtime.ray_cluster.connect import connect_to
if "before" in sys.argv:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
connect_to(sys.argv[1])
from ray._private.utils import publish_error_to_driver
from ray._private.worker import global_worker
for _ in range(20):  # until it listens
    publish_error_to_driver("worker_died", "half a page of guesses", global_worker.gcs_client)
    time.sleep(0.1)
"""


@pytest.mark.parametrize(("how", "printed"), [("by us", False), ("before", True)])
def test_rays_messages_stay_off_stdout(local_ray: LocalRay, how: str, printed: bool) -> None:
    """Where we connect. They are not ours to drop where the caller did."""
    words = [sys.executable, "-c", LISTENS, local_ray.address, how]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert ("half a page of guesses" in found.stdout) == printed, found
