"""The table of checkpoint forms in docs/models.md is that of the code."""

from __future__ import annotations

from pathlib import Path

from loraplex.models.checkpoints.forms import FORMS
from loraplex.models.checkpoints.gguf import ARCHITECTURES
from loraplex.models.checkpoints.gguf_blocks import BLOCK_TYPES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
HEAD = "| form | `quant_method` | what is read | kept in its own integers |\n|---|---|---|---|\n"


def table() -> str:
    rows = [f"| {form.title} | `{method}` | {form.reads} | {form.keeps} |\n" for method, form in FORMS.items()]
    types = ", ".join(["floats", *(kind.name for kind in BLOCK_TYPES.values())])
    keeps = ", ".join(kind.name for kind in BLOCK_TYPES.values() if kind.bits)
    rows.append(f"| GGUF of {', '.join(ARCHITECTURES)} | | {types} | {keeps} |\n")
    return HEAD + "".join(rows)


def test_the_table_is_that_of_the_code() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), f"docs/models.md has to have:\n{table()}"
