"""What makes the pure tier pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.checkpoint.checkpoint_kit import memory_folder

memory_path = pytest.fixture(memory_folder)


@pytest.fixture(autouse=True, scope="module")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test plans by what runs of this machine, those of other tests among them, have measured.

    A patch of its own: a test's patches end before its folders do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))
        yield


@pytest.fixture(autouse=True, scope="module")
def pure(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a run of this tier alone no file of tests may have imported torch or Ray."""
    yield
    if request.config.getoption("markexpr") == "pure":
        assert not {"torch", "ray"} & set(sys.modules), "the pure tier imports neither torch nor Ray"
