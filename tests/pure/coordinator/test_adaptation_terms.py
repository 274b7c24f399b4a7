"""Adaptation across terms: verdicts, settings and permissions, when a coordinator dies or a run resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.suggestions import problem_of
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.planner.calibration import Calibration
from picotron_ray.runtime.coordinator.adaptation_record import AdaptationRecord
from picotron_ray.runtime.coordinator.records import Facts
from picotron_ray.runtime.run_storage.generation_entries import generation_body, spec_of
from tests.support.runs.adaptive_world import AdaptiveWorld, adaptive_job, decisions, plain_figures
from tests.support.runs.coordinator_world import of, outcomes, snapshot

LARGE = (("comm.bucket_mib", "25.0"),)


def helps(spec: m.GenerationSpec, step: int) -> m.RunFigures:
    """A step of which half is lost to sums in tiny buckets, until they are large."""
    large = dict(spec.settings).get("comm.bucket_mib") == "25.0"
    return plain_figures(0.5 if large else 1.0, forward=0.2, backward=0.25, reduce=0.01 if large else 0.5)


def hurts(spec: m.GenerationSpec, step: int) -> m.RunFigures:
    return plain_figures(2.0 if spec.settings else 1.0, forward=0.2, backward=0.25, reduce=0.5)


def bucket_job(**changes: Any) -> Any:
    return adaptive_job("bucket", comm__bucket_mib=0.001, layout__dp=4, layout__zero=0, **changes)


def past(there: AdaptiveWorld) -> dict[str, Any]:
    """What the record of a run tells the next term, after a trip through storage."""
    facts = Facts()
    for alert in of(there.log, m.Alert):
        facts.alerted(alert)
    return AdaptationRecord.read(json.loads(json.dumps(facts.adaptation.plain()))).past(0.0)


def logged(spec: m.GenerationSpec) -> m.GenerationSpec:
    """A spec as the run's log has it."""
    return spec_of(json.loads(json.dumps(generation_body(spec))))


def resumed(there: AdaptiveWorld, config: Any = None, **told: Any) -> AdaptiveWorld:
    """The next launch, which begins from a commit of the newest generation."""
    spec = logged(there.spec)
    later = AdaptiveWorld(config or there.config, there.figures)
    commit = m.Commit(there.step, spec.id, "manifests/x", 5)
    words = {**past(there), **told}
    out = later.send(m.Begin(2, generations=(spec,), commits=(commit,), **words), m.NodeJoined("a", 4))
    out += later.ready(out)
    later.answer(out)
    later.wait(5.0)
    assert later.state is MachineState.RUNNING
    later.trains(later.spec.resume_step + 1)
    return later


def restarted(there: AdaptiveWorld) -> AdaptiveWorld:
    """The next term of a coordinator that died, with its generation still at work."""
    later = AdaptiveWorld(there.config, there.figures)
    later.now = there.now
    spec = there.spec
    later.send(m.Begin(2, running=spec, workers=spec.members, **past(there)), m.NodeJoined("a", 4))
    return later


def lose_one(there: AdaptiveWorld) -> list[m.Command]:
    """A worker dies, and another generation begins."""
    spec = there.spec
    dead = spec.members[-1].worker
    out = there.send(m.WorkerExited(dead, "killed"))
    out += there.send(*outcomes(spec, FailureKind.PEER_LOST, there.step, but=(dead,)))
    out += there.answer(out, snapshot(spec, there.step))
    more = there.ready(out) + there.wait(3.0)  # a replacement, after which states are looked for again
    more += there.ready(more)
    out += more + there.answer(more, snapshot(spec, there.step))
    assert there.spec.id != spec.id
    return out


def kept_world() -> AdaptiveWorld:
    there = AdaptiveWorld(bucket_job(), helps)
    there.start()
    assert ("kept", "bucket") in decisions([c for _ in range(4) for c in there.report()])
    assert there.spec.adapted[-1].verdict == "trial"  # as its workers know it
    return there


def test_what_was_kept_stays_kept_after_a_restart_and_a_failure() -> None:
    later = restarted(kept_world())
    later.trains(400)
    out = lose_one(later)
    assert decisions(out) == []
    assert later.spec.settings == LARGE
    assert later.spec.adapted[-1].verdict == "kept"


def test_what_was_kept_stays_kept_in_the_next_launch() -> None:
    later = resumed(kept_world())
    assert later.spec.settings == LARGE
    assert [one.verdict for one in later.spec.adapted] == ["kept"]
    assert decisions([c for _ in range(5) for c in later.report()]) == []


def test_a_trial_without_a_verdict_is_void_in_the_next_launch() -> None:
    there = AdaptiveWorld(bucket_job(), helps)
    there.start()
    there.report()
    later = resumed(there)
    assert later.spec.settings == ()
    assert later.spec.adapted[-1].verdict == "void"


def test_a_verdict_of_another_change_judges_nothing() -> None:
    there = AdaptiveWorld(bucket_job(), helps)
    there.start()
    there.report()
    other = m.Judged(m.GenerationId(1, 99), "kept")
    assert resumed(there, judged=other).spec.settings == ()


def taken_back_and_killed() -> AdaptiveWorld:
    """The coordinator dies between its word that a change is taken back and the launch that does it."""
    there = AdaptiveWorld(bucket_job(), hurts)
    there.start()
    there.report()
    assert there.spec.settings == LARGE
    there.remesh = lambda commands: []  # type: ignore[method-assign]
    assert decisions(there.report()) == [("back", "bucket")]
    assert there.state is MachineState.LEAVING
    return there


def test_what_hurt_is_taken_back_by_the_next_term_and_not_tried_again() -> None:
    there = taken_back_and_killed()
    later = restarted(there)
    out = later.send(*outcomes(there.spec, "interrupted", there.step))
    out += later.answer(out, snapshot(there.spec, there.step))
    later.trains(there.step + 1)
    assert later.spec.settings == ()
    assert later.spec.adapted[-1].verdict == "back"
    assert later.spec.adapted[-1].layout is None
    assert decisions([c for _ in range(30) for c in later.report()]) == []


def test_a_generation_that_hurts_and_was_not_told_to_leave_is_left_by_the_next_term() -> None:
    there = taken_back_and_killed()
    later = restarted(there)
    out = later.trains(there.step)
    out += later.wait(2.0, steps=there.step)
    assert later.state is MachineState.LEAVING
    later.step = there.step
    later.remesh(out)
    assert later.spec.settings == ()
    assert later.spec.reason.startswith("adapt: bucket is taken back")


def test_what_hurt_is_not_tried_again_by_the_next_launch() -> None:
    later = resumed(taken_back_and_killed())
    assert later.spec.settings == ()
    assert [one.verdict for one in later.spec.adapted] == ["back"]
    assert decisions([c for _ in range(30) for c in later.report()]) == []


def test_the_logs_entry_of_a_generation_has_its_changes() -> None:
    there = AdaptiveWorld(bucket_job(), hurts)
    there.start()
    for _ in range(3):
        there.report()
    assert there.spec.adapted[-1].verdict == "back"
    assert logged(there.spec).adapted == there.spec.adapted
    older = generation_body(there.spec)
    older["spec"] = {k: v for k, v in older["spec"].items() if k not in ("adapted", "replaced", "settings")}
    assert spec_of(older).adapted == ()


def with_settings_of(there: AdaptiveWorld, *settings: tuple[str, str], **fields: Any) -> AdaptiveWorld:
    """The world, as if its generation ran with these settings."""
    spec = replace(there.spec, settings=settings, adapted=(), **fields)
    there.machine.memory.spec = spec
    return there


@pytest.mark.parametrize(
    ("kinds", "left"),
    [
        ((), ()),
        (("bucket",), (("comm.bucket_mib", "25.0"),)),
        (("compression",), (("comm.gradients", "int8"),)),
        (("bucket", "compression", "precision"), None),
    ],
)
def test_a_launch_keeps_what_its_own_permission_names(kinds: Any, left: Any) -> None:
    settings = (("comm.bucket_mib", "25.0"), ("comm.gradients", "int8"), ("precision", "bf16"))
    there = with_settings_of(kept_world(), *settings)
    held = {"comm__bucket_mib": 0.001, "layout__dp": 4, "layout__zero": 0}
    later = resumed(there, adaptive_job(*kinds, **held))
    assert later.spec.settings == (settings if left is None else left)
    told = [a.text for a in of(later.log, m.Alert) if "of an earlier launch is not kept" in a.text]
    assert len(told) == len(settings) - len(later.spec.settings)


def test_a_setting_gives_way_to_what_a_user_changes() -> None:
    there = kept_world()
    assert there.spec.replaced == (("comm.bucket_mib", "0.001"),)
    later = resumed(there, bucket_job(steps=99_999))
    assert later.spec.settings == LARGE
    later = resumed(there, adaptive_job("bucket", comm__bucket_mib=2.0, layout__dp=4, layout__zero=0))
    assert later.spec.settings == ()
    assert any("the job says 2.0 now, and said 0.001" in a.text for a in of(later.log, m.Alert))


def test_a_setting_that_the_job_as_it_is_now_refuses_is_dropped_alone() -> None:
    there = with_settings_of(kept_world(), *LARGE, ("comm.gradients", "int8"))
    held = {"comm__bucket_mib": 0.001, "layout__dp": 4, "layout__zero": 0, "precision": "fp64"}
    later = resumed(there, adaptive_job("bucket", "compression", **held))
    assert later.spec.settings == LARGE
    assert any("comm.gradients=int8" in a.text and "fp64" in a.text for a in of(later.log, m.Alert))


def test_room_that_was_made_stays_though_it_is_not_permitted_any_more() -> None:
    """The limit of memory stays too, below which what the job names does not fit."""
    held = {"layout__dp": 4, "layout__zero": 0, "layout__micro_batch": 8, "layout__recompute": "none"}

    def pressed(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        roomy = spec.layout.recompute != "none"
        found = plain_figures(1.3 if roomy else 1.0, forward=0.3, backward=0.6)
        return replace(found, peak_bytes=int(1e9 * (0.6 if roomy else 0.95)), device_bytes=10**9)

    there = AdaptiveWorld(adaptive_job("recompute", **held), pressed)
    there.start()
    assert ("kept", "recompute") in decisions([c for _ in range(4) for c in there.report()])
    later = resumed(there, adaptive_job(**held))
    assert later.spec.layout.recompute != "none"


def test_permitted_precision_can_be_made_lower() -> None:
    """With bf16 set, the rule that bf16 cannot give way to bf16 would refuse it."""
    held = {"comm__bucket_mib": 0.001, "layout__dp": 4, "layout__zero": 0}
    assert problem_of(adaptive_job("precision", **held), (("precision", "bf16"),)) == ""
    assert "fp64" in problem_of(adaptive_job(precision="fp64", **held), (("comm.gradients", "int8"),))


def test_the_loop_asks_by_the_factors_that_the_launch_began_with() -> None:
    told = Calibration(1.3, 1.3, 1.5)
    there = AdaptiveWorld(
        adaptive_job("micro-batch"), lambda spec, step: plain_figures(1.0, forward=0.4, backward=0.5)
    )
    out = there.send(m.Begin(1, calibration=told), m.NodeJoined("a", 4))
    there.answer(there.ready(out))
    there.trains(1)
    assert there.machine.memory.adaptation.calibration == told
    there.report()
    there.report()
    found = there.machine.memory.adaptation.calibration
    assert found.compute != told.compute
    assert found.memory == told.memory
