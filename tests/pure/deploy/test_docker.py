"""docker/: images are pinned, run as a user that is not root, copy only what exists. Nothing is built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction and its arguments; continued lines joined, comments dropped."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, arguments in instructions(text):
        if name == "FROM":
            found[arguments.split()[-1]] = [(name, arguments)]
        elif found:
            found[list(found)[-1]].append((name, arguments))
    return found


def problems(text: str) -> list[str]:
    """What is wrong with the Dockerfile."""
    found = []
    base = dict(instructions(text))["ARG"].removeprefix("PYTHON=")
    version = re.fullmatch(
        r"docker\.io/library/python:(\d+\.\d+\.\d+)-slim-bookworm(@sha256:[0-9a-f]{64})?", base
    )
    if version is None or version[1] not in SpecifierSet(PROJECT["project"]["requires-python"]):
        found.append(f"base image {base}")
    for name, arguments in instructions(text):
        if name == "FROM" and arguments.split()[0] not in {"${PYTHON}", *stages(text)}:
            found.append(f"FROM {arguments}")
        if name == "RUN" and "pip install" in arguments:
            packages = [word for word in arguments.split() if re.fullmatch(r"[a-z][a-z0-9-]*(==\S+)?", word)]
            named = set(packages) - {"pip", "install", "check"}
            found += [f"{package} without a version" for package in named if "==" not in package]
    for target in ("cpu", "cuda"):
        user = [arguments for name, arguments in stages(text)[target] if name == "USER"][-1:]
        if user != ["1000:1000"] or stages(text)[target][-1][0] != "USER":
            found.append(f"{target} ends as {user}")
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_dockerfile_is_sound() -> None:
    assert problems(DOCKERFILE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3.11.15-slim-bookworm", "latest"),
        ("3.11.15-slim-bookworm", "3.10.14-slim-bookworm"),
        ("USER 1000:1000\n", ""),
        ("USER 1000:1000", "USER root"),
        ("torch==2.13.0", "torch"),
        ("FROM base AS cuda", "FROM nvidia/cuda AS cuda"),
    ],
)
def test_a_planted_mistake_is_found(old: str, new: str) -> None:
    assert problems(DOCKERFILE.read_text().replace(old, new))


def test_what_is_copied_exists_and_is_let_through() -> None:
    allowed = set(re.findall(r"^!(\S+)$", DOCKERFILE.with_suffix(".dockerignore").read_text(), re.MULTILINE))
    assert {
        "pyproject.toml",
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
        *WHEEL,
    } <= allowed
    assert [name for name in allowed if not (ROOT / name).exists() and name not in WHEEL] == []
    copied = [
        arguments.split()[0] for name, arguments in instructions(DOCKERFILE.read_text()) if name == "COPY"
    ]
    assert set(copied) <= {".", *allowed}


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    for text in PROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        assert pinned[requirement.name] in requirement.specifier, text


def test_torch_is_pinned_once() -> None:
    assert set(re.findall(r"torch==(\S+)", DOCKERFILE.read_text())) == {pins()["torch"]}


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([str(HADOLINT), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
