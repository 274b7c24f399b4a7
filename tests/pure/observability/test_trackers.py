"""Trackers: each step once and in order, over restarts, cut lines and steps that are taken back."""

from __future__ import annotations

import csv
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.config.schema.service import TrackerConfig
from picotron_ray.errors import ConfigError
from picotron_ray.observability import event_file, trackers
from picotron_ray.observability.event_file import crc32c, event, record, scalars
from picotron_ray.observability.remote_trackers import RemoteTracker, TensorBoard, open_tracker
from picotron_ray.observability.trackers import Row, Tracker, TrackerProgress, check_trackers, row_of


def row(step: int, loss: float = 2.0) -> Row:
    line = {
        "step": step, "term": 1, "n": 1, "samples": [(step - 1) * 8, step * 8], "rows": [], "tokens": 128,
        "loss": loss, "grad_norm": 0.5, "learning_rate": 1e-3, "at_s": 1e9 + step,
    }  # fmt: skip
    return row_of(line)


def evaluation(step: int) -> Row:
    return {"step": step, "eval_loss": 3.0}


def opened(kind: Any, folder: Path) -> Tracker:
    return open_tracker(TrackerConfig(kind=kind), "r", {"steps": 10}, folder)


def read(kind: str, folder: Path) -> list[tuple[str, int, float]]:
    """(train or eval, step, loss) in the order of the files."""
    if kind == "jsonl":
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [
            ("eval" if "eval_loss" in r else "train", r["step"], r.get("eval_loss", r.get("loss")))
            for r in rows
        ]
    found = []
    for name, file, key in (("train", "steps.csv", "loss"), ("eval", "evaluations.csv", "eval_loss")):
        with (folder / file).open() as opened_file:
            found += [(name, int(r["step"]), float(r[key])) for r in csv.DictReader(opened_file)]
    return found


def steps(kind: str, folder: Path, what: str = "train") -> list[int]:
    return [step for name, step, _ in read(kind, folder) if name == what]


KINDS = ("csv", "jsonl")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_on_where_an_earlier_coordinator_ended(kind: str, tmp_path: Path) -> None:
    first = opened(kind, tmp_path)
    assert first.last_step == 0
    first.write([row(1), row(2)], [evaluation(2)])
    second = opened(kind, tmp_path)
    assert (second.last_step, second.last_eval_step) == (2, 2)
    second.write([row(3)], [])
    assert steps(kind, tmp_path) == [1, 2, 3]
    assert steps(kind, tmp_path, "eval") == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_a_crash_cut_short_is_written_again(kind: str, tmp_path: Path) -> None:
    tracker = opened(kind, tmp_path)
    tracker.write([row(1), row(2)], [])
    file = tmp_path / ("steps.csv" if kind == "csv" else "metrics.jsonl")
    file.write_bytes(file.read_bytes()[:-9])
    again = opened(kind, tmp_path)
    assert again.last_step == 1
    again.write([row(2)], [])
    assert steps(kind, tmp_path) == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_taken_back_go(kind: str, tmp_path: Path) -> None:
    tracker = opened(kind, tmp_path)
    tracker.write([row(step) for step in range(1, 6)], [evaluation(2), evaluation(4)])
    tracker.rewind(3)
    assert (tracker.last_step, tracker.last_eval_step) == (3, 2)
    tracker.write([row(4, loss=1.0)], [])
    assert [entry for entry in read(kind, tmp_path) if entry[0] == "train"] == [
        ("train", 1, 2.0), ("train", 2, 2.0), ("train", 3, 2.0), ("train", 4, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "tensorboard"])
def test_folders_are_made(kind: str, tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = opened(kind, tmp_path / "a" / "b")
        tracker.write([row(step)], [])
        tracker.close()
    assert list((tmp_path / "a" / "b").iterdir())


def test_an_evaluation_stands_after_its_step(tmp_path: Path) -> None:
    opened("jsonl", tmp_path).write([row(1), row(2), row(3)], [evaluation(1), evaluation(2)])
    found = [(what, step) for what, step, _ in read("jsonl", tmp_path)]
    assert found == [("train", 1), ("eval", 1), ("train", 2), ("eval", 2), ("train", 3)]


def test_a_row_holds_the_figures_of_its_step(tmp_path: Path) -> None:
    tracker = opened("jsonl", tmp_path)
    tracker.write([row(3, loss=float("nan"))], [])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 3, "loss": None, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens": 384, "samples": 24,
        "term": 1, "n": 1, "at_s": 1e9 + 3,
    }  # fmt: skip


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float], float | None]] = []
        self.rewound: list[int] = []
        self.flushed = self.closed = 0

    def log(self, step: int, figures: dict[str, float], at_s: float | None) -> None:
        self.logged.append((step, figures, at_s))

    def rewind(self, step: int) -> None:
        self.rewound.append(step)

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


def test_a_tracker_that_cannot_be_read_back_remembers_how_far_it_came(tmp_path: Path) -> None:
    sink = Kept()
    tracker = RemoteTracker(sink, TrackerProgress(tmp_path / "x.progress"))
    tracker.write([row(1), row(2)], [evaluation(2)])
    assert [(step, sorted(figures)) for step, figures, _ in sink.logged] == [
        (1, ["train/grad_norm", "train/learning_rate", "train/loss", "train/tokens"]),
        (2, ["eval/loss", "train/grad_norm", "train/learning_rate", "train/loss", "train/tokens"]),
    ]
    tracker.write([], [evaluation(4)])
    assert sink.logged[-1] == (4, {"eval/loss": 3.0}, None)
    assert sink.flushed == 2
    again = RemoteTracker(sink, TrackerProgress(tmp_path / "x.progress"))
    assert (again.last_step, again.last_eval_step) == (2, 4)
    again.rewind(1)
    assert (again.last_step, again.last_eval_step, sink.rewound) == (1, 1, [1])
    again.rewind(3)
    assert (again.last_step, again.last_eval_step, sink.rewound) == (1, 1, [1, 3])
    assert sink.closed == 0
    again.close()
    assert sink.closed == 1


class Library:
    """Stands in for a library: notes each call as (name, arguments, options), and answers as it was told."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            return self.answers.get(name, self)

        return call


FIGURES = {"train/loss": 2.0, "train/grad_norm": 0.5, "train/learning_rate": 1e-3, "train/tokens": 128}


@pytest.mark.parametrize("given", [{}, {"project": "p", "url": "http://w"}], ids=["plain", "given"])
def test_weights_and_biases_is_given_the_run_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str]
) -> None:
    library = Library(Settings="settings")
    monkeypatch.setitem(sys.modules, "wandb", library)
    tracker = open_tracker(TrackerConfig(kind="wandb", **given), "night", {"steps": 10}, tmp_path)
    tracker.write([row(1)], [evaluation(2)])
    tracker.rewind(1)
    tracker.close()
    base = {"base_url": "http://w"} if given else {}
    project = "p" if given else "picotron_ray"
    options = {
        "project": project, "id": "night", "name": "night", "resume": "allow", "config": {"steps": 10},
        "dir": str(tmp_path), "settings": "settings",
    }  # fmt: skip
    assert library.calls == [
        ("Settings", (), {"console": "off", **base}),
        ("init", (), options),
        ("log", (FIGURES,), {"step": 1}),
        ("log", ({"eval/loss": 3.0},), {"step": 2}),
        ("finish", (), {}),
    ]
    assert opened("wandb", tmp_path).last_step == 1


@pytest.mark.parametrize("known", [None, SimpleNamespace(experiment_id="e")], ids=["new", "known"])
@pytest.mark.parametrize("given", [{}, {"project": "p", "url": "http://m"}], ids=["plain", "given"])
def test_mlflow_goes_on_with_the_run_whose_id_it_keeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str], known: Any
) -> None:
    made = SimpleNamespace(info=SimpleNamespace(run_id="7"))
    library = Library(get_experiment_by_name=known, create_experiment="e", create_run=made)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    config = TrackerConfig(kind="mlflow", **given)
    tracker = open_tracker(config, "night", {"steps": 10}, tmp_path)
    tracker.write([{**row(1), "at_s": 2.5}], [evaluation(2)])
    tracker.rewind(1)
    tracker.close()
    project, url = given.get("project", "picotron_ray"), given.get("url")
    begin = [
        ("MlflowClient", (), {"tracking_uri": url}),
        ("get_experiment_by_name", (project,), {}),
        *([] if known else [("create_experiment", (project,), {})]),
        ("create_run", ("e",), {"run_name": "night"}),
        ("log_param", ("7", "steps", 10), {}),
    ]
    assert library.calls == [
        *begin,
        ("update_run", ("7",), {"status": "RUNNING"}),
        *(("log_metric", ("7", name, value, 2500, 1), {}) for name, value in FIGURES.items()),
        ("log_metric", ("7", "eval/loss", 3.0, None, 2), {}),
        ("set_terminated", ("7",), {}),
    ]
    library.calls.clear()
    open_tracker(config, "night", {"steps": 10}, tmp_path)
    assert library.calls == [begin[0], ("update_run", ("7",), {"status": "RUNNING"})]


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer, by its own rules."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[at : at + size]
        at += size


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show of each tag, files in order."""
    seen: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("events.*")):
        raw, at = file.read_bytes(), 0
        while at < len(raw):  # a record: length (8), its checksum (4), the event, its checksum (4)
            size = int.from_bytes(raw[at : at + 8], "little")
            found = dict(fields(raw[at + 12 : at + 12 + size]))
            at += 12 + size + 4
            step = found[2]
            if 7 in found:  # a session starts: older files' later steps are void
                seen = {tag: [pair for pair in pairs if pair[0] < step] for tag, pairs in seen.items()}
            for _, value in fields(found.get(5, b"")):
                parts = dict(fields(value))
                seen.setdefault(parts[1].decode(), []).append((step, struct.unpack("<f", parts[2])[0]))
    return seen


def test_tensorboard_shows_what_was_written_and_not_taken_back(tmp_path: Path) -> None:
    tracker = opened("tensorboard", tmp_path)
    tracker.write([row(step) for step in range(1, 301)], [evaluation(2)])
    tracker.rewind(200)
    tracker.write([row(201, loss=1.5)], [])
    tracker.close()
    seen = scalars_of(tmp_path)
    assert seen["train/loss"] == [*((step, 2.0) for step in range(1, 201)), (201, 1.5)]
    assert seen["eval/loss"] == [(2, 3.0)]


def test_each_event_file_is_closed_when_the_next_begins(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0)
    first = board._file._file
    board.rewind(1)
    second = board._file._file
    assert (first.closed, second.closed) == (True, False)
    board.close()
    assert second.closed


def test_event_files_have_the_checksums_of_their_format() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_an_event_file_begins_with_its_version_and_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file.time, "time", lambda: 7.0)
    first = opened("tensorboard", tmp_path)
    first.write([row(1)], [])
    first.close()
    tracker = opened("tensorboard", tmp_path)
    _, second = sorted(tmp_path.glob("events.*"))
    begin = record(event(7.0, 0, b"\x1a\x0dbrain.Event:2")) + record(event(7.0, 2, b"\x3a\x02\x08\x01"))
    assert second.read_bytes() == begin
    tracker.write([{**row(2), "at_s": 5.0}], [evaluation(3)])
    figures = {f"train/{key}": row(2)[key] for key in ("loss", "grad_norm", "learning_rate", "tokens")}
    added = record(event(5.0, 2, scalars(figures))) + record(event(7.0, 3, scalars({"eval/loss": 3.0})))
    assert second.read_bytes() == begin + added
    tracker.close()


def test_records_are_framed_as_in_any_event_file() -> None:
    framed = record(bytes(24))
    assert framed[:12] == b"\x18" + bytes(7) + b'\xa3\x7fK"', "the first bytes of every file of TensorBoard's"
    assert (len(framed), framed[12:36]) == (8 + 4 + 24 + 4, bytes(24))
    crc = crc32c(bytes(24))
    rotated = crc >> 15 | (crc & 0x7FFF) << 17
    assert int.from_bytes(framed[36:], "little") == (rotated + 0xA282EAD8) % 2**32


def test_events_are_encoded_as_their_schema_says() -> None:
    made = event(1.0, 300, scalars({"a": 1.5}))
    assert made == struct.pack("<Bd", 0x09, 1.0) + b"\x10\xac\x02" + b"*\n\n\x08\n\x01a\x15\x00\x00\xc0?"
    assert [event(0.0, step, b"")[10:] for step in (127, 128)] == [b"\x7f", b"\x80\x01"]
    largest = (2 - 2**-23) * 2.0**127
    ends = {value: scalars({"a": value})[-4:] for value in (largest, 2 * largest, -2 * largest)}
    inf, minus_inf = b"\0\0\x80\x7f", b"\0\0\x80\xff"
    assert ends == {largest: b"\xff\xff\x7f\x7f", 2 * largest: inf, -2 * largest: minus_inf}
    (nan,) = struct.unpack("<f", scalars({"a": float("nan")})[-4:])
    assert nan != nan


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_trackers([TrackerConfig(kind="csv"), TrackerConfig(kind="wandb"), TrackerConfig(kind="mlflow")])
    assert caught.value.problems == tuple(
        f"trackers.{index}.kind: {kind} is not installed; install the extra {kind}"
        f" (in a checkout: pip install -e '.[{kind}]'), or leave this tracker out"
        for index, kind in ((1, "wandb"), (2, "mlflow"))
    )
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    check_trackers([TrackerConfig(kind="wandb"), TrackerConfig(kind="mlflow")])


def test_two_trackers_in_one_place_are_refused(tmp_path: Path) -> None:
    check_trackers([TrackerConfig(kind="csv"), TrackerConfig(kind="csv", folder=str(tmp_path))])
    with pytest.raises(ConfigError, match=r"trackers\.1\.folder"):
        check_trackers([TrackerConfig(kind="csv"), TrackerConfig(kind="csv")])
