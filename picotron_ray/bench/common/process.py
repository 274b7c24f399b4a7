"""Process of a benchmark, with all its children; its output goes to a file."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from picotron_ray.bench.recovery.peers.host import environment
from picotron_ray.errors import PicotronError


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """Make the command that runs ``module`` in ``ranks`` processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", module, *arguments]


class Launched:
    """Running command of the benchmark ``title``; its log is in ``folder``, which is made."""

    def __init__(self, title: str, folder: Path) -> None:
        self.title, self.folder = title, folder
        folder.mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, command: list[str]) -> None:
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
            )

    def ended(self) -> int | None:
        """Exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def check(self) -> None:
        """Raise PicotronError with the log's last line where it has ended by itself."""
        if self.ended() is not None:
            lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
            raise PicotronError(f"{self.title}: {self.folder.name} ended by itself: {''.join(lines)[:300]}")

    def stop(self) -> None:
        """End it with all its processes."""
        if self._process is None:
            return
        if self._process.poll() is None:
            parent = psutil.Process(self._process.pid)
            for member in [*parent.children(recursive=True), parent]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None
