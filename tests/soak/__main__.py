"""python -m tests.soak --seconds 600 --seed N: random requests, verbs, faults, kills; every answer compared.

Exit code 1 when anything was found; then the latest actions are in the log, and the same seed gives every worker the
same actions.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

from tests.fixtures import ModelZoo
from tests.soak.orders import GROUPS
from tests.soak.soak import Plan, Report, Soak
from tests.soak.world import make_world

NUM_FAMILIES = 12
NUM_VERSIONS = 3
NUM_PROMPTS = 18


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # thousands of refusals are logged by design
    groups = frozenset(filter(None, options.faults.split(",")))
    if not groups <= set(GROUPS):
        sys.exit(f"--faults takes {', '.join(GROUPS)}, not {', '.join(sorted(groups - set(GROUPS)))}")
    period_s = min(120.0, options.seconds / 3)
    plan = Plan(
        options.seconds, options.seed, kill_period_s=None if options.no_kills else period_s, fault_groups=groups
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        root = Path(folder)
        world = make_world(ModelZoo(root / "models"), NUM_FAMILIES, NUM_VERSIONS, NUM_PROMPTS)
        (root / "run").mkdir()
        report = asyncio.run(Soak(plan, world, root / "run").run())
    show(report, Console(width=140))
    if report.findings:
        log = Path(options.log)
        log.write_text("\n".join([f"seed {plan.seed}, {plan}", *report.findings, "", *report.ledger.latest, ""]))
        print(f"{len(report.findings)} findings; seed {plan.seed}; the latest actions are in {log}")
    return 1 if report.findings else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="", help=f"groups of faults to inject, with commas: {','.join(GROUPS)}")
    parser.add_argument("--no-kills", action="store_true", help="the engine process lives")
    parser.add_argument("--log", default="soak.log", help="where findings and the latest actions are written")
    return parser.parse_args()


def show(report: Report, console: Console) -> None:
    ledger = report.ledger
    actions = Table("action", "number", title=f"Soak of {report.plan.seconds:.0f} s, seed {report.plan.seed}")
    for action, number in sorted(ledger.actions.items()):
        actions.add_row(action, str(number))
    outcomes = Table("what", "outcomes")
    for what, counts in sorted(ledger.outcomes.items()):
        outcomes.add_row(what, ", ".join(f"{outcome} {number}" for outcome, number in counts.most_common()))
    numbers = Table("measure", "value")
    share = ledger.num_sure_tokens / max(1, ledger.num_compared_tokens)
    numbers.add_row("answers compared", f"{ledger.num_compared} ({share:.0%} of their tokens before a near tie)")
    numbers.add_row("answers with wrong tokens", str(ledger.num_wrong))
    numbers.add_row("kills of the engine", str(report.num_kills))
    for what, value in report.engine_counters.items():
        numbers.add_row(f"{what} (last engine)", f"{value:g}")
    for process, text in report.memory:
        numbers.add_row(f"memory of {process}", text)
    for table in (actions, outcomes, numbers):
        console.print(table)
    for finding in report.findings:
        console.print(f"FINDING {finding}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
