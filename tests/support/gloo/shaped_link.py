"""Two network namespaces joined by a link of a given rate, and what a rank does in one of them.

``python -m tests.support.gloo.shaped_link HOST PORT RANK WORLD FOLDER`` is one rank. It prints a line of
JSON: the seconds of each way before, what the selector uses after each decision, and the seconds again at
the end. Rank 0 leaves the file ``halve`` in FOLDER where the link is to become slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

SIZE = 2**18
"""Elements of a buffer: 1 MiB."""
REPEATS = 5
HALVED_AT, STEPS = 130, 330
IP = "10.213.7.{}"


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def may_make_namespaces() -> bool:
    """Whether this process may make namespaces and shape links."""
    name = f"prt{os.getpid()}"
    try:
        command("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    try:
        command("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb")
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        command("ip", "netns", "del", name)
    return True


class Link:
    """Two namespaces, ``names``, with the interface ``link0`` in each."""

    def __init__(self, mbit: int) -> None:
        self.names = [f"pr{os.getpid()}{end}" for end in "ab"]
        for name in self.names:
            command("ip", "netns", "add", name)
        first, second = self.names
        command(
            "ip",
            "-n",
            first,
            "link",
            "add",
            "link0",
            "type",
            "veth",
            "peer",
            "name",
            "link0",
            "netns",
            second,
        )
        for number, name in enumerate(self.names, 1):
            command("ip", "-n", name, "addr", "add", f"{IP.format(number)}/24", "dev", "link0")
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("ip", "-n", name, "link", "set", "link0", "up")
            command(
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                "link0",
                "root",
                "handle",
                "1:",
                "htb",
                "default",
                "1",
            )
        self.shape(mbit, "add")

    def shape(self, mbit: int, how: str = "change") -> None:
        """Set the rate of both directions."""
        for name in self.names:
            place = ("dev", "link0", "parent", "1:", "classid", "1:1")
            command("tc", "-n", name, "class", how, *place, "htb", "rate", f"{mbit}mbit", "quantum", "1514")

    def close(self) -> None:
        for name in self.names:
            command("ip", "netns", "del", name)


@contextlib.contextmanager
def shaped(mbit: int) -> Iterator[Link]:
    link = Link(mbit)
    try:
        yield link
    finally:
        link.close()


def run(link: Link, folder: Path, halved_mbit: int) -> list[dict[str, Any]]:
    """Four ranks, two in each namespace; returns what they printed."""
    ranks = []
    for rank in range(4):
        inside = ["ip", "netns", "exec", link.names[rank // 2]]
        arguments = [IP.format(1), "29500", str(rank), "4", str(folder)]
        ranks.append(
            subprocess.Popen(
                [*inside, sys.executable, "-m", __name__, *arguments],
                stdout=subprocess.PIPE,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"},
                text=True,
            )
        )
    try:
        while not (folder / "halve").exists() and all(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
        link.shape(halved_mbit)
        return [json.loads(rank.communicate(timeout=200)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


class Rank:
    """One rank's sums."""

    def __init__(self, host: str, port: int, rank: int, world: int) -> None:
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from picotron_ray.comm.process_groups import ProcessGroups

        torch.set_num_threads(1)
        if rank == 0:
            limit = timedelta(seconds=60)
            self.store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit)
        else:
            time.sleep(1.0)
        self.rank, self.groups = rank, ProcessGroups.open(host, port, "shaped", rank, world)
        self.flat = torch.randn(SIZE)

    def seconds(self, plan: Any, repeats: int) -> float:
        """Median time of a sum after a first one, on this rank."""
        import torch
        import torch.distributed as dist

        from picotron_ray.comm.reducers.choose import make_reducer
        from picotron_ray.comm.reducers.feedback import Feedback

        group = dist.group.WORLD
        assert group is not None
        reducer = make_reducer(plan, group, 4 * SIZE)
        feedback = None if reducer.exact else Feedback(self.flat, group.size())
        times = []
        for _ in range(repeats + 1):
            flat = self.flat.clone()
            dist.barrier()
            began = time.perf_counter()
            reducer.start(flat, [torch.Size((512, SIZE // 512))], feedback, 1).wait()
            times.append(time.perf_counter() - began)
        return sorted(times[1:])[repeats // 2]

    def measured(self, plans: dict[str, Any]) -> dict[str, float]:
        """Seconds of each plan, on the slowest rank."""
        import torch

        mine = torch.tensor([self.seconds(plan, REPEATS) for plan in plans.values()])
        return dict(zip(plans, self.groups.all_gather(mine).amax(dim=0).tolist(), strict=True))


def main(host: str, port: str, rank: str, world: str, folder: str) -> None:
    import torch

    from picotron_ray.comm.reducers.choose import ReductionPlan
    from picotron_ray.parallel.mesh import neighbours
    from picotron_ray.train.reduction_plan import reduction_candidates
    from picotron_ray.train.way_selection import Cost, WayChoice

    me = Rank(host, int(port), int(rank), int(world))
    inner = neighbours(me.groups.nodes)
    exact = reduction_candidates(ReductionPlan(), inner, int(world))
    compressed = {name: ReductionPlan(name) for name in ("bf16", "int8", "topk")}
    before = me.measured(exact | compressed)
    choice = WayChoice("gradients", list(exact), "across nodes", me.rank == 0)
    used = []
    for step in range(1, STEPS + 1):
        if step == HALVED_AT and me.rank == 0:
            (Path(folder) / "halve").touch()
        mine = torch.tensor([me.seconds(exact[choice.begin(step)], 1)])
        choice.decide(Cost(4 * SIZE, float(me.groups.all_gather(mine).max())))
        used.append(choice.chosen)
    found = {"inner": inner, "before": before, "used": used, "after": me.measured(exact)}
    me.groups.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
