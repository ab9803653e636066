"""What the documentation names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "loraplex"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def code_spans(page: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", page.read_text()))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name in ("architecture.md", "README.md")], ids=lambda p: p.name
)
def test_files_that_are_named_exist(page: Path) -> None:
    named = {span for span in code_spans(page) if re.fullmatch(r"[\w./]+(\.py|/)", span)}
    missing = {name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())}
    renamed = {"openai_api.py"}  # the page says what became of it
    assert missing - renamed == set()


def test_the_eight_steps_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    life = text.split("## The life of a request")[1].split("## The parts")[0]
    assert re.findall(r"^(\d)\. ", life, re.MULTILINE) == list("12345678")


def test_every_part_is_in_the_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    parts = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    parts |= {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert {part for part in parts if f"`{part}`" not in text} == set()


def test_every_target_of_the_names_page_can_be_imported() -> None:
    text = (ROOT / "docs" / "names.md").read_text()
    targets = re.findall(r"`(loraplex(?:\.\w+)+)`", text)
    assert len(targets) > 40
    for target in targets:
        _resolve(target)


def _resolve(dotted: str) -> object:
    """`loraplex.a.b.Class.method`: the longest module, then attributes."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{dotted} cannot be imported")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_hold(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
