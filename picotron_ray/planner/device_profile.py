"""Device profiles: hardware figures for the planner, as values that callers pass in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from picotron_ray.planner.software_profile import PLAIN, SoftwareProfile


class PassCost(NamedTuple):
    """Cost of an all-gather or a reduce-scatter, as multiples of half an all-reduce's."""

    per_byte: float = 1.0
    latency: float = 1.0


HALF_A_SUM = PassCost()


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One worker's device and its links, by figures that are reached in practice, not peaks.

    Fields:
        flops: floating-point operations per second in large matrix products.
        matmul_half: smallest dimension of a matrix product at which it runs at half of ``flops`` (t = work /
            flops · (1 + half / dimension), a form that thin products of cuBLAS follow within some per cent);
            0: shapes are not told apart.
        tensor_loss: share of arithmetic lost to thinner matrices per doubling of tp, where ``matmul_half`` is
            0. Megatron-LM (Shoeybi et al. 2019) kept 77 % at 8-way, its collectives included.
        attention_flops: the same within attention's kernel, forward, of the half of the square that a causal
            kernel computes; 0: attention counts as other products do, over the whole square.
        attention_backward_flops: of its backward pass, 2.5 times as much work (Dao 2023).
        memory_bytes: device memory that training may use.
        memory_bytes_s: device memory that operations on single elements read and write per second.
        link_bytes_s: bandwidth between two workers of one node, bytes per second and direction.
        latency_s: seconds that one collective or message costs besides its bytes.
        gather, scatter: an all-gather and a reduce-scatter against half an all-reduce, whose figures
            ``link_bytes_s`` and ``latency_s`` are.
        node_link_bytes_s: bandwidth per worker between nodes; 0: as inside a node.
        host_link_bytes_s: bandwidth between device and host memory, bytes per second and direction.
        host_bytes_s: host memory that one thread reads and writes per second.
        kernel_s: seconds that one decoder block costs per micro-batch besides its arithmetic
            (launches, framework), forward and backward together.
        crowd: workers per core, at least 1, of a machine whose cores its workers share: while one waits for
            another, that one has its core.
        software: what the program does with the device.
        guessed: the rates are neither measured nor of a data sheet: they order layouts, and no more.
    """

    flops: float
    memory_bytes: float
    link_bytes_s: float
    latency_s: float
    gather: PassCost = HALF_A_SUM
    scatter: PassCost = HALF_A_SUM
    node_link_bytes_s: float = 0.0
    kernel_s: float = 0.0
    host_link_bytes_s: float = 1e10
    host_bytes_s: float = 1e10
    memory_bytes_s: float = 1e10
    matmul_half: float = 0.0
    tensor_loss: float = 0.1
    attention_flops: float = 0.0
    attention_backward_flops: float = 0.0
    crowd: float = 1.0
    software: SoftwareProfile = PLAIN
    guessed: bool = False

    def said(self, figure: float) -> str:
        """A figure that follows from the rates, with as many digits as they are worth.

        >>> from dataclasses import replace
        >>> CPU.said(0.3649), CPU.said(12.0), replace(CPU, guessed=False).said(0.3649)
        ('0.4', '10', '0.365')
        """
        return f"{float(f'{figure:.1g}'):g}" if self.guessed else f"{figure:.3g}"

    def passes(self, micro_batches: float, waiting: float) -> float:
        """Micro-batches' times that a pipeline takes for so many, and its waiting to fill and drain.

        >>> from dataclasses import replace
        >>> CPU.passes(4, 3), replace(CPU, crowd=2.0).passes(4, 3), replace(CPU, crowd=1.4).passes(4, 3)
        (7.0, 4.0, 5.0)
        """
        return max(float(micro_batches), (micro_batches + waiting) / self.crowd)


# One CPU core with gloo over loopback. Arithmetic and bandwidth are the order of what small matrices reach;
# the latency is set low on purpose: on CPU the aim is to train elastically with all workers given, and with
# the measured 3e-4 s the planner would rightly run a toy model on one of them and leave the others idle. A
# block's operators cost a millisecond or two however small they are, so rows one by one are slow.
CPU = DeviceProfile(
    flops=5e9, memory_bytes=8e9, link_bytes_s=1e9, latency_s=1e-5, kernel_s=1e-3, guessed=True
)
