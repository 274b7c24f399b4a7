"""Parts of manifests: a commit gets all of its own, whatever else is committed meanwhile."""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator.upload_requests import UploadRequests

OLD, NEW = m.GenerationId(1, 1), m.GenerationId(1, 2)


def uploaded(requests: UploadRequests, node: str, generation: m.GenerationId, step: int) -> None:
    slots = (f"{node}.slot",)
    requests.ask(m.Upload(node, generation, step, slots))
    requests.ended(m.Uploaded(node, generation, step, slots=slots), f"{node} {step}".encode())


def test_a_late_commit_of_a_void_state_takes_no_part_of_the_present_checkpoint_along() -> None:
    """The run went back from 60 to 40, and saves step 50 when storage has step 60."""
    requests = UploadRequests()
    for node in "ab":
        uploaded(requests, node, OLD, 60)
        uploaded(requests, node, NEW, 50)
    requests.forget(OLD, 60)
    assert requests.parts(m.AppendCommit(NEW, 50, ("a", "b"))) == [b"a 50", b"b 50"]
    assert requests.parts(m.AppendCommit(OLD, 60, ("a", "b"))) == []
    requests.forget(NEW, 50)
    assert requests.parts(m.AppendCommit(NEW, 50, ("a", "b"))) == []


def test_a_commit_of_which_a_part_is_lost_is_uploaded_again_as_a_whole() -> None:
    """A part of it would be refused as incomplete, time and again."""
    requests = UploadRequests()
    uploaded(requests, "a", NEW, 50)
    assert requests.parts(m.AppendCommit(NEW, 50, ("a",))) == [b"a 50"]
    assert requests.parts(m.AppendCommit(NEW, 50, ("a", "b"))) == []
