"""End of what a run has on its nodes, by a coordinator with a term or by one that never got one.

Agents refuse an order of a term that is older than the newest that they heard of. A coordinator which is
restarted while storage is out has no term to order by. It is the run's all the same, where Ray calls its
process by the run's name. So it ends the run in the newest term that the agents heard of: one that is claimed
meanwhile still fences it off.
"""

from __future__ import annotations

import asyncio
import logging
import os

import ray

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.final_wait import KEPT, unkept
from picotron_ray.errors import FencedError
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.ray_cluster import kept_slots, local_ray
from picotron_ray.runtime.ray_cluster.connect import run_folders
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, coordinator_name
from picotron_ray.runtime.ray_cluster.ray_calls import is_this_process
from picotron_ray.runtime.ray_cluster.supervisor import LINGER_S

log = logging.getLogger(__name__)


async def leave_to_successor(run: str, finish: m.Finish) -> None:
    """Leave everything as it is, this process too, where Ray calls another one by the run's name."""
    if not await is_this_process(coordinator_name(run)):
        log.warning("%s (%s): this process leaves everything as it is", finish.status, finish.detail)
        os._exit(0)


async def close_nodes(cluster: Cluster, record: RunRecord, run: str, term: int, finish: m.Finish) -> m.Finish:
    """Close all nodes of a run, and have the record learn the workers' last figures.

    Where an agent heard of a newer term, of which storage did not tell, all snapshots are kept: they are
    closed in that term, unless its coordinator is of this Ray.

    Args:
        term: of the coordinator; 0: it has none, but is the one that Ray knows.

    Returns:
        ``finish``, with what could not be kept, or as "fenced".
    """
    if not term:
        await cluster.find()
    figures, heard = await asyncio.gather(cluster.figures(), cluster.heard_term(patient=not term))
    for node, pages in figures.items():
        record.figures(node, pages)  # the last evaluation may be younger than a heartbeat
    try:
        if term and heard > term:  # before any agent that did not hear of it deletes slots
            raise FencedError(f"refused: term {term} is older than {heard}; another coordinator took over")
        return await _closed(cluster, term or heard, finish)
    except FencedError as error:
        finish = m.Finish("fenced", f"{error}; {KEPT}", m.Source("slots"))
    await leave_to_successor(run, finish)
    try:
        return await _closed(cluster, await cluster.heard_term(), finish)
    except FencedError as error:  # yet another
        log.warning("%s: left as it is", error)
        return finish


async def _closed(cluster: Cluster, term: int, finish: m.Finish) -> m.Finish:
    return unkept(finish, await cluster.close(term, finish.keep, finish.status == "finished"))


async def leave(job: JobConfig, owns_ray: bool, finish: m.Finish) -> None:
    """End this process, now that the run's result is there to be read.

    Args:
        owns_ray: whether the launch started this Ray, which then ends with it.
    """
    if owns_ray:
        if finish.status == "finished" and finish.keep is None:
            kept_slots.discard(run_folders(job))  # committed, though nobody lived to note it
        local_ray.announce_end()  # its supervisor takes it down a little later
    else:
        await asyncio.sleep(LINGER_S)  # drivers that are attached read the result meanwhile
        ray.kill(ray.get_actor(coordinator_name(job.name), NAMESPACE))
