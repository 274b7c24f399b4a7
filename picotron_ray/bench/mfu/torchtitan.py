"""torchtitan (github.com/pytorch/torchtitan) as a peer: its Llama 3 and step, from the user's own checkout.

Its ``Trainer`` also makes tokenizer, data, checkpoints and logs, so its constructor is not called. What a
step needs is made here in the same order and by the same functions of it (device mesh, model on the meta
device, ``parallelize_llama``, initial weights, loss, optimizers), and a step is its ``Trainer.train_step``.
As our config says: sizes, AdamW's settings, learning rate, clipping, rows per micro-batch, tensor parallel
degree, how far data parallelism cuts the state (all of it by FSDP2 there), recomputation, torch.compile of
blocks, and whether the loss is computed by parts of the tokens.

Rows go in as documents of one packed sequence, which is how it takes them. On CUDA its own default, flex
attention, keeps them apart. Flex attention has no backward pass on CPUs: there its SDPA module stands in, as
in its own tests, and `_rows_apart` gives it one row after the other.

Written for the checkout of 2026-08-21 (b5bcd76). Its functions take other arguments from month to month; a
checkout that does not fit is refused by the error that it gave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from picotron_ray.bench.mfu.checkout import import_checkout
from picotron_ray.bench.mfu.peers import LOSS_PARTS
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.errors import PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.train.optim.lr_schedule import factor
from picotron_ray.train.passes import OnPhase, silent

NOT_CALLED = {
    "torchtitan.distributed.minimal_async_ep.kernels": "triton",
    "torch.utils.tensorboard": "tensorboard",
    "grain.python": "grain",
    "grain.experimental": "grain",
    "datasets.distributed": "datasets",
    "tokenizers": "tokenizers",
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class TorchtitanTraining:
    """One rank of torchtitan's loop under dp x tp; the default process group must be there."""

    def __init__(self, checkout: Path, job: JobConfig, layout: Layout, device: torch.device) -> None:
        theirs = _modules(checkout, device)
        self._losses: list[torch.Tensor] = []
        self._compiler = torch._dynamo.config.save_config() if job.kernels.compile else None
        try:
            self.trainer = _trainer(theirs, job, layout, device, self._losses)
        except (AttributeError, TypeError, ValueError) as error:
            raise PicotronError(f"torchtitan: {checkout} is not of the kind known here: {error}") from error

    def step(self, batch: StepBatch, on_phase: OnPhase = silent) -> torch.Tensor:
        """Run its ``train_step``; return the loss without waiting for it, as torchtitan seldom logs it."""
        self._losses.clear()
        self.trainer.step = batch.step
        self.trainer.train_step(_micro_batches(batch))
        return torch.stack(self._losses).sum()

    def close(self) -> None:
        del self.trainer
        if self._compiler is not None:
            torch._dynamo.config.load_config(self._compiler)


def _micro_batches(batch: StepBatch) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Micro-batches in the form of torchtitan's data loader.

    All rows lie in one dimension, with positions that begin at 0 in each row, beside the labels.
    """
    for rows in torch.from_numpy(batch.tokens):
        positions = torch.arange(rows.size(1) - 1).repeat(rows.size(0))
        yield {"input": rows[:, :-1].flatten(), "positions": positions}, rows[:, 1:].flatten()


def _trainer(
    theirs: SimpleNamespace, job: JobConfig, layout: Layout, device: torch.device, losses: list[torch.Tensor]
) -> Any:
    """torchtitan's ``Trainer`` with those parts alone that its ``train_step`` uses.

    Args:
        losses: gets every micro-batch's share of the step's loss.
    """
    config = _config(theirs, job, layout, device)
    kind = theirs.trainer.Trainer
    trainer = kind.__new__(kind)
    trainer.config, trainer.device = config, device
    trainer.parallel_dims = theirs.distributed.ParallelDims.from_config(config.parallelism, layout.world_size)
    theirs.utils.set_spmd_backend(config.parallelism.spmd_backend)
    trainer.loss_fn = config.loss.build(compile_config=config.compile)
    model = _model(trainer, device)
    trainer.optimizers = config.optimizer.build(model_parts=[model])
    trainer.lr_schedulers = theirs.optimizer.LRSchedulersContainer(
        trainer.optimizers, lambda done: factor(job.optimizer.schedule, done + 1, job.steps)
    )
    trainer.gradient_accumulation_steps = layout.micro_batches(job.data.global_batch)
    trainer.num_pp_microbatches, trainer.ntokens_seen = 1, 0
    trainer.metrics_processor = SimpleNamespace(should_log=lambda step: False)
    trainer.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
    trainer.train_context = theirs.utils.get_spmd_context(parallel_dims=trainer.parallel_dims)
    body = kind._forward_backward_body

    def kept(*arguments: Any) -> torch.Tensor:
        loss: torch.Tensor = body(trainer, *arguments)
        losses.append(loss.to_local().detach() if isinstance(loss, DTensor) else loss.detach())
        return loss

    trainer.fwd_bwd_fn = kept
    return trainer


def _model(trainer: Any, device: torch.device) -> Any:
    """torchtitan's model: built on the meta device, made parallel, then given its first weights."""
    config, spec = trainer.config, trainer.config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=trainer.parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    if device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that scales
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    trainer.model_config, trainer.model_parts = spec.model, [model]
    if hasattr(trainer.loss_fn, "set_lm_head"):
        trainer.loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return model


# --- its config ------------------------------------------------------------------------------------------


def _config(theirs: SimpleNamespace, job: JobConfig, layout: Layout, device: torch.device) -> Any:
    """torchtitan's ``Trainer.Config`` for our job; other fields keep torchtitan's defaults."""
    settings, length = theirs.config, job.data.sequence_length
    replicate = layout.replicate if layout.zero else layout.dp
    loss = theirs.loss.CrossEntropyLoss.Config(global_vocab_size=job.model.vocab_size)
    if job.kernels.loss == "linear":
        loss = theirs.loss.ChunkedLossWrapper.Config(num_chunks=LOSS_PARTS, loss_fn=loss)
    return theirs.trainer.Trainer.Config(
        model_spec=theirs.spec.ModelSpec(
            name="llama3",
            flavor="ours",
            model=_sizes(theirs, job, device),
            parallelize_fn=theirs.llama3.parallelize_llama,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        loss=loss,
        optimizer=_optimizer(theirs, job),
        training=settings.TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=layout.micro_batch * length,
            num_tokens_per_train_step=job.data.global_batch * length,
            max_context_length=length,
            max_norm=job.optimizer.clip_norm or math.inf,
            disable_cuda_graphs=True,
            mixed_precision_param=DTYPES[job.precision],
        ),
        parallelism=settings.ParallelismConfig(
            data_parallel_replicate_degree=replicate,
            data_parallel_shard_degree=layout.dp // replicate,
            tensor_parallel_degree=layout.tp,
            spmd_backend="partial_dtensor",  # its default needs a later torch than 2.13
            fsdp_reshard_after_forward="default" if layout.zero == 3 else "never",
        ),
        activation_checkpoint=theirs.recompute.FullAC.Config() if layout.recompute == "full" else None,
        compile=settings.CompileConfig(enable=job.kernels.compile),
        validator=theirs.validate.Validator.Config(dataloader=theirs.loader.BaseDataLoader.Config()),
    )


def _sizes(theirs: SimpleNamespace, job: JobConfig, device: torch.device) -> Any:
    """Config of torchtitan's model in our sizes."""
    llama3, common, model = theirs.llama3, theirs.common, job.model
    width, scaling, length = model.hidden_size, model.rope_scaling, job.data.sequence_length
    rope = common.ComplexRoPE.Config(
        dim=model.head_size,
        max_context_length=length,
        theta=model.rope_theta,
        scaling="none" if scaling.factor == 1.0 else "llama",
        scaling_factor=scaling.factor,
        low_freq_factor=scaling.low_frequency_factor,
        high_freq_factor=scaling.high_frequency_factor,
        original_max_position_embeddings=scaling.original_length,
    )
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=model.vocab_size,
        enable_weight_tying=model.tie_embeddings,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=model.vocab_size,
            embedding_dim=width,
            param_init=llama3._EMBEDDING_SKIP_INIT if model.tie_embeddings else llama3._EMBEDDING_INIT,
        ),
        norm=common.RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=common.Linear.Config(
            in_features=width, out_features=model.vocab_size, param_init=llama3._output_linear_init(width)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=model.layers,
            dim=width,
            n_heads=model.heads,
            n_kv_heads=model.kv_heads,
            hidden_dim=model.intermediate_size,
            rope=rope,
            attn_backend="flex",
        ),
    )
    for _, norm, _, _ in config.traverse(common.RMSNorm.Config):
        norm.eps = model.norm_eps
    if device.type == "cpu":
        for layer in config.layers:
            layer.attention.inner_attention = _rows_apart(theirs, length)
    return config


def _optimizer(theirs: SimpleNamespace, job: JobConfig) -> Any:
    """AdamW as ours, without decay for norms and, where asked, for the embedding."""
    optimizer = job.optimizer
    spared = "norm" if optimizer.decay_embeddings else "norm|tok_embeddings"
    adamw: dict[str, Any] = {
        "lr": optimizer.learning_rate,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
    }
    groups = [
        theirs.optimizer.ParamGroupConfig(
            pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**adamw, "weight_decay": decay}
        )
        for pattern, decay in ((spared, 0.0), (".*", optimizer.weight_decay))
    ]
    kernel = job.kernels.optimizer
    return theirs.optimizer.OptimizersContainer.Config(param_groups=groups, implementation=kernel)


def _rows_apart(theirs: SimpleNamespace, length: int) -> Any:
    """Config of its SDPA module over rows of ``length`` tokens, cut out of ``[tokens, heads, head]``."""
    sdpa = theirs.common.ScaledDotProductAttention

    class RowsApart(sdpa):  # type: ignore[misc, valid-type]
        @dataclass(kw_only=True, slots=True)
        class Config(sdpa.Config):  # type: ignore[name-defined]
            pass

        def forward(  # its sharding goes by these names
            self, q_TNH: torch.Tensor, k_TNH: torch.Tensor, v_TNH: torch.Tensor, **named: Any
        ) -> torch.Tensor:
            rows = (x.unflatten(0, (-1, length)) for x in (q_TNH, k_TNH, v_TNH))
            seen: torch.Tensor = super().forward(*rows, **named)
            return seen.flatten(0, 1)

    return RowsApart.Config()


def _modules(checkout: Path, device: torch.device) -> SimpleNamespace:
    """torchtitan's modules, imported from the checkout for one kind of device."""
    tools = import_checkout("torchtitan", checkout, {"utils": "torchtitan.tools.utils"}, NOT_CALLED)
    # it takes the machine's GPU, or CUDA where there is none; the other modules copy these names
    tools.utils.device_type, tools.utils.device_module = device.type, getattr(torch, device.type)
    names = {
        "trainer": "torchtitan.trainer",
        "llama3": "torchtitan.models.llama3",
        "common": "torchtitan.models.common",
        "spec": "torchtitan.protocols.model_spec",
        "config": "torchtitan.config",
        "distributed": "torchtitan.distributed",
        "utils": "torchtitan.distributed.utils",
        "recompute": "torchtitan.distributed.activation_checkpoint",
        "loss": "torchtitan.components.loss",
        "loader": "torchtitan.components.data.loader",
        "validate": "torchtitan.components.validate",
        "optimizer": "torchtitan.components.optimizer",
    }
    return import_checkout("torchtitan", checkout, names, NOT_CALLED)
