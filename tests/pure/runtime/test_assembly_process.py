"""The assembler's process makes large manifests, is replaced where it dies or hangs, and outlives nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.store.assembly import Assembler
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.manifest import committed_manifest, load_manifest
from picotron_ray.checkpoint.store.outline import Outline, decode_outline
from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import Appended, GenerationId, GenerationSpec, Source
from picotron_ray.errors import (
    CorruptError,
    FencedError,
    PartsGoneError,
    StorageError,
    StorageUnavailableError,
)
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.run_storage import assembly_process
from picotron_ray.runtime.run_storage.assembly_frames import (
    decode_frames,
    encode_frame,
    error_words,
    raise_told,
)
from picotron_ray.runtime.run_storage.assembly_process import INLINE_BYTES, AssemblyProcess
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.support.checkpoint.large_parts import large_part
from tests.support.checkpoint.open_files import a_thousand_open_files
from tests.support.selection import also_deep

LARGE = 2000  # chunks; of 8 rows of 16 bytes
A = GenerationId(1, 1)
SPEC = GenerationSpec(A, (), Layout(), Source("init"), "first")


@pytest.fixture
def job(memory_path: Path) -> JobConfig:
    return parse_job({"name": "r", "storage": {"url": str(memory_path)}, "data": {"global_batch": 8}})


@pytest.fixture
def store(job: JobConfig) -> Iterator[RunStore]:
    made = RunStore(job, lambda step: None)
    assert made.claim() == 1
    assert made.append_generation(SPEC).seq
    yield made
    made.close()


def upload(store: RunStore, chunks: int, step: int, known: int = 0) -> list[bytes]:
    """Parts of a state whose chunks are there."""
    part = large_part(chunks, step, known=known)
    for address, info in part.chunks.items():
        store._storage.put(chunk_key(address), bytes(info.size))
    return [part.encode()]


def pid(store: RunStore) -> int | None:
    return store._assembly.pid


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_large_state_is_committed_by_the_process_and_a_small_one_here(store: RunStore) -> None:
    first = store.commit(A, 1, upload(store, 40, 1))
    assert (first.error, pid(store)) == ("", None)
    second = store.commit(A, 2, upload(store, LARGE, 2, known=1))
    assert second.error == ""
    assert pid(store) not in (None, os.getpid())
    body = store._log.commits()[1].body
    manifest = committed_manifest(store._storage, body)
    assert (len(manifest.chunks), [s.last for s in manifest.ledger]) == (LARGE, [1, 2])
    assert store._outlines.committed(store._storage, body) == Outline.of(manifest)
    assert body["segment"] == ["ledger/1-1-2-2.jsonl", 2, 2, manifest.ledger[1].digest]
    assert list(store._storage.list("intents/")) == []
    assert store.commit_figures[2]["written_bytes"] == 0
    assert store.commit(A, 2, [b"junk"]) == second, "asked again, as the reply was lost"
    assert store.collect_garbage() == ""


def test_a_coordinator_of_many_nodes_commits_large_states_too(store: RunStore) -> None:
    """Each agent has a connection or two; the process is first asked when they all have theirs."""
    with a_thousand_open_files():
        assert store.commit(A, 1, upload(store, LARGE, 1)).error == ""
        assert pid(store) not in (None, os.getpid())


def test_an_error_that_nobody_thought_of_is_an_answer_too(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one, the entries behind it wait for ever."""
    parts = upload(store, 40, 1)

    def broken(*words: Any) -> None:
        raise KeyError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(store._assembly, "assembling", broken)
        event = store.commit(A, 1, parts)
    assert (event.error, event.fenced) == ("an error of the program: KeyError('no such thing')", False)
    assert "in broken" in caplog.text, "where it was is told"
    assert store.commit(A, 1, parts).error == ""


def test_ledger_lines_that_nobody_has_are_left_out_where_that_is_asked_for(store: RunStore) -> None:
    for step, chunks in ((2, 40), (5, LARGE)):  # here, and by the process
        parts = upload(store, chunks, step, known=step - 1)
        event = store.commit(A, step, parts)
        assert (event.seq, event.parts_gone) == (0, True)
        assert event.unproven == event.error != ""
        event = store.commit(A, step, parts, unproven=True)
        assert (event.error, event.unproven) == ("", "1" if step == 2 else "3 to 4")
        assert store.commit(A, step, parts) == event, "asked again, as the reply was lost"


def test_errors_are_those_of_the_commit(store: RunStore) -> None:
    parts = upload(store, LARGE, 1)
    gone = next(iter(store._storage.list("chunks/"))).key
    store._storage.delete(gone)
    event = store.commit(A, 1, parts)
    assert (event.parts_gone, event.seq) == (True, 0)
    assert event.error == f"1 chunks of step 1 are gone, first {gone.rpartition('/')[2]}; upload it again"
    before = pid(store)
    event = store.commit(A, 3, upload(store, LARGE, 3, known=2))
    assert event.error == (
        "checkpoint of step 3: the slots carry no ledger line of step 1, expected 1..3; every node that holds"
        " the state is asked for it"
    )
    assert pid(store) == before, "an error is no reason to replace it"
    assert store.commit(A, 1, upload(store, LARGE, 1)).error == ""


@pytest.mark.parametrize("by", [*also_deep(signal.SIGKILL), signal.SIGSTOP])
def test_a_process_that_dies_or_freezes_is_replaced(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    store._assembly._silent_s = 3.0
    assert store.commit(A, 1, upload(store, LARGE, 1)).error == ""
    old = pid(store)
    assert old is not None
    os.kill(old, by)
    assert store.commit(A, 2, upload(store, LARGE, 2, known=1)).error == ""
    assert pid(store) != old
    assert gone(old)


def test_what_died_between_its_two_steps_is_assembled_again(store: RunStore) -> None:
    parts = upload(store, LARGE, 1)
    assembling: Any = store._assembly.assembling(store._storage, parts, 0.0)
    outline = assembling.assemble(None)
    old = pid(store)
    assert old is not None
    os.kill(old, signal.SIGKILL)
    until(lambda: gone(old))
    stored = assembling.store()
    assert pid(store) != old
    manifest = load_manifest(store._storage, stored.key, stored.digest)
    assert Outline.of(manifest).addresses == outline.addresses
    again = assembling.store()
    assert (again.key, again.digest) == (stored.key, stored.digest), "the same bytes are there already"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit(7)", "it ended with 7"),
        ("import time; time.sleep(60)", "it took nothing for 0.3 s"),
    ],
)
def test_a_process_that_never_works_is_told_as_an_outage(job: JobConfig, program: str, why: str) -> None:
    process = AssemblyProcess(job, (sys.executable, "-S", "-E", "-c", program), 0.3)
    with pytest.raises(StorageUnavailableError) as caught:
        process.outline("m", bytes(INLINE_BYTES + 1))
    text = str(caught.value)
    assert text.startswith("the assembler's process failed 3 times (")
    assert why in text or "Broken pipe" in text
    assert process.pid is None, "it is reaped"


def test_the_end_of_the_run_ends_the_wait(job: JobConfig) -> None:
    program = "import time; time.sleep(60)"
    process = AssemblyProcess(job, (sys.executable, "-S", "-E", "-c", program))
    heard: list[Exception] = []

    def ask() -> None:
        try:
            process.outline("m", bytes(INLINE_BYTES + 1))
        except StorageUnavailableError as error:
            heard.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: process.pid is not None)
    process.close()
    thread.join(20)
    assert [str(error) for error in heard] == ["the run ends; nothing is assembled any more"]


def test_it_ends_with_whoever_started_it() -> None:
    """Also where another process still holds its input open."""
    program = (
        "import os, subprocess, sys\n"
        "r, w = os.pipe()\n"
        "os.set_inheritable(w, True)\n"
        f"child = subprocess.Popen({assembly_process.COMMAND!r}, stdin=r, stdout=subprocess.PIPE)\n"
        "child.stdout.read(1)\n"  # it is up
        "keeper = subprocess.Popen(['sleep', '30'], pass_fds=[w], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, keeper.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    child, keeper = map(int, parent.stdout.readline().split())
    try:
        assert not gone(child)
        parent.kill()
        until(lambda: gone(child))
    finally:
        os.kill(keeper, signal.SIGKILL)
        parent.stdin.close()
        parent.stdout.close()
        parent.wait()


def test_a_large_manifest_is_read_by_the_process(store: RunStore) -> None:
    """After a restart, which knows none."""
    assert store.commit(A, 1, upload(store, LARGE, 1)).error == ""
    body = store._log.commits()[0].body
    data = store._storage.get(body["manifest"])
    assert len(data) > INLINE_BYTES
    before = pid(store)
    assert store._assembly.outline("m", data) == decode_outline("m", data)
    with pytest.raises(CorruptError, match="bad is not readable JSON") as caught:
        store._assembly.outline("bad", b"{" * (INLINE_BYTES + 1))
    assert caught.value.where == "bad"
    assert pid(store) == before


def test_a_generation_does_not_wait_for_an_assembly(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the question for the newest term; entries stay in the order in which they were written."""
    begun, go_on = threading.Event(), threading.Event()
    real = Assembler.store

    def slow(self: Assembler) -> Any:
        begun.set()
        assert go_on.wait(30)
        return real(self)

    monkeypatch.setattr(Assembler, "store", slow)
    parts = upload(store, 40, 1)
    commit = store.committer.submit(store.commit, A, 1, parts)
    assert begun.wait(30)
    second = GenerationSpec(GenerationId(1, 2), (), Layout(), Source("slots", 1, A), "next")
    event: Appended = store.executor.submit(store.append_generation, second).result(30)
    assert event.seq == 3
    assert not commit.done()
    go_on.set()
    assert commit.result(30).seq == 4


@pytest.mark.parametrize(
    "error",
    [
        PartsGoneError("a"),
        StorageError("b"),
        StorageUnavailableError("c"),
        FencedError("d"),
        CorruptError("e", "f"),
    ],
)
def test_errors_travel_by_name(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        raise_told(error_words(error))
    assert (str(caught.value), getattr(caught.value, "where", None)) == (
        str(error), getattr(error, "where", None),
    )  # fmt: skip
    raise_told({"step": 1})
    for other in (KeyError("x"), SystemExit("y")):
        with pytest.raises(RuntimeError, match=f"the assembler met {type(other).__name__}"):
            raise_told(error_words(other))  # type: ignore[arg-type]


def test_frames_come_in_pieces() -> None:
    sent = b"".join([*encode_frame({"a": 1}, [b"xy", b""]), *encode_frame({"beat": True}), *encode_frame({})])
    unread, found = bytearray(), []
    for byte in sent:
        unread.append(byte)
        found += decode_frames(unread)
    assert found == [({"a": 1}, [b"xy", b""]), ({"beat": True}, []), ({}, [])]
    assert not unread
