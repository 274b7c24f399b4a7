"""Steps that wait for their device once, and compiled code over generations, on the devices at hand."""

from __future__ import annotations

import pytest

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.layout.layout import Layout
from tests.gpu.conftest import Devices
from tests.gpu.main_jobs import compiled_generations, quiet_steps
from tests.gpu.test_layouts import BATCH, LONGER, PLAIN, WIDER
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job
from tests.support.gloo.pool import Pool

pytestmark = [pytest.mark.any_device, pytest.mark.timeout(900)]
QUIET = [name for name in PLAIN if name != "recompute"]


@pytest.mark.parametrize("name", QUIET)
def test_a_step_waits_once(devices: Devices, pool: Pool, name: str) -> None:
    """Where the host waited a second time, torch would raise (``torch.cuda.set_sync_debug_mode``)."""
    layout = PLAIN[name]
    devices.need(layout.world_size)
    job = make_job("adamw", BATCH, WIDER, length=LONGER, precision="bf16")
    for reads, losses in pool.run(layout.world_size, quiet_steps, job, layout, devices.kind):
        assert reads == len(losses) == 6
        assert losses[-1] < losses[0] * 1.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_code_outlives_generations(devices: Devices, pool: Pool, ranks: int) -> None:
    """Six of them over three layouts: the same losses as without, all blocks compiled, each layout once."""
    devices.need(ranks)
    many = [Layout(dp=ranks, micro_batch=rows, zero=3 * (ranks > 1)) for rows in (1, 2, 1, 4, 2, 1)]
    plain, made = (
        pool.run(
            ranks,
            compiled_generations,
            make_job(
                "adamw",
                4 * ranks,
                WIDER,
                length=LONGER,
                precision="fp32",
                kernels=KernelsConfig(compile=compiles),
            ),
            many,
            devices.kind,
        )
        for compiles in (False, True)
    )
    for without, compiled in zip(plain, made, strict=True):
        for (_, expected, _), (applied, losses, _) in zip(without, compiled, strict=True):
            assert f"{WIDER.layers} blocks compiled, each as one graph" in applied
            assert losses == pytest.approx(expected, rel=1e-4)
        graphs = [count for *_, count in compiled]
        assert graphs[0] > 0
        assert graphs[2] == graphs[1] > graphs[0], "a layout that comes back compiles nothing"
        assert graphs[5] == graphs[4] == graphs[3] > graphs[2]
