"""What the tests of moments in 8 bits share: models of tensors that are large enough, torchao's zeros."""

from __future__ import annotations

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.train.optim.quantized_state import Codebook, codebook_of, middles_of
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job

WIDE = ModelConfig(
    vocab_size=64, hidden_size=256, intermediate_size=512, layers=2, heads=4, kv_heads=2, init_std=0.05
)
MIXTURE = ModelConfig(
    **{**WIDE.model_dump(), "moe": {"experts": 4, "intermediate_size": 128, "shared_intermediate_size": 64}}
)
BATCH = 12


def job_of(moments: str, model: ModelConfig = WIDE, optimizer: str = "adamw") -> JobConfig:
    job = make_job(optimizer, BATCH, model, precision="fp32")
    changed = {"moments": moments, "learning_rate": 1e-3}
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update=changed)})


def with_zeros(signed: bool, device: torch.device) -> Codebook:
    """torchao's way with small squares."""
    codebook = codebook_of(signed, device)
    borders = torch.cat([middles_of(codebook.numbers), torch.tensor([torch.inf])])
    return codebook._replace(borders=borders, first=torch.where(codebook.first == 1, 0, codebook.first))
