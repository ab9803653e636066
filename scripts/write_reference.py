"""Writes the pages of docs/ that are made from the code: the command line, metrics, errors, and the parts.

    python scripts/write_reference.py           writes docs/reference/{cli,metrics,errors}.md and docs/design/parts.md
    python scripts/write_reference.py --check   says which are not current, with exit code 1

A test runs the check, so a page never falls behind.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from cyclopts import App, Argument
from prometheus_client.core import Metric

from loraplex import errors
from loraplex.cli import app
from loraplex.cli_help import command_paths, shown_default
from loraplex.metrics import EngineStats, RunnerReport
from loraplex.router.metrics import RouterMetrics
from loraplex.server.config import ServerConfig
from loraplex.server.connections import Connections
from loraplex.server.metrics_page import MetricsPage
from loraplex.server.telemetry.series import RequestSeries

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "loraplex"
NOTE = "<!-- Made by scripts/write_reference.py. -->\n"


def paragraph(text: str, first: str = "", then: str = "") -> list[str]:
    """A text in lines of at most 120 columns."""
    text = " ".join(text.split())
    return textwrap.wrap(
        text, 120, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def item(text: str) -> list[str]:
    return paragraph(text, "- ", "  ")


# ------------------------------------------------------------------------------------------------------- command line


def arguments_of(command: App) -> list[Argument]:
    collection = command.assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)
    return [argument for argument in collection if argument.show]


def cli_page() -> str:
    lines = ["# Command line", "", NOTE, "`loraplex COMMAND --help` says the same in a terminal.", ""]
    for path in command_paths(app):
        command = reduce(lambda parent, name: parent[name], path, app)
        lines += [f"## `loraplex {' '.join(path)}`", "", *paragraph(_summary(command)), ""]
        lines += [line for argument in arguments_of(command) for line in item(_option(argument))]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _summary(command: App) -> str:
    """The help of a command without its parameters, which follow."""
    return " ".join(re.split(r"\n\s*Parameters\s*\n\s*---", command.help or "")[0].split())


def _option(argument: Argument) -> str:
    names = "`, `".join(name for name in argument.names if not name.startswith("--no-"))
    help_text = argument.parameter.help or ""
    return f"**`{names}`**{_default(argument)}: {help_text}"


def _default(argument: Argument) -> str:
    default = argument.field_info.default
    shown = None if default is inspect.Parameter.empty else shown_default(default)
    return f" (default: {shown})" if shown else ""


# ------------------------------------------------------------------------------------------------------------ metrics


def metrics_page() -> str:
    connections = Connections(ServerConfig(), max_open=1)
    page = MetricsPage("model", connections, series=RequestSeries(1, 1))
    reports = [RunnerReport("0", "cpu", stats=EngineStats()), RunnerReport("1", "cpu")]
    families = page.families(EngineStats(), {}, reports=reports)
    lines = ["# Metrics", "", NOTE, "`GET /metrics`, in Prometheus' text format.", ""]
    lines += ["Every series has the labels `model_name` and `engine`, and those in brackets."]
    lines += ["The name of a counter ends in `_total` there. `loraplex:runner_*` are there with several runners.", ""]
    lines += [line for family in families for line in item(_metric(family))]
    lines += ["", "## `loraplex route`", "", "The router's own, without those labels:", ""]
    of_router = RouterMetrics((), connections, int).families()
    return "\n".join([*lines, *(line for family in of_router for line in item(_metric(family))), ""])


def _metric(family: Metric) -> str:
    labels = [label for label in getattr(family, "_labelnames", ()) if label not in ("model_name", "engine")]
    shown = "".join(f"{{{label}}}" for label in labels)
    return f"**`{family.name}{shown}`** ({family.type}): {family.documentation}"


# ------------------------------------------------------------------------------------------------------------- errors


def errors_page() -> str:
    lines = ["# Errors", "", NOTE]
    lines += ["Every error that Loraplex raises is a `loraplex.LoraplexError`. Over HTTP the answer is"]
    lines += [
        '`{"error": {"message", "type", "param", "code"}}` with the status below; indentation shows which class is'
        " which",
        "one's parent.",
        "",
        "| class | status | type |",
        "|---|---|---|",
    ]
    lines += list(_error_rows(errors.LoraplexError, 0))
    return "\n".join([*lines, "", "What each means stands in the tree:", "", "```", *_tree(), "```", ""])


def _error_rows(of: type[errors.LoraplexError], depth: int) -> Iterator[str]:
    yield f"| {'&emsp;' * depth}`{of.__name__}` | {of.http_status} | `{of.kind}` |"
    for child in of.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _error_rows(child, depth + 1)


def _tree() -> list[str]:
    text = (errors.__doc__ or "").split("\n\n")[1]
    return [line.removeprefix("    ") for line in text.splitlines()]


# -------------------------------------------------------------------------------------------------------------- parts


def parts_page() -> str:
    lines = ["# The parts", "", NOTE, "Every file by its first line. Imports go one way, in the order of"]
    lines += ["`tests/test_architecture.py`. [The life of a request](../architecture.md) shows the parts at work.", ""]
    for folder in [PACKAGE, *sorted({path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE})]:
        name = "loraplex/" if folder == PACKAGE else f"{folder.relative_to(PACKAGE)}/"
        files = [path for path in sorted(folder.glob("*.py")) if path.name not in ("__init__.py", "__main__.py")]
        lines += [f"## `{name}`", "", *paragraph(_first_line(folder / "__init__.py")), ""]
        lines += [line for path in files for line in item(f"`{path.name}`: {_first_line(path)}")]
        lines += [""] if files else []
    return "\n".join(lines).rstrip() + "\n"


def _first_line(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    return " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())


PAGES: dict[str, Any] = {
    "reference/cli.md": cli_page,
    "reference/metrics.md": metrics_page,
    "reference/errors.md": errors_page,
    "design/parts.md": parts_page,
}


def stale_pages() -> list[str]:
    return [name for name, make in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != make()]


def main() -> int:
    stale = stale_pages()
    if "--check" in sys.argv[1:]:
        print("\n".join(f"docs/{name} is not current: run scripts/write_reference.py" for name in stale))
        return int(bool(stale))
    for name in stale:
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(PAGES[name]())
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
