"""Memory by class, GPUs and MFU, asked from the run's own metrics endpoints, on a thread of their own.

At most `MOST_NODES` nodes are asked, each `INTERVAL_S`: what a page shows of memory is a sample of nodes, and
thousands of agents are not asked for the sake of a page.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

INTERVAL_S = 10.0
MOST_SILENT = 3
"""Rounds without an answer after which the newest figures are shown no more."""
MOST_NODES = 16
ANSWER_S = 2.0
ANSWER_BYTES = 4 << 20
OF_WORKER = {
    "picotron_worker_memory_peak_bytes": "accounted_peak_bytes",
    "picotron_worker_peak_bytes": "peak_bytes",
    "picotron_worker_resident_bytes": "resident_bytes",
}
OF_GPU = {
    "picotron_gpu_utilization_ratio": "utilization_ratio",
    "picotron_gpu_memory_used_bytes": "used_bytes",
    "picotron_gpu_memory_size_bytes": "size_bytes",
    "picotron_gpu_temperature_celsius": "temperature_c",
    "picotron_gpu_power_watts": "power_w",
}
MFU, MEMORY = "picotron_training_mfu_ratio", "picotron_worker_memory_bytes"
READ = (MFU, MEMORY, *OF_WORKER, *OF_GPU)


def read_metrics(texts: Iterable[str]) -> dict[str, Any]:
    """Return ``workers`` by name and ``gpus`` that endpoints told, and MFU with its peak where one did.

    Raises:
        ValueError: an answer is none of an endpoint.

    >>> text = 'picotron_worker_memory_bytes{run="a",node="n",worker="w0",class="weights"} 8.5'
    >>> read_metrics([text])["workers"]
    {'w0': {'node': 'n', 'classes': {'weights': 8.5}}}
    """
    workers: dict[str, dict[str, Any]] = {}
    gpus: dict[tuple[str, str], dict[str, Any]] = {}
    run: dict[str, Any] = {}
    for text in texts:
        wanted = [line for line in text.splitlines() if line.startswith(READ)]  # parsing costs the most
        if not wanted and text.strip() and "# TYPE" not in text:
            raise ValueError(f"saw {text[:40]!r}, expected metrics")
        for family in text_string_to_metric_families("\n".join([*wanted, ""])):
            for sample in family.samples:
                if sample.name == MFU:
                    run = {"mfu_ratio": sample.value, "mfu_peak": sample.labels.get("peak", "")}
                _take(sample.name, sample.labels, sample.value, workers, gpus)
    return {"workers": workers, "gpus": [gpus[key] for key in sorted(gpus)], **run}


def _take(
    name: str,
    labels: Mapping[str, str],
    value: float,
    workers: dict[str, dict[str, Any]],
    gpus: dict[tuple[str, str], dict[str, Any]],
) -> None:
    node = labels.get("node", "")
    if name in OF_WORKER or name == MEMORY:
        one = workers.setdefault(labels["worker"], {"node": node, "classes": {}})
        if name in OF_WORKER:
            one[OF_WORKER[name]] = value
        else:
            one["classes"][labels["class"]] = value
    elif name in OF_GPU:
        gpu = gpus.setdefault((node, labels["gpu"]), {"node": node, "gpu": labels["gpu"]})
        gpu[OF_GPU[name]] = value


def fetch(address: str) -> str:
    """Scrape one endpoint; OSError where it does not answer."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=ANSWER_S) as answer:
        return bytes(answer.read(ANSWER_BYTES)).decode(errors="replace")


class NodeScrapes:
    """Newest figures of the nodes that are asked."""

    def __init__(self, ask: Callable[[str], str] = fetch) -> None:
        self._ask = ask
        self._addresses: tuple[str, ...] = ()
        self._wake = threading.Event()
        self._closed = False
        self.newest: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._keep_asking, name="agent-figures", daemon=True)
        self._thread.start()

    def of(self, endpoints: Mapping[str, str], first: Iterable[str]) -> None:
        """Ask these endpoints (address by node) from now on.

        Args:
            first: nodes that are asked before others, such as those of slow ranks.
        """
        order = dict.fromkeys([*(node for node in first if node in endpoints), *sorted(endpoints)])
        order.pop("coordinator", None)
        own = [endpoints["coordinator"]] if "coordinator" in endpoints else []
        found = (*own, *(endpoints[node] for node in itertools.islice(order, MOST_NODES)))
        if found != self._addresses:
            self._addresses = found
            self._wake.set()

    def close(self) -> None:
        """End the thread, soon."""
        self._closed = True
        self._wake.set()

    def _keep_asking(self) -> None:
        silent = 0
        while not self._closed:
            found = self._asked()
            silent = 0 if found else silent + 1
            if found or silent >= MOST_SILENT:
                self.newest = found
            self._wake.wait(INTERVAL_S)
            self._wake.clear()

    def _asked(self) -> dict[str, Any]:
        """Ask all endpoints; what those that answer say, nothing where none does."""
        texts = []
        for address in self._addresses:
            # whatever it is: the endpoint is gone or not there yet, or its port is somebody else's by now
            with contextlib.suppress(Exception):
                texts.append(self._ask(address))
        with contextlib.suppress(Exception):
            return {**read_metrics(texts), "nodes": len(texts)} if texts else {}
        return {}
