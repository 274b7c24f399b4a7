"""Fixtures of the tests of runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from picotron_ray.runtime.run_storage.life_sign import LifeSign

FOLDERS = {"memory_path", "folder"}
"""Fixtures that remove what they made."""


@pytest.fixture(autouse=True)
def no_sign_outlives_its_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """End what still signs: it would write into a folder that is being removed."""
    for name in FOLDERS & set(request.fixturenames):
        request.getfixturevalue(name)  # made before, so removed after
    begun: list[LifeSign] = []
    real = LifeSign.begin
    monkeypatch.setattr(LifeSign, "begin", lambda sign, term: begun.append(sign) or real(sign, term))
    yield
    for sign in begun:
        sign.close()
        for thread in (sign._thread, *sign._puts):
            if thread is not None:
                thread.join(10.0)
