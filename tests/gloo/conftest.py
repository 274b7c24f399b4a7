"""One pool of worker processes for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.support.gloo.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    living = Pool()
    yield living
    living.close()
