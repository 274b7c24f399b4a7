"""Peers of ``bench mfu``: other trainers of the base's model, and what they cannot do. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from picotron_ray.bench.mfu.settings import Kind, Refusal, Setting
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError

PEERS: tuple[Kind, ...] = ("plain", "picotron", "torchtitan")
CHECKOUTS = {
    "picotron": ("picotron/model.py", "github.com/huggingface/picotron"),
    "torchtitan": ("torchtitan/trainer.py", "github.com/pytorch/torchtitan of August 2026"),
}
"""Peer → a file by which one knows a checkout of it, and where that comes from."""

LOSS_PARTS = 8
"""torchtitan's number of parts of a micro-batch's tokens, where it computes the loss part by part."""

FLEX_HEAD = 16
"""Narrowest head of torch's flex attention on CUDA (torch._inductor.kernel.flex)."""


def chosen_peers(names: str, checkouts: Mapping[str, Path]) -> list[Kind]:
    """From ``--peers``; raises ConfigError for an unknown one, or one without its checkout."""
    wanted = [] if names == "none" else [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise ConfigError(f"--peers: saw {unknown[0]!r}, expected some of {', '.join(PEERS)}, or none")
    for name, (file, origin) in CHECKOUTS.items():
        given = checkouts.get(name)
        if name in wanted and (given is None or not (given / file).is_file()):
            saw = "none" if given is None else f"{given}, without {file}"
            raise ConfigError(f"--{name}: saw {saw}, expected a checkout of {origin}")
    return [name for name in PEERS if name in wanted]


def peer(base: Setting, name: Kind) -> Setting | Refusal:
    """A peer that trains the same model on the same batches."""
    problem = {"plain": _plain_problem, "picotron": _picotron_problem, "torchtitan": _torchtitan_problem}
    reason = _other_model(base.job) or problem[name](base)
    return Refusal(name, reason) if reason else Setting(name, name, base.job, base.layout)


def _other_model(job: JobConfig) -> str:
    """Reason that no peer trains the base's model."""
    if job.model.builder is not None or job.model.moe.experts:
        return "written for the dense built-in decoder alone"
    if job.optimizer.name != "adamw":
        return f"written for AdamW, saw optimizer.name={job.optimizer.name}"
    if job.data.keeps_documents_apart:
        return f"its attention sees whole rows, saw {'='.join(job.data.asks_apart)}"
    if job.adaptive_precision.error_bound is not None:
        return "it computes in one precision, saw adaptive_precision.error_bound"
    if job.precision == "fp16":
        return "it has no loss scale, saw precision=fp16"
    if job.precision == "fp8":
        return "it has no fp8 layers, saw precision=fp8"
    if job.optimizer.moments != "full":
        return f"its moments are full, saw optimizer.moments={job.optimizer.moments}"
    return ""


def _plain_problem(base: Setting) -> str:
    job, layout = base.job, base.layout
    if layout.world_size != layout.dp or job.data.global_batch % layout.dp:
        return f"the plain loop is data-parallel over equal shares, saw {layout}"
    return ""


def _picotron_problem(base: Setting) -> str:
    job, model = base.job, base.job.model
    wanted = "bf16" if job.cluster.device == "cuda" else "fp32"
    if job.precision != wanted:
        return f"it trains in {wanted} on {job.cluster.device}, saw precision={job.precision}"
    if _no_llama(model) or model.rope_scaling.factor != 1.0 or model.tie_embeddings:
        return "its model has no such heads, biases, norms, window, stretched positions or tied embeddings"
    return _uneven(base)


def _torchtitan_problem(base: Setting) -> str:
    job, layout = base.job, base.layout
    if job.precision not in ("fp32", "bf16"):
        return f"it trains in fp32 or bf16, saw precision={job.precision}"
    if _no_llama(job.model):
        return "its Llama 3 has no such heads, biases, norms or window, nor such positions"
    if job.cluster.device == "cuda" and job.model.head_size < FLEX_HEAD:
        return f"its flex attention takes heads of {FLEX_HEAD} and more on CUDA, saw {job.model.head_size}"
    if layout.recompute not in ("none", "full"):
        return f"it recomputes as ours does by none or full, saw layout.recompute={layout.recompute}"
    if layout.offload_activations or job.optimizer.offload:
        return "compared with its state on the device, saw layout.offload_activations or optimizer.offload"
    if job.kernels.cuda_graphs:
        return "compared without CUDA graphs, saw kernels.cuda_graphs=true"
    tokens = layout.micro_batch * job.data.sequence_length
    if job.kernels.loss == "linear" and tokens % LOSS_PARTS:
        return f"it computes the loss of {LOSS_PARTS} equal parts, saw {tokens} tokens in a micro-batch"
    return _uneven(base)


def _uneven(base: Setting) -> str:
    job, layout = base.job, base.layout
    if layout.world_size != layout.dp * layout.tp or job.data.global_batch % (layout.dp * layout.micro_batch):
        return f"compared under dp and tp with equal micro-batches, saw {layout}"
    if job.model.vocab_size % layout.tp:
        return f"it cuts a vocabulary into equal parts, saw model.vocab_size={job.model.vocab_size}, {layout}"
    return ""


def _no_llama(model: ModelConfig) -> bool:
    """Whether blocks are others than Llama's."""
    other_heads = model.head_size * model.heads != model.hidden_size
    other_positions = model.rope_scaling.type != "llama3" or model.partial_rotary_factor != 1.0
    others = (other_heads, other_positions, model.qkv_bias, model.qk_norm, model.sliding_window)
    return model.family != "llama" or any(others)
