"""The command `loraplex model inspect`. What it needs is imported when it runs."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import TYPE_CHECKING

from cyclopts import App

if TYPE_CHECKING:
    from loraplex.models.inspect import ModelReport

model_app = App(name="model", help="Look at base models.")


@model_app.command(name="inspect")
def inspect_base(model: str, /, *, revision: str | None = None, json: bool = False) -> int:
    """Say what a base model is and how it would be served, or why it is refused. Exit code 1 when it is.

    Reads its configuration and the headers of its weights, never the weights.

    Parameters
    ----------
    model
        Directory or hub id of the model.
    revision
        Revision of a hub model: a branch, tag or commit.
    json
        Output as JSON.
    """
    from loraplex.models.inspect import inspect_model

    report = inspect_model(model, revision)
    if json:
        print(json_module.dumps(asdict(report), indent=2))
    else:
        _show(report)
    return 0 if report.is_served else 1


def _show(report: ModelReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from loraplex.models.inspect import shown_bytes

    console = Console()
    console.print(report.describe(), markup=False, highlight=False, soft_wrap=True)
    if not report.forms:
        return
    table = Table("device", "kernels", "--quantization", "weights", "in memory", title="how it would be served")
    for form in report.forms:
        table.add_row(form.device, form.kernels, form.quantization, form.kept, shown_bytes(form.weight_bytes))
    console.print(table)
