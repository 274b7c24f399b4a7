"""Chromium for tests of the page: Debian's, driven by Playwright, with an empty profile."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("chromium", "fonts-dejavu-core")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-default-browser-check", "--disable-dev-shm-usage"),
)
WIDE, PHONE = (1280, 900), (360, 740)
KEYS = """() => [...document.querySelectorAll('a[href],button,input,select,summary,[tabindex="0"]')]
  .filter((e) => !e.disabled && e.checkVisibility({visibilityProperty: true}))
  .map((e, i) => { e.dataset.key = i; return `${i} ${e.tagName} ${e.id || e.ariaLabel}`; })"""


def program() -> str:
    """Path of Chromium, which root installs where it is absent; skips the test where that cannot be."""
    with open(Path(tempfile.gettempdir()) / "picotron-chromium.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if shutil.which("chromium") is None and os.geteuid() == 0 and shutil.which("apt-get"):
            env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for words in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
                apt = ["apt-get", "-qq", *words]
                subprocess.run(apt, check=True, timeout=400, capture_output=True, env=env)
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no Chromium on this machine: `apt-get install chromium`")
    return found


@dataclass
class Visit:
    """A page that was opened, and what its console said."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def hear(self, said: Any) -> None:
        """Take what the console says."""
        if said.type in ("error", "warning"):
            self.complaints.append(said.text)

    def open(self, url: str) -> None:
        """Open an address as from a link, with nothing kept from before."""
        self.page.goto("about:blank")
        self.page.goto(url)

    def violations(self) -> list[str]:
        """What axe-core finds wrong, a line each."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        places = {one["id"]: [node["html"][:120] for node in one["nodes"][:3]] for one in found}
        return [f"{one['id']}: {one['help']}: {places[one['id']]}" for one in found]

    def unreached(self) -> list[str]:
        """What can be used and the Tab key does not come to."""
        wanted = self.page.evaluate(KEYS)
        self.page.evaluate("() => { document.activeElement?.blur(); scrollTo(0, 0); }")
        reached = set()
        for _ in range(len(wanted) + 5):
            self.page.keyboard.press("Tab")
            reached.add(self.page.evaluate("() => document.activeElement?.dataset?.key"))
        return [line for line in wanted if line.partition(" ")[0] not in reached]

    def scrolls_sideways(self) -> bool:
        """Whether the page is wider than its window."""
        return bool(self.page.evaluate("() => document.documentElement.scrollWidth > innerWidth"))

    def text(self, selector: str) -> str:
        """Text of an element."""
        return str(self.page.inner_text(selector))

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return int(self.page.locator(selector).count())


@contextlib.contextmanager
def visit(size: tuple[int, int] = WIDE, scheme: str = "light") -> Iterator[Visit]:
    """Start Chromium with a new, empty profile."""
    from playwright.sync_api import sync_playwright

    path = program()
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=path,
            headless=True,
            args=list(FLAGS),
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,  # type: ignore[arg-type]
        )
        page = context.pages[0] if context.pages else context.new_page()
        found = Visit(page)
        page.on("console", found.hear)
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        yield found
        context.close()


@contextlib.contextmanager
def served(*words: str, env: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """The page's server as a process of its own: what it told, once it listens."""
    command = [sys.executable, "-m", "picotron_ray.cli", "dashboard", *words, "--port", "0", "--json"]
    environment = {**os.environ, **(env or {})}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        with process:
            assert process.stdout is not None
            line = process.stdout.readline()
            try:
                errors.seek(0)
                assert line, errors.read()
                yield json.loads(line)
            finally:
                process.terminate()
        errors.seek(0)
        said = errors.read()
    assert "Traceback" not in said, said
