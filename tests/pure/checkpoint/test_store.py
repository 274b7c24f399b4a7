"""Saves and restores through the store; damage is refused, an older commit used; GC keeps what is needed."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import chunks
from picotron_ray.checkpoint.store.assembly import assemble
from picotron_ray.checkpoint.store.commit import commit, parent_of
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.manifest import load_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.checkpoint.store.upload_part import UploadPart
from picotron_ray.checkpoint.store.verify import latest_good, read_ledger, verify_all
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.errors import CorruptError, FencedError, NewerSchemaError, StorageError
from picotron_ray.layout.layout import Layout
from tests.support.checkpoint.checkpoint_kit import (
    LAYOUT,
    generation,
    ledger,
    load,
    make_state,
    same,
    save,
    upload,
    write_slots,
)


def files(storage: LocalStorage, prefix: str) -> list[Path]:
    return [Path(storage.where) / entry.key for entry in storage.list(prefix)]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=3, zero=2), Layout(tp=2), LAYOUT])
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_save_and_load(
    storage: LocalStorage, log: RunLog, memory_path: Path, layout: Layout, codec: str, nodes: int
) -> None:
    state = make_state(1)
    log.append("generation", generation(1, 1))
    (memory_path / "s").mkdir()
    paths = write_slots(memory_path / "s", state, layout, (1, 1, 5))
    parts = [
        upload_slots(paths[node::nodes], storage, 1, 1, 5, owner=f"n{node}", codec=codec)
        for node in range(min(nodes, len(paths)))
    ]
    parts = [UploadPart.from_dict(json.loads(json.dumps(part.to_dict()))) for part in parts]
    done = commit(storage, log, parts)
    good = latest_good(storage, log)
    assert good is not None
    assert same(load(storage, good.manifest), state)
    assert (good.manifest.cursor, good.manifest.extra, good.entry.seq) == (40, {"updates": 5}, done.seq)
    assert read_ledger(storage, good.manifest) == list(ledger(1, 5))
    assert list(storage.list("intents/")) == []


def test_same_state_in_another_layout_stores_nothing_new(
    storage: LocalStorage, log: RunLog, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small cells, so that every tensor has several chunks."""
    for name, size in {"CELL_BYTES": 256, "SMALL_BYTES": 64, "PACK_BYTES": 512}.items():
        monkeypatch.setattr(chunks, name, size)
        monkeypatch.setattr(f"picotron_ray.checkpoint.store.upload.{name}", size, raising=False)
    state = make_state(1)
    first = save(storage, log, memory_path / "a", state, (1, 1, 5))
    count = len(files(storage, "chunks/"))
    assert count > 8
    assert first.written_bytes == first.stored_bytes
    again = save(storage, log, memory_path / "b", state, (1, 2, 5), Layout(dp=3, zero=2))
    assert again.written_bytes == 0
    assert len(files(storage, "chunks/")) == count
    good = latest_good(storage, log)
    assert good is not None
    assert same(load(storage, good.manifest), state)


# --- incomplete ------------------------------------------------------------------------------------


def test_incomplete_uploads_are_not_committed(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    log.append("generation", generation(1, 1))
    parts = upload(storage, memory_path / "s", make_state(1), (1, 1, 5), nodes=2)
    with pytest.raises(StorageError, match=r"state group \d of 4 was not uploaded"):
        commit(storage, log, parts[:1])
    hidden = replace(parts[0], fragments=tuple((group, 0, 1) for group in range(4)))
    with pytest.raises(StorageError, match=r"is incomplete: .* is missing of"):
        commit(storage, log, [hidden])
    with pytest.raises(StorageError, match="cannot be mixed"):
        commit(storage, log, [parts[0], replace(parts[1], step=6)])
    with pytest.raises(StorageError, match=r"no ledger line of step 3, expected 1\.\.5"):
        commit(storage, log, [replace(part, ledger=part.ledger[:2]) for part in parts])
    with pytest.raises(StorageError, match=r"generation 1\.7 has no log entry"):
        commit(storage, log, [replace(part, n=7) for part in parts])
    assert log.commits() == []
    victim = files(storage, "chunks/")[0]
    saved = victim.read_bytes()
    victim.unlink()
    with pytest.raises(StorageError, match="1 chunks of step 5 are gone"):
        commit(storage, log, parts)
    victim.write_bytes(saved)
    assert commit(storage, log, parts).step == 5, "the same parts can be committed later"


def test_ledger_follows_the_lineage(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    """Commits 4 and 8, then a generation resumes from 6: 8 is void, the ledger continues at 4."""
    save(storage, log, memory_path / "a", make_state(1), (1, 1, 4))
    save(storage, log, memory_path / "b", make_state(2), (1, 1, 8))
    log.append("generation", generation(1, 2, step=6, parent=(1, 1)))
    parent = parent_of(storage, log, 1, 2)
    assert parent is not None
    assert parent.step == 4
    save(storage, log, memory_path / "c", make_state(3), (1, 2, 10))
    good = latest_good(storage, log)
    assert good is not None
    assert [(s.first, s.last) for s in good.manifest.ledger] == [(1, 4), (5, 10)]
    assert read_ledger(storage, good.manifest) == list(ledger(1, 10))


def test_replicas_on_two_nodes_are_stored_once(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    log.append("generation", generation(1, 1))
    state = make_state(4)
    parts = []
    for node, layout in enumerate([Layout(tp=2), Layout()]):
        (memory_path / str(node)).mkdir()
        paths = write_slots(memory_path / str(node), state, layout, (1, 1, 3))
        parts.append(upload_slots(paths[: 2 - node], storage, 1, 1, 3, owner=str(node)))
    manifest, _ = assemble(parts, None)
    boxes = [(part.shard.name, part.shard.box) for part in manifest.shards]
    assert len(boxes) == len(set(boxes))
    assert sum(part.shard.nbytes for part in manifest.shards) == sum(array.nbytes for array in state.values())


def test_names_taken_by_an_abandoned_attempt(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    """Nothing is overwritten: another name is used, and the log names that one."""
    storage.put("manifests/5-1-1.json", b"left behind")
    storage.put("ledger/1-1-1-5.jsonl", b"left behind")
    done = save(storage, log, memory_path / "a", make_state(1), (1, 1, 5))
    assert done.manifest == "manifests/5-1-1.2.json"
    assert storage.get("manifests/5-1-1.json") == b"left behind"
    good = latest_good(storage, log)
    assert good is not None
    assert read_ledger(storage, good.manifest) == list(ledger(1, 5))


def test_large_tensors_are_cut_and_small_ones_packed(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    """17 MB and 6 x 0.9 MB: cells of 8 MiB, packs of at most 4 MiB, no object beyond that."""
    shapes = {"big": (2200, 1000), **{f"small{i}": (110, 1000) for i in range(6)}}
    state = {name: array for name, array in make_state(1, shapes).items() if not name.startswith("exp_avg/")}
    done = save(storage, log, memory_path / "a", state, (1, 1, 1), Layout(dp=3, zero=2))
    sizes = sorted((entry.size for entry in storage.list("chunks/")), reverse=True)
    assert [size >> 20 for size in sizes] == [7, 7, 3, 2]
    assert sum(sizes) == done.stored_bytes == sum(array.nbytes for array in state.values())
    good = latest_good(storage, log)
    assert good is not None
    assert same(load(storage, good.manifest), state)


# --- damage ----------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 4
    elif how == "truncate":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    path.unlink()
    if how != "delete":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "delete"])
@pytest.mark.parametrize("what", ["chunks/", "manifests/", "ledger/", "log/"])
def test_damage_falls_back_to_the_older_commit(
    storage: LocalStorage, log: RunLog, memory_path: Path, what: str, how: str
) -> None:
    old, new = make_state(1), make_state(2)
    save(storage, log, memory_path / "a", old, (1, 1, 5))
    before = set(files(storage, what))
    save(storage, log, memory_path / "b", new, (1, 1, 10))
    fresh = RunLog(storage)
    fresh.refresh()
    good = latest_good(storage, fresh)
    assert good is not None
    assert (good.manifest.step, good.complaints) == (10, ())
    damage(max(set(files(storage, what)) - before), how)
    fresh = RunLog(storage)
    fresh.refresh()
    good = latest_good(storage, fresh)
    assert good is not None
    if (what, how) == ("log/", "delete"):
        assert good.manifest.step == 5, "a deleted last entry was never there"
        return
    assert good.manifest.step == 5
    assert len(good.complaints) == 1
    assert "\n" not in good.complaints[0]
    assert what.rstrip("s/") in good.complaints[0]
    assert ("truncated" in good.complaints[0]) or (what, how) != ("chunks/", "truncate")
    assert same(load(storage, good.manifest), old)


def test_chosen_step(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    assert latest_good(storage, log) is None
    for step in (5, 10):
        save(storage, log, memory_path / str(step), make_state(step), (1, 1, step))
    good = latest_good(storage, log, step=5)
    assert good is not None
    assert same(load(storage, good.manifest), make_state(5))
    with pytest.raises(StorageError, match=r"no commit of step 7.*\[5, 10\]"):
        latest_good(storage, log, step=7)
    for path in files(storage, "chunks/"):
        damage(path, "flip")
    with pytest.raises(StorageError, match="no commit that can be used") as caught:
        latest_good(storage, log)
    assert "\n" not in str(caught.value)


def test_damaged_chunk_is_put_again_by_the_next_save(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    state = make_state(1)
    save(storage, log, memory_path / "a", state, (1, 1, 5))
    damage(files(storage, "chunks/")[0], "flip")
    assert [bool(report.problems) for report in verify_all(storage, log)] == [True]
    with pytest.raises(StorageError):
        latest_good(storage, log)
    save(storage, log, memory_path / "b", state, (1, 2, 5))
    good = latest_good(storage, log)
    assert good is not None
    assert list(storage.list("quarantine/")) == []
    assert same(load(storage, good.manifest), state)


def test_no_flipped_bit_is_loaded(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    """100 single-bit flips over every object that a commit names: each is refused."""
    save(storage, log, memory_path / "a", make_state(1), (1, 1, 5))
    paths = [path for kind in ("chunks/", "manifests/", "ledger/") for path in files(storage, kind)]
    draw = random.Random(3)
    for _ in range(100):
        path = draw.choice(paths)
        clean = path.read_bytes()
        bad = bytearray(clean)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        assert [bool(report.problems) for report in verify_all(storage, log)] == [True], path
        path.write_bytes(clean)
    assert [report.problems for report in verify_all(storage, log)] == [()]


def test_damaged_chunk_never_reaches_a_reader(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    done = save(storage, log, memory_path / "a", make_state(1), (1, 1, 5))
    manifest = load_manifest(storage, done.manifest, done.digest)
    damage(files(storage, "chunks/")[0], "flip")
    with pytest.raises(CorruptError, match="do not match their address") as caught:
        load(storage, manifest)
    assert caught.value.where.startswith("chunks/")


def test_a_manifest_of_a_newer_schema_is_refused(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    done = save(storage, log, memory_path / "a", make_state(1), (1, 1, 5))
    value = json.loads(storage.get(done.manifest))
    storage.put("manifests/x.json", json.dumps({**value, "schema": 2}).encode())
    with pytest.raises(NewerSchemaError, match="schema 2, this version reads 1"):
        load_manifest(storage, "manifests/x.json")
    tensors = value["tensors"]
    tensors[0]["shards"][0]["range"][0] = 1 << 40
    storage.put("manifests/y.json", json.dumps({**value, "tensors": tensors}).encode())
    with pytest.raises(CorruptError, match="lie outside chunk"):
        load_manifest(storage, "manifests/y.json")


# --- collection ------------------------------------------------------------------------------------

NOW = CheckpointConfig(keep_last=2, gc_grace_s=0)


def settle(storage: LocalStorage, back_s: float = 5.0) -> None:
    """Make everything in the store look older than the next condemned list."""
    for path in Path(storage.where).rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - back_s, time.time() - back_s))


def test_retention_deletes_only_what_nothing_needs(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    for step in (5, 10, 15, 20):
        save(storage, log, memory_path / str(step), make_state(step), (1, 1, step))
    settle(storage)
    report = collect(storage, log, replace_config(keep_every_steps=10))
    assert report.retired == ("manifests/5-1-1.json",), "10 is kept by keep_every_steps, 15 and 20 are newest"
    settle(storage)
    report = collect(storage, log, NOW)
    assert [int(entry.body["step"]) for entry in log.commits()] == [15, 20]
    assert len(files(storage, "manifests/")) == 2
    for report_ in verify_all(storage, log):
        assert not report_.problems
    assert collect(storage, log, NOW).deleted == 0
    assert report.deleted_bytes > 0


def replace_config(**values: object) -> CheckpointConfig:
    return NOW.model_copy(update=values)


def test_orphans_of_abandoned_saves_are_collected(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    save(storage, log, memory_path / "a", make_state(1), (1, 1, 5))
    needed = set(files(storage, "chunks/"))
    parts = upload(storage, memory_path / "b", make_state(2), (1, 1, 6))
    assert set(files(storage, "chunks/")) > needed
    settle(storage)
    assert collect(storage, log, NOW).deleted == 0, "the save's intent is alive"
    settle(storage, 3600)
    assert collect(storage, log, NOW).deleted == len(parts[0].chunks)
    assert set(files(storage, "chunks/")) == needed
    assert list(storage.list("intents/")) == []


def test_grace_condemned_and_a_save_that_reuses(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    """The chunks of a retired commit are condemned; a save of the same bytes within the grace keeps them."""
    state = make_state(1)
    for step in (1, 2, 3):
        save(storage, log, memory_path / str(step), state if step == 1 else make_state(step), (1, 1, step))
    settle(storage, 5000)
    slow = replace_config(gc_grace_s=1000.0)
    assert collect(storage, log, slow).condemned == 2, "a chunk and a manifest"
    assert collect(storage, log, slow).deleted == 0, "the grace time is not over"
    parts = upload(storage, memory_path / "again", state, (1, 1, 4))
    assert parts[0].reused == (), "condemned chunks count as absent"
    for path in files(storage, "condemned/"):
        os.utime(path, (time.time() - 2000, time.time() - 2000))
    report = collect(storage, log, slow)
    assert (report.deleted, report.postponed) == (1, ""), "only the manifest: the intent lists the chunk"
    commit(storage, log, parts)
    good = latest_good(storage, log)
    assert good is not None
    assert same(load(storage, good.manifest), state)


def test_a_save_under_way_postpones_deletion(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    for step in (1, 2, 3):
        save(storage, log, memory_path / str(step), make_state(step), (1, 1, step))
    settle(storage)
    storage.put("intents/4-1-1-n0.json", b'{"chunks":null}')
    report = collect(storage, log, NOW)
    (listed,) = files(storage, "condemned/")
    told = f"1 saves are under way that began before condemned/{listed.name}"
    assert (report.deleted, report.postponed) == (0, told)
    storage.delete("intents/4-1-1-n0.json")
    assert collect(storage, log, NOW).deleted == 2


def test_chunk_written_again_after_the_list_stays(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    """Even where the intent is gone: what was written after the list was published is not deleted."""
    state = make_state(1)
    for step in (1, 2, 3):
        save(storage, log, memory_path / str(step), state if step == 1 else make_state(step), (1, 1, step))
    settle(storage, 5000)
    collect(storage, log, replace_config(gc_grace_s=1000.0))
    for path in files(storage, "condemned/"):
        os.utime(path, (time.time() - 2000, time.time() - 2000))
    parts = upload(storage, memory_path / "again", state, (1, 1, 4))
    storage.delete(parts[0].intent)
    assert collect(storage, log, replace_config(gc_grace_s=1000.0)).deleted == 1
    commit(storage, log, parts)


def test_a_collector_of_an_old_term_deletes_nothing(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    for step in (1, 2, 3):
        save(storage, log, memory_path / str(step), make_state(step), (1, 1, step))
    collect(storage, log, replace_config(gc_grace_s=1000.0))
    RunLog(storage).claim_term("newer")
    settle(storage)
    for path in files(storage, "condemned/"):
        os.utime(path, (time.time() - 1, time.time() - 1))
    count = len(files(storage, "chunks/"))
    with pytest.raises(FencedError):
        collect(storage, log, NOW)
    assert len(files(storage, "chunks/")) == count


def test_the_commit_that_a_running_generation_descends_from_is_kept(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    for step in (5, 10, 15):
        save(storage, log, memory_path / str(step), make_state(step), (1, 1, step))
    log.append("generation", generation(1, 2, step=5, parent=(1, 1)))
    settle(storage)
    collect(storage, log, NOW)
    assert [int(entry.body["step"]) for entry in log.commits()] == [5, 10, 15]
