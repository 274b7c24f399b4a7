"""Text from a commit: the weights of a run as one module, and tokens one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.data.tokenizer import ByteTokenizer
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.inference.decoding import Sampling, choose, decode, logits_of
from picotron_ray.runtime.inference.generate import read_prompt
from picotron_ray.runtime.inference.stored_model import find_model, load_model
from picotron_ray.runtime.inference.text import ModelText
from picotron_ray.runtime.run_storage.hf_import import import_hf
from tests.support.gloo.hf_kit import TOKENS, job_for, make

pytestmark = pytest.mark.filterwarnings("default")
CPU = torch.device("cpu")
KINDS = ("smollm", "gpt2", "gemma2", "qwen3-moe", "deepseek-v3")


def run_of(
    kind: str, tmp_path: Path, changes: dict[str, Any] | None = None, **sections: Any
) -> tuple[Any, str]:
    """A checkpoint's model, and the address of a run that has imported it."""
    theirs = make(kind, tmp_path / "hf", changes)
    import_hf(job_for(tmp_path / "hf", tmp_path / "runs", kind, **sections), tmp_path / "hf")
    return theirs, str(tmp_path / "runs" / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs, run = run_of(kind, tmp_path)
    found = find_model(run)
    module = load_model(found, CPU)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert (logits_of(module, TOKENS) - expected).norm() <= 1e-5 * expected.norm()
    prompt = TOKENS[0, :7].tolist()
    (sample,) = decode(
        module, prompt, most=9, positions=found.positions, vocabulary=0, sampling=Sampling(0.0)
    )
    ids = list(prompt)
    for _ in range(9):
        with torch.no_grad():
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
    assert (sample.ids, sample.finish) == (ids[7:], "length")


def test_a_full_expert_drops_nothing(tmp_path: Path) -> None:
    """Capacity is made for training's rows; short ones would lose nearly all."""
    theirs = make("qwen3-moe", tmp_path / "hf")
    job = job_for(tmp_path / "hf", tmp_path / "runs", "moe")
    tight = job.model.moe.model_copy(update={"capacity_factor": 0.1})
    import_hf(job.model_copy(update={"model": job.model.model_copy(update={"moe": tight})}), tmp_path / "hf")
    found = find_model(str(tmp_path / "runs" / "moe"))
    assert found.job.model.moe.capacity_factor == 0.1
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert (logits_of(load_model(found, CPU), TOKENS) - expected).norm() <= 1e-5 * expected.norm()


class Table(nn.Module):
    """Logits of the next token by the last one alone, and a record of what was asked."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))
        self.asked: list[tuple[int, ...]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.asked.append(tuple(tokens[0].tolist()))
        return self.rows[tokens]


def test_samples_end_and_follow_their_seed() -> None:
    table = Table([[0.0, 3.0, 1.0, 2.0]] * 4)
    told = {"most": 40, "positions": 8, "vocabulary": 4}

    def drawn(seed: int, samples: int = 1, **more: Any) -> list[list[int]]:
        sampling = Sampling(seed=seed, **more)
        return [one.ids for one in decode(table, [0], sampling=sampling, samples=samples, **told)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    three = drawn(3, samples=3)
    assert three[0] == drawn(3)[0]
    assert three[0] != three[1] != three[2]
    assert {token for ids in drawn(1, samples=4, top_k=2) for token in ids} == {1, 3}
    chances = torch.tensor([0.0, 3.0, 1.0, 2.0], dtype=torch.float64).softmax(0)
    nucleus = float(chances[1]) + 1e-6  # the likeliest alone does not reach it
    assert {token for ids in drawn(1, samples=4, top_p=nucleus) for token in ids} == {1, 3}
    assert drawn(1, top_p=nucleus - 2e-6) == [[1] * 40]
    assert max(map(len, table.asked)) == 8  # older tokens are left out
    ended = decode(table, [0], sampling=Sampling(0.0), end_id=1, **told)[0]
    assert (ended.ids, ended.finish) == ([], "end")
    stopped = decode(table, [0], sampling=Sampling(0.0), stopped=lambda ids: len(ids) == 3, **told)[0]
    assert (stopped.ids, stopped.finish) == ([1, 1, 1], "stop")
    assert decode(table, [0], sampling=Sampling(0.0), **{**told, "vocabulary": 1, "most": 2})[0].ids == [0, 0]
    with pytest.raises(ConfigError, match="logits that are not finite"):
        decode(Table([[float("nan")]]), [0], sampling=Sampling(), **told)


def test_draws_have_the_probabilities_of_the_logits() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), torch.Generator().manual_seed(0)
    drawn = torch.tensor([choose(logits, Sampling(2.0), generator) for _ in range(4000)]).bincount() / 4000
    assert torch.allclose(drawn.double(), (logits / 2).softmax(0), atol=0.03)


def test_bytes_are_text() -> None:
    text = ModelText(ByteTokenizer())
    assert text.encode("aé") == [97, 195, 169]
    assert text.decode([97, 195, 169, 256, 98, 300, 255]) == "aé<|end of document|>b<|300|>�"


def told(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["generate", *words])
    return result.exit_code, result.output


def test_a_command_says_what_it_made(tmp_path: Path) -> None:
    data = {"sequence_length": 24, "global_batch": 2, "source": "stdlib"}
    _, run = run_of("llama", tmp_path, {"vocab_size": 300}, data=data)
    code, output = told(run, "--prompt", "ab", "--max-tokens", "5", "--seed", "2", "--n", "2", "--json")
    made = json.loads(output)
    assert (code, made["step"], made["prompt_tokens"], made["device"]) == (0, 0, 2, "cpu")
    assert [sample["tokens"] for sample in made["samples"]] == [5, 5]
    (tmp_path / "prompt").write_text("ab")
    again = told(run, "--prompt-file", str(tmp_path / "prompt"), "--max-tokens", "5", "--seed", "2")
    assert again == (0, f"ab{made['samples'][0]['text']}\n")
    code, output = told(run, "--prompt", "", "--max-tokens", "1", "--json")
    assert (code, json.loads(output)["prompt_tokens"]) == (0, 1)  # the end of the document before
    for words, line in (
        (["--prompt", "x" * 25], "--prompt: saw 25 tokens, expected at most 24, the positions that"),
        (
            ["--prompt", "x", "--step", "3"],
            "--step: expected the commit of step 3 of run 'llama', which has those",
        ),
        (["--prompt", "x", "--temperature", "-0.1"], "--temperature: saw -0.1, expected 0 or more"),
        (["--prompt", "x", "--top-p", "0"], "--top-p: saw 0.0, expected more than 0, at most 1"),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens: saw 0, expected 1 or more"),
        (["--prompt", "x", "--weights", "best"], "--weights: saw best, expected trained or ema"),
        (
            ["--prompt", "x", "--weights", "ema"],
            "--weights: saw ema, but the commit of step 0 holds no average",
        ),
        (["--prompt", "x", "--prompt-file", "y"], "--prompt: saw both of --prompt and --prompt-file"),
        (["--prompt-file", str(tmp_path / "none")], "cannot be read as UTF-8 text"),
    ):
        code, output = told(run, *words)
        assert (code, line in output, output.count("\n")) == (2, True, 1), output
    code, output = told(str(tmp_path / "nothing"), "--prompt", "x")
    assert (code, "expected the name of a run" in output) == (2, True)


def test_ids_of_another_tokenizer_have_no_text(tmp_path: Path) -> None:
    _, run = run_of("llama", tmp_path)
    code, output = told(run, "--prompt", "x")
    assert (code, "data.source: saw memmap" in output) == (2, True)


def test_a_prompt_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="saw neither of"):
        read_prompt(None, None)
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        read_prompt(None, str(tmp_path / "bytes"))
