"""What the documentation names exists."""

from __future__ import annotations

import importlib
import json
import re
import runpy
from pathlib import Path

import pytest

import loraplex
from loraplex.events import EventKind

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "loraplex"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BESIDE = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]


def code_spans(page: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", page.read_text()))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name in ("architecture.md", "README.md") or page.parent.name == "adr"],
    ids=lambda p: p.name,
)
def test_files_that_are_named_exist(page: Path) -> None:
    named = {span for span in code_spans(page) if re.fullmatch(r"[\w./]+(\.py|/)", span)}
    missing = {name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())}
    renamed = {"openai_api.py"}  # the page says what became of it
    assert missing - renamed == set()


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_is_narrow_and_in_plain_words(page: Path) -> None:
    """Prose has the 120 columns of code; things of the code are its subjects, in the usual words."""
    text = page.read_text()
    assert [line for line in text.splitlines() if len(line) > 120] == []
    words = r"\b(nobody|somebody|whoever|whom|anew|for\s+ever|in\s+vain|farewell|makes?\s+way|gives?\s+way|unasked)\b"
    assert [match[0] for match in re.finditer(words, text, re.IGNORECASE)] == []


def test_the_eight_steps_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    life = text.split("## The life of a request")[1].split("## The parts")[0]
    assert re.findall(r"^(\d)\. ", life, re.MULTILINE) == list("12345678")


def test_pages_made_from_the_code_are_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_reference.py"))
    assert script["stale_pages"]() == [], "run scripts/write_reference.py"


def test_the_picture_shows_the_figures() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw_peers.py"))
    figures = ROOT / "docs" / "figures"
    assert (figures / "peers.svg").read_text() == script["svg"](json.loads((figures / "peers.json").read_text()))
    measured = (ROOT / "docs" / "performance.md").read_text()
    for engine in json.loads((figures / "peers.json").read_text())["engines"]:
        assert all(re.search(rf"\b{value}\b", measured) for value in engine["values"]), engine


def test_every_event_is_in_its_page() -> None:
    text = (ROOT / "docs" / "reference" / "events.md").read_text()
    assert re.findall(r"^- \*\*`(\w+)`\*\*", text, re.MULTILINE) == [kind.value for kind in EventKind]


def test_the_version_stands_in_one_place_and_the_citation_follows() -> None:
    assert f"\nversion: {loraplex.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_decisions_are_numbered_dated_and_listed() -> None:
    folder = ROOT / "docs" / "adr"
    pages = sorted(folder.glob("0*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    index = " ".join((folder / "index.md").read_text().split())
    for page in pages:
        title, _, date, *_ = page.read_text().splitlines()
        assert title.startswith(f"# {int(page.name[:4])}. "), page.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), page.name
        assert f"]({page.name}) {title.split('. ', 1)[1]}" in index, page.name


def test_every_page_is_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {
        str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md" and page.parent.name != "adr"
    }
    assert {page for page in pages if f": {page}\n" not in navigation} == set()


def test_every_target_of_the_names_page_can_be_imported() -> None:
    text = (ROOT / "docs" / "names.md").read_text()
    targets = re.findall(r"`(loraplex(?:\.\w+)+)`", text)
    assert len(targets) > 40
    for target in targets:
        resolve(target)


def resolve(dotted: str) -> object:
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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_hold(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
