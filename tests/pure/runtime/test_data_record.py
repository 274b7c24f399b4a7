"""Data of a run: other files are refused by name, and the summary's ledger is checked, not assumed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import make_batch
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.errors import ConfigError, DataError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver import storage_commands
from picotron_ray.runtime.driver.preflight import check_same_run
from picotron_ray.runtime.driver.resolve_job import DATA, SAME_RUN, ResolvedJob, resolve
from picotron_ray.runtime.driver.storage_commands import changed_keys, verify_ledger
from picotron_ray.runtime.run_storage import data_record
from picotron_ray.runtime.run_storage.data_record import check_data, ledger_figures, settle_data
from picotron_ray.runtime.run_storage.run_store import RunStore

STEPS, BATCH, SEQ = 6, 8, 16


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    write(tmp_path, "the quick brown fox jumps over the lazy dog")
    return JobConfig.model_validate(
        {
            "name": "small",
            "storage": {"url": str(tmp_path / "runs")},
            "data": {
                "source": "text", "path": str(tmp_path / "text"), "global_batch": BATCH,
                "sequence_length": SEQ, "held_out_fraction": 0.3,
            },
        }
    )  # fmt: skip


def write(folder: Path, words: str) -> None:
    for index in range(8):
        (folder / "text" / f"{index}.txt").write_text(f"{words} {index} " * 20)


def opened(job: JobConfig) -> DataSplits:
    return build_dataset(job.data, job.model.vocab_size, job.seed, data_record.cache_folder())


def lines(job: JobConfig) -> list[dict[str, Any]]:
    found, feed = [], opened(job).feed
    for step in range(1, STEPS + 1):
        parts = [make_batch(feed, Layout(dp=2), index, step) for index in range(2)]
        rows = [[*part.rows, part.digest.hex()] for part in parts]
        samples = [(step - 1) * BATCH, step * BATCH]
        found.append(
            {
                "step": step,
                "term": 1,
                "n": 1,
                "samples": samples,
                "rows": rows,
                "tokens": parts[0].global_tokens,
                "loss": 1.0,
            }
        )
    return found


def test_the_first_launch_records_its_data_and_others_are_held_to_it(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path), "r1")
    assert settle_data(storage, "r1", "") == "", "nobody looked"
    assert settle_data(storage, "r1", "aa") == "aa"
    assert settle_data(storage, "r1", "") == settle_data(storage, "r1", "aa") == "aa"
    for check in (settle_data, check_data):
        with pytest.raises(DataError) as caught:
            check(storage, "r1", "bb")  # type: ignore[operator]
        assert str(caught.value) == (
            "data.path: the files hold other samples: fingerprint bb, expected aa; restore the files of run"
            " r1, or choose another name"
        )


def test_a_second_launch_with_other_files_is_refused_before_anything_starts(
    job: JobConfig, tmp_path: Path
) -> None:
    store = RunStore(job, lambda step: None, data=opened(job).fingerprint)
    store.claim()
    assert store.data == opened(job).fingerprint
    assert resolve(ResolvedJob(job), (DATA, SAME_RUN)).notes == ()
    write(tmp_path, "the quick brown fox jumps over the lazy cat")
    with pytest.raises(DataError, match="the files hold other samples") as caught:
        resolve(ResolvedJob(job), (DATA, SAME_RUN))
    assert (caught.value.exit_code, caught.value.step) == (2, "same run")


def test_the_summary_counts_what_the_digests_prove(job: JobConfig) -> None:
    good = lines(job)
    data = opened(job)
    good[0]["loss"], good[-1]["loss"] = 3.0, 2.0
    assert ledger_figures(job, iter(good), STEPS, data.fingerprint) == {
        "tokens": STEPS * BATCH * SEQ, "first_loss": 3.0, "final_loss": 2.0,
        "ledger": {
            "samples": STEPS * BATCH, "lost": 0, "repeated": 0, "skipped": 0,
            "passed_over": 0, "checked": "tokens", "wrong": [],
        },
    }  # fmt: skip
    passed_over = {**good[0], "rows": [], "tokens": 0, "loss": None, "passed_over": True}
    figures = ledger_figures(job, [passed_over, *good[1:]], STEPS, data.fingerprint, [range(1, 2)])
    assert (figures["first_loss"], figures["ledger"]["passed_over"]) == (1.0, BATCH)
    assert ledger_figures(job, (), 0, data.fingerprint)["final_loss"] is None
    batch = make_batch(Feed.uniform(data.train, job.seed, BATCH), Layout(dp=2), 0, 2)
    good[2]["rows"][0][2] = batch.digest.hex()  # step 3 fed step 2's samples again, and says that it did not
    found = ledger_figures(job, good, STEPS, data.fingerprint)["ledger"]
    assert (found["lost"], found["samples"]) == (4, STEPS * BATCH - 4)
    assert found["wrong"] == ["step 3 of generation 1.1, replica 0 fed other tokens than rows 16..20 hold"]


def test_rows_of_a_mixture_are_proved_too(job: JobConfig, tmp_path: Path) -> None:
    words = job.model_dump()
    source = {"source": "text", "path": words["data"]["path"]}
    sources = [{**source, "name": name, "weight": weight} for name, weight in (("one", 2.0), ("two", 1.0))]
    words["data"] |= {"source": "stdlib", "path": None, "sources": sources, "batching": "packed"}
    mixed = JobConfig.model_validate({**words, "data": {**words["data"], "long_documents": "split"}})
    found = ledger_figures(mixed, iter(lines(mixed)), STEPS, opened(mixed).fingerprint)["ledger"]
    assert (found["samples"], found["lost"], found["checked"]) == (STEPS * BATCH, 0, "tokens")


@pytest.mark.parametrize("why", ["no data here", "other data here", "many tokens", "many samples"])
def test_rows_are_checked_where_tokens_cannot_be(
    job: JobConfig, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, expected = lines(job), opened(job).fingerprint
    if why == "no data here":
        for path in (tmp_path / "text").iterdir():
            path.unlink()
    elif why == "other data here":
        write(tmp_path, "another text of words")
    elif why == "many tokens":
        monkeypatch.setattr(data_record, "MOST_TOKENS", STEPS * BATCH * SEQ - 1)
    else:
        monkeypatch.setattr(data_record, "MOST_SAMPLES", STEPS * BATCH - 1)
    found = ledger_figures(job, good, STEPS, expected)["ledger"]
    assert (found["checked"], found["lost"], found["repeated"], found["wrong"]) == ("rows", 0, 0, [])
    good[4]["rows"][0][0] += 1  # a replica fed one row less, though step and samples say that all is well
    good[5] = json.loads(json.dumps(good[3]))
    found = ledger_figures(job, good, STEPS, expected)["ledger"]
    assert (found["lost"], found["repeated"]) == (1, BATCH)
    assert found["wrong"] == [
        "step 4 was fed 2 times, by generations 1.1, 1.1",
    ], "steps up to 5 count"


def test_other_files_are_named_before_the_ledger_or_the_config_is_judged(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(job, lambda step: None, data=opened(job).fingerprint)
    store.claim()
    assert changed_keys(job) == ["nothing changed"]
    good = SimpleNamespace(manifest=SimpleNamespace(step=STEPS, term=1, n=1), complaints=())
    monkeypatch.setattr(storage_commands, "latest_good", lambda *_: good)
    monkeypatch.setattr(storage_commands, "stream_ledger", lambda *_: lines(job))
    write(tmp_path, "the quick brown fox jumps over the lazy cat")
    for look in (verify_ledger, changed_keys):
        with pytest.raises(DataError, match="the files hold other samples: fingerprint"):
            look(job)
    for path in (tmp_path / "text").iterdir():
        path.unlink()
    assert changed_keys(job)[1].startswith("data: not compared here: ")


def test_a_launch_is_compared_with_the_one_before_it(job: JobConfig) -> None:
    def launched(steps: int) -> JobConfig:
        return job.model_copy(update={"steps": steps})

    for steps in (120, 60):
        RunStore(launched(steps), lambda step: None).claim()
    [line] = check_same_run(launched(70), open_storage(job.storage, job.name))
    assert line.startswith("steps: was 60, now 70;")
    assert changed_keys(launched(70))[0] == line


def test_a_comparison_says_where_there_is_no_such_run_and_refuses_a_step_that_is_no_commit(
    job: JobConfig,
) -> None:
    [line] = changed_keys(job)
    assert line.startswith(f"no run {job.name!r} is in ")
    assert line.endswith("a launch begins it; check name and storage.url if it is to go on")
    RunStore(job, lambda step: None).claim()
    wrong = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume_step": 50})})
    with pytest.raises(
        ConfigError, match=r"checkpoint.resume_step: saw 50, expected a committed step of run"
    ):
        changed_keys(wrong)
