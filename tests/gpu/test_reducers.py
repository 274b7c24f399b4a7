"""Reducers on CUDA devices: codecs give the bytes of a CPU, sums over NCCL those of gloo."""

from __future__ import annotations

import pytest
import torch

from picotron_ray.comm.collectives.exposed import ExposedTime
from picotron_ray.comm.reducers.codecs import Bf16, Codec, Quantized, TopK

CUDA = torch.device("cuda", 0)
CODECS = [Bf16(), Quantized(8), Quantized(4), TopK(0.5), TopK(0.03)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_codes_are_those_of_a_cpu(codec: Codec) -> None:
    """Ranks of one run may decode on either. No two values are of one size, so top-k has one answer."""
    order = torch.randperm(3 * 4096, generator=torch.Generator().manual_seed(0)).float() + 1
    rows = (order * torch.where(order % 2 == 0, 1.0, -1.0)).view(3, 4096) / 4096
    wire = codec.encode(rows)
    found = codec.encode(rows.to(CUDA))
    assert torch.equal(found.cpu(), wire)
    assert torch.equal(codec.decode(found, 4096).cpu(), codec.decode(wire, 4096))


def test_the_time_that_a_stream_waits_is_measured_on_its_own_time_line() -> None:
    """A sum on another stream that takes long, half of it beside the computation."""
    exposed, other = ExposedTime(CUDA), torch.cuda.Stream()
    torch.cuda._sleep(1_000)  # the first launch is slow
    torch.cuda.synchronize()
    cycles = 200_000_000

    def waited(beside: int) -> float:
        exposed.begin()
        with torch.cuda.stream(other):
            torch.cuda._sleep(cycles)
            done = torch.cuda.Event()
            done.record()
        torch.cuda._sleep(beside)
        with exposed.waiting():
            torch.cuda.current_stream().wait_event(done)
        return exposed.seconds

    whole, half = waited(1_000), waited(cycles // 2)
    assert whole > 0.01
    assert half == pytest.approx(whole / 2, rel=0.2)
    assert waited(2 * cycles) < 0.1 * whole, "hidden behind the computation"
