"""The table of failure kinds: complete, in the spellings that metrics and summaries have always had."""

from __future__ import annotations

import pytest

from picotron_ray.coordinator.codec import decode
from picotron_ray.failures import FAILURE_RULES, REPORTED, FailureKind, explains

LABELS = (
    "peer-lost",
    "failed",
    "numerics",
    "diverged",
    "worker-exited",
    "out-of-memory",
    "hang",
    "node-lost",
)


def test_every_kind_has_a_rule_and_is_reported_under_a_known_label() -> None:
    assert list(FAILURE_RULES) == list(FailureKind)
    assert tuple(kind.value for kind in REPORTED) == LABELS
    assert {rule.reported_as for rule in FAILURE_RULES.values()} == set(REPORTED)


@pytest.mark.parametrize("kind", FailureKind)
def test_a_kind_is_read_in_the_spellings_of_older_logs(kind: FailureKind) -> None:
    for spelled in (kind.value, kind.value.replace("-", " "), kind.value.replace("-", "_")):
        assert FailureKind.named(spelled) is kind
    assert FailureKind.named(f"{kind.value}: more") is None


def test_the_row_further_down_explains_the_one_above() -> None:
    assert explains(FailureKind.NODE_LOST, FailureKind.WORKER_EXITED)
    assert explains(FailureKind.HANG, FailureKind.WORKER_EXITED)
    assert not explains(FailureKind.PEER_LOST, FailureKind.FAILED)
    assert not explains(FailureKind.FAILED, FailureKind.FAILED)


def test_an_outcome_of_an_older_log_is_decoded() -> None:
    old = {
        "type": "Outcome",
        "worker": "w",
        "generation": {"term": 1, "n": 1},
        "kind": "peer_lost",
        "step": 3,
    }
    assert decode(old).kind is FailureKind.PEER_LOST
    assert decode({**old, "kind": "finished"}).kind == "finished"
    with pytest.raises(ValueError, match="saw 'hang', allowed are"):
        decode({**old, "kind": "hang"})
