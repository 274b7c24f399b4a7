"""The precision of a job: what is updated, kept and added up, and what computes and travels.

Under bf16 and fp16 weights compute and are gathered in 16 bits; so are the residual stream and what tensor,
pipeline, context and expert parallelism send. The weights that are updated and kept, their moments, the sums
of gradients, norms, routers, rotary positions and losses stay fp32: casting the parameters themselves would
lose small updates. fp8 computes the products of linear layers inside blocks (`parallel.precision.fp8`) and
leaves the rest to bf16. fp16 scales its loss (`loss_scaler`). tf32 is a format of NVIDIA's matrix products.

Under adaptive precision all of it is fp32 but the products of the parts that bear it, by torch's autocast:
which parts do is known only while the run goes on, and weights that were rounded once are no measure of it.
"""

from __future__ import annotations

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import precision_problem
from picotron_ray.config.validation.layout import splits_backward
from picotron_ray.errors import LayoutError
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.precision.compute_weights import ComputeWeights

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def compute_dtype(job: JobConfig) -> torch.dtype | None:
    """Return the type of weights as they compute, and of the residual stream; None: the master type."""
    return None if job.adaptive_precision.error_bound is not None else NARROW.get(job.precision)


def compute_weights(job: JobConfig, mesh: Mesh) -> ComputeWeights:
    """Make what holds a rank's weights as they compute, where FSDP does not."""
    wide = job.precision == "fp8" or splits_backward(job, mesh.layout)
    return ComputeWeights(compute_dtype(job), wide=wide, sharing=mesh.sharing)


def autocast_dtype(job: JobConfig) -> torch.dtype | None:
    """Return the type of matrix products under autocast; None: there is none (`parallel.precision`)."""
    mixed = job.adaptive_precision.error_bound is not None or job.model.builder is not None
    return NARROW.get(job.precision) if mixed else None


def master_dtype(job: JobConfig) -> torch.dtype:
    """Return the type of weights as they are updated and kept, of summed gradients and of moments."""
    return torch.float64 if job.precision == "fp64" else torch.float32


def check_precision(job: JobConfig, device: torch.device) -> None:
    """Raise LayoutError if this device does not compute in the job's precision, or launch left it open."""
    if job.precision == "auto":
        raise LayoutError("precision: saw auto, which launch settles before workers start; name one")
    cuda = device.type == "cuda"
    problem = precision_problem(job, device.type, [torch.cuda.get_device_capability(device)] if cuda else ())
    if problem:
        raise LayoutError(f"precision: {problem}")


def set_matrix_products(job: JobConfig) -> None:
    """Choose whether fp32 matrix products of this process run in TF32: a setting of the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"


def orthogonalization_dtype(job: JobConfig, device: torch.device) -> torch.dtype:
    """Return the type of Muon's Newton-Schulz iteration: bfloat16 suffices (Jordan et al. 2024).

    On CPUs, products in bfloat16 are no faster: there it is the master type.
    """
    return torch.bfloat16 if job.precision in ("bf16", "fp8") and device.type == "cuda" else master_dtype(job)
