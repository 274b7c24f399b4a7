"""The site builds with warnings as errors, and a planted mistake fails the build. Needs the extra ``docs``.

Sphinx runs in a process of its own: it imports what it documents, Ray and torch included.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STRICT = ["-W", "-n", "--keep-going", "-E", "-q"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="the extra docs is not installed"
)


def build(source: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", *STRICT, *options, str(source), str(output)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "docs", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    configuration = (tmp_path / "configuration.html").read_text()
    assert 'id="key-layout-memory-budget-gib"' in configuration
    assert "device memory that a worker may take" in configuration
    assert "picotron-ray checkpoints export-hf" in (tmp_path / "cli.html").read_text()
    assert "picotron_ray.ElasticTrainer" in (tmp_path / "api.html").read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[there](#not-there)", "not-there"),
        ("[there](gone.md)", "gone.md"),
        ("{term}`not a word`", "not a word"),
        ("{confval}`layout.tq`", "layout.tq"),
    ],
)
def test_a_mistake_fails_the_build(tmp_path: Path, line: str, said: str) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    shutil.copytree(ROOT / "docs" / "_ext", source / "_ext")
    shutil.copytree(ROOT / "docs" / "_static", source / "_static")
    text = (ROOT / "docs" / "conf.py").read_text().replace("HERE.parent)", f"{str(ROOT)!r})")
    (source / "conf.py").write_text(text)
    (source / "index.md").write_text(f"# Index\n\n{line}\n")
    done = build(source, tmp_path / "html", "-b", "dummy")
    assert done.returncode != 0
    assert said in done.stderr
