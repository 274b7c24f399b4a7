"""Ray Train's TorchTrainer (v2) as it is documented for fault tolerance, in a local Ray of its own.

On a failure its controller ends all workers of the attempt, starts new processes, forms the process
group and calls the training function again, which loads the newest checkpoint that was reported. The
phases: *detect* is the controller's own notice (``UserCallback.after_exception``), *rebuild* ends when
the last worker of the next attempt has its process group, model and optimizer, *restore* when it has
loaded the checkpoint.

``python -m picotron_ray.bench.recovery.peers.ray_train FOLDER`` is the driver; the benchmark starts it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from picotron_ray.bench.common.event_log import EventLog
from picotron_ray.bench.recovery.peers.host import Peer, environment, job_of
from picotron_ray.config.schema.job import JobConfig

SETTINGS: dict[str, Any] = {
    "max_failures": -1,  # FailureConfig: retry without end
    "num_to_keep": 2,  # CheckpointConfig: the newest one suffices; fewer files to delete
    "backend": "gloo",  # TorchConfig: the only one on CPUs
    "cpus_per_worker": 1,
    "spare_cpus": 1,  # as our runs have: nothing waits for a slot
    "environment": {
        # seconds between the controller's looks at its workers: 2 by default, which is detection time
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    },
}
"""Everything else is Ray Train's default. A checkpoint goes to a local folder and is reported before the
next step, so that the newest one counts. Elastic sizes (``num_workers=(min, max)``) restart all processes
just the same, and a slot for the replacement is free at once: four workers again are its best case."""
RUN = "bench-recovery-ray-train"


class RayTrain(Peer):
    """Started as one driver process; its Ray replaces dead workers by itself."""

    name = "ray_train"

    def start(self) -> None:
        command = [sys.executable, "-m", "picotron_ray.bench.recovery.peers.ray_train", str(self.folder)]
        self.launch(command, {**environment(), **SETTINGS["environment"]})

    def stop(self) -> None:
        from picotron_ray.runtime.ray_cluster import local_ray

        super().stop()
        with local_ray.locked(RUN):
            found = local_ray.find(RUN)
            if found is not None:
                local_ray.stop(found, grace_s=0.0)

    def revive(self) -> None:
        """Nothing to do: all workers were started anew."""


def train(config: dict[str, Any]) -> None:
    """The training function, as every worker of an attempt runs it."""
    import torch
    import torch.distributed as dist
    from ray import train as ray_train
    from torch.nn.parallel import DistributedDataParallel

    from picotron_ray.bench.recovery.peers.replica import Pace, Replica

    job = JobConfig.model_validate(config["job"])
    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    log = EventLog(Path(config["events"]), rank)
    replica = Replica(job, rank, world, Path(config["cache"]))
    model = DistributedDataParallel(replica.model)
    number = torch.tensor([os.getpid()])
    dist.broadcast(number, 0)
    era = str(int(number))  # of the attempt: its rank 0's process
    log.note("built", era=era)
    step = 0
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        replica.model.load_state_dict(state["model"])
        replica.optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    log.note("restored", era=era)
    pace = Pace(config["step_s"])
    while True:
        step += 1
        batch = replica.batch(step)
        replica.set_rate(step)
        replica.optimizer.zero_grad()
        log.note("fed", era=era, step=step, rows=batch.rows)
        replica.loss(model, batch).backward()
        replica.clip()
        replica.optimizer.step()
        pace.wait()
        log.note("step", era=era, step=step, members=world)
        if step % job.checkpoint.interval_steps == 0:
            _report(replica, step, rank)


def _report(replica: Any, step: int, rank: int) -> None:
    """Rank 0 writes the checkpoint, all report: the documented way for replicated state."""
    import torch
    from ray import train as ray_train

    if rank:
        ray_train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {
            "model": replica.model.state_dict(),
            "optimizer": replica.optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, Path(folder) / "state.pt")
        ray_train.report({"step": step}, checkpoint=ray_train.Checkpoint.from_directory(folder))


def drive(folder: Path) -> None:
    """Start a local Ray and train in it until this process is ended."""
    job, step_s = job_of(folder)
    from picotron_ray.runtime.ray_cluster import connect, local_ray
    from picotron_ray.runtime.ray_cluster.names import cache_folder

    workers = job.cluster.max_workers
    cpus = workers * SETTINGS["cpus_per_worker"] + SETTINGS["spare_cpus"]
    with local_ray.locked(RUN):
        connect.attach(local_ray.start(RUN, cpus=cpus, gpus=0, folders=()))
    from ray import train as ray_train
    from ray.train.torch import TorchConfig, TorchTrainer

    class Notice(ray_train.UserCallback):
        """Runs in the controller's process."""

        def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
            log = EventLog(folder / "events", -1)
            log.note("detected", ranks=sorted(worker_exceptions))
            log.close()

    TorchTrainer(
        train,
        train_loop_config={
            "job": job.model_dump(mode="json"),
            "events": str(folder / "events"),
            "cache": str(cache_folder()),
            "step_s": step_s,
        },
        torch_config=TorchConfig(backend=SETTINGS["backend"]),
        scaling_config=ray_train.ScalingConfig(
            num_workers=workers, resources_per_worker={"CPU": SETTINGS["cpus_per_worker"]}
        ),
        run_config=ray_train.RunConfig(
            name=RUN,
            storage_path=str(folder / "storage"),
            failure_config=ray_train.FailureConfig(max_failures=SETTINGS["max_failures"]),
            checkpoint_config=ray_train.CheckpointConfig(num_to_keep=SETTINGS["num_to_keep"]),
            callbacks=[Notice()],  # type: ignore[list-item]
        ),
    ).fit()


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
