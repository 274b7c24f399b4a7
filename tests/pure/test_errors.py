"""Errors: what each ends a command with, and that all of it arrives in another process."""

from __future__ import annotations

import pickle

import pytest

from picotron_ray import errors
from picotron_ray.errors import ConfigError, CorruptError, PicotronError, SlotUnreachableError

CODES = {
    "PicotronError": 3, "ConfigError": 2, "LayoutError": 2, "DataError": 2, "StorageError": 4,
    "StorageUnavailableError": 4, "NotFoundError": 4, "AlreadyExistsError": 4, "CorruptError": 4,
    "PartsGoneError": 4, "NumericsError": 3, "StorageFullError": 4, "SlotReusedError": 3, "SlotRoomError": 3,
    "FencedError": 3, "SlotError": 3, "SlotUnreachableError": 3, "PeerLostError": 3, "UnmarkedError": 3,
    "DivergedError": 3, "NotRunningError": 2,
    "ServiceBusyError": 3, "LedgerGoneError": 4, "NewerSchemaError": 2, "NoDeviceError": 5,
}  # fmt: skip


def test_each_kind_has_its_exit_code() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if getattr(kind, "exit_code", None)}
    assert {name: kind("x").exit_code for name, kind in kinds.items()} == CODES


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CorruptError("torn", "a.slot"), "torn"),
        (CorruptError("torn", where="a.slot"), "torn"),
        (SlotUnreachableError("silent", "a.slot"), "silent"),
        (ConfigError("steps: saw 0", "name: saw ''"), "steps: saw 0\nname: saw ''"),
    ],
)
def test_an_error_arrives_in_another_process(error: PicotronError, text: str) -> None:
    error.step = "data"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), text, vars(error))
    assert again.step == "data"
