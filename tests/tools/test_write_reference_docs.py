"""tools/write_reference_docs.py: generated pages and pictures are up to date, and the recipes good plans."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.pages import ROOT

from megatron.common.errors import ConfigError

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def writer() -> Iterator[ModuleType]:
    """The tool, which plans its recipes once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import write_reference_docs

        found = list(write_reference_docs.recipes())
        patch.setattr(write_reference_docs, "recipes", lambda: found)
        yield write_reference_docs


def test_the_pages_are_up_to_date(writer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["write_reference_docs.py", "--output", str(tmp_path)])
    writer.main()
    written = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    stale = [str(name) for name, text in written.items() if (DOCS / name).read_text() != text]
    assert len(written) > 10 and not stale, "run python tools/write_reference_docs.py"


def test_an_output_that_is_no_folder_is_refused_before_any_work(
    writer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["write_reference_docs.py", "--output", str(tmp_path / "file")])
    monkeypatch.setattr(writer, "layouts", None)
    with pytest.raises(ConfigError, match="--output: .*file is not a folder; name another folder"):
        writer.main()


def test_recipes_fit_and_are_among_the_fastest_layouts(writer: ModuleType) -> None:
    """Each is a run that the rules allow; it fits on its GPUs, and no other layout is planned to be 5 % faster.

    But for one that leaves less than 12 of a GPU's 80 GB, of which nobody has measured how much fragmentation takes.
    """
    found = {recipe.script.stem: recipe for recipe in writer.recipes()}
    assert {"gpt-125m", "gpt-350m", "gpt-1.3b", "llama-1b", "llama-8b", "llama-70b"} < found.keys() and len(found) == 8
    for recipe in found.values():
        seconds = recipe.planned.timing.total
        fastest = next(other for other in recipe.others.fitting if other.memory.total < 68e9)
        assert recipe.planned.fits and seconds < 1.05 * fastest.timing.total, recipe.script
