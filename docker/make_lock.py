"""Pin everything that the images install, with hashes: ``make lock``, or ``python docker/make_lock.py``.

uv resolves pyproject.toml once, with the extras of the images, for Linux on x86_64 and the Python of the
Dockerfile, against PyPI. The result is written in parts, since the CPU image takes another build of torch:

    common.txt   what both images install
    cuda.txt     torch from PyPI, and what only that build of it needs: CUDA, cuDNN, NCCL, Triton
    cpu.txt      the same torch from PyTorch's own index, by the hash of its wheel
    build.txt    what builds picotron-ray's wheel
    nvcc.txt     what builds flash-attn's as well: CUDA's compiler, of torch's version
    flash.txt    flash-attn as source, which PyPI has alone, and what it needs beside the above
    tools.txt    what lists (SBOM) and audits the rest

Versions that are pinned already stay, unless --upgrade is given or pyproject.toml rules them out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "docker" / "lock"
EXTRAS = ("hf", "fp8", "dashboard", "otel")
BUILD = ("hatchling",)
NVCC = (
    "ninja", "wheel", "nvidia-cuda-nvcc==13.0.*", "nvidia-cuda-cccl==13.0.*", "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
)  # fmt: skip
TOOLS = ("cyclonedx-bom>=7,<8", "pip-audit>=2.9,<3", "pip>=25.1")
CUDA_ONLY = re.compile(r"^(torch|triton|cuda-[a-z-]+|nvidia-(?!ml-py)[a-z0-9-]+)==")
"""What torch's CUDA build brings with it."""
FLASH = ("flash-attn>=2.7,<3", "einops")
HEAD = "# Made by `make lock` (docker/make_lock.py): do not edit.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--uv", default="uv", help="the program to resolve with")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument(
        "--torch-wheel",
        type=Path,
        metavar="FILE",
        help="torch's CPU wheel, as `pip download --no-deps --index-url https://download.pytorch.org/whl/cpu"
        " torch==VERSION+cpu` gives it: renews cpu.txt",
    )
    given = parser.parse_args()
    LOCK.mkdir(exist_ok=True)
    kept = [] if given.upgrade else [LOCK / "common.txt", LOCK / "cuda.txt"]
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    pins = entries(resolve(given.uv, [str(ROOT / "pyproject.toml"), *extras], kept))
    cuda = [pin for pin in pins if CUDA_ONLY.match(pin)]
    write("common.txt", [pin for pin in pins if pin not in cuda])
    write("cuda.txt", cuda)
    alone = ["--no-deps"]  # what else they need is in the other parts
    parts = {
        "build.txt": (BUILD, []),
        "nvcc.txt": (NVCC, alone),
        "tools.txt": (TOOLS, []),
        "flash.txt": (FLASH, alone),
    }
    for name, (wanted, options) in parts.items():
        before = [] if given.upgrade else [LOCK / name]
        write(name, entries(resolve(given.uv, ["-", *options], before, "\n".join(wanted))))
    (torch,) = [pin for pin in cuda if pin.startswith("torch==")]
    write_cpu(re.match(r"torch==(\S+)", torch)[1], given.torch_wheel)  # type: ignore[index]


def resolve(uv: str, sources: list[str], kept: list[Path], text: str | None = None) -> str:
    """Requirements with hashes, versions of the kept files preferred."""
    python = re.search(r"python:(\d+\.\d+)", (ROOT / "docker" / "Dockerfile").read_text())
    assert python is not None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "requirements.txt"
        out.write_text("".join(path.read_text() for path in kept if path.exists()))
        command = [uv, "pip", "compile", *sources, "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--python-version", python[1], "--python-platform", "x86_64-manylinux_2_28"]
        command += ["--quiet", "--no-config", "--output-file", str(out)]
        # Settings of a machine, such as a mirror's address, could end in the file.
        subprocess.run(command, input=text, text=True, check=True, env={**os.environ, "UV_NO_CONFIG": "1"})
        return out.read_text()


def entries(text: str) -> list[str]:
    """One string a package: its pin and its hashes, as they stand."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return [line for line in joined.splitlines() if line and not line.startswith(("#", "-"))]


def write(name: str, pins: list[str]) -> None:
    """Write pins with a hash a line."""
    (LOCK / name).write_text(HEAD + "".join(pin.replace(" --hash", " \\\n    --hash") + "\n" for pin in pins))


def write_cpu(version: str, wheel: Path | None) -> None:
    """Pin torch's CPU build, whose index gives no hash to uv: from a wheel at hand, else as it was."""
    path = LOCK / "cpu.txt"
    if wheel is None:
        if f"torch=={version}+cpu " not in path.read_text():
            raise SystemExit(f"{path.name} has another torch than {version}: give its wheel by --torch-wheel")
        return
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    write("cpu.txt", [f"torch=={version}+cpu --hash=sha256:{digest}"])


if __name__ == "__main__":
    main()
