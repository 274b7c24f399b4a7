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

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.coordinator.messages import GenerationId, Source
from picotron_ray.data.batch import make_batch
from picotron_ray.data.dataset import build_dataset
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.run_storage.hf_export import export_hf
from picotron_ray.runtime.run_storage.hf_import import import_hf, model_section
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


def job_of(kind: str, folder: Path) -> JobConfig:
    tokens = np.random.default_rng(0).integers(0, 96, 6000).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    model = model_section(folder / "hf")
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


def train(model: Any, job: JobConfig, folder: Path) -> Any:
    """Plain SGD on the run's samples, in one process; returns the model of the averaged weights."""
    samples = build_dataset(job.data, job.model.vocab_size, job.seed, folder).train
    parameters, averaged = list(model.parameters()), deepcopy(model)
    for step in range(1, STEPS + 1):
        batch = make_batch(samples, job.seed, Layout(micro_batch=BATCH), 0, BATCH, step)
        rows = torch.from_numpy(batch.tokens).flatten(0, 1)
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.linalg.vector_norm(torch.stack([part.norm() for part in gradients]))
        rate = learning_rate(job.optimizer, step, STEPS) * min(1.0, CLIP / float(norm))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
            for average, parameter in zip(averaged.parameters(), parameters, strict=True):
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


@pytest.mark.parametrize("kind", WAYS)
def test_in_through_two_layouts_and_out(pool: Pool, tmp_path: Path, kind: str) -> None:
    theirs = make(kind, tmp_path / "hf")
    job = job_of(kind, tmp_path)
    manifest = import_hf(job, tmp_path / "hf")["manifest"]
    before = logits_of(theirs)
    averaged = train(theirs, job, tmp_path)
    expected = logits_of(theirs)
    assert (expected - before).norm() > 0.01 * before.norm(), "training moved the weights"

    store = RunStore(job, lambda _: None)
    term = claim(store)
    (found,), _ = store.state(verify=False)
    assert found.manifest == manifest
    source = Source("commit", 0, found.generation, manifest=manifest, digest=found.digest)
    run = Run(pool, job, tmp_path, source, term)
    first, second = WAYS[kind]
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

    for weights, wanted in (("trained", expected), ("ema", logits_of(averaged))):
        out = tmp_path / weights
        assert export_hf(job, out, None, "float32", 20_000, weights)["step"] == STEPS
        back = transformers.AutoModelForCausalLM.from_pretrained(
            out, attn_implementation="eager", dtype=torch.float32
        ).eval()
        assert type(back) is type(theirs)
        difference = float((logits_of(back) - wanted).norm() / wanted.norm())
        print(f"{kind}, {weights}: {difference:.1e}")
        assert difference <= 1e-5
    assert (logits_of(averaged) - expected).norm() > 1e-3 * expected.norm()
