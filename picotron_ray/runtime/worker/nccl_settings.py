"""Settings of torch's process groups that recovery in place and hang verdicts need."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from picotron_ray.errors import ConfigError

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
NEEDED = {ASYNC_ERRORS: "0", NONBLOCKING: "1"}
"""Of torch's process groups over NCCL, for recovery in place."""
WITHOUT = {
    ASYNC_ERRORS: "torch ends the survivors of a lost peer",
    NONBLOCKING: "communicators that are being made cannot be aborted",
}
BLOCKING = ("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT")
RECORDED = "TORCH_FR_BUFFER_SIZE"


def prepare_recorder(environment: MutableMapping[str, str], operations: int) -> None:
    """Have torch's flight recorder, of gloo and NCCL, keep so many collectives; 0: none.

    It reads the environment at the first collective. What that says already stays.
    """
    environment.setdefault(RECORDED, str(operations))


def prepare_nccl(environment: MutableMapping[str, str]) -> None:
    """Have an error of a peer end no other process, and every wait of NCCL end with an abort.

    By default torch ends the process of every survivor, which would start anew; and a communicator that is
    still being made knows no abort, unless that is done without blocking.

    Raises:
        ConfigError: the environment says otherwise.
    """
    problems = nccl_problems(environment)
    if problems:
        raise ConfigError(*(f"{seen}; {mend}" for seen, mend in problems))
    environment.update(NEEDED)


def nccl_problems(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Find variables with which no run recovers in place: what is seen and means, and what to do."""
    found = []
    for name, value in NEEDED.items():
        if environment.get(name, value) != value:
            why = f"{name}: saw {environment[name]}, with which {WITHOUT[name]}"
            found.append((why, f"take it out; workers set it to {value}"))
    for name in BLOCKING:
        if environment.get(name, "0") != "0":
            found.append(
                (f"{name}: saw {environment[name]}, with which a lost peer blocks recovery", "take it out")
            )
    return found
