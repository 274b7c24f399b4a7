"""LoRA's matrices in PEFT's files, and merged into an export: by the formula, and by PEFT itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.import_commit import find
from picotron_ray.checkpoint.torch_state import restore
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.decoder.tensor_plan import mixture_modules
from picotron_ray.models.families.registry import finetuned_table, is_adapter
from picotron_ray.runtime.inference.decoding import logits_of
from picotron_ray.runtime.inference.stored_model import find_model, load_model
from picotron_ray.runtime.run_storage import hf_import
from picotron_ray.runtime.run_storage.commit_weights import AVERAGED
from picotron_ray.runtime.run_storage.hf_export import export_hf
from picotron_ray.runtime.run_storage.hf_import import import_hf, model_section
from picotron_ray.train.engine import build_engine
from tests.support.gloo.hf_kit import TOKENS, job_for, make, transformers

pytestmark = pytest.mark.filterwarnings("default")
RANK, ALPHA = 3, 5.0
TARGETS = {
    "llama": ["*.attention.w?", "*.mlp.*"],
    "qwen3-moe": ["*.wq", "*.wo"],
    "gpt2": ["*.wo", "*.up", "*.down"],
    "smollm": ["layers.1.*.wv", "*.down"],
}
FUSED = ["*.wq", "*.up"]  # GPT-2's q, k and v are one layer of transformers'


def imported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str], trained: bool = True
) -> tuple[Any, JobConfig]:
    """A checkpoint's model, and a run of it whose adapters and averages are random numbers, as if trained."""
    theirs = make(kind, tmp_path / "hf")
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets}
    job = job_for(
        tmp_path / "hf", tmp_path / "runs", kind, model={**model_section(tmp_path / "hf"), "lora": lora}
    )
    read, numbers = hf_import._read, np.random.default_rng(4)

    def with_adapters(job: JobConfig, *given: Any) -> Iterator[tuple[str, Any]]:
        yield from read(job, *given)
        for spec in finetuned_table(job.model) if trained else ():
            if is_adapter(spec.name):
                for name in (spec.name, AVERAGED + spec.name):
                    yield name, numbers.normal(0, 0.2, spec.shape).astype(np.float32)

    monkeypatch.setattr(hf_import, "_read", with_adapters)
    import_hf(job, tmp_path / "hf")
    return theirs, job


def our_logits(job: JobConfig) -> torch.Tensor:
    engine = build_engine(job, Layout(micro_batch=2), 0, None, torch.device("cpu"))
    engine.initialise(job.seed)
    storage = open_storage(job.storage, job.name)
    manifest = find(storage, None).manifest
    restore(engine.imported(manifest.tensors()), CommitSource(storage, manifest))
    named = {"weights": torch.ones(2)} if mixture_modules(job.model) else {}
    (model,) = engine._models.values()
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS, **named)
    return found


def read_logits(job: JobConfig, tmp_path: Path, weights: str = "trained") -> torch.Tensor:
    """Logits of the module that `picotron-ray generate` makes of the commit."""
    found = find_model(str(tmp_path / "runs" / job.name), None, weights)
    return logits_of(load_model(found, torch.device("cpu")), TOKENS).detach()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.mark.parametrize(("kind", "weights"), [*((kind, "trained") for kind in TARGETS), ("gpt2", "ema")])
def test_merged_and_adapter_say_the_same(
    kind: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged weights are those of the checkpoint with the adapter's files applied by hand."""
    from safetensors.torch import load_file

    theirs, job = imported(kind, tmp_path, monkeypatch, TARGETS[kind])
    export_hf(job, tmp_path / "merged", None, "float32", 1 << 30, weights)
    made = export_hf(job, tmp_path / "adapter", None, "float32", 1 << 30, weights, adapter=True)
    assert made["files"] == 1
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, 5)
    assert config["base_model_name_or_path"] == str(tmp_path / "hf")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(config["target_modules"])
    expected = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    for layer in config["target_modules"]:
        a, b = (tensors[f"base_model.model.{layer}.lora_{half}.weight"] for half in "AB")
        update = ALPHA / RANK * b @ a
        expected[f"{layer}.weight"] += update.T if config["fan_in_fan_out"] else update
    found = loaded(tmp_path / "merged")
    changed = 0
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
        changed += not torch.equal(tensor, theirs.state_dict()[name])
    assert changed == len(config["target_modules"])
    ours = our_logits(job)
    assert ((logits(found) - ours).norm() <= 1e-5 * ours.norm()) == (weights == "trained")
    alone = read_logits(job, tmp_path, weights)
    assert (logits(found) - alone).norm() <= 1e-5 * ours.norm()
    assert (logits(theirs) - ours).norm() > 0.01 * ours.norm()


@pytest.mark.parametrize("kind", TARGETS)
def test_peft_loads_the_adapter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", reason="compares with PEFT where it is installed")
    theirs, job = imported(kind, tmp_path, monkeypatch, TARGETS[kind])
    export_hf(job, tmp_path / "merged", None, "float32", 1 << 30)
    export_hf(job, tmp_path / "adapter", None, "float32", 1 << 30, adapter=True)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    ours = our_logits(job)
    assert (logits(adapted) - ours).norm() <= 1e-5 * ours.norm()
    merged, exported = adapted.merge_and_unload().state_dict(), loaded(tmp_path / "merged").state_dict()
    assert merged.keys() == exported.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, exported[name], rtol=1e-6, atol=1e-6)


def test_an_import_has_no_adapters_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged it is the checkpoint itself, and a run from it begins with adapters that add nothing."""
    theirs, job = imported("llama", tmp_path, monkeypatch, ["*.wq"], trained=False)
    export_hf(job, tmp_path / "merged", None, "float32", 1 << 30)
    found = loaded(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in theirs.state_dict().items())
    expected = logits(theirs)
    assert (our_logits(job) - expected).norm() <= 1e-5 * expected.norm()
    assert (read_logits(job, tmp_path) - expected).norm() <= 1e-5 * expected.norm()
    with pytest.raises(ConfigError, match="has no adapters yet; take a later one"):
        export_hf(job, tmp_path / "adapter", None, "float32", 1 << 30, adapter=True)
    assert not (tmp_path / "adapter").exists()


def test_what_peft_cannot_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, job = imported("gpt2", tmp_path, monkeypatch, FUSED)
    with pytest.raises(ConfigError, match=r"in one layer with others, transformer.h.0.attn.c_attn; export"):
        export_hf(job, tmp_path / "adapter", None, "float32", 1 << 30, adapter=True)
    export_hf(job, tmp_path / "merged", None, "float32", 1 << 30)
    ours = our_logits(job)
    assert (logits(loaded(tmp_path / "merged")) - ours).norm() <= 1e-5 * ours.norm()
    plain = job.model_copy(update={"model": job.model.model_copy(update={"lora": type(job.model.lora)()})})
    with pytest.raises(ConfigError, match=r"--adapter: saw model.lora.rank=0, a run without adapters"):
        export_hf(plain, tmp_path / "adapter", None, "float32", 1 << 30, adapter=True)
    with pytest.raises(ConfigError, match=r"model.lora.rank: saw 0, expected 3, as run 'gpt2' was trained"):
        export_hf(plain, tmp_path / "other", None, "float32", 1 << 30)
