"""Packages that only an extra installs: which job needs which of them."""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.extras import Extra, needed_extras


def test_what_a_job_needs() -> None:
    plain = JobConfig()
    fp8 = plain.model_copy(update={"precision": "fp8"})
    small = {"optimizer": plain.optimizer.model_copy(update={"moments": "8bit"})}
    kernels = {"kernels": plain.kernels.model_copy(update={"attention": "flash-attn"})}
    flash = Extra(
        "kernels.attention",
        "flash_attn",
        "flash-attn",
        "saw flash-attn, which is not there; on every node install the extra flash"
        " (in a checkout: pip install -e '.[flash]'), or use auto",
    )
    assert needed_extras(plain) == []
    assert needed_extras(plain.model_copy(update=kernels)) == [flash]
    every = needed_extras(fp8.model_copy(update={**small, **kernels}))
    assert [extra[:3] for extra in every[:2]] == [
        ("precision", "torchao", "torchao"),
        ("optimizer.moments", "torchao", "torchao"),
    ]
    assert every[2:] == [flash]
    assert every[0].missing.startswith("saw fp8, which needs torchao; on every node install")
    assert every[1].missing.startswith("saw 8bit, ")
