"""What the package uses of torch that torch does not promise: this fails where a version changes it.

``tests/pure/house/test_torch_private.py`` lists who uses what.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules, stage
from torch.testing._internal.distributed.fake_pg import FakeStore

from picotron_ray.comm import torch_groups
from picotron_ray.comm.operation_record import batch_size
from picotron_ray.parallel.memory.saved_parameters import of_a_parameter
from picotron_ray.parallel.pipeline.schedule_runtime import SENDS

OPERATORS = {
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        "output softmax_logsumexp",
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "query key value dropout_p is_causal attn_mask",
        "output logsumexp",
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal attn_mask",
        "grad_query grad_key grad_value",
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
        " rng_state unused",
        "",
    ),
    "_scaled_dot_product_cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
        "output logsumexp",
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k"
        " max_q max_k dropout_p is_causal",
        "",
    ),
    "_scaled_dot_product_efficient_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal",
        "output log_sumexp",
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p"
        " grad_input_mask is_causal",
        "",
    ),
}
"""Arguments that are passed by place, and results that are taken."""


@pytest.mark.parametrize("name", OPERATORS)
def test_attention_operators_take_and_give_what_they_did(name: str) -> None:
    arguments, results = (words.split() for words in OPERATORS[name])
    schema = getattr(torch.ops.aten, name).default._schema
    assert [each.name for each in schema.arguments][: len(arguments)] == arguments
    assert [each.name for each in schema.returns][: len(results)] == results


def test_a_window_is_an_argument_of_flash_attention() -> None:
    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        names = {each.name for each in getattr(torch.ops.aten, name).default._schema.arguments}
        assert {"window_size_left", "window_size_right"} <= names


def test_pipeline_schedules_are_lists_of_actions() -> None:
    assert schedules._Action._fields[:3] == ("stage_index", "computation_type", "microbatch_index")
    kinds = {kind.name for kind in schedules._ComputationType}
    wanted = {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"}
    assert kinds >= wanted | {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}
    assert {kind.name for kind in SENDS} == {"SEND_F", "SEND_B"}
    runtime = schedules._PipelineScheduleRuntime
    assert callable(runtime._prepare_schedule_with_comms)
    source = inspect.getsource(runtime._prepare_schedule_with_comms)
    assert "pipeline_order_with_comms" in source
    assert str(schedules._Action.from_str("1F2")) == "1F2"
    assert str(schedules._Action.from_str("1RECV_B2")) == "1RECV_B2"


def test_stages_hold_what_they_receive_by_micro_batch() -> None:
    """They are asked for one micro-batch's, which is copied with another buffer for all of them."""
    base = stage._PipelineStageBase
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters)[1] == "num_microbatches"
    assert {"args_recv_info", "grad_recv_info", "chunks"} <= set(base.__init__.__code__.co_names)
    info = stage._RecvInfo("x", 0, torch.ones(2), None)
    other = copy.copy(info)
    other.buffer = torch.zeros(2)
    assert info.buffer is not None
    assert info.buffer.sum() == 2
    for name in ("backward_one_chunk", "backward_weight_one_chunk"):
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters)[1] == "bwd_chunk_id"
    assert inspect.signature(PipelineStage.backward_one_chunk).parameters["full_backward"].default is True


def test_a_batch_of_messages_is_known_by_its_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def send(*_: Any, **__: Any) -> None:
        sizes.append(batch_size(sys._getframe()))

    monkeypatch.setattr(dist, "isend", send)
    monkeypatch.setattr(dist.distributed_c10d, "isend", send)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 1) for _ in range(3)])
    finally:
        dist.destroy_process_group()
    send()
    assert sizes == [3, 3, 3, 1]


def test_names_of_graph_nodes() -> None:
    """By which casts of weights are told from activations."""
    weight = nn.Parameter(torch.ones(3, 2))
    views: dict[str, Any] = {
        "to": weight.to(torch.bfloat16),
        "t": weight.t(),
        "transpose": weight.transpose(0, 1),
        "permute": weight.permute(1, 0),
        "view": weight.view(6),
        "unsqueeze": weight.unsqueeze(0),
        "select": weight.select(0, 1),
        "slice": weight[1:],
    }
    assert {name: of_a_parameter(view) for name, view in views.items()} == dict.fromkeys(views, True)
    assert not of_a_parameter(weight * 2)


def test_the_engine_says_what_it_executes() -> None:
    seen: list[bool] = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.nodes = [x.grad_fn, y.grad_fn]
            return x + y

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.extend(torch._C._will_engine_execute_node(node) for node in ctx.nodes)
            assert torch._C._current_graph_task_id() != -1
            return gradients[0], gradients[0]

    one, two = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x, y = one * 2, two * 3
    total = Asking.apply(x, y).sum()
    torch.autograd.grad(total, one)
    assert seen == [True, False]
    assert torch._C._current_graph_task_id() == -1


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_registry_of_groups(alone: Any) -> None:
    assert torch_groups.living_groups() == [alone]
    assert torch_groups.known_ranks(alone) == [0]
    assert torch_groups.known_name(alone) == alone.group_name
    torch_groups.register("another name", alone)
    assert torch_groups.resolve("another name") == alone
    torch_groups.unregister("another name")
    with pytest.raises(RuntimeError):
        torch_groups.resolve("another name")
    torch_groups.store_of(alone).set("a key", "a value")
    assert callable(dist.distributed_c10d._abort_process_group)
    dist.all_reduce(torch.ones(1))
    assert isinstance(list(torch_groups.recorded_operations(places=False)), list)


def test_fsdp_pads_its_shards_when_it_is_told(alone: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,)))
    model._get_fsdp_state()._lazy_init()
    before = model.weight.to_local().data_ptr()
    model(torch.ones(1, 3)).sum().backward()
    model.reshard()
    assert model.weight.to_local().data_ptr() == before


def test_meshes_find_their_groups_by_name(alone: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group(alone, "cpu", mesh=[0], mesh_dim_names=("data",))
    assert isinstance(mesh._pg_registry, dict)
    assert list(mesh._dim_group_names) == [alone.group_name]


def test_a_pipelines_first_messages_can_be_left_out() -> None:
    from torch.distributed.pipelining import PipelineStage

    assert callable(PipelineStage._get_init_p2p_neighbors_ops)


def test_the_allocators_settings_can_be_changed() -> None:
    assert callable(torch._C._accelerator_setAllocatorSettings)


def test_the_compilers_limits_are_settings() -> None:
    import torch._dynamo
    from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported, UserError

    config = torch._dynamo.config
    assert isinstance(config.recompile_limit, int)
    assert isinstance(config.fail_on_recompile_limit_hit, bool)
    assert all(issubclass(kind, Exception) for kind in (FailOnRecompileLimitHit, Unsupported, UserError))


def test_a_product_can_be_added_to_a_wider_sum_in_place() -> None:
    """No kernel but CUDA's: `parallel.precision.wide_sums`."""
    schema = torch.ops.aten.addmm.dtype_out._schema
    names = [argument.name for argument in schema.arguments]
    assert names == ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"]
    total, a, b = torch.zeros(2, 3), torch.ones(2, 4).bfloat16(), torch.ones(4, 3).bfloat16()
    with pytest.raises(NotImplementedError, match=r"addmm\.dtype_out"):  # found, and not for a CPU
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def test_memory_is_registered_as_torch_itself_does_it() -> None:
    """Its binding is not in builds without CUDA: `train.page_locks` calls it as torch's own module does."""
    from torch.cuda import _pin_memory_utils as own

    assert "cudart" in torch.cuda.__all__
    assert issubclass(torch.cuda.CudaError, RuntimeError)
    taken = "".join(inspect.getsource(own.pin_memory).split())
    assert "cudart=torch.cuda.cudart()" in taken
    assert "int(cudart.cudaHostRegister(data_ptr,size,1," in taken
    given = "".join(inspect.getsource(own.unpin_memory).split())
    assert "int(torch.cuda.cudart().cudaHostUnregister(data_ptr))" in given
