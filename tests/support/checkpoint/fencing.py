"""Show that storage itself fences a coordinator that was stopped before its commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good
from picotron_ray.config.schema.service import StorageConfig
from tests.support.checkpoint.checkpoint_kit import generation, load, make_state, same, save


def check_stopped_writer_is_refused(config: StorageConfig, run: str, folder: Path, point: str) -> None:
    """Stop a writer before its commit, let the next term commit, wake the writer: it must be refused."""
    script = Path(__file__).with_name("stopped_writer.py")
    (folder / "old").mkdir()
    writer = subprocess.Popen(
        [sys.executable, str(script), config.model_dump_json(), run, str(folder / "old"), point],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")]),
        },
    )
    try:
        _, status = os.waitpid(writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the writer ended before it was stopped"
        storage = open_storage(config, run)
        log = RunLog(storage)
        assert log.claim_term("new") == 2
        assert log.commits() == []
        log.append("generation", generation(2, 1))
        save(storage, log, folder / "new", make_state(2), (2, 1, 3))
        os.kill(writer.pid, signal.SIGCONT)
        output, _ = writer.communicate(timeout=60)
    finally:
        writer.kill()
        writer.wait()
    assert writer.returncode == 7, output
    assert "FencedError" in output
    assert "holds term 2, this writer has term 1" in output
    fresh = RunLog(storage)
    fresh.refresh()
    assert [(entry.body["term"], entry.body["step"]) for entry in fresh.commits()] == [(2, 3)]
    good = latest_good(storage, fresh)
    assert good is not None
    assert same(load(storage, good.manifest), make_state(2))
