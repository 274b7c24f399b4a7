"""Bad checkpoints, configs and folders on the command line: clear lines, exit code 2, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.cli import app
from picotron_ray.config.export import public_dict
from picotron_ray.config.load import parse_job
from picotron_ray.data.tokenizer import open_tokenizer
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver.resolve_job import check_machine
from picotron_ray.runtime.driver.resolve_start import settled_start
from picotron_ray.runtime.run_storage.hf_export import export_hf
from picotron_ray.runtime.run_storage.hf_import import import_hf
from picotron_ray.runtime.run_storage.run_store import RunStore
from picotron_ray.runtime.run_storage.tokenizer_record import keep_tokenizer
from tests.support.data_kit import CHATML, write_tokenizer
from tests.support.gloo.hf_kit import change_config, job_for, make

safetensors = pytest.importorskip("safetensors.torch", reason="of the hf extra")
load_file, save_file = safetensors.load_file, safetensors.save_file
pytestmark = pytest.mark.filterwarnings("default")
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], Any]


def command(*words: str | Path) -> tuple[int, str]:
    """Exit code and stderr of a command, after a look at it for tracebacks."""
    done = CliRunner().invoke(app, ["checkpoints", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stderr


def written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def config_file(folder: Path, storage: Path, name: str, **sections: Any) -> Path:
    path = folder.parent / f"{name}.json"
    path.write_text(json.dumps(public_dict(job_for(folder, storage, name, **sections))))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "hf"
    make("llama", folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint in several files, to be broken."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in whole.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def said(**values: Any) -> Change:
    return lambda folder: change_config(folder, **values)


def index(text: str) -> Change:
    return lambda folder: (folder / INDEX).write_text(text)


def placed(name: Any) -> Change:
    return index(json.dumps({"weight_map": {"model.norm.weight": name}}))


def with_value(value: float) -> Change:
    """One value of one tensor is another."""

    def change(folder: Path) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
        tensors = load_file(file)
        tensors[name][3, 2] = value
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def vocabulary(ids: dict[str, int]) -> Change:
    return lambda folder: (folder / "vocab.json").write_text(json.dumps(ids))


CONFIGS: dict[str, tuple[Change, str]] = {
    "text": (said(hidden_size="abc"), "config.json: hidden_size: saw abc, expected a whole number"),
    "negative": (said(hidden_size=-3), "config.json: hidden_size: saw -3, expected a whole number"),
    "null": (said(num_attention_heads=None), "config.json: num_attention_heads: saw null, expected"),
    "odd": (said(head_dim=7), "config.json: model.head_dim: saw"),
    "one-row": (said(vocab_size=1), "config.json: model.vocab_size: saw 1, "),
    "heads": (said(num_key_value_heads=3), "config.json: model.kv_heads: saw 3, which does not divide"),
    "number": (said(architectures=5), "config.json: architectures: saw 5, expected a list"),
    "plain": (
        said(architectures="LlamaForCausalLM"),
        "config.json: architectures: saw LlamaForCausalLM, ",
    ),
    "rope-text": (said(rope_parameters="x"), "config.json: rope_parameters: saw x, expected an object"),
    "rope-list": (said(rope_parameters=[1]), "config.json: rope_parameters: saw [1], expected an object"),
    "half": (said(partial_rotary_factor=0.5), "config.json: partial_rotary_factor: saw 0.5, expected 1"),
    "bytes": (lambda folder: (folder / "config.json").write_bytes(b"\xff{"), "config.json: is not JSON"),
    "deep": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json: is not JSON"),
    "list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json: saw a list, expected"),
    "none": (lambda folder: (folder / "config.json").unlink(), "expected a folder with config.json"),
}
FILES: dict[str, tuple[Change, str]] = {
    "index-broken": (index("{"), f"{INDEX}: is not JSON"),
    "index-list": (index("[]"), f"{INDEX}: saw a list, expected an object"),
    "index-empty": (index("{}"), f"{INDEX}: weight_map: saw None, expected file names by tensor name"),
    "index-text": (index('{"weight_map": "x"}'), f"{INDEX}: weight_map: saw 'x', expected file names"),
    "place-number": (placed(5), "model.norm.weight: saw 5, expected the name of a file in this folder"),
    "place-outside": (placed("../a.safetensors"), "saw '../a.safetensors', expected the name of a file in"),
    "place-root": (placed("/etc/passwd"), "saw '/etc/passwd', expected the name of a file in this folder"),
    "place-gone": (placed("a.safetensors"), "a.safetensors is missing; expected safetensors files"),
    "nan": (with_value(float("nan")), "tensor model.layers.1.mlp.up_proj.weight: saw NaN or infinite"),
    "infinite": (with_value(float("-inf")), "tensor model.layers.1.mlp.up_proj.weight: saw NaN or infinite"),
    "vocabulary": (vocabulary({"a": 96}), "saw token id 96, expected ids below 96, config.json's vocab_size"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_makes_no_model_prints_no_section(copy: Path, kind: str) -> None:
    change, text = CONFIGS[kind]
    change(copy)
    code, lines = command("import-hf", copy)
    assert (code, lines.count("\n")) == (2, 1), lines
    assert text in lines


@pytest.mark.parametrize("kind", [*CONFIGS, *FILES])
def test_nothing_is_imported_from_a_broken_checkpoint(copy: Path, whole: Path, kind: str) -> None:
    runs = copy.parent / "runs"
    config = config_file(whole, runs, f"broken-{kind}").rename(copy.parent / "job.json")
    change, text = {**CONFIGS, **FILES}[kind]
    change(copy)
    code, lines = command("import-hf", copy, config)
    assert (code, lines.count("\n")) == (2, 1), lines
    assert text in lines
    assert not written(runs)


def test_two_files_with_one_tensor_are_refused(copy: Path, whole: Path) -> None:
    first, second = sorted(copy.glob("model-*.safetensors"))[:2]
    names = sorted(load_file(first))
    save_file({**load_file(second), **load_file(first)}, second, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{names[0]} is in {first.name} and in {second.name}"):
        import_hf(job_for(whole, copy.parent / "runs", "twice"), copy)


def test_frequencies_in_older_files_of_llama_are_ignored(copy: Path) -> None:
    file = min(copy.glob("model-*.safetensors"))
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
    save_file({**load_file(file), **old, "model.rotary_emb.inv_freq": torch.ones(4)}, file)
    job = job_for(copy, copy.parent / "runs", "old")
    assert import_hf(job, copy)["step"] == 0
    save_file({**load_file(file), "model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    with pytest.raises(ConfigError, match=r"layers\.2\.self_attn\.rotary_emb\.inv_freq is not of this model"):
        import_hf(job, copy)


# --- export ----------------------------------------------------------------------------------------------

OTHER_MODELS = {
    "llama": (
        ("rope_theta=500000",),
        ("heads=8", "kv_heads=4"),
        ("norm_eps=0.001",),
        ("sliding_window=7",),
        ("rope_scaling.factor=8",),
    ),
    "qwen3-moe": (("moe.top_k=1",), ("moe.normalize=false",), ("rope_theta=500000",)),
}
"""Keys that leave no trace in the shape of a tensor."""


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_another_model_than_the_run_was_trained_with_is_not_exported(tmp_path: Path, kind: str) -> None:
    folder, out = tmp_path / "hf", tmp_path / "out"
    make(kind, folder)
    config = config_file(folder, tmp_path / "runs", "mine")
    assert command("import-hf", folder, config)[0] == 0
    for changes in OTHER_MODELS[kind]:
        code, lines = command("export-hf", config, *(f"model.{change}" for change in changes), "--to", out)
        assert (code, lines.count("\n")) == (2, len(changes)), lines
        for change, line in zip(changes, lines.splitlines(), strict=True):
            assert line.startswith(f"error: model.{change.split('=')[0]}: saw "), line
            assert ", expected " in line
            assert line.endswith(", as run 'mine' was trained; give its config"), line
        assert not out.exists()
    code, line = command("export-hf", config, "--to", out, "--weights", "ema")
    assert (code, out.exists()) == (2, False)
    assert line.startswith("error: --weights: saw ema, but the commit of step 0 holds no average of ")
    assert command("export-hf", config, "--to", out)[0] == 0


def test_a_folder_that_cannot_be_written_is_one_line(copy: Path) -> None:
    config = config_file(copy, copy.parent / "runs", "there")
    assert command("import-hf", copy, config)[0] == 0
    file = copy.parent / "file"
    file.write_text("")
    for target, text in [
        (file, f"--to: saw the file {file}, expected a new or empty folder"),
        (file / "below", f"--to: {file / 'below'} cannot be "),
        (Path("/proc/nothing/here"), "--to: /proc/nothing/here cannot be made"),
        (copy.parent / ("long" * 100), "--to: "),
    ]:
        code, lines = command("export-hf", config, "--to", target)
        assert (code, lines.count("\n")) == (2, 1), lines
        assert lines.startswith(f"error: {text}"), lines
    assert file.read_text() == ""


# --- what is kept ----------------------------------------------------------------------------------------

KEPT = {
    "vocab.json": {"a": 0, "b": 95},
    "tokenizer_config.json": {"added_tokens_decoder": {"3": {"content": "x"}}},
    "generation_config.json": {"eos_token_id": [1, 2], "temperature": 0.5},
}


def with_tokenizer(folder: Path) -> None:
    for name, value in KEPT.items():
        (folder / name).write_text(json.dumps(value, indent=3))
    change_config(folder, max_position_embeddings=4096, bos_token_id=5, eos_token_id=[1, 2])


def test_an_export_has_what_was_imported(copy: Path) -> None:
    with_tokenizer(copy)
    job = job_for(copy, copy.parent / "runs", "kept")
    import_hf(job, copy)
    out = copy.parent / "out"
    export_hf(job, out, None, "float32", 1 << 30)
    for name in KEPT:
        assert (out / name).read_bytes() == (copy / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["max_position_embeddings"], config["bos_token_id"]) == (4096, 5)
    assert config["eos_token_id"] == [1, 2]


def test_a_run_from_an_import_keeps_it_and_takes_no_bytes(copy: Path) -> None:
    """``init_from``: the tokenizer goes with the weights; a byte source is refused before anything starts."""
    make("llama", copy, {"vocab_size": 300})
    with_tokenizer(copy)
    job = job_for(copy, copy.parent / "runs", "origin")
    import_hf(job, copy)
    text = copy.parent / "text.txt"
    text.write_text("some words " * 4000)
    plain = {**public_dict(job), "name": "next", "init_from": {"run": "origin"}}
    plain["snapshot"] = {"folder": str(copy.parent)}
    fed = {"source": "text", "path": str(text), "sequence_length": 24, "global_batch": 2}
    told = "data.source: saw text, whose ids are bytes, but the weights come from Hugging Face checkpoint"
    fresh = parse_job({**plain, "data": fed})
    with pytest.raises(ConfigError, match=f"^{told}.* up to 95; .*data.source=memmap$"):
        check_machine(fresh, own_ray=True)
    with pytest.raises(ConfigError, match=told):
        import_hf(parse_job({**public_dict(job), "name": "bytes", "data": fed}), copy)
    tokens = copy.parent / "tokens.bin"
    tokens.write_bytes(bytes(range(96)) * 200)
    held = {**fed, "source": "memmap", "path": str(tokens), "memmap_dtype": "uint8"}
    good = parse_job({**plain, "init_from": {"run": "origin", "step": 0}, "data": held})
    check_machine(good, own_ray=True)
    storage = open_storage(good.storage, good.name)
    assert not list(storage.list("")), "a check leaves nothing"
    store = RunStore(good, lambda _: None, settled_start(good, storage)[1])
    store.claim()
    store.state(verify=True)
    out = copy.parent / "out"
    export_hf(good, out, None, "float32", 1 << 30)
    assert (out / "vocab.json").read_bytes() == (copy / "vocab.json").read_bytes()


def test_an_import_that_was_cut_off_is_no_run_of_random_weights(copy: Path) -> None:
    make("llama", copy, {"vocab_size": 300})
    job = job_for(copy, copy.parent / "runs", "cut", data={"sequence_length": 24, "global_batch": 2})
    import_hf(job, copy)
    storage = open_storage(job.storage, job.name)
    log = RunLog(storage)
    log.refresh()
    storage.delete(f"log/{log.commits()[0].seq:08d}.json")
    with pytest.raises(ConfigError, match=r"^name: the import into run 'cut' .* was cut off"):
        check_machine(job, own_ray=True)


def test_a_checkpoint_without_a_tokenizer_is_said_to_be_one(copy: Path) -> None:
    make("llama", copy, {"vocab_size": 300})
    job = job_for(copy, copy.parent / "runs", "bare", data={"sequence_length": 24, "global_batch": 2})
    assert "had no tokenizer" in import_hf(job, copy)["note"]
    assert any("had no tokenizer" in line for line in check_machine(job, own_ray=True).notes)


def test_an_export_has_the_tokenizer_of_the_data(copy: Path) -> None:
    """In place of what was imported, with the id that ends its documents where nothing was."""
    with_tokenizer(copy)
    job = job_for(copy, copy.parent / "runs", "tokens")
    import_hf(job, copy)
    folder = write_tokenizer(copy.parent / "tok", template=CHATML)
    data = job.data.model_copy(update={"tokenizer": str(folder)})
    keep_tokenizer(open_storage(job.storage, job.name), job.model_copy(update={"data": data}))
    out = copy.parent / "out"
    done = export_hf(job, out, None, "float32", 1 << 30)
    assert done["tokenizer"] == open_tokenizer(data).digest
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert (out / "vocab.json").read_bytes() == (copy / "vocab.json").read_bytes()
