"""One hierarchy of errors, and the exit code that each means.

A message is one line: what was seen, what was expected, what to do. Every error is built from its
message alone, so it survives pickling through Ray unchanged.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

REMOVED = "was removed while the run was using it"
"""Words of storage whose folder is gone: it is no use to wait for it."""


def install_extra(extra: str) -> str:
    """Say how the packages of an extra are installed, from an index as well as in a checkout.

    >>> install_extra("otel")
    "install the extra otel (in a checkout: pip install -e '.[otel]')"
    """
    return f"install the extra {extra} (in a checkout: pip install -e '.[{extra}]')"


class PicotronError(Exception):
    """Base of every error that picotron_ray raises on purpose."""

    exit_code = 3
    step: str = ""
    """Name of the step of ``resolve_job`` that raised it; empty elsewhere."""


class ConfigError(PicotronError):
    """The configuration, data or request cannot be used; nothing was started.

    ``problems`` holds one line per mistake; ``str(error)`` joins them with newlines.
    """

    exit_code = 2

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(str(line) for line in self.args)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class NotRunningError(ConfigError):
    """A run has no coordinator where it was looked for: it has ended, died, or never was.

    ``run`` is its name. A command adds what is remembered of it (`known_end`), which asks its storage.
    """

    run = ""


class LayoutError(ConfigError):
    """A layout does not divide the model, batch or world."""


class DataError(ConfigError):
    """The training data is missing, unreadable, empty or beyond the vocabulary."""


class StorageError(PicotronError):
    """Storage is missing, read-only, full, or refuses the credentials."""

    exit_code = 4


class StorageUnavailableError(StorageError):
    """Storage did not answer within its retry deadline; the same call may succeed later."""


class StorageFullError(StorageError):
    """Storage has no room left; what collection frees may make some."""


class NotFoundError(StorageError):
    """No object of that key."""


class AlreadyExistsError(StorageError):
    """A conditional put was refused: the key exists already, with other content."""


class PartsGoneError(StorageError):
    """Parts of a commit were uploaded and are not there any more; they must be uploaded again."""


class LedgerGoneError(PartsGoneError):
    """Ledger lines of a commit came with none of its parts; other nodes may have them, or they are lost."""


class CorruptError(StorageError):
    """Bytes do not match the digest that was recorded for them.

    ``where`` is the name of the slot, or the key of the object, that holds them.
    """

    def __init__(self, message: str = "", where: str = "") -> None:
        super().__init__(message)
        self.where = where


class NoDeviceError(PicotronError):
    """No CUDA device is seen by torch, and what was asked for needs one."""

    exit_code = 5


class NewerSchemaError(PicotronError):
    """A newer version wrote what is stored: this one must not go on with the run."""

    exit_code = 2


class FencedError(PicotronError):
    """A newer coordinator term exists: this writer must stop for good.

    ``owner`` is who claimed it, as the log names it; "" where that is not known.
    """

    owner = ""


class SlotError(PicotronError):
    """A snapshot slot cannot be allocated, written or read."""


class SlotRoomError(SlotError):
    """There is no room for a snapshot slot of the size that is needed; what it holds is as it was."""


class UnmarkedError(SlotError):
    """Slots that are to outlive their run could not be marked as kept; they are as they were."""


class SlotUnreachableError(SlotError):
    """A snapshot slot of another node cannot be had: its agent is silent, cut off, or has it no more.

    ``where`` is the name of the slot.
    """

    def __init__(self, message: str = "", where: str = "") -> None:
        super().__init__(message)
        self.where = where


class ServiceBusyError(SlotUnreachableError):
    """A shard service serves as many readers as it can: another node, or this one later, will do."""


class SlotReusedError(SlotError):
    """A snapshot slot holds another state than the one asked for, or is being overwritten.

    ``where`` is the name of the slot.
    """

    def __init__(self, message: str = "", where: str = "") -> None:
        super().__init__(message)
        self.where = where


class NumericsError(PicotronError):
    """Loss, gradients or weights are not finite, or too many updates were left out.

    ``bad_step`` is the step, 0 where it is none of a single step; ``reason`` says what is bad about it.
    """

    def __init__(self, message: str = "", bad_step: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.bad_step, self.reason = bad_step, reason


class DivergedError(PicotronError):
    """Ranks that hold the same part of the state hold different values.

    ``found`` says what is known of it, as plain values (`debug.replicas.ReplicaFinding`); ``settled`` whether
    the state at hand is sound all the same, as steps computed again have shown.
    """

    def __init__(self, message: str = "", found: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.found = found or {}

    @property
    def settled(self) -> bool:
        return bool(self.found.get("settled"))


class PeerLostError(PicotronError):
    """A collective failed because a peer died or the generation was aborted."""


@contextlib.contextmanager
def naming(step: str) -> Iterator[None]:
    """Write the step's name into an error that leaves it; an inner step's name stays."""
    try:
        yield
    except PicotronError as error:
        error.step = error.step or step
        raise
