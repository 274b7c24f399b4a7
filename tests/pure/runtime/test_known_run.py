"""A launch that finds its storage empty, against what the machine remembers of that very run."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.coordinator.event_log import files
from picotron_ray.runtime.driver.consent import Consent
from picotron_ray.runtime.driver.console import end_line
from picotron_ray.runtime.driver.ended_run import kept_end
from picotron_ray.runtime.driver.known_run import check_known_run, known_here
from picotron_ray.runtime.driver.resolve_job import check_machine
from picotron_ray.runtime.ray_cluster.names import event_folder
from tests.support.runs.remembered import remember


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def job_in(folder: Path) -> JobConfig:
    folder.mkdir(exist_ok=True)
    return load_job("tiny", ["name=night", f"storage.url={folder}"])


def storage_of(job: JobConfig, begun: bool = False) -> LocalStorage:
    storage = LocalStorage(job.storage.url, job.name)
    if begun:
        RunLog(storage).claim_term("here:1")
    return storage


def identity_of(storage: LocalStorage) -> str:
    log = RunLog(storage)
    log.refresh()
    return log.identity


def test_storage_that_is_not_mounted_is_refused_with_what_is_missed_and_what_to_do(tmp_path: Path) -> None:
    """It began at step 0 without a word, below the mount point, and cleared what told of the real run."""
    job = job_in(tmp_path / "mnt")
    remember(job, "a", finished=True)
    with pytest.raises(ConfigError) as refused:
        check_known_run(job, storage_of(job), True)
    said = str(refused.value)
    for words in (
        "storage.url: saw nothing of run 'night' in",
        "up to step 40",
        "mount or restore",
        "--begin-anew",
    ):
        assert words in said
    assert known_here(job.name) is not None, "nothing of it was deleted"
    end = kept_end(job.name)
    assert end is not None
    assert "its commits up to step 40 are not in" in end_line(end)
    assert end_line(end).endswith(
        "another launch is refused while they are missing, unless it is to `--begin-anew`"
    )
    with pytest.raises(ConfigError, match="saw nothing of run"):
        check_machine(job, True)
    assert check_machine(job, True, consent=Consent(begin_anew=True)).job == job


def test_another_folder_is_refused_where_the_run_was_not_finished(tmp_path: Path) -> None:
    """``storage.url=./runs`` means another place wherever a launch is called from."""
    remember(job_in(tmp_path / "one"), "a", finished=True)
    other = job_in(tmp_path / "two")
    note = check_known_run(other, storage_of(other), True, relative=True)
    assert "the one that this machine remembers has its commits up to step 40" in note
    remember(job_in(tmp_path / "one"), "a", finished=False)
    with pytest.raises(ConfigError, match="saw nothing of run 'night'"):
        check_known_run(other, storage_of(other), True, relative=True)
    assert "has nothing of run 'night'" in check_known_run(other, storage_of(other), True), (
        "it was named in full"
    )


def test_another_run_of_the_name_is_noted(tmp_path: Path) -> None:
    """``--begin-anew`` would go on with that one."""
    job = job_in(tmp_path / "runs")
    storage = storage_of(job, begun=True)
    remember(job, "a")
    assert "has another run of the name 'night'" in check_known_run(job, storage, True)


def test_a_commit_that_only_the_record_tells_of_counts(tmp_path: Path) -> None:
    """Of a long run no more than the last part of its logs is read."""
    job = job_in(tmp_path / "runs")
    remember(job, "a", step=0)
    facts = {"checkpoints": [{"step": 7}], "committed_at_s": 9.0}
    files.write_record(event_folder(job.name), {"term": 1, "line": 0, "facts": facts})
    with pytest.raises(ConfigError, match=r"up to step 7 .heard of on 1970"):
        check_known_run(job, storage_of(job), True)


def test_its_own_storage_first_launches_and_what_never_committed_are_let_by(tmp_path: Path) -> None:
    job = job_in(tmp_path / "runs")
    assert check_known_run(job, storage_of(job), True) == "", "it is the first"
    remember(job, "a", step=0)
    assert check_known_run(job, storage_of(job), True) == "", "nothing was committed"
    storage = storage_of(job, begun=True)
    remember(job, identity_of(storage))
    assert check_known_run(job, storage, True) == ""
