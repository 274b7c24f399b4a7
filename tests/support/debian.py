"""Programs of Debian packages, unpacked into a folder of our own: nothing is installed, no root is needed.

The package comes from the sources that apt on this machine uses, with apt's own check of its signature.
Only for programs that need no more than libc.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


def unpacked(package: str, home: str) -> Path:
    """Root of the unpacked package, kept under ``home``/.cache; skips the test where there is no apt-get."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"{package} is unpacked from a Debian package: no apt-get on this machine")
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")
    base = Path(os.environ.get("DEBIAN_PREFIX") or Path(home) / ".cache" / "ci-debian")
    root = base / f"{release}-{platform.machine()}" / package
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=root.parent) as work:
                _fetch(package, Path(work)).rename(root)
    return root


def _fetch(package: str, work: Path) -> Path:
    """Download and unpack into ``work``, with lists of packages of our own."""
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()
    settings = {
        "Dir::State": work / "state",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": 3,
    }
    options = [f"-o{key}={value}" for key, value in settings.items()]
    for command in (["update"], ["download", package]):
        apt = ["apt-get", "-qq", *options, *command]
        subprocess.run(apt, check=True, timeout=240, capture_output=True, cwd=work)
    (archive,) = work.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, work / "root"], check=True, timeout=60, capture_output=True)
    return work / "root"
