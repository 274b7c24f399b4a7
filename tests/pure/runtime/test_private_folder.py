"""Nothing of a user's folder in shared memory can be read, planted or led astray by others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.errors import ConfigError, PicotronError, SlotError
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.ray_cluster import cleanup, kept_slots, private_folder
from picotron_ray.runtime.ray_cluster.names import node_folder, run_folder
from picotron_ray.runtime.ray_cluster.node_facts import look


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    (tmp_path / "memory").mkdir()
    return load_job("tiny", ["name=night", f"snapshot.folder={tmp_path}/memory"])


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Somebody's folder, which looks like a node's that keeps slots."""
    folder = tmp_path / "home" / "node"
    folder.mkdir(parents=True)
    (folder / "thesis").write_text("years of work")
    (folder / kept_slots.MARKER).write_text('{"slots": {}, "spec": null}')
    return folder


def clean_all(job: JobConfig) -> None:
    """Everything that removes, as launch, an agent, `stop` and `stop --discard` do it."""
    folder = run_folder(job.snapshot.folder, job.name)
    kept_slots.remove_rest(folder)
    kept_slots.discard([folder])
    cleanup.release(node_folder(job.snapshot.folder, job.name, "node"))


def test_folders_and_files_are_for_their_user_alone(job: JobConfig) -> None:
    old = os.umask(0)
    try:
        folder = node_folder(job.snapshot.folder, job.name, "node")
        cleanup.claim(folder)
        Page(folder / "w.page", ElasticConfig())
        SlotFile.create(folder / "w.0.slot", 1).close()
        kept_slots.mark(folder, {"w.0.slot": 1}, None)
        private_folder.write_text(folder / "w.spec", "{}")
    finally:
        os.umask(old)
    top = Path(job.snapshot.folder) / f"picotron_ray-{os.getuid()}"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (top, *top.rglob("*"))}
    assert len(modes) == 8
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_folder_that_is_open_to_others_is_closed(job: JobConfig) -> None:
    top = private_folder.user_folder(job.snapshot.folder)
    top.mkdir(mode=0o777)
    top.chmod(0o777)
    cleanup.claim(node_folder(job.snapshot.folder, job.name, "node"))
    assert stat.S_IMODE(top.stat().st_mode) == 0o700


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["the user's", "the run's", "the node's"])
def test_a_planted_link_is_not_followed(job: JobConfig, precious: Path, depth: int) -> None:
    node = node_folder(job.snapshot.folder, job.name, "node")
    planted = (*reversed(node.parents), node)[-3 + depth]
    planted.parent.mkdir(parents=True, exist_ok=True)
    target = precious if depth == 2 else precious.parent
    if depth == 0:
        (precious.parent / job.name).mkdir()
        precious.rename(precious.parent / job.name / "node")
        precious = target / job.name / "node"
    planted.symlink_to(target)
    clean_all(job)
    assert (precious / "thesis").read_text() == "years of work"
    assert (precious / kept_slots.MARKER).exists()
    if not planted.is_symlink():
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.symlink_to(target)  # the link itself was removed
    with pytest.raises(PicotronError, match="link, expected a folder of user"):
        cleanup.claim(node)
    if depth == 0:
        with pytest.raises(ConfigError, match=r"snapshot\.folder: .*link.*remove it, or name another"):
            cleanup.clear(job, None)


def test_a_folder_of_another_user_is_refused_by_name(job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    monkeypatch.setattr(private_folder.os, "getuid", lambda: mine + 1)
    top = private_folder.user_folder(job.snapshot.folder)
    (top / job.name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"of user {mine}, expected a folder of user {mine + 1}"):
        cleanup.clear(job, None)
    private_folder.remove_tree(top / job.name)
    assert (top / job.name).exists()
    assert look(job.snapshot.folder, job.name).folder_problem.startswith("snapshot.folder: saw")


def test_a_file_in_the_place_of_the_folder_is_refused_by_name(job: JobConfig, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    there = job.model_copy(update={"snapshot": job.snapshot.model_copy(update={"folder": str(file)})})
    with pytest.raises(ConfigError, match=r"^snapshot\.folder: cannot look at .*: Not a directory; name a"):
        cleanup.clear(there, None)


def test_a_link_in_the_place_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    for name in ("w.0.slot", "w.new", "w.spec.new"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(SlotError):
        SlotFile.create(tmp_path / "w.0.slot", 1)
    with pytest.raises(OSError, match="symbolic links"):
        Page(tmp_path / "w.page", ElasticConfig())
    with pytest.raises(OSError, match="symbolic links"):
        private_folder.write_text(tmp_path / "w.spec", "{}")
    assert target.read_text() == "precious"
