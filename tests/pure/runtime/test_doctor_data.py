"""The doctor's look at the data: real files, opened as a worker opens them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.tasks import open_tasks
from picotron_ray.runtime.doctor import data_check, examine
from picotron_ray.runtime.doctor.data_check import DataReport, judge_data, open_data
from picotron_ray.runtime.doctor.finding import lines
from picotron_ray.runtime.run_storage.data_record import settle_data


def a_job(tmp_path: Path, tokens: int = 20_000, highest: int = 200, *more: str) -> JobConfig:
    """A job on a file of so many tokens, the last of which is the highest."""
    ids = np.arange(tokens, dtype=np.uint16) % 100
    ids[-1] = highest
    (tmp_path / "tokens.bin").write_bytes(ids.tobytes())
    words = [f"data.path={tmp_path}/tokens.bin", "data.source=memmap", f"storage.url={tmp_path}/runs", *more]
    return load_job("tiny", words)


def said(job: JobConfig) -> list[str]:
    """The doctor's lines on the data of this machine."""
    machines = next(iter(examine.examine(job, configured=True, drill=False)))
    return [" ".join(line.split()) for line in lines(one for one in machines if one.check == "data")]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(examine, "judge", lambda *_: [])
    monkeypatch.setattr(examine, "_planned_here", lambda job: [])


def test_sound_data_is_told_with_its_samples(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    seen = open_data(job.model_dump(mode="json"))
    assert said(job) == [
        f"ok data {seen.samples} samples for training, {seen.held_out} held out, {seen.fingerprint}"
    ]


@pytest.mark.parametrize(
    ("tokens", "highest", "more", "line"),
    [
        (20_000, 60_000, (), "FAIL data data.path: "),
        (40, 1, (), "FAIL data data.path: the "),
        (20_000, 1, ("data.global_batch=4000",), "WARN data "),
    ],
)
def test_data_that_will_not_do_is_one_line_with_the_mend(
    tmp_path: Path, tokens: int, highest: int, more: tuple[str, ...], line: str
) -> None:
    [found] = said(a_job(tmp_path, tokens, highest, *more))
    assert found.startswith(line), found
    assert any(word in found for word in ("set model.vocab_size", "give more data", "vocab")), found


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    (tmp_path / "tokens.bin").unlink()
    [found] = said(job)
    assert found.startswith("FAIL data")
    assert "tokens.bin" in found


def test_other_samples_than_the_run_began_with_are_refused(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    settle_data(open_storage(job.storage, job.name), job.name, "0" * 32)
    [found] = said(job)
    assert found.startswith("FAIL data data.path: the files hold other samples: fingerprint")
    assert f"restore the files of run {job.name}, or choose another name" in found


def test_machines_with_other_samples_are_named(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    reports = [
        ("a", DataReport("", 9, 1, "aa")),
        ("b", DataReport("", 9, 1, "bb")),
        ("c", DataReport("gone")),
    ]
    assert [" ".join(line.split()) for line in lines(judge_data(job, reports))] == [
        "FAIL data c: gone",
        "FAIL data machines hold different samples: fingerprint aa on a; bb on b; put the same files on all"
        " of them",
    ]


def test_data_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_check, "DATA_S", 0.05)
    monkeypatch.setattr(open_tasks, "open_data", lambda *_: time.sleep(5))
    [found] = said(a_job(tmp_path))
    assert found.startswith("WARN data not read within 0.05 s; ask again")


def test_without_a_config_there_is_no_data_to_look_at(tmp_path: Path) -> None:
    machines = next(iter(examine.examine(a_job(tmp_path), configured=False, drill=False)))
    assert [one for one in machines if one.check == "data"] == []
