"""The commands `loraplex state`. What they need is imported when they run."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

state_app = App(name="state", help="Check and repair the directory of --state-dir.")


@state_app.command(name="check")
def check_state(directory: Path, /) -> int:
    """Check the journal of a state directory, and say what a repair would do. Exit code 1 when something is damaged.

    Parameters
    ----------
    directory
        The --state-dir of a server that does not run now.
    """
    from loraplex.adapters.journal import repair

    report = repair.check_state(directory)
    print(report.describe())
    return 0 if report.is_whole else 1


@state_app.command(name="repair")
def repair_state(directory: Path, /) -> int:
    """Make a whole journal of what can be used of a state directory and its copies. What it replaces is kept in
    DIR/damaged.

    Parameters
    ----------
    directory
        The --state-dir of a server that does not run now.
    """
    from loraplex.adapters.journal import repair
    from loraplex.tenants.audit import recording

    with recording("state repair", directory):
        report = repair.repair_state(directory)
    print(report.describe())
    if report.is_whole:
        return 0
    print("repaired" if report.base_model is not None else "not repaired")
    return 0 if report.base_model is not None else 1
