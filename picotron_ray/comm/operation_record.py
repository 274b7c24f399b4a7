"""Newest messages between ranks of this process, which gloo's flight recorder leaves out, and its groups.

torch's recorder (TORCH_FR_BUFFER_SIZE) has collectives of gloo and NCCL, and NCCL's messages; gloo's messages
are noted here, as they are called. No tensor and no operation is kept alive: an operation that nobody holds
any more has been waited for.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm import torch_groups
from picotron_ray.comm.sockets import SocketInfo

_SKIPPED = (dist.__file__.rpartition("distributed")[0], __file__)
"""Where frames lie that stand between whoever communicates and this module: torch, and here."""


class MessageNote:
    """One end of a message.

    Fields:
        peer: rank in the group.
        number: among this rank's calls of the kind, the peer and the tag, counted from 1.
        batch: messages that are posted together with this one and itself.
    """

    __slots__ = (
        "_work",
        "batch",
        "done_ns",
        "dtype",
        "group",
        "issued_ns",
        "kind",
        "number",
        "peer",
        "place",
        "sizes",
        "tag",
    )

    def __init__(
        self, kind: str, group: str, peer: int, tag: int, number: int, tensors: list[Tensor]
    ) -> None:
        self.kind, self.group, self.peer, self.tag, self.number = kind, group, peer, tag, number
        self.sizes = [list(tensor.shape) for tensor in tensors]
        self.dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        self.batch = batch_size(sys._getframe(2))
        self.place = place_in_code(sys._getframe(2))
        self.issued_ns, self.done_ns = time.time_ns(), 0
        self._work: Callable[[], Any] | None = None

    def follow(self, work: Any) -> None:
        """Note the end of an operation once nobody holds it any more."""
        self._work = None if work is None else weakref.ref(work, self._ended)
        if work is None:
            self.done_ns = time.time_ns()

    def _ended(self, work: Any) -> None:
        self.done_ns = self.done_ns or time.time_ns()

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        work = None if self._work is None else self._work()
        return {
            "kind": self.kind, "group": self.group, "peer": self.peer, "tag": self.tag, "number": self.number,
            "sizes": self.sizes, "dtype": self.dtype, "batch": self.batch, "place": self.place,
            "issued_ns": self.issued_ns,
            "done_ns": self.done_ns, "done": bool(self.done_ns) or (work is not None and work.is_completed()),
        }  # fmt: skip


class OperationRecord:
    """Messages of this process's generation, and the names of its groups.

    Fields:
        since_ns: when the generation began, in nanoseconds since the epoch; what is older is of another one.
        is_ours: picks the connections of its groups.
    """

    def __init__(self) -> None:
        self._notes: deque[MessageNote] = deque(maxlen=0)
        self._numbers: Counter[tuple[str, str, int, int]] = Counter()
        self._axes: dict[str, str] = {}
        self._plain: dict[str, Any] = {}
        self.since_ns = 0
        self.is_ours: Callable[[SocketInfo], bool] = _no_socket

    def keep(self, most: int) -> None:
        """Keep so many messages of each generation from now on; 0: none."""
        self._notes = deque(maxlen=most)

    @property
    def most(self) -> int:
        """Messages that are kept."""
        return self._notes.maxlen or 0

    def begin(self, backend: str, is_ours: Callable[[SocketInfo], bool]) -> None:
        """Begin a generation; where the backend is gloo, its messages are noted until `end`."""
        self.is_ours = is_ours
        self._notes.clear()
        self._numbers.clear()
        self._axes.clear()
        self.since_ns = time.time_ns()
        if self.most and backend == "gloo" and not self._plain:
            for kind in ("send", "recv"):
                self._plain[kind] = vars(dist.ProcessGroup)[
                    kind
                ]  # as it lies there: it binds, what it gives not
                setattr(dist.ProcessGroup, kind, _noted(kind, getattr(dist.ProcessGroup, kind)))

    def end(self) -> None:
        """End a generation: its messages are noted no more."""
        for kind, plain in self._plain.items():
            setattr(dist.ProcessGroup, kind, plain)
        self._plain = {}
        self.is_ours = _no_socket

    def serves(self, group: dist.ProcessGroup, axis: str) -> None:
        """Note the axis of a layout that a group serves; the first one names it."""
        self._axes.setdefault(group.group_name, axis)

    def note(
        self, kind: str, group: dist.ProcessGroup, tensors: list[Tensor], peer: int, tag: int
    ) -> MessageNote:
        """Note a message that is being called."""
        name = group.group_name
        self._numbers[kind, name, peer, tag] += 1
        note = MessageNote(kind, name, peer, tag, self._numbers[kind, name, peer, tag], tensors)
        self._notes.append(note)
        return note

    def messages(self) -> list[dict[str, Any]]:
        """Messages as JSON values, oldest first."""
        return [note.plain() for note in tuple(self._notes)]

    def groups(self) -> list[dict[str, Any]]:
        """Groups of this process: name, axis, and ranks of the run in order."""
        named = [(group, torch_groups.known_name(group)) for group in torch_groups.living_groups()]
        return [
            {"name": name, "axis": self._axes.get(name, ""), "ranks": torch_groups.known_ranks(group)}
            for group, name in named
        ]


def _no_socket(info: SocketInfo) -> bool:
    return False


def _noted(kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, tensors: list[Tensor], *peer_and_tag: int, **named: int) -> Any:
        peer, tag = (*peer_and_tag, *named.values())
        note = OPERATIONS.note(kind, group, tensors, peer, tag)
        work = None
        try:
            work = plain(group, tensors, *peer_and_tag, **named)
        finally:
            note.follow(work)
        return work

    return call


def place_in_code(frame: Any) -> str:
    """Return the innermost place above a frame that is not torch's: file, line and function."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def batch_size(frame: Any) -> int:
    """Return how many messages are posted together, from a frame below `batch_isend_irecv`; 1: it is not.

    Torch does not promise that messages are called in that function.
    """
    code = dist.batch_isend_irecv.__code__
    while frame is not None:
        if frame.f_code is code:
            return len(frame.f_locals[code.co_varnames[0]])
        frame = frame.f_back
    return 1


def place_of_frames(frames: Sequence[dict[str, Any]]) -> str:
    """As `place_in_code`, of the frames that torch's recorder keeps of an operation, innermost first."""
    outside: Iterator[dict[str, Any]] = (
        frame for frame in frames if not frame["filename"].startswith(_SKIPPED)
    )
    frame = next(outside, None)
    return f"{frame['filename']}:{frame['line']} in {frame['name']}" if frame else ""


OPERATIONS = OperationRecord()
"""Of this process."""
