"""Compilation as a phase of its own: torch says when it begins and ends, whatever phase it happens in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import compiles
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.compiled_code import CODE
from picotron_ray.runtime.heartbeat import Page


@contextmanager
def compile_phase(page: Page, job: JobConfig, layout: Layout) -> Iterator[None]:
    """Enter the phase ``compile`` while torch compiles for a layout, and go back to the phase before."""
    if not compiles(job):
        yield
        return
    CODE.begin(layout)  # before anybody listens: it may drop whoever does
    from torch._dynamo.callback import CallbackArgs, callback_handler  # takes a second

    before: list[str] = []

    def begin(_: CallbackArgs) -> None:
        before.append(page.name)
        page.phase("compile")

    def end(_: CallbackArgs) -> None:
        page.phase(before.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
