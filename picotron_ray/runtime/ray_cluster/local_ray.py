"""A Ray of our own on this machine: started in a session of its own, found again, taken down by pid.

``ray.init()`` in a driver ties Ray to that driver: SIGKILL it and every actor dies with it. So launch
starts ``supervise`` in a new session, which runs ``ray start --head --block`` and outlives the driver.
A state file under ``$XDG_STATE_HOME/picotron_ray/`` remembers it; a lock beside it lets two launches of
one name agree on who starts. The supervisor takes Ray down once the run has announced its end
(``announce_end``); ``stop``, or the next start of that name, removes whatever a SIGKILL left behind.

Ports are ephemeral and calls need a token that only this user can read, unless the user chose a
``RAY_AUTH_MODE``. ``RAY_ADDRESS`` is not looked at here: with it, no local Ray is used at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.runtime.ray_cluster import kept_slots, processes
from picotron_ray.runtime.ray_cluster.head_command import head_command

LEAST_START_S = 5.0  # a start takes about 4 s
TOO_SLOW = "timed out during startup"  # of Ray 2.x, after 30 s that nobody can change
_children: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process started: kept, since they shall outlive it without a warning."""
REAP_S = 5.0
NICENESS = "RAY_worker_niceness"
"""Environment variable of Ray's node manager: niceness that its actors get."""
ENDED = "PICOTRON_LOCAL_RAY_ENDED"
"""Environment variable with the path of the file that says that the run is over."""


class LocalRayError(PicotronError):
    """The local Ray did not start, or did not stop."""


class SlowRayError(LocalRayError):
    """Ray gave its own start up, because the machine was too slow for it."""


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A Ray, as its state file has it. ``folders`` hold the run's slots and pages and go away with Ray."""

    run: str
    mark: str
    session: int
    address: str
    temp_folder: str
    token: str
    folders: tuple[str, ...] = ()

    @property
    def running(self) -> bool:
        """True while its supervisor runs."""
        return processes.is_member(self.session, self.mark, self.session)

    @property
    def alive(self) -> bool:
        """True where it can be used: its supervisor runs and the run has not announced its end."""
        return bool(self.address) and self.running and not ended_file(Path(self.temp_folder)).exists()

    @property
    def exit_status(self) -> str:
        """Exit status of Ray's head where that ended by itself; empty where it was asked to, or runs."""
        try:
            return exit_file(Path(self.temp_folder)).read_text().strip()
        except OSError:
            return ""


def state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "picotron_ray"


def state_file(run: str) -> Path:
    return state_folder() / f"{run}.json"


def lock_file(run: str) -> Path:
    """Path of a run's start/stop lock; a name that was never launched here has none."""
    return state_folder() / f"{run}.lock"


def ended_file(temp_folder: Path) -> Path:
    """File that exists once the run is over."""
    return temp_folder / "ended"


def begun_file(temp_folder: Path) -> Path:
    """File that exists once Ray has something to run, for which it outlives the process that started it."""
    return temp_folder / "begun"


def exit_file(temp_folder: Path) -> Path:
    """File that exists once Ray's head has ended by itself, with its exit status."""
    return temp_folder / "exit-status"


def rays_folder(temp_folder: Path) -> Path:
    """Ray's own temporary folder; Ray opens it to all users, so it lies inside one that is ours alone."""
    return temp_folder / "r"


def default_temp_folder(run: str, states: Path | None = None) -> Path:
    """A short path: Ray puts sockets below it, whose paths must stay under 108 bytes.

    Args:
        states: folder of the state files, where another process has another one than this.
    """
    digest = hashlib.sha256(f"{states or state_folder()}/{run}".encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"picotron-{os.getuid()}-{digest}"


SOCKET_NAMES = len("/session_2026-11-23_10-29-44_375116_/sockets/plasma_store")
"""Characters of Ray's longest socket path below its folder, but for the number of its process."""
SOCKET_PATH = 107
"""Most characters of a socket's path on Linux (unix(7))."""


def refuse_long_folder(run: str) -> None:
    """Raise ConfigError where Ray could not make its sockets: it would try for minutes, in silence."""
    folder, temporary = str(rays_folder(default_temp_folder(run))), tempfile.gettempdir()
    room = SOCKET_PATH - SOCKET_NAMES - len(str(os.getpid())) - len(folder)
    if room < 0:
        raise ConfigError(
            f"TMPDIR: saw {temporary}, expected at most {len(temporary) + room} characters: paths of Ray's"
            f" sockets below it may have {SOCKET_PATH}; set it to a shorter folder, such as /tmp"
        )


def log_folder(run: str) -> Path:
    """Ray's logs of the run's newest local Ray; they stay after its end."""
    return rays_folder(default_temp_folder(run)) / "session_latest" / "logs"


@contextlib.contextmanager
def locked(run: str) -> Iterator[None]:
    """Hold the start/stop lock of a run name on this machine.

    Raises:
        ConfigError: this user has no folder for it.
    """
    path = lock_file(run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise ConfigError(
            f"XDG_STATE_HOME: {path.parent} cannot be written ({error.strerror}), where launch remembers its"
            " runs; make it writable, or set XDG_STATE_HOME to a folder of yours"
        ) from error
    with lock as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find(run: str) -> LocalRay | None:
    """Read the state file of that run's Ray, which need not be alive; None where there is none.

    Raises:
        LocalRayError: it cannot be read.
    """
    path = state_file(run)
    try:
        values = json.loads(path.read_text())
        return LocalRay(**{**values, "folders": tuple(values["folders"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LocalRayError(
            f"{path} cannot be read ({error}), which tells of the Ray of run {run!r}; end that by hand, then"
            " remove the file"
        ) from error


def runs() -> list[str]:
    """Names of all runs that have a state file here."""
    return sorted(path.stem for path in state_folder().glob("*.json"))


def save(ray: LocalRay) -> None:
    """Write the state file of a run's Ray, whose lock the caller holds.

    Raises:
        ConfigError: its folder cannot be written.
    """
    path = state_file(ray.run)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(ray), file)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"XDG_STATE_HOME: {path.parent} takes no more ({error.strerror}), where launch remembers its"
            " runs; free some room there, or set XDG_STATE_HOME to another folder of yours"
        ) from error


def authentication(token: str) -> dict[str, str]:
    """Environment that the processes of that Ray, and drivers that connect to it, need."""
    if not token:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def start(
    run: str,
    *,
    cpus: int,
    gpus: int | None = None,
    folders: Sequence[Path] = (),
    temp_folder: Path | None = None,
    timeout_s: float = 120.0,
) -> LocalRay:
    """Start a Ray with ``cpus`` CPU slots and wait until it takes connections (about 4 s).

    Ray gives its own start 30 s, which a busy machine may not keep: it is started again then, for as long as
    ``timeout_s`` allows. Cleans up after a dead Ray of that name first. Raises LocalRayError with the end of
    Ray's own output.
    """
    deadline = time.monotonic() + timeout_s
    temp_folder = temp_folder or default_temp_folder(run)
    while True:
        old = find(run)
        if old is not None:
            stop(old, grace_s=0.0)
        try:
            return _start_once(run, cpus, gpus, folders, temp_folder, deadline - time.monotonic())
        except SlowRayError:
            if deadline - time.monotonic() < LEAST_START_S:
                raise


def _start_once(
    run: str, cpus: int, gpus: int | None, folders: Sequence[Path], temp_folder: Path, timeout_s: float
) -> LocalRay:
    shutil.rmtree(temp_folder, ignore_errors=True)
    try:
        temp_folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise LocalRayError(f"the local Ray needs {temp_folder} for itself: {error.strerror}") from error
    mark = secrets.token_hex(16)
    token = "" if os.environ.get("RAY_AUTH_MODE") else secrets.token_hex(32)
    ended = ended_file(temp_folder)
    environment = {
        **os.environ,
        **authentication(token),
        processes.MARK: mark,
        ENDED: str(ended),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default of 15 leaves an actor 3 % of a core beside any other process: heartbeats come late.
        NICENESS: os.environ.get(NICENESS, "0"),
    }
    environment.pop("RAY_ADDRESS", None)
    module = "picotron_ray.runtime.ray_cluster.supervisor"
    supervise = [sys.executable, "-m", module, run, str(ended), str(os.getpid())]
    with (temp_folder / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            [*supervise, *head_command(rays_folder(temp_folder), cpus, gpus)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    _children.append(process)
    ray = LocalRay(run, mark, process.pid, "", str(temp_folder), token, tuple(str(path) for path in folders))
    try:
        save(ray)
        ray = replace(ray, address=_wait_for_address(process, temp_folder, timeout_s))
        save(ray)
    except BaseException:
        stop(ray, grace_s=0.0)
        raise
    return ray


def _wait_for_address(process: subprocess.Popen[bytes], temp_folder: Path, timeout_s: float) -> str:
    log = temp_folder / "ray.log"
    # Written last of all, after "Ray runtime started" was printed.
    written = rays_folder(temp_folder) / "ray_current_cluster"
    left = exit_file(temp_folder)
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and not left.exists() and time.monotonic() < deadline:
        if written.exists() and (address := written.read_text().strip()):
            return address
        time.sleep(0.05)
    code = left.read_text() if left.exists() else process.returncode
    what = f"was not up in {timeout_s:.3g} s" if code is None else f"exited with {code}"
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
    kind = SlowRayError if TOO_SLOW in last[0] else LocalRayError
    raise kind(f"the local Ray {what}: {last[0].strip()[:300]} (all of it: {log})")


def _reap(ended: Collection[int]) -> None:
    """Forget this process's supervisors that are gone; those of the pids ``ended`` are waited for.

    A process has lost its environment, by which it is known, some milliseconds before it can be waited for.
    """
    for child in _children:
        if child.pid in ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(REAP_S)
    _children[:] = [child for child in _children if child.poll() is None]


def stop(ray: LocalRay, grace_s: float = 3.0, discard: bool = False) -> None:
    """End every process of that Ray and remove what it left on this machine; its logs stay.

    Slots that the run keeps for its next launch stay too, with the state file that names their folders,
    unless ``discard`` says otherwise. Idempotent. Raises LocalRayError, naming the pids, if a process
    survives SIGKILL.
    """
    left = processes.end_all(ray.mark, ray.session, grace_s)
    _reap(() if left else (ray.session,))
    current = find(ray.run)
    if current is None or current.mark == ray.mark:  # else a newer Ray of that run uses them by now
        folders = [Path(folder) for folder in ray.folders]
        if discard:
            kept_slots.discard(folders)
        for folder in folders:
            kept_slots.remove_rest(folder)
        _keep_only_logs(Path(ray.temp_folder))
        if not kept_slots.keeping(folders):
            state_file(ray.run).unlink(missing_ok=True)
    if left:
        raise LocalRayError(
            f"processes {left} of run {ray.run!r} survive SIGKILL; their machine needs a look"
        )


def _keep_only_logs(temp_folder: Path) -> None:
    for session in rays_folder(temp_folder).glob("session_2*"):
        for entry in session.iterdir():
            if entry.is_dir() and entry.name != "logs":
                shutil.rmtree(entry, ignore_errors=True)


def begin(ray: LocalRay) -> None:
    """Tell the supervisor that there is something to run now: the process that started Ray may end.

    Raises:
        LocalRayError: it cannot be told.
    """
    path = begun_file(Path(ray.temp_folder))
    try:
        path.touch()
    except OSError as error:
        raise LocalRayError(
            f"the local Ray of run {ray.run} needs {path}: {error.strerror}; free some room there"
        ) from error


def announce_end() -> None:
    """Tell the supervisor, from inside the local Ray, that the run is over: it takes Ray down soon after."""
    path = os.environ.get(ENDED)
    if path:
        Path(path).touch()
