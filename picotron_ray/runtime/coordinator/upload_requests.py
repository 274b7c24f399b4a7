"""Uploads that nodes were asked for, and the parts of manifests that came of them.

A node may upload several sets of slots of one state at a time: the checkpoint was planned anew when another
node was lost. The part that counts is that of the set that was asked for last.
"""

from __future__ import annotations

from picotron_ray.coordinator import messages as m

State = tuple[m.GenerationId, int]
Request = tuple[str, tuple[str, ...]]
"""A node and the slots that it was asked for."""


class UploadRequests:
    """Requests by state, until that or a later state of the same generation or a later one is committed."""

    def __init__(self) -> None:
        self._open: dict[str, m.Upload] = {}  # by node: what was asked for last and has not ended
        self._newest: dict[State, dict[str, tuple[str, ...]]] = {}  # by node: the slots asked for last
        self._parts: dict[State, dict[Request, bytes]] = {}

    def ask(self, command: m.Upload) -> None:
        """Note a request, in the place of an earlier one of its node."""
        self._open[command.node] = command
        state = (command.generation, command.step)
        self._newest.setdefault(state, {})[command.node] = command.slots

    def open(self, node: str) -> m.Upload | None:
        """Return what a node was asked for last, unless it has ended."""
        return self._open.get(node)

    def ended(self, event: m.Uploaded, part: bytes | None) -> None:
        """Note how a request ended; ``part``: what it gives to the manifest, None where it failed."""
        asked = self._open.get(event.node)
        state = (event.generation, event.step)
        if asked is not None and (asked.generation, asked.step, asked.slots) == (*state, event.slots):
            del self._open[event.node]
        if part is not None:
            self._parts.setdefault(state, {})[event.node, event.slots] = part

    def parts(self, command: m.AppendCommit) -> list[bytes]:
        """Return the parts of a commit; none where one is not here, so that all is uploaded again."""
        state = (command.generation, command.step)
        newest, parts = self._newest.get(state, {}), self._parts.get(state, {})
        found = [parts.get((node, newest.get(node, ()))) for node in command.nodes]
        return [] if None in found else [part for part in found if part is not None]

    def forget(self, generation: m.GenerationId, step: int) -> None:
        """Forget a state that is committed, and what is older in its generation and in earlier ones.

        A later generation may have gone back behind it: its own states are uploaded still.
        """

        def waits(state: State) -> bool:
            return state[0] > generation or state[1] > step

        self._parts = {state: found for state, found in self._parts.items() if waits(state)}
        self._newest = {state: found for state, found in self._newest.items() if waits(state)}
