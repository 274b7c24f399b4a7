"""Whether torch.compile can make one graph of each block of a user's own model, tried before a run starts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from picotron_ray.config.import_path import one_line
from picotron_ray.errors import ConfigError, LayoutError
from picotron_ray.parallel.compiled_code import CODE, compile_blocks


def check_compiles(module: nn.Module, tokens: Tensor, names: Sequence[str]) -> None:
    """Trace every block on ``tokens [batch, seq]``; no kernel is made.

    Raises:
        ConfigError: one line on the block that breaks, on what and where.
    """
    CODE.begin("inspection")
    blocks = {name: module.get_submodule(name) for name in names}
    compile_blocks(blocks, one_graph=True, backend="eager")
    try:
        module(tokens)
    except LayoutError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:  # noqa: BLE001 (of torch's compiler: the same tokens went through the module as it is)
        text = f"kernels.compile: saw true, but torch cannot trace the model's blocks: {one_line(error)}"
        raise ConfigError(f"{text}. Use false, or change the model") from None
    finally:
        for block in blocks.values():
            del block.forward
        CODE.drop()
