"""Report of ``bench comm``, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from picotron_ray.bench.common.report import machine_line


def lines(found: Mapping[str, Any]) -> list[str]:
    """A row for each cell, what was cut, and the selector's choices."""
    return [*_cells(found), *_cuts(found), *_selections(found)]


def _cells(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"collectives on {found['device']} {machine_line(found)}"
    yield (
        f"{'collective':16}{'strategy':16}{'bytes':>12}{'ranks':>6}{'avg ms':>11}{'std':>9}{'min':>10}"
        f"{'max':>10}{'bus GB/s':>10}{'sent MB':>10}{'repeats':>8}"
    )
    for cell in found["cells"]:
        ms = (1e3 * cell[name] for name in ("avg_s", "std_s", "min_s", "max_s"))
        average, std, least, most = ms
        yield (
            f"{cell['collective']:16}{cell['strategy']:16}{cell['size_bytes']:12}{cell['group']:6}{average:11.3f}{std:9.3f}"
            f"{least:10.3f}{most:10.3f}{cell['busbw_bytes_s'] / 1e9:10.3f}{cell['sent_bytes'] / 1e6:10.3f}"
            f"{cell['repeats']:8}"
        )


def _cuts(found: Mapping[str, Any]) -> Iterator[str]:
    for cut in found["cuts"]:
        what = f"{cut['collective']} by {cut['strategy']} of {cut['size_bytes']} B over {cut['group']}"
        yield f"not measured: {what}: {cut['cut']}"


def _selections(found: Mapping[str, Any]) -> Iterator[str]:
    for pick in found["selections"]:
        yield (
            f"selector: {pick['collective']} of {pick['size_bytes']} B over {pick['group']}:"
            f" {pick['selected']}, best {pick['best']}, {pick['over_best']:.2f} of its time"
        )
    share = found["selected_within_10_percent"]
    if share is not None:
        yield f"selected within 10 % of the best, or inside its quartiles: {100 * share:.0f} %"
