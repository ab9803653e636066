"""Merges in a process of their own: `MergeProcess` here, `main` over there.

A thread of the server cannot have a lower priority than the engine: Linux weighs sessions against each other before
threads (autogroups), and a thread of low priority that holds the interpreter's lock would hold up the server. So the
process has a session of the least priority for itself, and one thread.

A message is a line of JSON. The process ends when its input does, after KEEP_S without a merge, or with the server.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex import logs
from loraplex.adapters.merging.wish import MergeWish
from loraplex.adapters.source import AdapterSource
from loraplex.errors import LoraplexError, RequestAbortedError, error_from_payload
from loraplex.processes.environment import child_environment, leave_to_parent

if TYPE_CHECKING:
    from loraplex.adapters.merging.merge import MergePlan

KEEP_S = 60.0
"""To import torch takes longer than to merge two adapters."""

LOWEST_PRIORITY = 19
"""The nice value of the process and of its session: the engine's get some 70 times their share of a core."""

STARTING_PRIORITY = 10
"""While it imports what it needs, once: a tenth of a core that others want."""

LEAST_SHARE = 0.8
"""Of a core: a part of a merge that had less of it waited for others."""

RESTS_FOR_WORK = 9
"""Seconds of rest for a second of work then."""

LONGEST_REST_S = 0.5

OnProgress = Callable[[int, int], None]
IsCancelled = Callable[[], bool]


class MergeProcess:
    """For one merge at a time, which starts it when there is none."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def make(
        self, plan: MergePlan, folder: Path, max_bytes: int, on_progress: OnProgress, is_cancelled: IsCancelled
    ) -> None:
        """Merge and write the result to `folder`. Raises what merging and writing raise, RequestAbortedError when it
        was cancelled, and LoraplexError when the process ended."""
        question = json.dumps(_question(plan, folder, max_bytes))
        while True:
            process, is_new = self._running()
            is_begun = False
            for answer in _answers(process, question):
                is_begun = True
                if is_cancelled():  # `kill` may have come before the process
                    process.kill()
                    break
                if "error" in answer:
                    raise error_from_payload(answer)
                if "mistake" in answer:
                    raise RuntimeError(answer["mistake"])
                if "done" not in answer:
                    return
                on_progress(answer["done"], answer["total"])
            if is_cancelled():
                process.wait()
                raise RequestAbortedError("the merge was cancelled")
            if is_begun or is_new:  # else it ended because it had waited for long
                code = process.wait()
                text = f"the process of the merge ended unexpectedly (exit status {code})"
                raise LoraplexError(f"{text}; was there memory enough for it?")

    def _running(self) -> tuple[subprocess.Popen[str], bool]:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process, False
            if self._process is not None:
                _end(self._process)
            self._process = _start()
            return self._process, True

    def kill(self) -> None:
        """Without waiting for its end, which takes time where others want the cores: `make` waits for it."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """At once, whatever it does."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _end(process)


def _question(plan: MergePlan, folder: Path, max_bytes: int) -> dict[str, Any]:
    origins = [outline.origin for outline in plan.outlines]
    roots = origins[0].source.allowed_roots
    return {
        "wish": asdict(plan.wish),
        "origins": [[each.name, each.path, each.digest] for each in origins],
        "roots": None if roots is None else [str(root) for root in roots],
        "folder": str(folder),
        "max_bytes": max_bytes,
    }


def _answers(process: subprocess.Popen[str], question: str) -> Any:
    """Until the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, ValueError):
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
        for line in process.stdout:
            yield json.loads(line)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *logs.arguments()],
        env={**child_environment(), "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()


# ------------------------------------------------------------------------------------------------- in the process


def main() -> None:
    _lower_priority(STARTING_PRIORITY)
    leave_to_parent()
    logs.configure_from(sys.argv[1:])
    import torch

    torch.set_num_threads(1)
    _lower_priority(LOWEST_PRIORITY)
    try:
        while select.select([sys.stdin], [], [], KEEP_S)[0] and (line := sys.stdin.readline()):
            _say(_answer(json.loads(line)))
    except BrokenPipeError:  # the server was killed; what is unsaid cannot be flushed at an orderly end either
        os._exit(1)


def _lower_priority(nice: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    with suppress(OSError):  # a system without autogroups
        Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")


class Pace:
    """Rests between the parts of a merge while others want the cores: one thread of the engine that waits for a core
    holds up all of them. Alone on the machine, a merge does not rest."""

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._wall, self._busy, self._sleep = wall, busy, sleep
        self._since = wall(), busy()

    def rest(self) -> None:
        wall, busy = self._wall() - self._since[0], self._busy() - self._since[1]
        if busy < LEAST_SHARE * wall:
            self._sleep(min(RESTS_FOR_WORK * busy, LONGEST_REST_S))
        self._since = self._wall(), self._busy()


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        make_directory(question)
    except LoraplexError as error:
        return error.to_payload()
    except Exception as error:
        return {"mistake": f"{type(error).__name__}: {error}"[:1000]}
    return {}


def make_directory(question: Mapping[str, Any]) -> None:
    """What `MergeProcess.make` does, here."""
    from loraplex.adapters.merging.merge import plan_merge, run_merge
    from loraplex.adapters.merging.outline import Origin
    from loraplex.adapters.merging.written import write_directory

    server, fields, roots = os.getppid(), question["wish"], question["roots"]
    source = AdapterSource(None if roots is None else tuple(map(Path, roots)))
    origins = [Origin(name, path, source, digest) for name, path, digest in question["origins"]]
    wish = MergeWish(**{**fields, "adapters": tuple((name, weight) for name, weight in fields["adapters"])})
    plan = plan_merge(origins, wish, question["max_bytes"])
    pace = Pace()

    def say(done: int, total: int) -> None:
        _say({"done": done, "total": total})
        pace.rest()

    made = run_merge(plan, question["max_bytes"], say, lambda: os.getppid() != server)
    write_directory(made, Path(question["folder"]))


if __name__ == "__main__":
    main()
