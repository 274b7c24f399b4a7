"""Schedulers of a study, as Ray Tune's: early ends, and populations whose members take over from each other.

Under PBT (Jaderberg et al. 2017) and PB2 (Parker-Holder et al. 2020) all trials are one population. After
every ``interval`` steps a member of the worst quarter goes on from a commit of one of the best quarter
(exploit), with other values (explore). Where not all members fit the cluster at once they take turns, and
exchange when all have come as far; else each exchanges as it gets there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.schedulers.pb2 import PB2

from tuning.parts import ROUND
from tuning.points import Explored
from tuning.searchers import domain
from tuning.spaces import Choice, Range, Space
from tuning.study_options import StudyOptions


def scheduler(options: StudyOptions, space: Space, concurrent: int) -> TrialScheduler:
    """Ray Tune's scheduler: what may end a trial before its last step, or move it to another's state."""
    if kind := options.population_based:
        shared: dict[str, Any] = {
            "time_attr": ROUND,
            "perturbation_interval": 1,
            "synch": concurrent < options.members,
        }
        explored = Explored(space)
        if kind == "pb2":
            return LogarithmicPB2(space, custom_explore_fn=explored, log_config=False, **shared)
        mutations = {
            key: list(axis.values) if isinstance(axis, Choice) else domain(axis)
            for key, axis in space.items()
        }
        return Turns(hyperparam_mutations=mutations, custom_explore_fn=explored, log_config=False, **shared)
    if options.scheduler == "none":
        return FIFOScheduler()
    steps = options.steps
    return ASHAScheduler(
        time_attr="step", max_t=steps + 1, grace_period=max(1, steps // 4), reduction_factor=3
    )


class Turns(PopulationBasedTraining):
    """Population whose members take turns: none waits for an exchange that no other will come to.

    Tune forgets the rounds when a study is resumed, and members that are at their end exchange no more.
    """

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        chosen = super().choose_trial_to_run(tune_controller)
        live = tune_controller.get_live_trials()
        if chosen is None and live and all(trial.status == Trial.PAUSED for trial in live):
            self._next_perturbation_sync = 1 + max(self._trial_state[at].last_train_time for at in live)
            chosen = super().choose_trial_to_run(tune_controller)
        return chosen


class LogarithmicPB2(Turns, PB2):
    """PB2 whose model sees logarithmic axes as their logarithm; choices are taken over unchanged."""

    def __init__(self, space: Space, custom_explore_fn: Explored, **options: Any) -> None:
        ranges = {key: axis for key, axis in space.items() if isinstance(axis, Range)}
        self._log = {key for key, axis in ranges.items() if axis.log}
        bounds: dict[str, Any] = {
            key: [math.log(axis.low), math.log(axis.high)] if axis.log else [axis.low, axis.high]
            for key, axis in ranges.items()
        }
        super().__init__(
            hyperparam_bounds=bounds,
            custom_explore_fn=lambda config: custom_explore_fn(self._with(math.exp, config)),
            **options,
        )

    def _save_trial_state(self, state: Any, time: int, result: dict[str, Any], trial: Trial) -> Any:
        score = super()._save_trial_state(state, time, result, trial)
        for key in self._log:
            self.data.loc[self.data.index[-1], key] = math.log(trial.config[key])
        return score

    def _get_new_config(self, trial: Trial, trial_to_clone: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        config = trial_to_clone.config
        trial_to_clone.config = self._with(math.log, config)
        try:
            with warnings.catch_warnings():  # a kernel that few points do not fix is used as it is
                warnings.simplefilter("ignore")
                return super()._get_new_config(trial, trial_to_clone)
        finally:
            trial_to_clone.config = config

    def _with(self, function: Callable[[float], float], config: dict[str, Any]) -> dict[str, Any]:
        return {key: function(value) if key in self._log else value for key, value in config.items()}
