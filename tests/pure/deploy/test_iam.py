"""The policies of deploy/iam give what the storage's calls need, and deletion to whom it belongs."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.deploy.render import DEPLOY, ROOT

ACTIONS = {
    "put_object": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_objects_v2": "s3:ListBucket",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
}


def policy(name: str) -> dict[str, list[str]]:
    """Resources by action; a policy of this folder only allows."""
    found: dict[str, list[str]] = {}
    for statement in json.loads((DEPLOY / "iam" / f"{name}.json").read_text())["Statement"]:
        assert statement["Effect"] == "Allow"
        for action in statement["Action"]:
            found.setdefault(action, []).extend(statement["Resource"])
    return found


def test_the_head_may_what_the_storage_calls_and_nothing_else() -> None:
    calls = re.findall(r"_client\.(\w+)\(", (ROOT / "picotron_ray/checkpoint/storage/s3.py").read_text())
    assert set(policy("head")) == {ACTIONS[call] for call in calls}


@pytest.mark.parametrize("name", ["head", "worker", "reader", "kms"])
def test_nothing_is_allowed_everywhere(name: str) -> None:
    for action, resources in policy(name).items():
        assert "*" not in action
        assert all(
            re.match(r"arn:aws:(s3:::my-bucket(/picotron/.+)?|kms:.+:key/\w+)$", word) for word in resources
        )
    if name != "kms":
        text = (DEPLOY / "iam" / f"{name}.json").read_text()
        assert '"s3:prefix"' in text, "a list beyond the prefix"


def test_workers_delete_their_own_notes_alone() -> None:
    """Agents delete intents once they are settled, and the quarantined copy of a chunk put again."""
    places = [word.rpartition("/picotron/*/")[2] for word in policy("worker")["s3:DeleteObject"]]
    assert places == ["intents/*", "quarantine/chunks/*"]
    assert "s3:DeleteObject" not in policy("reader")
    assert "s3:PutObject" not in policy("reader")


def test_a_key_encrypts_and_decrypts_alone() -> None:
    assert set(policy("kms")) == {"kms:GenerateDataKey", "kms:Decrypt"}
