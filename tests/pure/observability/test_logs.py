"""Lines of a run: their place, what is kept of them, and how they are asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.observability.logs import pages, store
from picotron_ray.observability.logs.lines import (
    MOST_TEXT,
    NOWHERE,
    Place,
    decode,
    encode,
    head,
    read_line,
    time_text,
)
from picotron_ray.observability.logs.pages import START, Cursor, page_of, read_page
from picotron_ray.observability.logs.query import Query, query_of
from picotron_ray.observability.logs.store import LogStore, log_files, newest_lines
from picotron_ray.observability.redaction import Redactor

AT = 1_000_000_000.0


def line(
    text: str, at_s: float = AT, level: str = "info", rank: int | None = None, **more: Any
) -> dict[str, Any]:
    found = read_line(text, "stdout", Place("1.1", rank, 5), at_s)
    assert found is not None
    words = found.pop("text")
    return {**found, "level": level, "node": "n1", "worker": "w0", "pid": 7, **more, "text": words}


def texts(page: pages.LogPage) -> list[str]:
    return [entry["text"] for entry in page.entries]


def test_a_record_is_read_back_with_its_place() -> None:
    place = Place("2.13", 7, 120, "4bf92f35")
    text = head(AT, "WARNING", "picotron_ray.train.loop", place) + "the loss is [nan] at step 3"
    assert read_line(text, "stdout", NOWHERE, 0.0) == {
        "time": "2001-09-09T01:46:40.000Z",
        "level": "warning",
        "generation": "2.13",
        "rank": 7,
        "step": 120,
        "logger": "picotron_ray.train.loop",
        "trace": "4bf92f35",
        "text": "the loss is [nan] at step 3",
    }
    nowhere = read_line(head(AT, "INFO", "x", NOWHERE) + "hello", "stdout", place, 0.0)
    assert nowhere is not None
    assert (nowhere["generation"], nowhere["rank"], nowhere["logger"]) == (None, None, "x")


def test_what_is_printed_has_a_level_of_its_own_and_the_workers_place() -> None:
    printed = read_line("[W1126 10:00 socket.cpp:1] x", "stderr", Place("1.1", 3, 9), AT)
    assert printed is not None
    assert (printed["level"], printed["rank"], printed["step"], printed["logger"]) == ("stderr", 3, 9, None)
    assert read_line(":actor_name:WorkerActor", "stdout", NOWHERE, AT) is None
    long = read_line("x" * (MOST_TEXT + 5), "stdout", NOWHERE, AT)
    assert long is not None
    assert long["text"].endswith("x (and 5 characters)")


def test_a_stored_line_survives_all_characters() -> None:
    text = 'tab\t quote" \u2028 \ud800 null\0 ü'
    stored = encode(3, line(text))
    assert stored.count(b"\n") == 1
    found = decode(stored)
    assert found is not None
    assert found["text"] == text.replace("\ud800", "?")
    assert decode(stored[:-9]) is None


def test_filters() -> None:
    entries = [
        line("a", rank=1, level="info"),
        line("b", rank=11, level="stderr"),
        line("c", rank=1, level="error", at_s=AT + 60),
        line("d", rank=None, level="stdout"),
    ]
    stored = [encode(number, entry) for number, entry in enumerate(entries, 1)]

    def found(**filters: Any) -> str:
        return "".join(texts(page_of(stored, query_of(**{**dict.fromkeys(NAMES), **filters}, now_s=AT + 70))))

    NAMES = ("rank", "node", "since", "level", "pattern")
    assert found() == "abcd"
    assert found(rank=1) == "ac"
    assert found(level="warning") == "bc", "stderr counts as a warning"
    assert found(level="info") == "abcd"
    assert found(level="stderr") == "b"
    assert found(since="20s") == "c"
    assert found(since="2001-09-09T01:47:00+00:00") == "c"
    assert found(pattern="^[ad]$") == "ad"
    assert page_of(stored, Query()).highest_rank == 11


def test_a_pattern_that_takes_for_ever_elsewhere_takes_no_time() -> None:
    """It runs in the process that sends a node's heartbeats."""
    evil = [line("a" * 5000 + "!")] * 20
    assert Query(pattern="(a+)+$").matching(evil) == [False] * 20


def test_lines_are_kept_up_to_a_size_and_numbered_over_processes(tmp_path: Path) -> None:
    kept = LogStore(tmp_path, most_bytes=40_000)
    for number in range(400):
        kept.add([line(f"{number} " + "x" * 200)])
    sizes = [path.stat().st_size for path in log_files(tmp_path)]
    assert 20_000 < sum(sizes) <= 42_000
    again = LogStore(tmp_path, most_bytes=40_000)
    assert again.add([line("after")]) == 401
    newest = [decode(each) for each in newest_lines(tmp_path, 1000)]
    assert [entry["seq"] for entry in newest if entry] == [399, 400, 401]
    assert not newest_lines(tmp_path, 1000, worker="w1")
    assert len(newest_lines(tmp_path, 1000, worker="w0")) == 3


def test_a_full_disk_costs_lines_which_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, room = LogStore(tmp_path), [10_000]
    real = os.write

    def write(handle: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(len(data), room[0])
        room[0] -= taken
        return real(handle, bytes(data[:taken]))

    monkeypatch.setattr(store.os, "write", write)
    kept.add([line("before")])
    room[0] = 100  # in the midst of a line
    kept.add([line("lost")])
    kept.add([line("lost too"), line("and this")])
    assert (kept.lines, kept.lost) == (1, 3)
    room[0] = 10_000
    kept.add([line("after")])
    assert texts(read_page(tmp_path, Query())) == ["before", "3 lines of this node are missing here", "after"]


def test_pages_are_bounded_and_lose_nothing(tmp_path: Path) -> None:
    kept = LogStore(tmp_path, most_bytes=1 << 20)
    for number in range(3000):
        kept.add([line(f"{number}", rank=number % 3)])
    assert len(log_files(tmp_path)) > 1
    cursor, found, calls = START, [], 0
    while True:
        page = read_page(tmp_path, Query(rank=1), cursor, most_bytes=5000, scan_bytes=50_000)
        assert sum(len(encode(1, entry)) for entry in page.entries) < 6000
        found += texts(page)
        cursor, calls = page.cursor, calls + 1
        if not page.more:
            break
    assert found == [str(number) for number in range(1, 3000, 3)]
    assert calls > 5
    assert page.highest_rank == 2
    kept.add([line("new", rank=1)])
    assert texts(read_page(tmp_path, Query(rank=1), cursor)) == ["new"]
    assert texts(read_page(tmp_path, Query(rank=1), Cursor(seq=2999)))[-1] == "new", "after a source's change"
    assert len(read_page(tmp_path, Query(), Cursor(seq=2999)).entries) == 2


def test_files_older_than_the_query_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = LogStore(tmp_path, most_bytes=8000)
    for number in range(60):
        kept.add([line(f"{number}", at_s=AT + number)])
    files = log_files(tmp_path)
    for path in files[:-1]:
        os.utime(path, (AT, AT))
    opened: list[Path] = []
    monkeypatch.setattr(pages, "_lines", lambda path, *_: opened.append(path) or ([], False))
    read_page(tmp_path, Query(since=time_text(AT + 10)))
    assert opened == files[-1:]


def test_a_cursor_into_a_file_that_has_gone_goes_on_with_the_oldest(tmp_path: Path) -> None:
    kept = LogStore(tmp_path, most_bytes=8000)
    for number in range(30):
        kept.add([line(f"{number}")])
    cursor = read_page(tmp_path, Query(), START, most_bytes=1).cursor
    for number in range(30, 200):
        kept.add([line(f"{number}")])
    page = read_page(tmp_path, Query(), cursor)
    assert int(texts(page)[0]) > 100
    assert texts(page)[-1] == "199"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("login with hunter2hunter2", "login with ***"),
        ("AWS_SECRET_ACCESS_KEY=abcdefgh/+12", "AWS_SECRET_ACCESS_KEY=***"),
        ('{"api_key": "abcdefgh12"}', '{"api_key": "***"}'),
        ("Authorization: Bearer abcdefghij0123456789", "Authorization: Bearer ***"),
        ("key AKIAABCDEFGHIJKLMNOP in use", "key *** in use"),
        ("git clone https://u:pw@host/a?token=1", "git clone https://host/a"),
        ("s3://user:hunter3hunter3@bucket/x", "s3://bucket/x"),
        ("it was hunter3hunter3", "it was ***"),
        (
            "post https://hooks.slack.com/services/T0/B0/abcdef failed",
            "post https://hooks.slack.com/*** failed",
        ),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----", "***"),
        *[(each, each) for each in ("tokens=123456, token: 1234567", "tokens_per_s: 12345678")],
        ("secret_sharing of 3 tokenizer: gpt2-large", "secret_sharing of 3 tokenizer: gpt2-large"),
    ],
)
def test_secrets_are_cut_out(text: str, kept: str) -> None:
    environment = {
        "MY_PASSWORD": "hunter2hunter2",
        "HTTPS_PROXY": "http://me:hunter3hunter3@proxy",
        "SSH_AUTH_SOCK": "/tmp/ssh-agent.12",
        "SHORT_KEY": "abc",
    }
    assert Redactor(environment)(text) == kept


def test_no_line_is_lost_where_a_call_ends_within_a_file(tmp_path: Path) -> None:
    """What was left of a file, cut in mid-line, was passed over for the next file."""
    for begin in (0, 200):  # an agent that is back begins a new file
        kept = LogStore(tmp_path)
        kept.add([line(f"{begin + at} {'x' * (300 + at % 37)}", rank=at % 3) for at in range(200)])
    assert len(log_files(tmp_path)) == 2
    for scan_bytes in (70_000, 100_000):
        found, cursor, more = [], START, True
        while more:
            page = read_page(tmp_path, Query(rank=1), cursor, scan_bytes=scan_bytes)
            found += [int(text.split()[0]) for text in texts(page)]
            cursor, more = page.cursor, page.more
        assert found == [begin + at for begin in (0, 200) for at in range(200) if at % 3 == 1]
