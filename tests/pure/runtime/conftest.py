"""Fixtures of the tests of runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from picotron_ray.runtime.run_storage.life_sign import LifeSign


@pytest.fixture(autouse=True)
def no_sign_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what still signs: it would write into a folder that is being removed."""
    begun: list[LifeSign] = []
    real = LifeSign.begin
    monkeypatch.setattr(LifeSign, "begin", lambda sign, term: begun.append(sign) or real(sign, term))
    yield
    for sign in begun:
        sign.close()
        if sign._thread is not None:
            sign._thread.join(10.0)
