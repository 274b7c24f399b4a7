"""Hugging Face checkpoints against transformers itself: same logits, there and back, at another layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

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
from picotron_ray.runtime.run_storage.hf_export import export_hf
from picotron_ray.runtime.run_storage.hf_import import import_hf, model_section
from picotron_ray.train.engine import build_engine
from tests.support.gloo.hf_kit import KINDS, TOKENS, change_config, job_for, make
from tests.support.gloo.pool import Job, Pool

transformers = pytest.importorskip("transformers", reason="of the hf extra")
pytestmark = pytest.mark.filterwarnings("default")


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def parts_of(job: Job | None, config: JobConfig, layout: Layout) -> list[tuple[Any, ...]]:
    """Restore the run's commit into a layout; the logits of one process, or every rank's boxes."""
    groups = None if job is None else job.groups()
    if groups is not None:
        groups.connect()
    engine = build_engine(config, layout, 0 if job is None else job.rank, groups, torch.device("cpu"))
    engine.initialise(config.seed)
    storage = open_storage(config.storage, config.name)
    restore(engine.weights(), CommitSource(storage, find(storage, None).manifest))
    if job is None:
        with torch.no_grad():
            named = {"weights": torch.ones(2)} if mixture_modules(config.model) else {}
            (model,) = engine._models.values()
            found = [model(TOKENS, **named)]
    else:
        found = [
            (item.shard.name, item.shard.box.offset, item.shard.box.size, item.tensor.numpy().copy())
            for item in engine.weights()
        ]
    engine.close()
    if groups is not None:
        groups.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_there_and_back(kind: str, tmp_path: Path) -> None:
    theirs = make(kind, tmp_path / "hf")
    job = job_for(tmp_path / "hf", tmp_path / "runs", kind)
    assert import_hf(job, tmp_path / "hf")["step"] == 0
    expected = logits_of(theirs)
    (found,) = parts_of(None, job, Layout(micro_batch=2))
    assert (found - expected).norm() <= 1e-5 * expected.norm()

    export_hf(job, tmp_path / "back", None, "float32", 20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", dtype=torch.float32
    ).eval()
    assert type(again) is type(theirs)
    assert torch.equal(logits_of(again), expected)
    tensors = again.state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3-moe", Layout(dp=2, tp=2, ep=2, zero=2)),
        ("smollm", Layout(pp=2)),  # tied: both stages hold the embedding
        ("gpt2", Layout(tp=2, pp=2)),
        ("olmo2", Layout(tp=2, pp=2)),
        ("gemma3", Layout(tp=2, pp=2)),
        ("deepseek-v3", Layout(tp=2, pp=2)),
        ("gpt-oss", Layout(dp=2, tp=2, ep=2, zero=2)),
    ],
    ids=str,
)
def test_a_checkpoint_goes_into_another_layout(pool: Pool, tmp_path: Path, kind: str, layout: Layout) -> None:
    make(kind, tmp_path / "hf")
    job = job_for(tmp_path / "hf", tmp_path / "runs", "cut")
    import_hf(job, tmp_path / "hf")
    ranks = pool.run(layout.world_size, parts_of, job, layout)
    whole = {item.shard.name: item for item in states(job)}
    for parts in ranks:
        for name, offset, size, values in parts:
            place = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
            assert (whole[name].tensor.numpy()[place] == values).all(), name
    holders = [rank for rank, parts in enumerate(ranks) if any(part[0] == "embed.weight" for part in parts)]
    held = layout.world_size if job.model.tie_embeddings or layout.pp == 1 else layout.world_size // layout.pp
    assert holders == list(range(held)), "the first stage, and of a tied embedding the last"


def test_experts_in_mxfp4_become_what_transformers_makes_of_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    widths = {"hidden_size": 64, "intermediate_size": 32}  # of 32 values that share a scale
    theirs = make("gpt-oss", tmp_path / "hf", widths, max_shard_size="1GB")
    file, packed, plain = tmp_path / "hf" / "model.safetensors", {}, {}
    random = torch.Generator().manual_seed(0)
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj") or ".experts." not in name:
            packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=random).byte()
        scales = torch.randint(122, 126, blocks.shape[:-1], generator=random).byte()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(packed, file, metadata={"format": "pt"})
    change_config(tmp_path / "hf", quantization_config={"quant_method": "mxfp4"})
    missing, unexpected = theirs.load_state_dict(plain, strict=False)
    assert not unexpected
    assert len(missing) == len(theirs.state_dict()) - len(plain)
    job = job_for(tmp_path / "hf", tmp_path / "runs", "packed")
    import_hf(job, tmp_path / "hf")
    expected = logits_of(theirs)
    (found,) = parts_of(None, job, Layout(micro_batch=2))
    assert (found - expected).norm() <= 1e-5 * expected.norm()

    export_hf(job, tmp_path / "back", None, "bfloat16", 10**9)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(written[name].float(), value) for name, value in plain.items())
    name = f"{next(iter(plain))}_scales"
    save_file({**packed, name: packed[name].int()}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="saw type I32, expected one of"):
        import_hf(job_for(tmp_path / "hf", tmp_path / "other", "packed"), tmp_path / "hf")


def test_gpt2_of_older_files_has_bare_names_and_masks(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = make("gpt2", tmp_path / "hf", max_shard_size="1GB")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    assert "h.0.attn.c_attn.weight" in tensors
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 40, 40).tril() for layer in range(2)}
    save_file({**tensors, **masks}, file, metadata={"format": "pt"})
    job = job_for(tmp_path / "hf", tmp_path / "runs", "bare")
    import_hf(job, tmp_path / "hf")
    expected = logits_of(theirs)
    (found,) = parts_of(None, job, Layout(micro_batch=2))
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    for values, text in [
        ({"activation_function": "relu"}, "activation_function: saw 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu_new"}, "scale_attn_by_inv"),
    ]:
        change_config(tmp_path / "hf", **values)
        with pytest.raises(ConfigError, match=text):
            model_section(tmp_path / "hf")


def states(config: JobConfig) -> list[Any]:
    engine = build_engine(config, Layout(), 0, None, torch.device("cpu"))
    engine.initialise(config.seed)
    storage = open_storage(config.storage, config.name)
    restore(engine.weights(), CommitSource(storage, find(storage, None).manifest))
    return engine.weights()


def test_what_is_not_this_model_is_refused_in_one_line_each(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, runs = tmp_path / "hf", tmp_path / "runs"
    make("llama", folder, max_shard_size="1GB")
    job = job_for(folder, runs, "bad")
    other = job.model_copy(update={"model": job.model.model_copy(update={"layers": 3})})
    cases: list[tuple[JobConfig, str]] = [(other, "model.layers: saw 3, expected 2")]
    file = folder / "model.safetensors"
    whole = load_file(file)

    def with_tensors(change: Any) -> None:
        tensors = {**whole}
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    for changed, text in cases:
        with pytest.raises(ConfigError, match=text):
            import_hf(changed, folder)
    norm = "model.norm.weight"
    for change, text in [
        (lambda t: t.pop(norm), f"tensor {norm} is missing"),
        (lambda t: t.update({norm: torch.ones(31)}), r"saw shape \[31\], expected \[32\]"),
        (lambda t: t.update({norm: torch.ones(32, dtype=torch.int32)}), "saw type I32, expected one of"),
        (lambda t: t.update({"model.extra": torch.ones(1)}), "tensor model.extra is not of this model"),
    ]:
        with_tensors(change)
        with pytest.raises(ConfigError, match=text):
            import_hf(job, folder)
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        import_hf(job, folder)
    for values, text in [
        ({"architectures": ["GPTNeoForCausalLM"]}, "architectures: saw GPTNeoForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"}, "hidden_act: saw 'gelu'"),
        ({"hidden_act": "silu", "rope_parameters": {"rope_type": "longrope"}}, "rope_type: saw longrope"),
    ]:
        change_config(folder, **values)
        with pytest.raises(ConfigError, match=text):
            model_section(folder)
    assert not runs.exists() or not any(path.is_file() for path in runs.rglob("*")), "nothing was written"


def test_an_export_needs_an_empty_folder_and_a_commit(tmp_path: Path) -> None:
    make("llama", tmp_path / "hf")
    job = job_for(tmp_path / "hf", tmp_path / "runs", "export")
    with pytest.raises(ConfigError, match="expected a commit"):
        export_hf(job, tmp_path / "out", None, "float32", 1 << 30)
    import_hf(job, tmp_path / "hf")
    with pytest.raises(ConfigError, match="exists in"):
        import_hf(job, tmp_path / "hf")
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        export_hf(job, tmp_path / "hf", None, "float32", 1 << 30)
    done = export_hf(job, tmp_path / "half", None, "bfloat16", 1 << 30)
    assert done["files"] == 1
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16


@pytest.mark.deep
def test_the_command_line_takes_a_checkpoint_in_and_out(tmp_path: Path) -> None:
    make("llama", tmp_path / "hf")

    def command(*words: str, expect: int = 0) -> str:
        line = [sys.executable, "-m", "picotron_ray.cli", "checkpoints", *words]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout if expect == 0 else done.stderr

    section = command("import-hf", "hf")
    more = "name: mine\nprecision: fp32\ndata: {source: memmap, path: none, sequence_length: 24}\n"
    (tmp_path / "job.yaml").write_text(section + more)
    refused = command("import-hf", "hf", "job.yaml", "model.layers=3", expect=2)
    assert refused.startswith("error: model.layers: saw 3, expected 2")
    assert not (tmp_path / "runs").exists()
    assert "step 0 is committed" in command("import-hf", "hf", "job.yaml")
    assert "step 0 is in out" in command("export-hf", "job.yaml", "--to", "out")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__.startswith(
        "Llama"
    )
