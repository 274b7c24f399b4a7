"""What a node says of the run's folder: whose it is, and nothing while storage fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.run_log import RunLog, entry_key
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import NotFoundError, StorageUnavailableError
from picotron_ray.runtime.run_storage import shared_folder
from picotron_ray.runtime.run_storage.shared_folder import unseen_problem


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Identity of a run in that folder."""
    monkeypatch.setattr(shared_folder, "SEEN_S", 0.5)
    log = RunLog(LocalStorage(str(tmp_path), "night"))
    log.claim_term("coordinator")
    return log.identity


def seen(folder: Path | str, run: str) -> str:
    return unseen_problem(StorageConfig(url=str(folder)), "night", run, "host-1")


def test_the_coordinators_folder_is_known_by_the_runs_first_entry(tmp_path: Path, run: str) -> None:
    assert (seen(tmp_path, run), seen(f"file://{tmp_path}", run)) == ("", "")
    assert seen(tmp_path / "else", run) == (
        f"storage.url: saw no run 'night' in {tmp_path}/else/night on node host-1, where the coordinator has"
        " this one; give a folder that every node sees, or s3://bucket/prefix"
    )
    assert seen(tmp_path, "anothers").startswith("storage.url: saw another run 'night' in ")
    assert (seen("s3://bucket/x", run), seen(tmp_path / "else", "")) == ("", ""), "nothing to compare"


def test_a_file_that_is_shown_late_is_waited_for(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, real = [1, 1], shared_folder.get_bounded

    def look(*words: Any) -> bytes:
        if late:
            late.pop()
            raise NotFoundError("log")
        return real(*words)

    monkeypatch.setattr(shared_folder, "get_bounded", look)
    assert (seen(tmp_path, run), late) == ("", [])


def test_storage_that_fails_says_nothing_of_the_node(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "night" / entry_key(1)).write_bytes(b"torn")
    assert seen(tmp_path, run) == ""

    def down(*words: Any) -> bytes:
        raise StorageUnavailableError("down")

    monkeypatch.setattr(shared_folder, "get_bounded", down)
    assert seen(tmp_path, run) == ""
