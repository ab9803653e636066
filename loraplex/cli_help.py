"""What `--help` shows and in which groups, sizes as they are written, what an unknown command is answered with, and
options in errors of settings.

A settings dataclass says its groups at its fields (`config.setting(..., group="Memory")`): a field is in the group of
the one before it, the first one in the group of its class. So a new field belongs where it stands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter, UnknownCommandError

from loraplex.errors import shown

GROUPS = (
    "Model and adapters",
    "Server",
    "Security",
    "Limits",
    "Engine process",
    "Ray Serve",
    "Logging",
    "Observability",
    "Profile",
    "Model files",
    "Kernels",
    "Scheduling",
    "Memory",
    "Memory care",
    "Adapters",
    "Adapter memory",
    "Workload",
    "Fleet",
    "Service level",
)
"""In the order of the page. Others come after them."""


Flat = Parameter(name="*")
"""Of a settings dataclass: its fields are flags of the command."""

Listed = Parameter(consume_multiple=True)
"""Of a flag that takes several values."""


def help_group(name: str) -> Group:
    order = GROUPS.index(name) if name in GROUPS else len(GROUPS)
    return Group(name, sort_key=order)


def in_group(name: str) -> Parameter:
    """The annotation of a command's own parameter."""
    return Parameter(group=help_group(name))


def group_fields(settings: type, first_group: str) -> None:
    """Tell cyclopts the group of each field, and its flag where that is not the field's name: it reads annotations."""
    hints, group = get_type_hints(settings), first_group
    for each in fields(settings):
        group = each.metadata.get("group") or group
        flag = each.metadata.get("flag")
        annotation = Parameter(group=help_group(group), name=(flag,) if flag else None)
        settings.__annotations__[each.name] = Annotated[hints[each.name], annotation]


def group_engine_fields() -> None:
    """Of the settings that commands share."""
    from loraplex.config import EngineSettings, LoRAConfig

    group_fields(EngineSettings, "Model files")
    group_fields(LoRAConfig, "Adapter memory")


def shown_default(value: Any) -> str | None:
    """Sizes in MiB or GiB, and nothing for what is empty."""
    if value in ((), None):
        return None
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"{value >> 30}GiB" if value % 2**30 == 0 else f"{value >> 20}MiB"
    return str(value)


def parse_sizes(arguments: Sequence[str]) -> list[str]:
    """`--x-bytes 2GiB` and `--x-bytes=2GB` with the size as a whole number of bytes; other arguments as they are."""
    parsed: list[str] = []
    is_size = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if is_size:
            parsed.append(_bytes(argument))
        elif equals and flag.startswith("--") and flag.endswith("-bytes"):
            parsed.append(f"{flag}={_bytes(value)}")
        else:
            parsed.append(argument)
        is_size = not equals and argument.startswith("--") and argument.endswith("-bytes")
    return parsed


def _bytes(text: str) -> str:
    from loraplex.config import parse_bytes

    size = parse_bytes(text)
    return text if size is None else str(size)


def explain(error: CycloptsError | OSError, app: App) -> str:
    """The error in words. A command that is below another one (`inspect` for `adapter inspect`) is found, too.

    Of the system's errors those of a path that no check was about; raises all others again.
    """
    if isinstance(error, OSError):
        if error.filename is None:
            raise error
        return f"{shown(os.fsdecode(error.filename))}: {error.strerror}"
    given = error.unused_tokens[0] if isinstance(error, UnknownCommandError) and error.unused_tokens else None
    if given is None or error.app is not app or "Did you mean" in str(error):
        return str(error)
    nested = [path for path in command_paths(app) if len(path) > 1]
    nearest = get_close_matches(given, [path[-1] for path in nested], n=1, cutoff=0.75)
    meant = " or ".join(f'"{" ".join(path)}"' for path in nested if path[-1:] == tuple(nearest))
    return f'Unknown command "{given}". Did you mean {meant}?' if meant else str(error)


def with_options(text: str, command: App) -> str:
    """An error of settings, with each field as the option that sets it: `--max-loras`, not `max_loras`.

    A field of one word may be any word: it is taken for the field where it is what the error is about, at the start.
    """
    arguments = command.assemble_argument_collection()
    options = {each.field_info.name: each.name for each in arguments if each.name.startswith("--")}
    long = "|".join(re.escape(name) for name in options if "_" in name)
    short = "|".join(re.escape(name) for name in options if "_" not in name)
    field = re.compile(
        rf"(?<![\w.'\"/-])(?:{long or '(?!)'})(?![\w.'\"/-])|^(?:{short or '(?!)'})(?= must | is | needs | \()"
    )
    return field.sub(lambda match: options[match[0]], text)


def command_paths(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that does something."""
    for name in app:
        if not name.startswith("-"):
            child = app[name]
            yield from command_paths(child, (*path, name)) if child.default_command is None else [(*path, name)]
