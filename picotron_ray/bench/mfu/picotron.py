"""picotron (github.com/huggingface/picotron) as a peer: its model and step, from the user's own checkout.

Imported from there are its process groups, tensor parallelism, model, bucketed data parallelism and
``train_step``. What stands in its ``__main__`` block, and so cannot be imported, is done here in the same
order: zero_grad, step, loss averaged over ranks, torch's AdamW with its defaults, ``reset``. It clips
nothing. On CUDA it trains in pure bf16 and, where flash-attn is installed, with its kernels.

Packages that its files import at the top and a step never calls here (wandb, datasets; flash_attn where
it is not installed, with FLASH_ATTEN=0) are stood in for by names that refuse to be called.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from picotron_ray.bench.mfu.checkout import import_checkout
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.train.passes import OnPhase, silent

NOT_CALLED = {
    "wandb": "wandb",
    "datasets": "datasets",
    "flash_attn.flash_attn_interface": "flash_attn",
    "flash_attn.layers.rotary": "flash_attn",
    "flash_attn.ops.triton.layer_norm": "flash_attn",
}


class PicotronTraining:
    """One rank of picotron's loop under dp x tp; the default process group must be there."""

    def __init__(self, checkout: Path, job: JobConfig, layout: Layout, device: torch.device) -> None:
        flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
        self._theirs = _modules(checkout, device, flash)
        theirs, self._device = self._theirs, device
        theirs.groups.setup_process_group_manager(tp_size=layout.tp, cp_size=1, pp_size=1, dp_size=layout.dp)
        model = theirs.model.Llama(config=_config(job))
        if layout.tp > 1:
            model = theirs.tensor.apply_tensor_parallel(model)
        model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
        self._model = theirs.data.DataParallelBucket(model) if layout.dp > 1 else model
        self._model.train()
        rate = job.optimizer.learning_rate
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate)

    def step(self, batch: StepBatch, on_phase: OnPhase = silent) -> float:
        self._optimizer.zero_grad()
        loss = self._theirs.train.train_step(self._model, _Batches(batch), self._device)
        loss = self._theirs.utils.average_loss_across_dp_cp_ranks(loss, self._device)
        self._optimizer.step()
        if hasattr(self._model, "reset"):
            self._model.reset()
        return float(loss)

    def close(self) -> None:
        self._theirs.groups.process_group_manager = None
        del self._model, self._optimizer


class _Batches:
    """The micro-batches of one step as picotron's data loader hands them out."""

    def __init__(self, batch: StepBatch) -> None:
        self.grad_acc_steps = len(batch.tokens)
        self._rows: Iterator[torch.Tensor] = iter(torch.from_numpy(batch.tokens))

    def __next__(self) -> dict[str, torch.Tensor]:
        rows = next(self._rows)
        return {"input_ids": rows[:, :-1], "target_ids": rows[:, 1:]}


def _config(job: JobConfig) -> SimpleNamespace:
    """The model section under the names of Hugging Face's Llama config."""
    model = job.model
    return SimpleNamespace(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=job.data.sequence_length,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
    )


def _modules(checkout: Path, device: torch.device, flash: bool) -> SimpleNamespace:
    """picotron's modules, imported from the checkout under the settings that its script makes."""
    os.environ.update(
        FLASH_ATTEN="1" if flash else "0",
        DEVICE=device.type,
        DTYPE="bfloat16" if device.type == "cuda" else "float32",
    )
    names = {
        "groups": "picotron.process_group_manager",
        "model": "picotron.model",
        "tensor": "picotron.tensor_parallel.tensor_parallel",
        "data": "picotron.data_parallel.data_parallel",
        "utils": "picotron.utils",
        "train": "train",
    }
    return import_checkout("picotron", checkout, names, NOT_CALLED)
