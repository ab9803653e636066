"""The command `loraplex`: serve, route, generate, demo, bench, profile, calibrate, simulate, plan, and some more.

Flags, defaults and help come from the fields of the config dataclasses. Sizes may be written 512MiB, 2GiB or 4GB. The
module of a command is imported when it is called, or asked for its help; what it needs, when it runs. So the help of
all commands stands here, word for word that of the command, and imports no settings.
"""

from __future__ import annotations

import sys
from functools import reduce
from operator import getitem

from cyclopts import App, CycloptsError, Parameter

from loraplex import __version__
from loraplex.cli_help import explain, parse_sizes, shown_default, with_options
from loraplex.errors import LoraplexError

COMMANDS = (
    ("adapter", "loraplex.commands.adapters:adapter_app", "Look at adapters, and make new ones of them."),
    ("state", "loraplex.commands.state:state_app", "Check and repair the directory of --state-dir."),
    (
        "calibrate",
        "loraplex.twin.commands:calibrate",
        "Measure what steps and loads take here, for `simulate` and `plan`. Give the settings that the server will "
        "have, and leave the machine alone meanwhile.",
    ),
    (
        "simulate",
        "loraplex.twin.commands:simulate",
        "Say how a server would fare under a workload: throughput, waiting, hits, evictions; without a model or a "
        "device.",
    ),
    (
        "plan",
        "loraplex.twin.commands:plan",
        "Say how many devices a service level takes, and which budgets. Exit code 1 when no size that it looks at "
        "holds.",
    ),
    (
        "tenant",
        "loraplex.tenants.commands:tenant_app",
        "Tenants of a server: what each may load, use and see.",
    ),
    ("key", "loraplex.tenants.commands:key_app", "API keys of a server's tenants and operators."),
    ("model", "loraplex.models.commands:model_app", "Look at base models."),
    (
        "serve",
        "loraplex.commands.serving:serve",
        "Serve a model and its adapters over HTTP, as OpenAI's and vLLM's clients expect.",
    ),
    (
        "route",
        "loraplex.commands.route:route",
        "One address in front of several servers of the same base model: each request goes to one, verbs to all.",
    ),
    (
        "generate",
        "loraplex.commands.offline:generate",
        "Complete prompts with a model and, if given, an adapter, without a server.",
    ),
    (
        "demo",
        "loraplex.commands.serving:demo",
        "Answer a mixed batch with one base model and eleven adapters, and check every answer.",
    ),
    (
        "bench",
        "loraplex.commands.offline:bench",
        "Measure the offline engine on a closed batch of random prompts. Prefix caching is on unless you turn it off.",
    ),
    (
        "profile",
        "loraplex.commands.offline:profile",
        "Say where the time of a step goes: schedule, build, GEMM, LoRA, attention; or, with --url, how a running "
        "server's adapters fare.",
    ),
    (
        "top",
        "loraplex.commands.watching:top",
        "Watch a running server: throughput, latency, tiers, chunks, adapters, events. Ctrl-C ends it.",
    ),
    (
        "doctor",
        "loraplex.commands.watching:doctor",
        "Say what is installed, which kernels run here and why, and in which form a running server has its model.",
    ),
)
"""Name, where it is, and its help: the first paragraph of its docstring, which a test compares."""

app = App(
    name="loraplex",
    version=__version__,
    help="One base model in memory, thousands of LoRA adapters, any mix of them in one batch.",
    help_format="plaintext",
    default_parameter=Parameter(negative_iterable=(), show_default=shown_default),
)
for _name, _place, _help in COMMANDS:
    app.command(_place, name=_name, help=_help)


def main() -> None:
    """Entry point: the exit code of the command. An error is a line on stderr, without a traceback, and exit code 1."""
    try:
        sys.exit(app(parse_sizes(sys.argv[1:]), exit_on_error=False, print_error=False))
    except (CycloptsError, OSError) as error:
        text = explain(error, app)
    except LoraplexError as error:
        text = with_options(str(error), reduce(getitem, app.parse_commands(sys.argv[1:])[0], app))
    except KeyboardInterrupt:
        sys.exit(130)
    from loraplex.logs import printable

    print("error: " + "\n".join(map(printable, text.split("\n"))), file=sys.stderr)
    sys.exit(1)
