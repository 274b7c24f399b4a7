"""Hugging Face checkpoints against transformers itself: same logits, there and back, at another layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from picotron_ray.checkpoint.adopt import find
from picotron_ray.checkpoint.commit_source import CommitSource
from picotron_ray.checkpoint.dcp import restore
from picotron_ray.checkpoint.storage import open_storage
from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.load import parse_job
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.huggingface import export_hf, import_hf, model_section
from picotron_ray.train.engine import build_engine
from tests.gloo.pool import Job, Pool

transformers = pytest.importorskip("transformers", reason="of the hf extra")
pytestmark = pytest.mark.filterwarnings("default")

SHARED = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MOE = {"num_experts_per_tok": 2, "router_jitter_noise": 0.0}
GPT2_SHARES = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "layer_norm_epsilon": 1e-4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3}),
    "smollm": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 4, "sliding_window": None}),
    "gpt2": ("GPT2", {**GPT2, "n_inner": 48}),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}
LENGTH = 24
TOKENS = (torch.arange(2 * LENGTH) * 37 % 96).view(2, LENGTH)


def make(kind: str, folder: Path, **options: Any) -> Any:
    """A model of random weights and its checkpoint in small files."""
    family, more = KINDS[kind]
    shared = {key: SHARED[key] for key in GPT2_SHARES} if family == "GPT2" else SHARED
    config = getattr(transformers, f"{family}Config")(**{**shared, **more})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.1 if norm else 0.2)
    model.tie_weights()
    model.save_pretrained(folder, **{"max_shard_size": "20KB", **options})
    return model


def job_for(folder: Path, storage: Path, name: str, **sections: Any) -> JobConfig:
    return parse_job(
        {
            "name": name,
            "precision": "fp32",
            "storage": {"url": str(storage)},
            "data": {"sequence_length": LENGTH, "global_batch": 2, "source": "memmap", "path": "/unused"},
            "model": model_section(folder),
            **sections,
        }
    )


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
            named = {"weights": torch.ones(2)} if engine._definition.mixtures else {}
            found = [engine._output(TOKENS, named)]
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


def test_a_mixture_goes_into_another_layout_and_out_of_it(pool: Pool, tmp_path: Path) -> None:
    make("qwen3-moe", tmp_path / "hf")
    job = job_for(tmp_path / "hf", tmp_path / "runs", "cut")
    import_hf(job, tmp_path / "hf")
    layout = Layout(dp=2, tp=2, ep=2, zero=2)
    ranks = pool.run(4, parts_of, job, layout)
    whole = {item.shard.name: item for item in states(job)}
    for parts in ranks:
        for name, offset, size, values in parts:
            place = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
            assert (whole[name].tensor.numpy()[place] == values).all(), name


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


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


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
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "vocab_size"}))
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size is missing"):
        model_section(folder)
    for values, text in [
        ({"vocab_size": 96, "architectures": ["GPTNeoForCausalLM"]}, "architectures: saw GPTNeoForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"}, "hidden_act: saw 'gelu'"),
        ({"hidden_act": "silu", "rope_parameters": {"rope_type": "yarn"}}, "rope_type: saw 'yarn'"),
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
