"""Intents of saves that are committed: one a node, and no commit's answer waits for their deletion."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from picotron_ray.checkpoint.store.assembly import Assembler
from picotron_ray.checkpoint.store.commit import commit_assembled
from picotron_ray.checkpoint.store.deletion import delete_settled
from picotron_ray.checkpoint.store.outline import Outlines
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.errors import StorageUnavailableError
from tests.support.checkpoint.large_parts import CountedStorage, large_part

INTENTS = [f"intents/{number}" for number in range(2500)]


class Server:
    """A storage of which only deletions are asked, that is away, or too busy for some keys."""

    def __init__(self, away: bool = False, busy: Sequence[str] = ()) -> None:
        self.asked: list[int] = []
        self.away, self.busy = away, busy

    def delete_many(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        self.asked.append(len(keys))
        if self.away:
            raise StorageUnavailableError("away")
        return [key for key in keys if key in self.busy]


def test_they_go_by_the_thousand_and_what_is_left_is_tried_the_next_time() -> None:
    intents, server = deque(INTENTS), Server(busy=INTENTS[7:9])
    delete_settled(server, intents)  # type: ignore[arg-type]
    assert server.asked == [1000, 1000, 502], "those two again with the last"
    assert list(intents) == INTENTS[7:9]
    server.busy = ()
    delete_settled(server, intents)  # type: ignore[arg-type]
    delete_settled(server, intents)  # type: ignore[arg-type]
    assert (server.asked[3:], intents) == ([2], deque())


def test_none_is_forgotten_in_an_outage() -> None:
    intents, server = deque(INTENTS), Server(away=True)
    with pytest.raises(StorageUnavailableError):
        delete_settled(server, intents)  # type: ignore[arg-type]
    assert (server.asked, sorted(intents)) == ([1000], sorted(INTENTS))


def test_a_commit_leaves_them_to_whoever_made_it() -> None:
    """On S3 the answer of a thousand nodes' commit came a minute after it was durable."""
    storage = CountedStorage()
    log = RunLog(storage)
    log.claim_term("t")
    log.append("generation", {"term": 1, "n": 1, "source": {"generation": None, "step": 0}})
    part = large_part(12, 1)
    storage.hold(part)
    done = commit_assembled(storage, log, (1, 1), Assembler(storage, [part]), Outlines())
    assert done.intents == (part.intent,)
    assert not [call for call in storage.calls if call.startswith("delete")]
