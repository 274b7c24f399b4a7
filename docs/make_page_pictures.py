"""Make the pictures of the page in ``docs/_static``: of a run whose worker is killed, and from its storage.

    .venv/bin/python docs/make_page_pictures.py

Runs the packaged recipe ``quickstart`` for real, in a folder of its own, and looks at its page with Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

NAME = "quickstart"
OUTPUT = Path(__file__).parent / "_static"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
RECOVERED = "#chart-loss .failure"


@contextmanager
def served(folder: Path, word: str) -> Iterator[str]:
    """Serve a run's page; gives its address."""
    command = [sys.executable, "-m", "picotron_ray.cli", "dashboard", word, "--port", "0", "--json"]
    into = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=_env(folder), stdout=into, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGINT)


def _env(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state")}


def command(folder: Path, *words: str) -> None:
    """Run one of our commands, which must succeed."""
    subprocess.run([sys.executable, "-m", *words], cwd=folder, env=_env(folder), check=True)


@contextmanager
def opened(playwright: Any, url: str, size: tuple[int, int], scheme: str) -> Iterator[Page]:
    """Look at an address."""
    viewport = {"width": size[0], "height": size[1]}
    with tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path="/usr/bin/chromium",
            args=list(FLAGS),
            viewport=viewport,
            color_scheme=scheme,
        )
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector(RECOVERED, timeout=180_000, state="attached")
        page.wait_for_timeout(2500)
        yield page
        context.close()


def main() -> None:
    """Run, look, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output: Path = parser.parse_args().output.absolute()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        words = ["steps=600", "telemetry.interval_s=2"]
        command(folder, "picotron_ray.launch", NAME, *words, "--detach")
        with served(folder, NAME) as url, opened(playwright, url, (1100, 1180), "light") as page:
            page.wait_for_timeout(15_000)  # a replacement joins
            page.screenshot(path=output / "page-light.png")
        command(folder, "picotron_ray.cli", "stop", NAME)
        address = str(folder / "runs" / NAME)
        with served(folder, address) as url, opened(playwright, url, (390, 1000), "dark") as page:
            page.screenshot(path=output / "page-phone-dark.png")


if __name__ == "__main__":
    main()
