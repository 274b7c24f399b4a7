"""The telemetry page: what a worker writes is what its agent reads, whole or not at all."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from picotron_ray.errors import SlotRoomError
from picotron_ray.runtime import telemetry_page
from picotron_ray.runtime.telemetry_page import (
    MOST_STAGES,
    ROWS,
    SIZE,
    MemoryFigures,
    StepRow,
    TelemetryPage,
    read_rows,
)

PHASES = (0.01, 0.2, 0.4, 0.0, 0.05, 0.02, 0.01, 0.1, 0.01)
ROW = StepRow(
    row=0,
    term=2,
    n=5,
    rank=3,
    step=41,
    ordinal=0,
    step_s=0.8,
    row_s=0.15,
    phase_s=PHASES,
    sent_bytes=(100, 0, 7, 0, 0),
    stage_s={1: 0.25, 3: 0.5},
    rows=4,
    micro_batches=2,
    memory=MemoryFigures(1, 2, 3, 4, 5),
    links=(1e-4, 0.0, 2e-4, 0.0, 0.0, 1e9, 0.0, 2e9, 0.0, 0.0),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w1.telemetry"


def test_reader_sees_what_the_writer_wrote(path: Path) -> None:
    page = TelemetryPage(path, gpu="GPU-11111111-2222-3333-4444-555555555555")
    page.write(ROW)
    found = read_rows(path)
    assert found is not None
    assert (found.worker, found.pid, found.gpu) == (
        "w1",
        os.getpid(),
        "GPU-11111111-2222-3333-4444-555555555555",
    )
    assert found.rows == (ROW._replace(row=1),)
    unseen = ROW._replace(row=2, waits_seen=False)
    page.write(unseen)
    again = read_rows(path)
    assert again is not None
    assert again.rows == (ROW._replace(row=1), unseen)
    assert [file.name for file in path.parent.iterdir()] == ["w1.telemetry"]


def test_a_fresh_page_holds_no_row(path: Path) -> None:
    TelemetryPage(path)
    found = read_rows(path)
    assert found is not None
    assert found.rows == ()


def test_the_last_hundred_steps_stay_in_their_order(path: Path) -> None:
    page = TelemetryPage(path)
    for step in range(1, ROWS + 31):
        page.write(ROW._replace(step=step, ordinal=step - 1))
    found = read_rows(path)
    assert found is not None
    assert [row.step for row in found.rows] == list(range(31, ROWS + 31))


def test_rows_of_an_earlier_generation_are_left_out(path: Path) -> None:
    page = TelemetryPage(path)
    for n, step in ((5, 10), (5, 11), (6, 11), (6, 12)):
        page.write(ROW._replace(n=n, step=step))
    found = read_rows(path)
    assert found is not None
    assert [(row.n, row.step) for row in found.rows] == [(6, 11), (6, 12)]


def test_a_row_that_is_half_written_is_left_out(path: Path) -> None:
    """Any split of a row between old and new bytes shows in its sum."""
    page = TelemetryPage(path)
    for step in range(ROWS):
        page.write(ROW._replace(step=step))
    old = path.read_bytes()
    page.write(ROW._replace(step=ROWS, step_s=0.9))
    new = path.read_bytes()
    first = telemetry_page._HEAD_BYTES
    for cut in range(1, 300, 4):
        path.write_bytes(new[: first + cut] + old[first + cut :])
        found = read_rows(path)
        assert found is not None
        steps = [row.step for row in found.rows]
        whole = (
            new[first : first + cut] == old[first : first + cut] or new[first + cut :] == old[first + cut :]
        )
        assert steps[0] == 1 or whole, cut


WRITER = """
import sys
from pathlib import Path
from picotron_ray.runtime.telemetry_page import TelemetryPage
from tests.pure.runtime.test_telemetry_page import ROW
page = TelemetryPage(Path(sys.argv[1]))
for step in range(1, 30_001):
    page.write(ROW._replace(step=step, ordinal=step, phase_s=(float(step),) * 9, stage_s={0: float(step)}))
"""


def test_rows_are_whole_while_another_process_writes(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=Path(__file__).parents[3]) as writer:
        seen, last = 0, 0
        while writer.poll() is None or last < 30_000:
            found = read_rows(path)
            if found is None:
                continue
            seen += len(found.rows)
            last = max((row.step for row in found.rows), default=0)
            for row in found.rows:
                assert {*row.phase_s, *row.stage_s.values()} == {float(row.step)}
    assert writer.returncode == 0
    assert seen > 1000


@pytest.mark.parametrize("garbage", [b"", b"x", b"\xff" * SIZE, bytes(SIZE), b"\0" * (SIZE - 1)])
def test_garbage_is_no_page(path: Path, garbage: bytes) -> None:
    path.write_bytes(garbage)
    assert read_rows(path) is None
    assert read_rows(path.with_name("absent.telemetry")) is None


def test_garbage_in_rows_is_no_row(path: Path) -> None:
    TelemetryPage(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: telemetry_page._HEAD_BYTES] + os.urandom(SIZE - telemetry_page._HEAD_BYTES))
    found = read_rows(path)
    assert found is not None
    assert found.rows == ()


def test_a_page_of_another_version_is_not_read(path: Path) -> None:
    TelemetryPage(path).write(ROW)
    raw = bytearray(path.read_bytes())
    struct.pack_into("=q", raw, 8, telemetry_page.VERSION + 1)
    path.write_bytes(raw)
    assert read_rows(path) is None


def test_figures_that_are_no_numbers_make_no_row(path: Path) -> None:
    page = TelemetryPage(path)
    page.write(ROW._replace(step_s=math.nan))
    page.write(ROW._replace(stage_s={0: math.inf}))
    found = read_rows(path)
    assert found is not None
    assert found.rows == ()


def test_a_rank_of_very_many_stages_tells_of_the_first(path: Path) -> None:
    TelemetryPage(path).write(ROW._replace(stage_s={stage: float(stage) for stage in range(MOST_STAGES + 8)}))
    found = read_rows(path)
    assert found is not None
    assert found.rows[0].stage_s == {stage: float(stage) for stage in range(MOST_STAGES)}


def test_a_full_file_system_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SlotRoomError, match=f"no room for a page of {SIZE} bytes"):
        TelemetryPage(path)
    assert list(path.parent.iterdir()) == []
