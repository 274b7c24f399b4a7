"""README, CONTRIBUTING and docs/ name only what exists: paths, anchors, config keys, commands, tests."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from picotron_ray.cli import app
from picotron_ray.config.json_schema import key_schemas
from picotron_ray.config.load import parse_job
from tuning.commands import tune

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LEAST_CLAIMS = 50


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = page.read_text()
    for included in re.findall(r"```\{include\} (\S+)", text):
        text += (page.parent / included).read_text()
    return {slug(title) for title in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)}


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of a page to a file or heading that is not there."""
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, here\n[a](page.md#a-title-here) [b](gone.md) [c](#gone) [d](https://x.org/#y)\n"
    )
    assert list(broken_links(page)) == ["gone.md", "#gone"]


# What docs/ speaks of by a path; a placeholder in capitals or angle brackets is no path.
PATH = re.compile(r"(?:tests|picotron_ray|docs|deploy|docker|tuning)/[\w./-]*\w")


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=names)
def test_files_named_in_code_exist(page: Path) -> None:
    named = {
        path
        for code in CODE.findall(prose(page))
        for path in PATH.findall(code)
        if not re.search(rf"[\w:/.>]{re.escape(path)}", code)
    }
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


# --- claims ---------------------------------------------------------------------------------------------


def claims() -> list[tuple[str, str]]:
    """Every claim with its command."""
    lines = [line for line in (ROOT / "docs" / "claims.md").read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [(claim, command) for claim, command in rows if claim != "claim"]


def test_every_claim_has_a_command_that_names_existing_tests() -> None:
    found = claims()
    assert len(found) >= LEAST_CLAIMS
    for claim, command in found:
        if command == "the first command of the README":
            continue
        code = CODE.fullmatch(command)
        assert code, f"{claim}: {command} is no command"
        words = [word for word in shlex.split(code[1]) if "=" not in word]
        assert words[0] in ("pytest", "picotron-ray", "python", ".ci/long"), command
        paths = [word for word in words if "/" in word]
        assert paths or words[0] == "picotron-ray", command
        assert [path for path in paths if not (ROOT / path).exists()] == [], command


# --- words and examples ---------------------------------------------------------------------------------

WORDS = """
run term generation layout slot snapshot commit chunk ledger re-mesh incident stage micro-batch rank worker
agent coordinator driver storage store
"""


def test_the_glossary_has_the_words_of_the_service() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    glossary = re.search(r"```\{glossary\}\n(.*?)```", text, re.DOTALL)
    assert glossary is not None
    terms = re.findall(r"^(\S.*)$", glossary[1], re.MULTILINE)
    assert set(terms) >= set(WORDS.split())
    assert len(terms) == len(set(terms))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


# The guides show fragments of what they add, which their own tests run.
COMPLETE = [page for page in PAGES if not page.name.startswith("add-a-")]


@pytest.mark.parametrize("page", COMPLETE, ids=names)
def test_examples_are_python(page: Path) -> None:
    """Not raising is the claim."""
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", COMPLETE, ids=names)
def test_examples_of_configs_are_valid(page: Path) -> None:
    """Not raising is the claim."""
    for block in blocks(page, "yaml"):
        parse_job(yaml.safe_load(block))


# --- commands and keys ----------------------------------------------------------------------------------


def shell_lines(page: Path) -> Iterator[str]:
    """Our own commands in a page's shell blocks and in its prose, comments cut off."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()] + CODE.findall(prose(page))
    for line in lines:
        line = re.split(r"\s#\s|\s[>&|]", line + " ")[0].strip()
        if re.match(r"picotron-ray \w", line):
            yield line


def wrong_words(line: str) -> list[str]:
    """Words of a command line that are neither a command nor an option of it."""
    group = typer.main.get_command(app)
    group.commands["tune"] = typer.main.get_command(tune)  # an entry point brings it
    _, *words = line.split()
    while words and hasattr(group, "commands"):
        if words[0] not in group.commands:
            return [] if words[0] in ("…",) else [words[0]]
        group = group.commands[words.pop(0)]
    known = {
        option
        for parameter in getattr(group, "params", ())
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known.add("--help")
    return [word for word in words if word.startswith("-") and word not in known]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_and_options_exist(page: Path) -> None:
    assert {line: wrong_words(line) for line in shell_lines(page) if wrong_words(line)} == {}


def test_a_wrong_command_is_found() -> None:
    assert wrong_words("picotron-ray checkpoints list my.yaml") == ["list"]
    assert wrong_words("picotron-ray stop NAME --later") == ["--later"]
    assert wrong_words("picotron-ray checkpoints export-hf my.yaml --to OUT") == []


def unknown_keys(text: str) -> list[str]:
    """Dotted keys of a section of the config that the schema does not have."""
    keys = set(key_schemas())
    sections = {key.partition(".")[0] for key in keys if "." in key}
    return [
        found[0]
        for code in CODE.findall(text)
        if (found := re.match(r"([a-z_]+)\.[a-z_][a-z_0-9.]*(?=$|[\s=:])", code))
        and found[1] in sections
        and found[0] not in keys
        and not found[0].endswith((".py", ".md", ".json", ".yaml"))
    ]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=names)
def test_config_keys_exist(page: Path) -> None:
    assert unknown_keys(prose(page)) == []


def test_an_unknown_key_is_found() -> None:
    assert unknown_keys("`layout.tq` `layout.tp` `layout.tp=2` `model.safetensor: 1`") == [
        "layout.tq",
        "model.safetensor",
    ]


def test_no_text_installs_an_extra_from_an_index() -> None:
    """There is no release on one: what a reader has is a checkout."""
    sources = [path for folder in ("picotron_ray", "tuning") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in [*PAGES, *sources] if "install 'picotron-ray[" in path.read_text()] == []
