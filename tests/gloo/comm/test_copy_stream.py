"""Copies beside the device's work: at once without CUDA, and with a CUDA that is made up, in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.comm import copy_stream
from picotron_ray.comm.copy_stream import CopyStream, host_like, host_zeros

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_without_cuda_a_copy_is_done_at_once() -> None:
    stream, target = CopyStream(CPU), torch.zeros(2, 3)
    event = stream.copy(target, torch.arange(6.0).view(2, 3))
    assert event is None
    assert target.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    stream.follow(event)


def test_with_cuda_a_copy_follows_what_was_computed_and_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            calls.append((self.name, "waits for", other.name))

        def wait_event(self, event: object) -> None:
            calls.append((self.name, "waits for", event))

        def record_event(self) -> str:
            calls.append((self.name, "records"))
            return "an event"

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        calls.append(("enter", stream.name))
        yield
        calls.append(("leave", stream.name))

    def copy_(source: object, non_blocking: bool = False) -> None:
        calls.append(("copies", source, non_blocking))

    cuda = SimpleNamespace(
        Stream=lambda device: Stream(("own", device)),
        current_stream=lambda device: Stream(("current", device)),
        stream=inside,
    )
    monkeypatch.setattr(copy_stream.torch, "cuda", cuda)
    stream = CopyStream(CUDA)
    own, current = ("own", CUDA), ("current", CUDA)
    event: Any = stream.copy(SimpleNamespace(copy_=copy_), "the source")  # type: ignore[arg-type]
    assert event == "an event"
    assert calls == [
        (own, "waits for", current), ("enter", own), ("copies", "the source", True), ("leave", own),
        (own, "records"),
    ]  # fmt: skip
    calls.clear()
    stream.follow(event)
    stream.follow(None)
    assert calls == [(current, "waits for", "an event")]


def test_host_memory_is_locked_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = host_zeros(3, torch.float16, CPU)
    assert (zeros.tolist(), zeros.dtype, zeros.is_pinned()) == ([0, 0, 0], torch.float16, False)
    turned = torch.arange(6.0).view(2, 3).T
    assert host_like(turned).stride() == turned.stride()
    assert host_like(turned).shape == turned.shape
    asked: list[tuple[Any, ...]] = []

    def note(*arguments: Any, **named: Any) -> None:
        asked.append((*arguments, named))

    monkeypatch.setattr(copy_stream.torch, "zeros", note)
    monkeypatch.setattr(copy_stream.torch, "empty_like", note)
    on_device: Any = SimpleNamespace(device=CUDA)
    host_zeros(3, torch.float16, CUDA)
    host_like(on_device)
    assert asked == [
        (3, {"dtype": torch.float16, "pin_memory": True}),
        (on_device, {"device": "cpu", "pin_memory": True}),
    ]
