"""Log-likelihoods of texts under a commit's model, by hand and through lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.runtime.inference import lm_eval_adapter
from picotron_ray.runtime.inference.decoding import Sampling
from picotron_ray.runtime.inference.scoring import CommitScorer, windows
from picotron_ray.runtime.inference.stored_model import find_model, load_model
from picotron_ray.runtime.inference.text import text_of
from picotron_ray.runtime.run_storage.hf_import import import_hf
from tests.support.gloo.hf_kit import job_for, make

pytestmark = pytest.mark.filterwarnings("default")
LENGTH = 24


def scorer_of(tmp_path: Path, kind: str) -> tuple[Any, CommitScorer, str]:
    """transformers' model, the scorer of a run that imported it, and the run's address."""
    theirs = make(kind, tmp_path / "hf", {"vocab_size": 300})
    data = {"sequence_length": LENGTH, "global_batch": 2, "source": "stdlib"}
    import_hf(job_for(tmp_path / "hf", tmp_path / "runs", kind, data=data), tmp_path / "hf")
    run = str(tmp_path / "runs" / kind)
    found = find_model(run)
    return theirs, CommitScorer(load_model(found, torch.device("cpu")), text_of(found.job), LENGTH), run


def by_hand(theirs: Any, before: list[int], after: list[int]) -> tuple[float, bool]:
    """One token at a time, by transformers."""
    total, greedy, ids = 0.0, True, list(before)
    for token in after:
        with torch.no_grad():
            chances = theirs(torch.tensor([ids[-LENGTH:]])).logits[0, -1].double().log_softmax(0)
        total, greedy = total + float(chances[token]), greedy and int(chances.argmax()) == token
        ids.append(token)
    return total, greedy


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_loglikelihoods_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Also of texts of many lengths at once, where rows are filled, and a mixture must not see what fills."""
    theirs, scorer, _ = scorer_of(tmp_path, kind)
    likely = scorer.go_on("abc", [], 3, Sampling(0.0))
    pairs = [
        ("abc", "de"),
        ("", "abcdef"),
        ("a", ""),
        ("what is it", " it is"),
        ("x" * 30, "yz"),
        ("abc", likely),
    ]
    expected = []
    for context, continuation in pairs:
        before = list(context.encode()) or [256]
        cut = before[-(LENGTH + 1 - len(continuation)) :]
        expected.append(by_hand(theirs, cut, list(continuation.encode())))
    found = scorer.loglikelihoods(pairs)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for (mine, _), (other, _) in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
    long = "the quick brown fox jumps over the lazy dog, twice"
    parts = [
        by_hand(theirs, before, after)[0] for before, after in windows(list(long.encode()), [256], LENGTH)
    ]
    assert scorer.rolling([long, ""]) == pytest.approx([sum(parts), 0.0], abs=1e-4)


def test_windows_score_each_token_once_with_a_whole_row_before_the_last() -> None:
    ids = list(range(10))
    assert list(windows(ids, [99], 4)) == [
        ([99], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert list(windows(ids[:3], [99], 4)) == [([99], [0, 1, 2])]
    assert list(windows([], [99], 4)) == []


def test_an_answer_ends_before_what_it_was_to_end_at(tmp_path: Path) -> None:
    _, scorer, _ = scorer_of(tmp_path, "llama")
    whole = lm_eval_adapter.answer(scorer, "abc", {"max_gen_toks": 12})
    assert lm_eval_adapter.answer(scorer, "abc", {"until": [], "max_gen_toks": 4}) == whole[:4]
    stop = whole[3]
    for until in (stop, [stop]):
        found = lm_eval_adapter.answer(scorer, "abc", {"until": until, "max_gen_toks": 12})
        assert found == whole[: whole.index(stop)]


def task(folder: Path) -> None:
    """A task of lm-eval whose documents lie here."""
    documents = [{"question": "abc", "choices": ["d", "e"], "answer": at % 2} for at in range(6)]
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "letters.yaml").write_text(
        "task: letters\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'docs.jsonl'}}}}}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    )


def test_lm_eval_sees_the_scorer(tmp_path: Path) -> None:
    """Its accuracy is that of the likelier choice; of six documents three have each answer."""
    pytest.importorskip("lm_eval", reason="of the lm-eval extra")
    _, scorer, run = scorer_of(tmp_path, "llama")
    model = lm_eval_adapter.adapted(scorer)
    asked = [SimpleNamespace(args=("abc", "d")), SimpleNamespace(args=("abc", "e"))]
    assert model.loglikelihood(asked) == scorer.loglikelihoods([("abc", "d"), ("abc", "e")])
    assert model.loglikelihood_rolling([SimpleNamespace(args=("abc",))]) == scorer.rolling(["abc"])
    folder = tmp_path / "tasks"
    folder.mkdir()
    task(folder)
    words = ["evaluate", run, "--tasks", "letters", "--include", str(folder), "--json"]
    result = CliRunner().invoke(app, [*words, "--limit", "1"])
    assert result.exit_code == 0, result.output
    likelier_d = scorer.loglikelihoods([("abc", "d")])[0][0] > scorer.loglikelihoods([("abc", "e")])[0][0]
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["step"], told["results"]["letters"]["acc"]) == (0, float(likelier_d))
    refused = CliRunner().invoke(app, ["evaluate", run, "--tasks", "no-such-task"])
    assert (refused.exit_code, "--tasks: saw no-such-task" in refused.output) == (2, True)


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, run = scorer_of(tmp_path, "llama")
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    result = CliRunner().invoke(app, ["evaluate", run, "--tasks", "arc_easy"])
    assert (result.exit_code, "install the extra lm-eval" in result.output) == (2, True)
