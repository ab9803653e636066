"""The table of families in docs/models.md is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from loraplex.models.families import FAMILIES, NOT_SERVED, Family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LINEARS = FAMILIES["llama"].linear_modules


def row(model_type: str, family: Family) -> str:
    name = f"`{model_type}`" + (f", `{family.text_of}`" if family.text_of else "")
    return f"| {' | '.join((name, *family.traits))} |".replace("|  |", "| |").replace("|  |", "| |")


def test_the_table_has_every_family() -> None:
    section = PAGE.read_text().partition("## Families\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")][1:]
    assert table == [row(*each) for each in sorted(FAMILIES.items())]


def test_the_page_names_linears_that_are_not_llamas_and_what_is_refused() -> None:
    page = PAGE.read_text()
    for model_type, family in FAMILIES.items():
        for module in {*family.linear_modules} - {*LINEARS}:
            assert re.search(rf"`{model_type}`[^.]*`{module}`", page), (model_type, module)
    for model_type in NOT_SERVED:
        assert f"`{model_type}`" in page


def test_a_family_is_data_of_fewer_than_sixty_lines() -> None:
    source = (PAGE.parents[1] / "loraplex" / "models" / "families.py").read_text()
    entries = source.partition("FAMILIES: dict[str, Family] = {\n")[2].partition("\n}\n")[0]
    assert max(len(entry.splitlines()) for entry in re.split(r'(?m)^    (?="\w+": Family\()', entries)) < 60
