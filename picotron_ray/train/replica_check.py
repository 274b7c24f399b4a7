"""Check in the run: ranks that hold the same part of the state compare it, bit by bit, every so many steps.

Between checks it costs nothing. A check reads the state once on the device, and all-gathers two numbers for
each of a rank's few keys (`parallel.shard_boxes.replica_key`): ranks with equal keys hold the same. What ZeRO
cuts has no second holder, unless there are several copies (``layout.replicate``), and cannot be compared;
`ReplicaCheck.applied` says which share of a rank's state has one.

Where digests differ the ranks look for the place together: the first tensor by its hash, then ever smaller
parts of it, until a few elements are left whose values they tell each other. With three or more holders the
minority is wrong. With two the steps since the last check are computed again by the next generation, which
brings their values along (``replay``), and `debug.replicas.judge_replay` decides.

Whatever is found ends the generation: all ranks raise the same error at the same step.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.comm.renamed import all_gather_single
from picotron_ray.debug.replicas import (
    DifferingValues,
    RankValues,
    ReplicaFinding,
    Word,
    differing_keys,
    differing_values,
    first_difference,
    first_part,
    judge_replay,
    outvoted,
)
from picotron_ray.errors import DivergedError
from picotron_ray.train.tensor_hash import tensor_hashes, words_of

MOST_KEYS = 16
"""Keys of one rank: weights and some moments, each cut in up to four ways."""
PARTS = 64
"""Parts of a tensor that are compared at a time while the place is looked for."""
FEW = 256
"""Elements whose values are told."""
Parts = Sequence[tuple[str, StateTensor]]


class NoReplicaCheck:
    """Check that is switched off, or that has nobody to compare with."""

    applied: tuple[str, ...] = ()
    agreed_step = -1
    """Newest state of which all ranks were found to hold the same; -1: none was looked at."""

    def due(self, step: int, *, leaving: bool) -> bool:
        """Whether ranks compare the state after ``step``, the same on all of them.

        Args:
            leaving: it is the generation's last step.
        """
        return False

    def check(self, step: int) -> None:
        """Do nothing."""


class ReplicaCheck(NoReplicaCheck):
    """Check of one rank in one generation.

    Args:
        every: steps between checks.
        parts: what this rank may hold as others do, each with its key (`Engine.replicated`).
        world_size: ranks, all of which check.
        device: of the process group's tensors.
        start_step: of the state that the generation began with.
        replay: what an earlier generation found at a step that this one computes again; None: nothing.
    """

    def __init__(
        self,
        every: int,
        parts: Parts,
        rank: int,
        world_size: int,
        device: torch.device,
        start_step: int,
        replay: DifferingValues | None = None,
    ) -> None:
        self._every, self._rank, self._ranks, self._device = every, rank, world_size, device
        self._parts: dict[int, list[StateTensor]] = _by_key(parts)
        self.agreed_step, self._replay = start_step, replay
        self.applied = (self._coverage(),)

    def _coverage(self) -> str:
        """Say which share of this rank's state another rank holds too; all ranks call it."""
        held = [sorted(self._parts)] if self._ranks == 1 else self._gather(sorted(self._parts))
        counts: dict[int, int] = defaultdict(int)
        for keys in held:
            for key in keys:
                counts[key] += 1
        sizes = {key: sum(t.shard.box.numel for t in tensors) for key, tensors in self._parts.items()}
        total = sum(sizes.values())
        shared = sum(size for key, size in sizes.items() if counts[key] > 1)
        share = shared / total if total else 0.0
        why = "" if share else ": no rank holds what another one holds, nothing can be compared"
        return f"replica check every {self._every} steps: {share:.1%} of the state has a second holder{why}"

    def due(self, step: int, *, leaving: bool) -> bool:
        """Every so many steps, at the last one, and where a replay is through."""
        return step % self._every == 0 or leaving or self._replayed(step)

    def _replayed(self, step: int) -> bool:
        return self._replay is not None and self._replay.step == step

    def check(self, step: int) -> None:
        """Compare the state after ``step``; all ranks call it.

        Raises:
            DivergedError: ranks differ, or a replay is through.
        """
        differing = differing_keys(self._exchange())
        if self._replayed(step):
            self._settle(step, sound=not differing)
        if differing:
            raise self._found(step, differing)
        self.agreed_step = step

    # --- all agree, as a rule -----------------------------------------------------------------------

    def _exchange(self) -> list[dict[int, int]]:
        """By rank, digests by key."""
        mine = torch.zeros(2 * MOST_KEYS, dtype=torch.int64)
        found = iter(
            tensor_hashes([_plain(tensor) for tensors in self._parts.values() for tensor in tensors])
        )
        for at, (key, tensors) in enumerate(self._parts.items()):
            hashes = list(islice(found, len(tensors)))
            mine[2 * at], mine[2 * at + 1] = key, _digest(struct.pack(f"<{len(hashes)}q", *hashes))
        rows = self._all_gather(mine).view(self._ranks, MOST_KEYS, 2).tolist()
        return [{key: digest for key, digest in row if key} for row in rows]

    def _all_gather(self, mine: Tensor) -> Tensor:
        local = mine.to(self._device)
        gathered = local.new_empty((self._ranks * local.numel(),))
        all_gather_single(gathered, local.view(-1))
        return gathered.view(self._ranks, *local.shape).cpu()

    # --- they differ --------------------------------------------------------------------------------

    def _gather(self, told: Any) -> list[Any]:
        """All-gather plain values, as JSON; by rank."""
        data = json.dumps(told).encode()
        sizes = self._all_gather(torch.tensor([len(data)])).view(-1).tolist()
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._all_gather(mine).numpy()
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _found(self, step: int, differing: frozenset[int]) -> DivergedError:
        """Look for the place, and return the error that tells of it."""
        mine = {
            f"{tensor.shard.name}@{tensor.shard.box.offset}": tensor
            for key, tensors in self._parts.items()
            if key in differing
            for tensor in tensors
        }
        hashes = tensor_hashes([_plain(tensor) for tensor in mine.values()])
        name = first_difference(self._gather(dict(zip(mine, hashes, strict=True))))
        values = None if name is None else self._located(step, name, mine.get(name))
        since = f"they agreed after step {self.agreed_step}"
        if values is None:
            found = ReplicaFinding(step, self.agreed_step)
            text = f"replicas differ after step {step}, and no longer where it was looked for; {since}"
            return DivergedError(text, found.plain())
        text = f"replicas differ after step {step}: {values}; {since}"
        liars = outvoted(values)
        if liars:
            text = f"{text}; {_named(liars)} differs from the majority"
            return DivergedError(text, ReplicaFinding(step, self.agreed_step, liars).plain())
        return DivergedError(text, ReplicaFinding(step, self.agreed_step, replay=values).plain())

    def _located(self, step: int, name: str, tensor: StateTensor | None) -> DifferingValues | None:
        """Find elements that differ in a tensor; None of it is on this rank where ``tensor`` is None."""
        words = None if tensor is None else words_of(_plain(tensor))
        size = max(self._gather(0 if words is None else words.numel()))
        first, end = 0, size
        while end - first > FEW:
            length = -(-(end - first) // PARTS)
            pieces = None if words is None else words[first:end].split(length)
            at = first_part(self._gather(None if pieces is None else tensor_hashes(pieces)))
            if at is None:
                return None
            first, end = first + at * length, min(first + (at + 1) * length, end)
        told = None if tensor is None else _words(_plain(tensor), first, end)
        return differing_values(step, name.rpartition("@")[0], first, self._gather(told))

    # --- computed again -------------------------------------------------------------------------------

    def _settle(self, step: int, *, sound: bool) -> None:
        """Judge by steps that were computed again. Always raises."""
        recorded = self._replay
        assert recorded is not None
        mine = None
        if any(one.rank == self._rank for one in recorded.ranks):
            found = [t for ts in self._parts.values() for t in ts if t.shard.name == recorded.tensor]
            flat = _plain(found[0]).reshape(-1)
            mine = [float(flat[at]) for at in recorded.elements]
        again = {rank: told for rank, told in enumerate(self._gather(mine)) if told is not None}
        liars, why = judge_replay(recorded, again)
        state = "all ranks agree now" if sound else "ranks differ once more"
        who = f"{_named(liars)} held wrong values" if liars else "who was wrong cannot be decided"
        text = f"{recorded.tensor} after step {step}: {who}; {why}; {state}"
        agreed = step if sound else self.agreed_step
        raise DivergedError(text, ReplicaFinding(step, agreed, liars, settled=sound).plain())


def replica_check(
    every: int,
    parts: Callable[[], Parts],
    rank: int,
    world_size: int,
    device: torch.device,
    start_step: int,
    replay: Mapping[str, Any] | None,
) -> NoReplicaCheck:
    """Return the check that a job asks for (``debug.replica_check_steps``); 0: none.

    Args:
        replay: as `DifferingValues.plain` has it.
    """
    if not every or world_size == 1:
        return NoReplicaCheck()
    return ReplicaCheck(every, parts(), rank, world_size, device, start_step, values_of(replay))


def values_of(data: Mapping[str, Any] | None) -> DifferingValues | None:
    """Read what `DifferingValues.plain` wrote; None of nothing."""
    if data is None:
        return None
    ranks = tuple(RankValues(one["rank"], tuple(one["values"])) for one in data["ranks"])
    return DifferingValues(data["step"], data["tensor"], tuple(data["elements"]), ranks, data["bits"])


def _by_key(parts: Parts) -> dict[int, list[StateTensor]]:
    """Tensors by a number for their key; who has other names under a key is not compared with."""
    named: dict[str, list[StateTensor]] = defaultdict(list)
    for key, tensor in parts:
        if tensor.shard.box.numel:
            named[key].append(tensor)
    found = {}
    for key, tensors in named.items():
        names = json.dumps([key, [tensor.shard.name for tensor in tensors]])
        found[_digest(names.encode()) or 1] = tensors
    assert len(found) <= MOST_KEYS, f"saw {len(found)} keys, expected at most {MOST_KEYS}"
    return found


def _plain(tensor: StateTensor) -> Tensor:
    return cast(Tensor, tensor.tensor).detach()


def _words(tensor: Tensor, first: int, end: int) -> list[Word]:
    values = tensor.reshape(-1)[first:end].double().cpu().tolist()
    return list(zip(words_of(tensor)[first:end].tolist(), values, strict=True))


def _digest(data: bytes) -> int:
    """Signed number of 64 bits that stands for bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
