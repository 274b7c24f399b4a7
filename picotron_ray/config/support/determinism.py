"""Settings that ``kernels.deterministic`` cannot have: with them bits differ from run to run. Torch-free.

Torch's flash and efficient attention, sums into shared places (`index_add`, `scatter_add`) and compiled
kernels have a deterministic way, which torch takes under ``use_deterministic_algorithms`` (2.11 to 2.13, its
documentation and aten's attention_backward.cu); flash-attn has one by an argument. cuDNN's attention has
none, and is not offered (`config.support.kernels`).
"""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig

KEY = "kernels.deterministic"


def determinism_problems(job: JobConfig) -> dict[str, str]:
    """Explain, by the other key, why the bits of a job differ from run to run; empty where they do not.

    The layout is no part of it: another one sums in another order.
    """
    if not job.kernels.deterministic:
        return {}
    found = {}
    if job.comm.selector:
        found["comm.selector"] = (
            "saw true with comm.selector=true, which takes the way that was fastest, and so another order of"
            " sums in each run; drop one"
        )
    if job.adapt.apply:
        found["adapt.apply"] = (
            f"saw true with adapt.apply={', '.join(job.adapt.apply)}, which changes the run by what is"
            " measured of it; drop one"
        )
    if job.kernels.tp_overlap == "symmetric-memory":
        found["kernels.tp_overlap"] = (
            "saw true with kernels.tp_overlap=symmetric-memory, whose fused sums promise no order; use ring"
            " or none, or drop it"
        )
    return found
