"""End of what a run has on its nodes, by a coordinator with a term or by one that never got one.

Agents refuse an order of a term that is older than the newest that they heard of. A coordinator which is
restarted while storage is out has no term to order by. It is the run's all the same, where Ray calls its
process by the run's name. So it ends the run in the newest term that the agents heard of: one that is claimed
meanwhile still fences it off.
"""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.final_wait import unkept
from picotron_ray.errors import FencedError
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.run_record import RunRecord


async def close_nodes(cluster: Cluster, record: RunRecord, term: int, finish: m.Finish) -> m.Finish:
    """Close all nodes of a run, and have the record learn the workers' last figures.

    Args:
        term: of the coordinator; 0: it has none, but is the one that Ray knows.

    Returns:
        ``finish``, with what could not be kept, or as "fenced".
    """
    if not term:
        await cluster.find()
        term = await cluster.heard_term()
    for node, figures in (await cluster.figures()).items():
        record.figures(node, figures)  # the last evaluation may be younger than a heartbeat
    try:
        return unkept(finish, await cluster.close(term, finish.keep, finish.status == "finished"))
    except FencedError as error:
        return m.Finish("fenced", str(error))
