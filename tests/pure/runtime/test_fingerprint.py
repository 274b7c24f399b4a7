"""Fingerprints cover what they speak for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from picotron_ray.runtime.ray_cluster import fingerprint


def test_a_change_in_any_package_changes_the_packages_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes with other code anywhere in the package may not take part in a run."""
    of = fingerprint.package_fingerprint.__wrapped__
    copy = tmp_path / "picotron_ray"
    shutil.copytree(fingerprint.package_folder(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = of()
    monkeypatch.setattr(fingerprint, "package_folder", lambda: copy)
    assert of() == before, "a copy elsewhere is the same package"
    packages = [path.parent for path in copy.glob("*/__init__.py")]
    assert len(packages) > 8
    for folder in (copy, *packages):
        added = folder / "added.py"
        added.write_text("")
        assert of() != before, folder.name
        added.unlink()
