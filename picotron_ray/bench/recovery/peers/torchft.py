"""torchft: every data-parallel replica is a process group of its own that outlives the others.

A lighthouse tells the replicas who takes part in each step; when one dies, the others' all-reduce fails,
nobody commits that step, the next quorum is formed without it and the step is done again by the
survivors, whose state never left them: *detect* is the first survivor whose step does not commit,
*rebuild* ends when the last survivor has its new process group, *restore* takes nothing. The share of the
batch that the dead replica would have fed is dropped (``torchft.data``: "inherently lossy") until it is
back; how much that is gets counted. It is started again only after the figure of its kill was taken, so
that importing torch does not compete with the recovery.

``python -m picotron_ray.bench.recovery.peers.torchft FOLDER RANK LIGHTHOUSE`` is one replica.
"""

from __future__ import annotations

import socket
import sys
import sysconfig
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picotron_ray.bench.common.event_log import EventLog
from picotron_ray.bench.recovery.peers.host import Peer, environment, job_of

if TYPE_CHECKING:
    from picotron_ray.bench.recovery.peers.replica import Replica

SETTINGS: dict[str, Any] = {
    "lighthouse": {
        "min_replicas": 1,  # go on with whoever is there
        "join_timeout_ms": 200,  # wait for a missing replica no longer than this: 60,000 by default
        "quorum_tick_ms": 50,  # look for a new quorum this often: 100 by default
        "heartbeat_timeout_ms": 1000,  # a silent replica is dead: 5,000 by default
    },
    "manager": {
        "min_replica_size": 1,
        "use_async_quorum": True,  # the default: the quorum is formed while the forward pass runs
        "init_sync": False,  # documented for weights that are initialised alike
    },
    "timeout_s": 30,  # of collectives and RPCs; recovery does not wait for it
}
"""Process group: ``ProcessGroupGloo``. Gradients go through ``Manager.allreduce``, all in one: the hook of
``torchft.ddp.DistributedDataParallel`` 0.2.0 ends the survivors by an AssertionError when a peer dies under
gloo (``_comm_hook``: ``assert fut._fut`` after a wait that failed)."""


class TorchFT(Peer):
    """A lighthouse and one process per replica; dead ones are started again when asked to."""

    name = "torchft"

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        flags = [f"--{name}={value}" for name, value in SETTINGS["lighthouse"].items()]
        lighthouse = Path(sysconfig.get_path("scripts")) / "torchft_lighthouse"
        self.launch([str(lighthouse), f"--bind=127.0.0.1:{port}", *flags], environment())
        self._replicas = {rank: self._replica(rank) for rank in range(self.job.cluster.max_workers)}

    def _replica(self, rank: int) -> Any:
        module = "picotron_ray.bench.recovery.peers.torchft"
        return self.launch(
            [sys.executable, "-m", module, str(self.folder), str(rank), self._address], environment()
        )

    def revive(self) -> None:
        for rank, process in self._replicas.items():
            if process.poll() is not None:
                self._replicas[rank] = self._replica(rank)


def train(folder: Path, rank: int, lighthouse: str) -> None:
    """One replica, until it is ended."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from picotron_ray.bench.recovery.peers.replica import Pace, Replica
    from picotron_ray.runtime.ray_cluster.names import cache_folder

    job, step_s = job_of(folder)
    log = EventLog(folder / "events", rank)
    replica = Replica(job, rank, job.cluster.max_workers, cache_folder())
    group = _noted_group(log)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = _manager(replica, group, rank, lighthouse, store.port)
    pace = Pace(step_s)
    while True:
        manager.start_quorum()
        step = manager.current_step() + 1
        batch = replica.batch(step)
        replica.set_rate(step)
        replica.optimizer.zero_grad()
        replica.loss(replica.model, batch).backward()
        manager.wait_quorum()
        if manager.is_participating():
            log.note("fed", era=group.quorum, step=manager.current_step() + 1, rows=batch.rows)
        _average(manager, [parameter.grad for parameter in replica.model.parameters()])
        if manager.errored() is not None:
            log.note("detected")
        replica.clip()
        if not manager.should_commit():
            log.note("detected")
            continue
        replica.optimizer.step()
        pace.wait()
        log.note("step", era=group.quorum, step=manager.current_step(), members=manager.num_participants())


def _noted_group(log: EventLog) -> Any:
    """Gloo's process group, which notes when it is formed; the quorum's number is the membership."""
    from torchft import ProcessGroupGloo

    class Noted(ProcessGroupGloo):
        def configure(self, *args: Any, **kwargs: Any) -> None:
            super().configure(*args, **kwargs)
            self.quorum = str(kwargs.get("quorum_id", args[4] if len(args) > 4 else None))
            log.note("built", era=self.quorum)
            log.note("restored", era=self.quorum)

    return Noted(timeout=timedelta(seconds=SETTINGS["timeout_s"]))


def _manager(replica: Replica, group: Any, rank: int, lighthouse: str, store_port: int) -> Any:
    """torchft's manager of the replica: a world of one, which the lighthouse joins with the others."""
    from torchft import Manager

    def load(state: Any) -> None:
        replica.model.load_state_dict(state["model"])
        replica.optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {
            "model": replica.model.state_dict(),
            "optimizer": replica.optimizer.state_dict(),
        },
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store_port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{rank}",
        hostname="127.0.0.1",
        timeout=timedelta(seconds=SETTINGS["timeout_s"]),
        **SETTINGS["manager"],
    )


def _average(manager: Any, gradients: list[Any]) -> None:
    """Average over the replicas, as one tensor; an error is kept by the manager and fails the commit."""
    import torch

    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
