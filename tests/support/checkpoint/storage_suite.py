"""One conformance suite for every kind of storage; each kind's test module supplies ``storage``."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from picotron_ray.checkpoint.storage.base import Storage, probe
from picotron_ray.errors import AlreadyExistsError, NotFoundError


class StorageConformance:
    """What the rest of the package relies on."""

    many = 50  # objects in the long listing; S3 answers 1000 at a time

    def test_put_get_replace_delete(self, storage: Storage) -> None:
        storage.put("a/b.json", b"one")
        assert storage.get("a/b.json") == b"one"
        storage.put("a/b.json", b"another")
        assert storage.get("a/b.json") == b"another"
        assert storage.size("a/b.json") == 7
        storage.delete("a/b.json")
        storage.delete("a/b.json")
        assert storage.size("a/b.json") is None
        with pytest.raises(NotFoundError, match=r"a/b\.json"):
            storage.get("a/b.json")
        with pytest.raises(NotFoundError, match=r"a/b\.json"):
            storage.get_range("a/b.json", 0, 1)

    def test_empty_and_large_objects(self, storage: Storage) -> None:
        large = os.urandom(9 << 20)
        storage.put("large", large)
        storage.put("empty", b"")
        assert storage.get("large") == large
        assert storage.get("empty") == b""
        assert storage.size("empty") == 0

    def test_ranges(self, storage: Storage) -> None:
        storage.put("r", bytes(range(100)))
        assert storage.get_range("r", 10, 5) == bytes(range(10, 15))
        assert storage.get_range("r", 95, 50) == bytes(range(95, 100))
        assert storage.get_range("r", 3, 0) == b""
        assert storage.get_range("r", 200, 5) == b""

    def test_listing_is_sorted_complete_and_by_prefix(self, storage: Storage) -> None:
        before = time.time()
        names = ["log/00000001.json", "log/00000002.json", "logs/x", "manifests/1-1-1.json", "chunks/ab/abc"]
        for name in names:
            storage.put(name, name.encode())
        assert [entry.key for entry in storage.list("log/")] == names[:2]
        assert [entry.key for entry in storage.list("log")] == names[:3]
        assert [entry.key for entry in storage.list("")] == sorted(names)
        assert list(storage.list("nothing/")) == []
        entry = next(iter(storage.list("chunks/a")))
        assert entry.size == len(names[4])
        assert before - 60 < entry.mtime_s < time.time() + 60

    def test_listing_of_more_than_one_page(self, storage: Storage) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda i: storage.put(f"many/{i:05d}", b""), range(self.many)))
        assert [entry.key for entry in storage.list("many/")] == [f"many/{i:05d}" for i in range(self.many)]

    def test_many_objects_are_deleted_at_once_and_none_begins_too_late(self, storage: Storage) -> None:
        names = [f"chunks/ab/{i:03d}" for i in range(60)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: storage.put(name, b"x"), names))
        storage.put("chunks/abc", b"its neighbour")
        assert set(storage.delete_many(names[:50], time.monotonic() - 0.001)) == set(names[:50])
        assert len(list(storage.list("chunks/ab/"))) == 60
        gone = [*names[:50], "chunks/ab/never-there"]
        assert list(storage.delete_many(gone, time.monotonic() + 60.0)) == []
        assert [entry.key for entry in storage.list("chunks/")] == [*names[50:], "chunks/abc"]

    def test_conditional_put(self, storage: Storage) -> None:
        storage.put_if_absent("log/1", b"mine")
        storage.put_if_absent("log/1", b"mine")  # a repeated try after a lost reply
        with pytest.raises(AlreadyExistsError, match="log/1"):
            storage.put_if_absent("log/1", b"other")
        assert storage.get("log/1") == b"mine"

    def test_conditional_put_has_one_winner(self, storage: Storage) -> None:
        def race(number: int) -> bool:
            try:
                storage.put_if_absent(f"race/{number // 8}", str(number).encode())
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as threads:
            won = list(threads.map(race, range(80)))
        for group in range(10):
            winners = [n for n in range(8 * group, 8 * group + 8) if won[n]]
            assert len(winners) == 1
            assert storage.get(f"race/{group}") == str(winners[0]).encode()

    def test_probe_leaves_nothing(self, storage: Storage) -> None:
        probe(storage)
        assert list(storage.list("")) == []

    def test_errors_survive_pickling(self, storage: Storage) -> None:
        with pytest.raises(NotFoundError) as caught:
            storage.get("missing")
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (NotFoundError, str(caught.value))
        assert "\n" not in str(again)
