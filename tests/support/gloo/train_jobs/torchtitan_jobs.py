"""What the pool's processes do for tests/gloo/bench/test_torchtitan.py: its steps beside plain PyTorch's."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.attention.flex_attention import flex_attention

from picotron_ray.bench.mfu import torchtitan
from picotron_ray.bench.mfu.peers import peer
from picotron_ray.bench.mfu.settings import Refusal, base_setting
from picotron_ray.bench.mfu.torchtitan import TorchtitanTraining
from picotron_ray.bench.mfu.worker import WorkerPlace
from picotron_ray.bench.recovery.peers.replica import Replica
from picotron_ray.data.batch import make_batch
from picotron_ray.models.huggingface import names
from picotron_ray.runtime.ray_cluster.names import cache_folder
from tests.support.gloo.pool import Job

CPU = torch.device("cpu")
STEPS = 3


def _quiet() -> None:
    """Its initial weights are drawn as DTensors; that CPUs draw them unlike GPUs is nothing to us."""
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")


def apart(job: Job, checkout: str, overrides: list[str], device: torch.device = CPU) -> dict[str, float]:
    """The largest differences of three steps' losses, first clipped gradients and last weights."""
    _quiet()
    os.environ.update(MASTER_ADDR=job.host, MASTER_PORT=str(job.port))
    setting = peer(base_setting("tiny", overrides, job.world_size, device.type), "torchtitan")
    assert not isinstance(setting, Refusal), setting.reason
    config, layout = setting.job, setting.layout
    ours = Replica(config, 0, 1, cache_folder(), device)
    with WorkerPlace(job.rank, job.world_size, device).groups(f"{job.prefix}/titan", True):
        training = TorchtitanTraining(Path(checkout), config, layout, device)
        theirs = _Theirs(training.trainer, config)
        theirs.load(dict(ours.model.named_parameters()))
        found = {"loss": 0.0}
        for step in range(1, STEPS + 1):
            loss = _our_step(ours, step)
            dp_index = layout.coordinates(job.rank).dp
            batch = make_batch(ours.feed, layout, dp_index, step)
            share = training.step(batch) / layout.tp
            dist.all_reduce(share)
            found["loss"] = max(found["loss"], abs(loss - float(share)))
            if step == 1:
                gradients = {name: p.grad for name, p in ours.model.named_parameters()}
                found["gradients"] = theirs.furthest(gradients, of="grad")
        found["weights"] = theirs.furthest(dict(ours.model.named_parameters()), of="data")
        training.close()
        del theirs, training
    return found


def flex_loss_apart(job: Job, checkout: str, overrides: list[str]) -> float:
    """Difference of the first loss with the attention that it has on CUDA; forward alone, as CPUs can."""
    _quiet()
    torchtitan._modules(Path(checkout), CPU)
    from torchtitan.models.common.attention import FlexAttention  # type: ignore[import-not-found]

    os.environ.update(MASTER_ADDR=job.host, MASTER_PORT=str(job.port))
    base = base_setting("tiny", overrides, job.world_size, "cpu")
    ours = Replica(base.job, 0, 1, cache_folder())
    batch = make_batch(ours.feed, base.layout, 0, 1)
    with (
        WorkerPlace(job.rank, job.world_size, CPU).groups(f"{job.prefix}/flex", True),
        mock.patch.object(torchtitan, "_rows_apart", return_value=FlexAttention.Config()),
        mock.patch.object(FlexAttention, "_compiled_flex_attn", flex_attention),
        torch.no_grad(),
    ):
        training = TorchtitanTraining(Path(checkout), base.job, base.layout, CPU)
        trainer, found = training.trainer, 0.0
        theirs = _Theirs(trainer, base.job)
        theirs.load(dict(ours.model.named_parameters()))
        for fed, labels in torchtitan._micro_batches(batch):
            tokens, labels, named = trainer.post_dataloading_process(fed, labels)
            assert "attention_masks" in named
            with trainer.train_context():
                loss, _ = trainer.loss_fn(trainer.model_parts[0](tokens, **named), labels)
            found += float(loss) / batch.global_tokens
        training.close()
        del theirs, training, trainer
        return abs(float(ours.loss(ours.model, ours.batch(1))) - found)


def _our_step(ours: Replica, step: int) -> float:
    """One step of the plain loop; returns the loss, and leaves the clipped gradients."""
    batch = ours.batch(step)
    ours.set_rate(step)
    ours.optimizer.zero_grad()
    loss = ours.loss(ours.model, batch)
    loss.backward()
    ours.clip()
    ours.optimizer.step()
    return loss.item()


class _Theirs:
    """torchtitan's model under our parameters' names, by its own adapter for Hugging Face's."""

    def __init__(self, trainer: Any, config: Any) -> None:
        from torchtitan.models.llama3 import Llama3StateDictAdapter  # type: ignore[import-not-found]

        self._model: nn.Module = trainer.model_parts[0]
        self._adapter = Llama3StateDictAdapter(trainer.model_config, None)
        self._adapter.fqn_to_index_mapping = None
        held = names.tensors(config.model, names.architecture_of(config.model))
        self._names = {one.ours[0]: one.theirs[0] for one in held}

    def load(self, parameters: dict[str, Tensor]) -> None:
        whole = self._adapter.from_hf({self._names[name]: each.detach() for name, each in parameters.items()})
        held: dict[str, Any] = self._model.state_dict()
        self._model.load_state_dict(
            {name: distribute_tensor(whole[name], to.device_mesh, to.placements) for name, to in held.items()}
        )

    def furthest(self, ours: dict[str, Any], of: str) -> float:
        """Largest difference of a gradient (``of="grad"``) or weight (``of="data"``) from ours.

        Relative to the largest element of each tensor.
        """
        kept = [parameter.detach().clone() for parameter in self._model.parameters()]
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(getattr(parameter, of))
        state: dict[str, Any] = self._model.state_dict()
        whole = self._adapter.to_hf({name: each.full_tensor().clone() for name, each in state.items()})
        assert set(whole) == set(self._names.values())
        with torch.no_grad():
            for parameter, before in zip(self._model.parameters(), kept, strict=True):
                parameter.copy_(before)
        return max(
            float((whole[self._names[name]] - each.detach()).abs().max() / each.detach().abs().max())
            for name, each in ours.items()
        )
