"""What FSDP is told of a model's units and of every pass; torch's side is made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from picotron_ray.parallel.data import fsdp
from picotron_ray.parallel.data.fsdp import (
    FsdpUnits,
    apply_fsdp,
    clone_output_views,
    free_gathered_weights,
    pad_shards,
    prepare_backward,
)


class Sharded(nn.Linear):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.log: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_") or name in ("reshard", "_get_fsdp_state", "_lazy_init"):

            def note(*given: Any) -> Any:
                self.log.append((name, *given))
                return self

            return note
        return super().__getattr__(name)


@pytest.fixture(autouse=True)
def shards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(fsdp, "FSDPModule", Sharded)
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **options: calls.append((module, options)))
    return calls


NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("expert_mesh", [None, "experts"])
@pytest.mark.parametrize(("dtype", "policy"), [(None, MixedPrecisionPolicy()), (torch.bfloat16, NARROW)])
def test_units_and_what_stays_whole(
    shards: list[Any], zero: int, expert_mesh: Any, dtype: Any, policy: MixedPrecisionPolicy
) -> None:
    blocks, experts, router, mesh = [Sharded(), Sharded()], nn.Linear(1, 1), nn.Linear(1, 1), Any
    embedding, norm, head = (Sharded() for _ in range(3))
    model = nn.Sequential(embedding, *blocks, norm, head, nn.Linear(1, 1))
    kept = model[5].bias
    held = blocks, [experts], expert_mesh, frozenset({kept}), [router], dtype
    units = FsdpUnits(*held, embedding=[embedding], head=[norm, head])
    apply_fsdp(model, units, mesh, zero)  # type: ignore[arg-type]
    whole = {kept} if expert_mesh else {kept, *experts.parameters()}
    by: dict[str, Any] = {"shard_placement_fn": units.placement, "mp_policy": policy}
    expected: list[Any] = [
        (unit, {"mesh": mesh, "reshard_after_forward": freed, **by, "ignored_params": whole})
        for unit, freed in (
            *((block, zero == 3) for block in blocks),
            (embedding, zero == 3),
            ([norm, head], False),
            (model, False),
        )
    ]
    own = {"reshard_after_forward": zero == 3}
    if expert_mesh:
        expected.insert(0, (experts, {"mesh": "experts", **own, **by}))
    if dtype is not None:  # in its own type, and no part of the block's unit
        expected.insert(0, (router, {"mesh": mesh, **own, "ignored_params": whole}))
    assert shards == expected
    sums = [("set_gradient_divide_factor", 1.0), ("set_force_sum_reduction_for_comms", True)]
    not_for_backward = [
        ("set_unshard_in_backward", False),
        ("set_modules_to_backward_prefetch", [embedding]),
    ]
    assert embedding.log == [
        *sums, *not_for_backward, ("set_modules_to_forward_prefetch", [blocks[0]])
    ]  # fmt: skip
    assert blocks[0].log == sums
    assert blocks[1].log == [*sums, ("set_modules_to_forward_prefetch", [norm])]
    assert norm.log == head.log == sums


def test_the_root_fetches_the_first_block_where_it_holds_what_stands_before(shards: list[Any]) -> None:
    model, block = Sharded(), Sharded()
    model.block = block
    apply_fsdp(model, FsdpUnits([block]), Any, 3)  # type: ignore[arg-type]
    assert [unit for unit, _ in shards] == [block, model]
    assert model.log[-1] == ("set_modules_to_forward_prefetch", [block])
    assert block.log[-1][0] == "set_force_sum_reduction_for_comms"


def test_views_are_cloned_where_a_gradient_passes() -> None:
    base = torch.ones(2, 2, requires_grad=True) * 1
    outputs = [base.view(4), base, torch.ones(4).view(2, 2), "text"]

    class Block(nn.Module):
        def forward(self, x: Tensor, *, more: int) -> Any:
            return {"all": outputs, "inputs": (x, more)}

    block = Block()
    clone_output_views(block)
    x = torch.ones(1)
    found = block(x, more=3)
    view, *others = found["all"]
    assert not view._is_view()
    assert torch.equal(view, outputs[0])  # type: ignore[arg-type]
    assert all(a is b for a, b in zip(others, outputs[1:], strict=True))
    assert found["inputs"][0] is x
    assert found["inputs"][1] == 3


@pytest.mark.parametrize("last", [True, False])
def test_every_kind_of_zero_before_a_backward_pass(last: bool) -> None:
    """Copies are summed in the last pass; 1 and 2 free weights there, 1 reduces there."""
    every = ("set_requires_all_reduce", "set_reshard_after_backward", "set_requires_gradient_sync")
    for zero, names in ((1, (*every, "set_is_last_backward")), (2, every[:2]), (3, every[:1])):
        model = Sharded()
        prepare_backward(model, zero, last)
        assert model.log == [(name, last) for name in names]
    prepare_backward(nn.Linear(1, 1), 1, last)


def test_weights_are_freed_in_all_units_and_shards_padded_at_once() -> None:
    units = [Sharded(), Sharded()]
    free_gathered_weights(nn.Sequential(*units, nn.Linear(1, 1)))
    assert [unit.log for unit in units] == [[("reshard",)]] * 2
    model = Sharded()
    pad_shards(model)
    assert model.log == [("_get_fsdp_state",), ("_lazy_init",)]
    pad_shards(nn.Linear(1, 1))
