"""The event log: written beside the decisions, bounded, torn lines skipped, and a week of it read at once."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.replay import event_line, header_line, seal, unseal
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.event_log import files, writer
from picotron_ray.runtime.coordinator.event_log.files import LoggedLine
from picotron_ray.runtime.coordinator.event_log.writer import EventLogWriter
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.ray_cluster.names import event_folder
from tests.support.runs.coordinator_world import job
from tests.support.runs.remembered import remember

HEADER = header_line(job(), {"device": "cpu"}, launch="l", offset_s=0.0)
EXIT = m.WorkerExited("w1", "x" * 200)


class Disk:
    """``os`` with a disk that takes ``room`` more bytes."""

    def __init__(self) -> None:
        self.room = 1 << 60

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(file, data[: self.room])
        self.room -= written
        return written


class Logs:
    """Logs in a folder, and what their writers tell."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder, self.disk, self.told, self.line = folder, disk, [], 0
        self.open: list[EventLogWriter] = []

    def log(self, term: int = 1) -> EventLogWriter:
        def memo() -> dict[str, Any]:
            return {"term": term, "line": self.line}

        made = EventLogWriter(
            self.folder, term, HEADER, memo, lambda level, kind, text: self.told.append((level, text))
        )
        self.open.append(made)
        return made

    def add(self, log: EventLogWriter, count: int) -> None:
        for _ in range(count):
            self.line = log.next_line
            log.add(float(self.line), 0.0, EXIT, [])

    def read(self, record: Any = None) -> list[tuple[int, int]]:
        return [(line.term, line.data["i"]) for line in files.lines_since(self.folder, record)]


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Logs]:
    disk = Disk()
    monkeypatch.setattr(writer, "os", disk)
    monkeypatch.setattr(writer, "RETRY_S", 0.01)
    made = Logs(tmp_path, disk)
    yield made
    for log in made.open:
        log.close()


def until(true: Any) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_full_disk_delays_no_decision_and_loses_no_line_that_waits(logs: Logs) -> None:
    log = logs.log()
    logs.add(log, 3)
    until(lambda: len(logs.read()) == 3)
    logs.disk.room = 100  # in the midst of a line
    logs.add(log, 50)
    until(lambda: logs.told)
    assert [len(logs.read()), logs.told[0][0]] == [3, "warning"]
    assert "No space left" in logs.told[0][1] or "only a part" in logs.told[0][1]
    logs.disk.room = 1 << 60
    until(lambda: len(logs.told) == 2)
    assert logs.told[1] == ("info", "the event log is written again")
    log.close()
    assert logs.read() == [(1, i) for i in range(1, 54)]


def test_a_header_that_is_written_while_its_file_is_read_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "events-1.jsonl"
    path.touch()
    texts = files._texts(path, 0)
    first = next(texts, "")
    path.write_text("a header\n")
    assert [first, *texts] == [""]


def test_what_waits_for_a_disk_is_bounded_and_what_is_missing_counted(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MOST_WAITING", 10)
    logs.disk.room = 0
    log = logs.log()
    logs.add(log, 5)
    until(lambda: logs.told)
    logs.add(log, 100)
    logs.disk.room = 1 << 60
    until(lambda: len(logs.told) == 2)
    log.close()
    written = len(logs.read())
    assert 10 <= written <= 12
    assert logs.told[1][1].endswith(f"; {105 - written} events are missing from it")


def test_a_record_that_cannot_be_made_holds_up_no_line(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once, and tried again; it ended the thread, and every later line waited in memory."""
    monkeypatch.setattr(writer, "RECORD_LINES", 2)
    log, made = logs.log(), log_record(logs)
    monkeypatch.setattr(log, "_record", lambda: made(fails=True))
    logs.add(log, 9)
    until(lambda: len(logs.read()) == 9)
    [(level, text)] = logs.told
    assert (level, "record cannot be made (TypeError('torn'))" in text) == ("error", True)
    monkeypatch.setattr(log, "_record", made)
    logs.add(log, 2)
    until(lambda: files.read_record(logs.folder))
    log.close()
    assert logs.read() == [(1, i) for i in range(1, 12)]
    assert len(logs.told) == 1


def log_record(logs: Logs) -> Callable[..., dict[str, Any]]:
    def record(fails: bool = False) -> dict[str, Any]:
        if fails:
            raise TypeError("torn")
        return {"term": 1, "line": logs.line}

    return record


def test_no_error_ends_the_log(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logs.log()
    failing, append = [True], log._append

    def broken(line: bytes) -> None:
        if failing[0]:
            raise RuntimeError("a bug")
        append(line)

    monkeypatch.setattr(log, "_append", broken)
    logs.add(log, 3)
    until(lambda: logs.told)
    assert "RuntimeError('a bug')" in logs.told[0][1]
    failing[0] = False
    until(lambda: len(logs.told) == 2)
    log.close()
    assert logs.read() == [(1, 1), (1, 2), (1, 3)]


def test_an_event_that_cannot_be_written_is_left_out(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logs.log()
    log.add(1.0, 0.0, object(), [])  # type: ignore[arg-type]
    logs.add(log, 1)
    until(logs.read)
    assert (logs.read(), logs.told) == ([(1, 2)], [])


def test_logs_of_another_run_go_with_the_count_of_its_exits(tmp_path: Path) -> None:
    for name in ("events-1.jsonl", files.RECORD, files.EXITS):
        (tmp_path / name).write_text("x")
    files.read_memory(tmp_path, lambda: None, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("term", [2, 3, 9])
def test_logs_of_another_run_go_at_any_term(tmp_path: Path, term: int) -> None:
    """A run that began elsewhere comes to a machine that remembers another one of its name."""
    night = job(name="night", storage={"url": str(tmp_path)})
    folder = event_folder("night")
    for theirs in (2, 3):
        remember(night, "theirs", term=theirs)
    files.write_record(folder, {"term": 3, "line": 1, "facts": {}})
    (folder / files.EXITS).write_text("7")
    remember(night, "mine", step=7, term=1)
    memo, lines = files.read_memory(folder, lambda: None, term, "mine")
    assert memo is None
    told = [line.head["identity"] for line in lines]
    assert (set(told), [path.name for path in folder.iterdir()]) == ({"mine"}, ["events-1.jsonl"])


def test_logs_that_may_be_the_runs_own_stay(tmp_path: Path) -> None:
    night = job(name="night", storage={"url": str(tmp_path)})
    remember(night, "mine", term=2)
    remember(night, "", term=3)  # of a version that did not note it
    files.log_file(event_folder("night"), 4, 0).write_text("torn")
    files.write_record(event_folder("night"), {"term": 3, "line": 0})
    for identity in ("mine", ""):  # "": storage does not tell
        memo, _ = files.read_memory(event_folder("night"), lambda: None, 5, identity)
        assert (memo, len(files.log_files(event_folder("night")))) == ({"term": 3, "line": 0}, 4)


def test_a_log_never_has_more_than_two_parts(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 20_000)
    monkeypatch.setattr(files, "RUN_BYTES", 40_000)
    for term in (1, 2):
        log = logs.log(term)
        logs.add(log, 500)
        log.close()
    names = [path.name for path in files.log_files(logs.folder)]
    assert all(name.startswith("events-2-") for name in names)
    assert sum(path.stat().st_size for path in files.log_files(logs.folder)) <= 40_000
    for path in files.log_files(logs.folder):
        assert json.loads(unseal(path.read_text().splitlines()[0]) or "")["launch"] == "l"
    assert logs.read()[-1] == (2, 500)


def test_each_part_of_a_log_says_which_it_is(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 20_000)
    for term in (9, 10):
        log = logs.log(term)
        logs.add(log, 400)
        log.close()
    for term, parts in zip((9, 10), files.term_logs(logs.folder), strict=True):
        assert len(parts) > 2
        heads = [json.loads(unseal(part.read_text().splitlines()[0]) or "") for part in parts]
        assert [head.get("part", 0) for head in heads] == list(range(len(parts)))
        assert all(part.name.startswith(f"events-{term}") for part in parts)


def test_a_restart_reads_the_record_and_the_lines_since(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RECORD_LINES", 100)
    log = logs.log()
    logs.add(log, 100)
    until(lambda: files.read_record(logs.folder) is not None)
    logs.add(log, 7)
    until(lambda: len(logs.read()) == 107)
    monkeypatch.setattr(files, "read_record", lambda _, read=files.read_record: read(logs.folder))
    record, lines = files.read_memory(logs.folder, lambda: None, 2)
    assert record is not None
    assert record["line"] >= 100
    assert [line.data["i"] for line in lines] == list(range(record["line"] + 1, 108))
    later = logs.log(2)
    logs.add(later, 2)
    later.close()
    assert logs.read({**record, "file": "gone"})[-3:] == [(1, 107), (2, 1), (2, 2)]


def test_torn_lines_are_skipped(tmp_path: Path) -> None:
    lines = [seal(event_line(float(i), EXIT, [], i=i)) for i in range(1, 5)]
    lines[1] = lines[1][:40]
    lines[2] = "{" + lines[2]
    files.log_file(tmp_path, 3, 0).write_text("\n".join([seal(HEADER), *lines]))
    (files.log_file(tmp_path, 1, 0)).write_text(
        '{"job": 1}\n' + event_line(9.0, EXIT, []) + '\n{"now": 1, "eve'
    )
    found = list(files.lines_since(tmp_path, None))
    assert [(line.term, line.data["now"]) for line in found] == [(1, 9.0), (3, 1.0), (3, 4.0)]
    assert found[-1].head["launch"] == "l"


def test_a_torn_record_counts_as_none(tmp_path: Path) -> None:
    assert files.read_record(tmp_path) is None
    files.write_record(tmp_path, {"term": 1, "line": 4})
    assert (tmp_path / files.RECORD).stat().st_mode & 0o777 == 0o600
    assert files.read_record(tmp_path) == {"term": 1, "line": 4}
    path = tmp_path / files.RECORD
    path.write_bytes(path.read_bytes()[:-1])
    assert files.read_record(tmp_path) is None


def test_another_head_begins_with_what_storage_has(tmp_path: Path) -> None:
    stored = files.encode_record({"term": 4, "line": 9})
    assert files.read_memory(tmp_path, lambda: stored, 9) == ({"term": 4, "line": 9}, [])
    files.log_file(tmp_path, 5, 0).write_text(seal(HEADER) + "\n" + seal(event_line(1.0, EXIT, [], i=1)))
    record, lines = files.read_memory(tmp_path, lambda: stored, 9)
    assert (record, len(lines)) == ({"term": 4, "line": 9}, 1), "and what this machine has beyond that"


def test_a_machine_that_ran_the_run_before_takes_the_newer_record_of_storage(tmp_path: Path) -> None:
    """The run was there in terms 1 and 2, elsewhere in terms 3 to 5, and is there again."""
    stored = files.encode_record({"term": 5, "line": 9})
    files.log_file(tmp_path, 2, 0).write_text(seal(HEADER) + "\n" + seal(event_line(1.0, EXIT, [], i=12)))
    files.write_record(tmp_path, {"term": 2, "line": 10})
    assert files.read_memory(tmp_path, lambda: stored, 9) == ({"term": 5, "line": 9}, [])
    older = files.encode_record({"term": 2, "line": 8})
    for kept in (older, None, older[:-1]):
        record, lines = files.read_memory(tmp_path, partial(bytes, kept) if kept else lambda: None, 9)
        assert (record, [line.data["i"] for line in lines]) == ({"term": 2, "line": 10}, [12])
    (tmp_path / files.RECORD).write_bytes(b"torn")
    record, lines = files.read_memory(tmp_path, lambda: stored, 9)
    assert (record, lines) == ({"term": 5, "line": 9}, [])


def test_a_week_of_events_is_read_in_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit a minute, as 8 nodes see it, and the record as it was before the last 1,000 lines."""
    spec = m.GenerationSpec(m.GenerationId(1, 1), (m.Member("a", "n"),), Layout(), m.Source("init"), "test")
    record = RunRecord(job())
    record.begin(1, {})
    record.observe(m.Tick(), [m.RunGeneration(spec)], 0.0)
    for step in range(10_080):
        record.observe(m.Appended("commit", spec.id, step, step), [], float(step))
        record.note("info", "commit", f"step {step} committed")
    path, offset = files.log_file(tmp_path, 1, 0), files.PART_BYTES - 1_000_000
    with path.open("wb") as file:
        file.write(f"{seal(HEADER)}\n".encode())
        file.seek(offset)  # what is before is not read
        for i in range(1, 1001):
            line = event_line(float(i), m.Uploaded("n" * 56, spec.id, i), [], i=99_000 + i)
            file.write(f"{seal(line)}\n".encode())
    files.write_record(tmp_path, {**record.memo(), "line": 99_000, "file": path.name, "offset": offset})
    later = RunRecord(job())
    began = time.process_time()
    memo, since = files.read_memory(tmp_path, lambda: None, 2)
    later.recall(memo, since)
    taken_s = time.process_time() - began
    assert len(since) == 1000
    assert later.status(0)["committed"] == 10_079
    assert taken_s < 1.0, "on a busy machine it takes twice as long"


def test_lines_have_their_headers(tmp_path: Path) -> None:
    files.log_file(tmp_path, 1, 0).write_text(seal(HEADER) + "\n" + seal(event_line(1.0, EXIT, [], i=1)))
    (line,) = files.lines_since(tmp_path, None)
    assert isinstance(line, LoggedLine)
    assert line.head["offset_s"] == 0.0
