"""docker/: images are pinned, run as a user that is not root, copy only what exists. Nothing is built."""

from __future__ import annotations

import os
import re
import runpy
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
LOCK = ROOT / "docker" / "lock"
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


def pip_commands(arguments: str) -> list[str]:
    """The commands of pip that install or build, of one RUN."""
    return re.findall(r"pip (?:install|wheel) .*?(?=&&|$)", arguments)


def loose(command: str) -> bool:
    """Whether a command of pip may take what the lock does not name: no hashes, no wheel of ours."""
    locked = "--require-hashes --requirement /" in re.sub(r"--index-url \S+\s+", "", command)
    ours = command.split()[-1] in ("/wheels/*.whl", ".") and "--no-deps" in command
    return not (locked or ours)


def problems(text: str) -> list[str]:
    """What is wrong with the Dockerfile."""
    found = []
    base = next(arguments for name, arguments in instructions(text) if name == "ARG").removeprefix("PYTHON=")
    version = re.fullmatch(
        r"docker\.io/library/python:(\d+\.\d+\.\d+)-slim-bookworm(@sha256:[0-9a-f]{64})?", base
    )
    if version is None or version[1] not in SpecifierSet(PROJECT["project"]["requires-python"]):
        found.append(f"base image {base}")
    for name, arguments in instructions(text):
        if name == "FROM" and arguments.split()[0] not in {"${PYTHON}", *stages(text)}:
            found.append(f"FROM {arguments}")
        if name == "RUN":
            found += [
                f"not from the lock: {command}" for command in pip_commands(arguments) if loose(command)
            ]
    if not [arguments for name, arguments in stages(text)["base"] if name == "HEALTHCHECK"]:
        found.append("no health check")
    for target in ("cpu", "cuda"):
        if not any("sbom.cdx.json" in arguments for _, arguments in stages(text)[target]):
            found.append(f"{target} has no list of what it holds")
        user = [arguments for name, arguments in stages(text)[target] if name == "USER"][-1:]
        if user != ["1000:1000"] or stages(text)[target][-1][0] != "USER":
            found.append(f"{target} ends as {user}")
    return found


def entries(name: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package of a part of the lock."""
    text = re.sub(r" \\\n\s*", " ", (LOCK / name).read_text())
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {
        word.partition("==")[0]: (word.partition("==")[2], [part.removeprefix("--hash=") for part in hashes])
        for word, *hashes in lines
    }


def test_the_dockerfile_is_sound() -> None:
    assert problems(DOCKERFILE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3.11.15-slim-bookworm", "latest"),
        ("3.11.15-slim-bookworm", "3.10.14-slim-bookworm"),
        ("USER 1000:1000\n", ""),
        ("USER 1000:1000", "USER root"),
        ("--require-hashes --requirement", "--requirement"),
        ("--no-deps --require-hashes --requirement /opt/picotron/lock/cuda.txt", "torch"),
        ("FROM base AS cuda", "FROM nvidia/cuda AS cuda"),
        ("HEALTHCHECK", "LABEL a="),
    ],
)
def test_a_planted_mistake_is_found(old: str, new: str) -> None:
    assert old in DOCKERFILE.read_text()
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
        arguments.split()[0]
        for name, arguments in instructions(DOCKERFILE.read_text())
        if name == "COPY" and not arguments.startswith("--from")
    ]
    assert {"docker/lock" if word.startswith("docker/lock/") else word for word in copied} <= {".", *allowed}


def images_extras() -> set[str]:
    """The extras that the lock was made with."""
    return set(runpy.run_path(str(ROOT / "docker" / "make_lock.py"))["EXTRAS"])


def test_the_readme_says_which_extras_the_images_hold() -> None:
    text = (ROOT / "deploy" / "README.md").read_text().partition("## What the images hold")[2]
    rows = dict(re.findall(r"^\| (`.*) \| (both|`cuda` alone|neither) \|$", text, re.MULTILINE))
    said = {where: set(re.findall(r"`([\w-]+)`", names)) for names, where in rows.items()}
    locked = images_extras() | {"8bit"}  # the same package as fp8's
    others = {"test", "docs", "dev"}
    assert said["both"] == locked
    assert said["`cuda` alone"] == {"flash"}
    assert said["neither"] == set(PROJECT["project"]["optional-dependencies"]) - locked - {"flash"} - others


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = entries("common.txt") | entries("cuda.txt")
    extras = PROJECT["project"]["optional-dependencies"]
    locked = images_extras()
    assert {"hf", "fp8", "dashboard", "otel"} <= locked
    for text in (*PROJECT["project"]["dependencies"], *(text for extra in locked for text in extras[extra])):
        requirement = Requirement(text)
        assert pinned[requirement.name][0] in requirement.specifier, text
    (flash,) = map(Requirement, extras["flash"])
    assert entries("flash.txt")["flash-attn"][0] in flash.specifier


@pytest.mark.parametrize("name", sorted(path.name for path in LOCK.iterdir()))
def test_every_pin_has_hashes_and_names_no_place(name: str) -> None:
    found = entries(name)
    assert found
    for package, (version, hashes) in found.items():
        assert version, package
        assert hashes, package
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", word) for word in hashes), package
    assert "://" not in (LOCK / name).read_text()


def test_images_differ_in_torchs_build_alone() -> None:
    (cpu,) = entries("cpu.txt").items()
    assert (cpu[0], cpu[1][0]) == ("torch", entries("cuda.txt")["torch"][0] + "+cpu")
    assert not {*entries("cuda.txt")} & {*entries("common.txt")}
    assert "nvidia-ml-py" in entries("common.txt"), "a dependency of ours, not of torch's"


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([str(HADOLINT), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
