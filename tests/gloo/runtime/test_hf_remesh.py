"""From Hugging Face into one layout, on in another after a kill, and back: as if transformers had trained it.

The reference is the model of transformers itself, trained by torch alone on the same samples.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.coordinator.messages import GenerationId, Source
from picotron_ray.data.batch import make_batch
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.layout.layout import Layout
from picotron_ray.models.finetune import LORA_A
from picotron_ray.models.layers.init import initial_value
from picotron_ray.runtime.run_storage.hf_export import export_hf
from picotron_ray.runtime.run_storage.hf_import import import_hf, model_section
from picotron_ray.runtime.run_storage.peft_export import layers_in_peft
from picotron_ray.runtime.run_storage.run_store import RunStore
from picotron_ray.train.optim.lr_schedule import learning_rate
from tests.support.gloo.hf_kit import LENGTH, TOKENS, job_for, make, transformers
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, terms

pytestmark = pytest.mark.filterwarnings("default")
STEPS, BATCH, CLIP, DECAY = 5, 4, 0.5, 0.6
# kind of model (tied: smollm, gpt2; a mixture: qwen3-moe), layout that is killed, layout that goes on
WAYS = {
    "smollm": (Layout(dp=2, tp=2, zero=1, micro_batch=1), Layout(cp=2, zero=3, micro_batch=2)),
    "gpt2": (Layout(tp=2, micro_batch=2), Layout(dp=2, zero=3, micro_batch=2)),
    "llama3": (Layout(cp=2, micro_batch=2), Layout(tp=2, pp=2, micro_batch=2)),
    "qwen3-moe": (Layout(dp=2, ep=2, zero=2, micro_batch=2), Layout(tp=2, cp=2, micro_batch=2)),
}


LORA: dict[str, Any] = {"rank": 3, "alpha": 5.0, "targets": ["*.attention.w?", "*.mlp.*"]}


def job_of(kind: str, folder: Path, **changes: Any) -> JobConfig:
    tokens = np.random.default_rng(0).integers(0, 96, 6000).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    model = {**model_section(folder / "hf"), **changes}
    if "moe" in model:  # transformers adds no balancing loss by itself
        model["moe"]["loss_coefficient"] = 0.0
    data = {"source": "memmap", "path": str(folder / "tokens.bin")}
    return job_for(
        folder / "hf",
        folder / "runs",
        f"remesh-{kind}",
        model=model,
        steps=STEPS,
        data={**data, "sequence_length": LENGTH, "global_batch": BATCH},
        optimizer={
            "name": "sgd",
            "learning_rate": 0.2,
            "clip_norm": CLIP,
            "weight_decay": 0.0,
            "ema_decay": DECAY,
        },
        checkpoint={"interval_steps": 1000},
        evaluate={"interval_steps": 1000, "samples": 4},
        snapshot={"interval_steps": 1, "folder": str(folder)},
    )


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Adapted(torch.nn.Module):
    """A weight with LoRA's matrices, as torch's parametrizations have it."""

    def __init__(self, a: torch.Tensor, outputs: int) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(torch.zeros(outputs, len(a)))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + LORA["alpha"] / LORA["rank"] * self.b @ self.a


def adapt(model: Any, job: JobConfig) -> None:
    """Freeze a model of transformers, and give it the adapters that the run begins with."""
    model.requires_grad_(requires_grad=False)
    for module, layer in layers_in_peft(job).items():
        linear = model.get_submodule(layer)
        outputs, inputs = linear.weight.shape
        name, bound = f"{module}.{LORA_A}", 1 / inputs**0.5
        a = initial_value(name, (LORA["rank"], inputs), job.seed, init_std=0.0, init_bound=bound)
        register_parametrization(linear, "weight", Adapted(a, outputs))


def train(model: Any, job: JobConfig, folder: Path) -> Any:
    """Plain SGD on the run's samples, in one process; returns the model of the averaged weights."""
    samples = build_dataset(job.data, job.model.vocab_size, job.seed, folder).train
    averaged = deepcopy(model)
    parameters, averages = trained(model), trained(averaged)
    for step in range(1, STEPS + 1):
        batch = make_batch(Feed.uniform(samples, job.seed, BATCH), Layout(micro_batch=BATCH), 0, step)
        rows = torch.from_numpy(batch.tokens).flatten(0, 1)
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.linalg.vector_norm(torch.stack([part.norm() for part in gradients]))
        rate = learning_rate(job.optimizer, step, STEPS) * min(1.0, CLIP / float(norm))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
            for average, parameter in zip(averages, parameters, strict=True):
                average.lerp_(parameter, 1 - DECAY)
    return averaged


def claim(store: RunStore) -> int:
    """A term that the log has claimed and no other run in the pool has: names of groups hold it."""
    claimed = store.claim()
    for term in terms:
        while claimed < term:
            claimed = store.claim()
        if claimed == term:
            break
    return claimed


def commit_of(run: Run, store: RunStore) -> None:
    """Commit the last step's slots, as agents and coordinator do."""
    storage = open_storage(run.job.storage, run.job.name)
    for spec in run.specs:
        store.append_generation(spec)
    last = run.specs[-1].id
    paths = [path for path, header in list_slots(run.folder) if header.key == (last.term, last.n, STEPS)]
    part = upload_slots(paths, storage, last.term, last.n, STEPS, owner="node")
    done = store.commit(GenerationId(last.term, last.n), STEPS, [part.encode()])
    assert not done.error, done


def run_and_commit(pool: Pool, job: JobConfig, folder: Path, first: Layout, second: Layout) -> None:
    """Import, train in one layout until a kill and on in another, and commit the last step."""
    manifest = import_hf(job, folder / "hf")["manifest"]
    store = RunStore(job, lambda _: None)
    term = claim(store)
    (found,), _ = store.state(verify=False)
    assert found.manifest == manifest
    source = Source("commit", 0, found.generation, manifest=manifest, digest=found.digest)
    run = Run(pool, job, folder, source, term)
    assert not layout_problems(job, first)
    assert not layout_problems(job, second)
    run.strike(first, (first.world_size - 1, 3, "forward"))
    run.finish(second)
    assert [spec.layout for spec in run.specs] == [first, second]
    assert run.specs[1].source.kind == "slots", "from the first layout's state, not from the import"
    assert run.specs[1].resume_step >= 1
    commit_of(run, store)
    store.executor.shutdown()
    store.committer.shutdown()


def check_exports(job: JobConfig, folder: Path, wanted: dict[str, torch.Tensor], kind: type) -> None:
    """Logits of the exports, by the weights that are exported."""
    for weights, expected in wanted.items():
        out = folder / weights
        assert export_hf(job, out, None, "float32", 20_000, weights)["step"] == STEPS
        back = transformers.AutoModelForCausalLM.from_pretrained(
            out, attn_implementation="eager", dtype=torch.float32
        ).eval()
        assert type(back) is kind
        difference = float((logits_of(back) - expected).norm() / expected.norm())
        print(f"{job.name}, {weights}: {difference:.1e}")
        assert difference <= 1e-5


@pytest.mark.parametrize("kind", WAYS)
def test_in_through_two_layouts_and_out(pool: Pool, tmp_path: Path, kind: str) -> None:
    theirs = make(kind, tmp_path / "hf")
    job = job_of(kind, tmp_path)
    before = logits_of(theirs)
    averaged = train(theirs, job, tmp_path)
    expected = logits_of(theirs)
    assert (expected - before).norm() > 0.01 * before.norm(), "training moved the weights"
    run_and_commit(pool, job, tmp_path, *WAYS[kind])
    check_exports(job, tmp_path, {"trained": expected, "ema": logits_of(averaged)}, type(theirs))
    assert (logits_of(averaged) - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.deep
def test_averages_of_adapters_are_merged_and_in_peft_files(pool: Pool, tmp_path: Path) -> None:
    """Both are of the averages of A and of B, not of products."""
    from safetensors.torch import load_file

    theirs = make("llama3", tmp_path / "hf")
    job = job_of("llama3", tmp_path, lora=LORA)
    before, kind = logits_of(theirs), type(theirs)
    adapt(theirs, job)
    averaged = train(theirs, job, tmp_path)
    wanted = {"trained": logits_of(theirs), "ema": logits_of(averaged)}
    assert (wanted["trained"] - before).norm() > 0.01 * before.norm(), "training moved the weights"
    assert (wanted["ema"] - wanted["trained"]).norm() > 1e-3 * before.norm()
    run_and_commit(pool, job, tmp_path, *WAYS["llama3"])
    check_exports(job, tmp_path, wanted, kind)
    for weights, model in (("trained", theirs), ("ema", averaged)):
        out = tmp_path / f"adapter-{weights}"
        export_hf(job, out, None, "float32", 20_000, weights, adapter=True)
        found = load_file(out / "adapter_model.safetensors")
        layers = layers_in_peft(job).values()
        assert len(found) == 2 * len(layers)
        for layer in layers:
            expected = model.get_submodule(layer).parametrizations.weight[0]
            for half, matrix in (("A", expected.a), ("B", expected.b)):
                ours = found[f"base_model.model.{layer}.lora_{half}.weight"]
                torch.testing.assert_close(ours, matrix.detach(), rtol=1e-4, atol=1e-6)
