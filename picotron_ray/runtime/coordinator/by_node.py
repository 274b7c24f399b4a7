"""Workers by node beside their node by worker: at thousands of nodes nothing may look at all of them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping


class ByNode(MutableMapping[str, str]):
    """Node of each worker; ``on`` and ``count`` answer for one node without a look at the others."""

    def __init__(self) -> None:
        self._node_of: dict[str, str] = {}
        self._on: dict[str, dict[str, None]] = {}  # by node: its workers, in the order in which they came

    def __getitem__(self, worker: str) -> str:
        return self._node_of[worker]

    def __setitem__(self, worker: str, node: str) -> None:
        self.pop(worker, None)
        self._node_of[worker] = node
        self._on.setdefault(node, {})[worker] = None

    def __delitem__(self, worker: str) -> None:
        node = self._node_of.pop(worker)
        del self._on[node][worker]
        if not self._on[node]:
            del self._on[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self._node_of)

    def __len__(self) -> int:
        return len(self._node_of)

    def on(self, node: str) -> list[str]:
        """Workers of a node."""
        return list(self._on.get(node, ()))

    def count(self, node: str) -> int:
        """Count the workers of a node."""
        return len(self._on.get(node, ()))
