"""Private interfaces of torch: each is used by one module and stands in this list.

``tests/gloo/comm/test_torch_interfaces.py`` fails where torch changes one.

A name is private where it, or a module on the way to it, begins with an underscore. What is public to whoever
writes operators (``torch.ops.aten`` without an underscore, ``torch._foreach_*``) is not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "picotron_ray"
USED: dict[str, set[str]] = {
    "bench/mfu/torchtitan.py": {"torch._dynamo.config.load_config", "torch._dynamo.config.save_config"},
    "bench/rendezvous_calls.py": {"torch.testing._internal.distributed.fake_pg"},
    "comm/abortable_wait.py": {"torch._C._distributed_c10d.OpType", "torch._C._distributed_c10d.Work"},
    "comm/torch_groups.py": {
        "distributed_c10d._abort_process_group",
        "distributed_c10d._get_process_group_store",
        "distributed_c10d._resolve_process_group",
        "distributed_c10d._world.pg_group_ranks",
        "distributed_c10d._world.pg_map",
        "distributed_c10d._world.pg_names",
        "torch._C._distributed_c10d._register_process_group",
        "torch._C._distributed_c10d._unregister_process_group",
    },
    "parallel/attention/flash_operators.py": {
        "torch.ops.aten._flash_attention_backward",
        "torch.ops.aten._flash_attention_forward",
    },
    "parallel/attention/lse_kernels.py": {
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "parallel/attention/lse_kernels_cuda.py": {
        "torch.ops.aten._scaled_dot_product_cudnn_attention",
        "torch.ops.aten._scaled_dot_product_cudnn_attention_backward",
        "torch.ops.aten._scaled_dot_product_efficient_attention",
        "torch.ops.aten._scaled_dot_product_efficient_attention_backward",
    },
    "parallel/compiled_code.py": {
        "torch._dynamo.config.fail_on_recompile_limit_hit",
        "torch._dynamo.config.recompile_limit",
        "torch._dynamo.exc.BackendCompilerFailed",
        "torch._dynamo.exc.FailOnRecompileLimitHit",
        "torch._dynamo.exc.Unsupported",
        "torch._dynamo.exc.UserError",
        "torch._dynamo.reset",
    },
    "parallel/loss/linear_cross_entropy.py": {"torch._C._will_engine_execute_node"},
    "parallel/memory/activation_checkpointing.py": {
        "torch.ops.profiler._record_function_enter_new.default",
        "torch.ops.profiler._record_function_exit._RecordFunction",
    },
    "parallel/memory/trace.py": {"torch._C._current_graph_task_id"},
    "parallel/pipeline/schedule_runtime.py": {
        "torch.distributed.pipelining.schedules._Action",
        "torch.distributed.pipelining.schedules._ComputationType",
        "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    },
    "parallel/tensor/symmetric_memory.py": {"torch.distributed._symmetric_memory"},
    "runtime/worker/allocator.py": {"torch._C._accelerator_setAllocatorSettings"},
    "runtime/worker/compile_phase.py": {
        "torch._dynamo.callback.CallbackArgs",
        "torch._dynamo.callback.callback_handler",
    },
    "runtime/worker/tools/profiler.py": {"torch.profiler._KinetoProfile"},
    "runtime/worker/worker.py": {"torch._dynamo"},
    "train/dry_run/even_routes.py": {"torch.ops.aten._local_scalar_dense.default"},
    "train/dry_run/run.py": {
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.testing._internal.distributed.fake_pg.FakeStore",
    },
}
"""By module below the package."""


ROOTS = ("torch", "dist", "distributed_c10d")
"""Names under which modules know torch's."""
SHARED = {"torch._subclasses.fake_tensor.FakeTensorMode", "torch._subclasses.fake_tensor.FakeTensor"}
"""What several modules may use: documented, and used by everybody who traces."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that begin with ``torch`` and have a private part, and modules that are imported so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name is not None and is_private(name):
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (name for alias in node.names if is_private(name := f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def is_private(name: str) -> bool:
    first, *parts = name.split(".")
    public = ("_foreach_", "_pytree", "_python_dispatch", "__")
    return first in ROOTS and any(part.startswith("_") and not part.startswith(public) for part in parts)


def test_each_private_interface_is_used_where_the_list_says() -> None:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        names = set(private_names(ast.parse(path.read_text())))
        longest = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
        if longest:
            found[path.relative_to(PACKAGE).as_posix()] = longest
    assert found == USED


def test_no_two_modules_use_one() -> None:
    every = [name for names in USED.values() for name in names - SHARED]
    assert len(every) == len(set(every))
