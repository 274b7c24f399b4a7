"""Files that commands are asked to write: a line and exit code 2 where that fails, and the old one stays."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver.asked_files import write_asked

FULL = Path("/dev/full")


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """Have files end at 64 bytes, as ``ulimit -f`` and a full disk do."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_was_there_stays_where_the_new_one_has_no_room(
    tmp_path: Path, small_files: Callable[[], None]
) -> None:
    page = tmp_path / "r.html"
    page.write_text("the good one")
    small_files()
    with pytest.raises(ConfigError, match=r"^--to: cannot write .*r\.html: File too large; name a file"):
        write_asked("--to", page, "x" * 1000)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("r.html", "the good one")]


def test_a_file_is_replaced_with_its_mode_and_behind_its_link(tmp_path: Path) -> None:
    page, link = tmp_path / "r.html", tmp_path / "newest.html"
    page.write_text("before")
    page.chmod(0o640)
    link.symlink_to(page)
    write_asked("--to", link, "after")
    assert (page.read_text(), page.stat().st_mode & 0o777, link.is_symlink()) == ("after", 0o640, True)


def test_a_device_is_written_where_it_is() -> None:
    write_asked("--to", Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(ConfigError, match=f"^--to: cannot write /dev/full: {os.strerror(errno.ENOSPC)}; "):
        write_asked("--to", FULL, "x" * 10)


@pytest.mark.parametrize("words", [("plan", "tiny", "--gpus", "2"), ("analyse", "tiny"), ("runs", ".")])
def test_json_on_a_full_disk_is_one_line_and_exit_2(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said that what is printed is not taken, and that a run goes on."""
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, [*words, "--json", str(FULL)])
    assert said.exit_code == 2, said.output
    assert said.stderr.splitlines()[-1].startswith("error: --json: cannot write /dev/full: No space left")
    assert json.loads(CliRunner().invoke(app, ["runs", ".", "--json", "-"]).stdout) == []
