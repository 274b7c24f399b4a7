"""State groups that checkpointed given boxes of the state, found from the writers' layout alone. Torch-free.

A restore opens the slots of these groups and of no others. To look through all slots instead takes a
connection to each node, by the square of the nodes, where the number of workers changes under ZeRO.

Candidates follow from the chunks that a box meets: a few for each parameter. Then `shard_boxes`, by which
the writers cut, has the last word on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.expert_order import places_of
from picotron_ray.layout.layout import Coordinates, Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.shard_boxes import chunk, is_primary, local_boxes, zero_dim
from picotron_ray.planner.model_sizes import stage_bounds


class ShareHolders:
    """Holders of the state that ranks of one layout wrote."""

    def __init__(
        self, table: Iterable[ParameterSpec], layout: Layout, bounds: Sequence[tuple[int, int]]
    ) -> None:
        """
        Args:
            table: every parameter of the model.
            bounds: half-open ranges of layer numbers, of all pipeline stages of ``layout``.
        """
        self._specs = {spec.name: spec for spec in table if not spec.copy}
        self._layout, self._bounds = layout, bounds
        self._pp_of = {stage: pp for pp in range(layout.pp) for stage in layout.rank_stages(pp)}

    def groups(self, wanted: Iterable[Shard]) -> frozenset[int]:
        """State groups (``Layout.state_group``) that hold anything of what is ``wanted``.

        A moment is where its parameter is. What belongs to no parameter is the first group's.
        """
        found: set[int] = set()
        seen: set[tuple[str, Box]] = set()
        for shard in wanted:
            name = shard.name if shard.name in self._specs else shard.name.partition("/")[2]
            if not shard.box.numel or (name, shard.box) in seen:
                continue
            seen.add((name, shard.box))
            spec = self._specs.get(name)
            if spec is None:
                found.add(0)
            else:
                self._add(found, spec, shard.box)
        return frozenset(found)

    def _add(self, found: set[int], spec: ParameterSpec, box: Box) -> None:
        layout = self._layout
        pp = self._pp_of.get(self._stage(spec))
        if pp is None:
            return
        for tp, part in self._candidates(spec, box):
            dp, cp = divmod(part, layout.cp)
            rank = layout.rank(Coordinates(pp, dp, cp, tp))
            group = layout.state_group(rank)
            if group in found or not is_primary(spec, layout, rank):
                continue
            if any(held.intersect(box) is not None for held in local_boxes(spec, layout, rank)):
                found.add(group)

    def _stage(self, spec: ParameterSpec) -> int:
        """Pipeline stage of a parameter; -1 where it is on none."""
        if spec.part == "embed":
            return 0
        if spec.part == "head":
            return len(self._bounds) - 1
        layer = -1 if spec.layer is None else spec.layer
        return next((i for i, (first, last) in enumerate(self._bounds) if first <= layer < last), -1)

    def _candidates(self, spec: ParameterSpec, box: Box) -> Iterator[tuple[int, int]]:
        """Tensor-parallel rank and first replica of state groups that may hold some of a box."""
        layout = self._layout
        experts = layout.ep if spec.expert else 1
        shards, dim = 1, zero_dim(spec, layout)
        if layout.zero and spec.sharded:
            shards = layout.expert_shards if spec.expert else layout.shards
        for tp in self._tp_ranks(spec, box):
            rows = (0, spec.shape[0]) if spec.shape else (0, 1)
            if spec.tp_dim == 0 and not spec.expert:
                rows = chunk(rows[1], layout.tp, tp)
            for placed in self._as_ordered(spec, box):
                for expert in _met(placed, 0, rows, experts):
                    start, length = chunk(rows[1], experts, expert)
                    cut = (rows[0] + start, length) if dim == 0 else self._span(spec, dim, tp)
                    for shard in _met(placed, dim, cut, shards):
                        yield tp, shard * experts + expert

    def _span(self, spec: ParameterSpec, dim: int, tp: int) -> tuple[int, int]:
        """Start and length along a dimension that tensor parallelism leaves a rank."""
        return chunk(spec.shape[dim], self._layout.tp, tp) if dim == spec.tp_dim else (0, spec.shape[dim])

    def _as_ordered(self, spec: ParameterSpec, box: Box) -> Iterator[Box]:
        """Boxes that make up a box where the stack of experts is as the layout orders it."""
        order = self._layout.experts_of(spec.layer) if spec.expert and self._layout.ep > 1 else ()
        if not order:
            yield box
            return
        for expert in range(box.offset[0], box.offset[0] + box.size[0]):
            yield Box((places_of(order)[expert], *box.offset[1:]), (1, *box.size[1:]))

    def _tp_ranks(self, spec: ParameterSpec, box: Box) -> range:
        """Tensor-parallel ranks of which some hold what others do not."""
        if spec.tp_dim is None:
            return range(1)
        return _met(box, spec.tp_dim, (0, spec.shape[spec.tp_dim]), self._layout.tp)


def holders_of(
    model: ModelConfig, table: Sequence[ParameterSpec], wrote: Layout | None, wanted: Sequence[Shard]
) -> frozenset[int]:
    """State groups of layout ``wrote`` that hold anything of what is ``wanted``; empty: not known.

    Args:
        table: all parameters of the model.
    """
    if wrote is None:
        return frozenset()
    try:
        bounds = stage_bounds(model, wrote.cut)
    except LayoutError:  # of another model
        return frozenset()
    return ShareHolders(table, wrote, bounds).groups(wanted)


def _met(box: Box, dim: int, span: tuple[int, int], parts: int) -> range:
    """Chunks of ``span`` (start and length along a dimension), cut into ``parts``, that meet a box.

    >>> _met(Box((5,), (4,)), 0, (0, 12), 4)
    range(1, 3)
    """
    if parts == 1:
        return range(1)
    start, length = span
    step = -(-length // parts)
    low, high = max(box.offset[dim] - start, 0), min(box.offset[dim] + box.size[dim] - start, length)
    return range(low // step, -(-high // step)) if low < high else range(0)
