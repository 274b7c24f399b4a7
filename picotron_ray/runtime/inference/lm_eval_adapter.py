"""A commit's model for EleutherAI's evaluation harness (extra lm-eval), which is imported inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from picotron_ray.errors import ConfigError, install_extra
from picotron_ray.runtime.inference.decoding import Sampling
from picotron_ray.runtime.inference.generate import device_here
from picotron_ray.runtime.inference.scoring import CommitScorer
from picotron_ray.runtime.inference.stored_model import find_model, load_model
from picotron_ray.runtime.inference.text import text_of

MOST_TOKENS = 256
"""Of a generated answer, where a task says nothing."""


def library() -> Any:
    """Import lm-eval; raises ConfigError where it is absent."""
    try:
        import lm_eval
    except ImportError as error:
        raise ConfigError(f"lm-eval: it cannot be imported ({error}); {install_extra('lm-eval')}") from error
    return lm_eval


def adapted(scorer: CommitScorer) -> Any:
    """Wrap a scorer as a model of lm-eval."""
    library()
    from lm_eval.api.model import LM

    class CommitModel(LM):
        """Model of lm-eval that asks the scorer."""

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return scorer.loglikelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            return scorer.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            return [answer(scorer, *request.args) for request in requests]

    return CommitModel()


def answer(scorer: CommitScorer, context: str, asked: dict[str, Any]) -> str:
    """Answer a request of lm-eval to generate; ``asked``: its keyword arguments."""
    until = asked.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    samples = bool(asked.get("do_sample", False))
    temperature = float(asked.get("temperature", 1.0)) if samples else 0.0
    sampling = Sampling(temperature, int(asked.get("top_k", 0)), float(asked.get("top_p", 1.0)))
    return scorer.go_on(context, stops, int(asked.get("max_gen_toks", MOST_TOKENS)), sampling)


def evaluate(
    run: str,
    tasks: Sequence[str],
    step: int | None,
    weights: str,
    shots: int | None,
    limit: int | None,
    include: Path | None,
) -> dict[str, Any]:
    """Run tasks of lm-eval on a commit; nothing is loaded before they are known.

    Args:
        shots: examples before each question; None: as the task has it.
        limit: documents of each task; None: all.
        include: folder with tasks of the user's own.

    Raises:
        ConfigError: no such task, run or commit, or the library is absent.
    """
    found = find_model(run, step, weights)
    text = text_of(found.job)
    lm_eval = library()
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown or not tasks:
        seen = ", ".join(unknown) or "none"
        raise ConfigError(f"--tasks: saw {seen}, expected names of tasks of lm-eval (`lm-eval ls tasks`)")
    scorer = CommitScorer(load_model(found, device_here()), text, found.positions)
    told = lm_eval.simple_evaluate(
        model=adapted(scorer),
        tasks=list(tasks),
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
    )
    return {"run": found.job.name, "step": found.step, "results": dict(_plain(told["results"]))}


def _plain(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Figures of each task that are numbers; ``acc,none`` is called ``acc``."""
    for task, figures in results.items():
        yield (
            task,
            {
                name.removesuffix(",none"): float(value)
                for name, value in figures.items()
                if isinstance(value, int | float) and not isinstance(value, bool) and "," in name
            },
        )
