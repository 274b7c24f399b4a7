"""One data-parallel replica in plain PyTorch: what every peer trains, so that all train the same."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch, make_batch
from picotron_ray.data.dataset import build_dataset
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, region, slabs, whole
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.layers.init import initial_value
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.loss.cross_entropy import token_losses, weighted_sum
from picotron_ray.train.optim.lr_schedule import learning_rate
from picotron_ray.train.optim.optimizer import decays
from picotron_ray.train.precision.precision import master_dtype
from picotron_ray.train.training_state import INITIAL_PIECE, MadeWeights

CPU = torch.device("cpu")


class Replica:
    """Model, optimizer and data of one rank.

    Args:
        job: the job; ``data.global_batch`` must be a multiple of ``world``.
        rank, world: which equal share of every global batch it feeds.
        cache: folder of tokenised data.
        device: where it trains.
        micro_batch: rows per forward and backward pass; None: its whole share at once.
        made: weights of step 0 that others have made, or will want.
    """

    def __init__(
        self,
        job: JobConfig,
        rank: int,
        world: int,
        cache: Path,
        device: torch.device = CPU,
        micro_batch: int | None = None,
        made: MadeWeights | None = None,
    ) -> None:
        torch.set_num_threads(1)  # as our workers do
        self.job = job
        self.rank = rank
        self.device = device
        self.layout = Layout(dp=world, micro_batch=micro_batch or job.data.global_batch // world)
        self.feed = build_dataset(job.data, job.model.vocab_size, job.seed, cache).feed
        self.model = Transformer(job.model).to(device, master_dtype(job))
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for spec in parameter_table(job.model):
                parameter = parameters[spec.name]
                for piece in slabs(whole(spec.shape), INITIAL_PIECE):
                    key = (spec.name, piece)
                    value = made[key] if made and key in made else _initial(spec, job.seed, piece)
                    if made is not None:
                        made[key] = value
                    parameter[region(piece, whole(spec.shape))] = value
                (decayed if decays(spec, job.optimizer) else others).append(parameter)
        settings = job.optimizer
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    def batch(self, step: int) -> StepBatch:
        """This replica's rows of global step ``step`` (1-based)."""
        return make_batch(self.feed, self.layout, self.rank, step)

    def loss(self, model: nn.Module, batch: StepBatch, micro_batch: int = 0) -> Tensor:
        """One micro-batch's share of the replica's mean token loss.

        Summed over micro-batches and averaged over replicas it is the global batch's.
        """
        tokens = torch.from_numpy(batch.tokens[micro_batch]).to(self.device, non_blocking=True)
        weights = torch.from_numpy(batch.weights[micro_batch]).to(self.device, master_dtype(self.job))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.precision == "bf16"):
            logits = model(tokens[:, :-1])
        total = weighted_sum(token_losses(logits, tokens[:, 1:], None), weights)
        return total * (self.layout.dp / batch.global_tokens)

    def clip(self) -> None:
        """Clip the averaged gradients to ``optimizer.clip_norm``."""
        if self.job.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.job.optimizer.clip_norm)

    def set_rate(self, step: int) -> None:
        rate = learning_rate(self.job.optimizer, step, self.job.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def _initial(spec: ParameterSpec, seed: int, box: Box) -> Tensor:
    return initial_value(spec.name, spec.shape, seed, init_std=spec.init_std, box=box)


class Pace:
    """Pads every step to ``step_s`` seconds, so that all frameworks take steps of the same length."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._began = time.monotonic()

    def wait(self) -> None:
        time.sleep(max(0.0, self._began + self._step_s - time.monotonic()))
        self._began = time.monotonic()
