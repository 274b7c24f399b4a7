"""CUDA graphs: the forward and backward pass of a micro-batch, recorded once and replayed.

A small model's kernels end before the host has launched the next ones. A graph is launched whole, so that a
step no longer waits for the host. A replay reads and writes the same memory each time. So a micro-batch is
copied into the tensors of the recording, and gradients add up in tensors that stay (`StaticGradients`).
Activations lie in a pool of the graph's own, also between steps.

The config refuses what a graph cannot record: changes of shapes or memory (`config.support.devices`), and
communication within the passes (`config.validation.layout`). Sums over replicas begin after the last replay,
in which no hook of the backward pass runs. Tables that a model keeps for all steps (rotary positions,
windows) are made in the warm-up and outlive it.

On a CPU the same code computes the passes anew each time. Only tests ask for that.

Source: PyTorch's notes on CUDA graphs (Ng et al. 2021, Accelerating PyTorch with CUDA Graphs), whole-network
capture: warm-up on a side stream, one pool, static inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from picotron_ray.errors import LayoutError
from picotron_ray.train.micro_batches import MicroBatch

WARM_UP = 3
"""Passes before the recording. In the first ones libraries choose kernels and allocate workspaces."""

Passes = Callable[[MicroBatch, Tensor], Tensor]
"""(micro-batch, gradient of its loss) → the loss, after forward and backward."""


class StepGraph:
    """Records the passes of the first micro-batch it is given, and replays them with others.

    Args:
        passes: adds to gradients that keep their storage.
    """

    def __init__(self, passes: Passes, device: torch.device) -> None:
        self._passes, self._device = passes, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        self._fed: MicroBatch | None = None
        self._scale = torch.ones((), dtype=torch.float64, device=device)
        self._loss = torch.zeros((), device=device)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Enter the stream of the recording.

        Lasting hooks of the backward pass must be made here too: a gradient is added on the stream on which
        its hook was made, and the default stream records nothing.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @property
    def recorded(self) -> bool:
        """True once a micro-batch was recorded."""
        return self._fed is not None

    def record(self, like: MicroBatch, scale: float) -> None:
        """Warm up and record; gradients are meaningless afterwards.

        Raises:
            LayoutError: CUDA refuses to record something.
        """
        inputs, targets, weights, named = like
        copies = {name: value.clone() for name, value in named.items()}
        self._fed = inputs.clone(), targets.clone(), weights.clone(), copies
        self._scale.fill_(scale)
        with self.stream():
            for _ in range(WARM_UP):
                self._passes(self._fed, self._scale)
        if self._graph is None:
            return
        try:
            # other threads of the process, which copy snapshots, are not part of it
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self._passes(self._fed, self._scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._fed = None
            text = f"kernels.cuda_graphs: saw true, but this step cannot be recorded: {error}"
            raise LayoutError(f"{text.splitlines()[0]}; use false") from error

    def replay(self, micro_batch: MicroBatch, scale: float) -> Tensor:
        """Add the gradients of a micro-batch; return its loss.

        Args:
            micro_batch: with the shapes of the recording.
            scale: gradient of the loss.
        """
        assert self._fed is not None, "recorded before it is replayed"
        for held, given in zip(self._fed[:3], micro_batch[:3], strict=True):
            held.copy_(given)
        for name, held in self._fed[3].items():
            held.copy_(micro_batch[3][name])
        self._scale.fill_(scale)
        if self._graph is None:
            return self._passes(self._fed, self._scale)
        self._graph.replay()
        return self._loss.clone()

    def close(self) -> None:
        """Give back the graph and its memory."""
        if self._graph is not None and self._fed is not None:
            self._graph.reset()
        self._fed = self._graph = None
        del self._passes, self._loss
