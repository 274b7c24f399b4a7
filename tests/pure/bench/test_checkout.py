"""Code of a peer is imported from its checkout, whether or not what it never calls here is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from picotron_ray.bench.mfu.checkout import _stand_ins, import_checkout
from picotron_ray.errors import PicotronError

MODEL = """
import gone.language as language
from gone import Base
from rival.kernels import run

@language.jit(do_not_specialize=["rank"])
def kernel(): ...

class Loader(Base[int]):
    kind: language.constexpr = language.constexpr(3)

def train(): return "trained"
def load(): return Loader()
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "rival").mkdir()
    (tmp_path / "rival" / "__init__.py").touch()
    (tmp_path / "rival" / "model.py").write_text(MODEL)
    (tmp_path / "rival" / "kernels.py").write_text("import gone.driver\ndef run(): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "rival"]:
        del sys.modules[name]


def test_what_is_not_called_may_be_missing_and_refuses_to_be_called(checkout: Path) -> None:
    not_called = {"gone.language": "gone", "rival.kernels": "gone"}
    theirs = import_checkout("rival", checkout, {"model": "rival.model"}, not_called).model
    assert theirs.train() == "trained"
    assert sys.path[0] == str(checkout)  # it goes before what is installed
    for call, name in ((theirs.kernel, "gone.language.jit"), (theirs.load, "gone.Base")):
        with pytest.raises(PicotronError, match=rf"^rival: calls {name}, which is not installed$"):
            call()
    with pytest.raises(PicotronError, match=r"calls rival.kernels.run, which"):
        theirs.run()
    assert not {"gone", "gone.language", "rival.kernels"} & set(sys.modules)
    assert importlib.util.find_spec("gone") is None


def test_a_stand_in_is_there_during_the_import_alone(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    before = dict(sys.modules)
    not_called = {"gone.a.b": "gone", "gone.a.c": "gone", "rival.x.y": "gone", "json.tool": "json"}
    with _stand_ins("peer", not_called):
        added = {name: module for name, module in sys.modules.items() if name not in before}
        assert importlib.import_module("gone.a.b") is added["gone.a.b"]
    assert set(added) == {"gone", "gone.a", "gone.a.b", "gone.a.c", "rival.x.y"}
    assert not added.keys() & sys.modules.keys()


def test_a_module_that_is_there_is_not_replaced(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    standing = sys.modules["rival.kernels"] = ModuleType("rival.kernels")  # taken away with the checkout
    with _stand_ins("peer", {"rival.kernels": "gone"}):
        assert sys.modules["rival.kernels"] is standing
    assert sys.modules["rival.kernels"] is standing


def test_a_package_that_is_there_is_not_replaced(checkout: Path) -> None:
    (checkout / "gone").mkdir()
    (checkout / "gone" / "__init__.py").write_text("class Base(list): ...")
    (checkout / "gone" / "driver.py").touch()
    (checkout / "gone" / "language.py").write_text("constexpr = int\ndef jit(**named): return lambda f: f")
    try:
        not_called = {"gone.language": "gone", "rival.kernels": "gone"}
        theirs = import_checkout("rival", checkout, {"model": "rival.model"}, not_called).model
        assert theirs.load() == []
        assert theirs.kernel() is theirs.run() is None
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "gone"]:
            del sys.modules[name]


def test_what_it_needs_is_named_where_it_is_missing(checkout: Path) -> None:
    with pytest.raises(PicotronError, match=r"^rival: .* cannot be imported: No module named 'gone'"):
        import_checkout("rival", checkout, {"kernels": "rival.kernels"}, {})
    with pytest.raises(PicotronError, match=r"cannot be imported: No module named 'rival.missing'"):
        import_checkout("rival", checkout, {"missing": "rival.missing"}, {})
