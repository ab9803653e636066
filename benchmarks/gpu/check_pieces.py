"""Groups of checks as processes of their own, side by side: nearly all of a check's time is compiling, on one core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.adapters import remove_scratch
from benchmarks.gpu.kernel_checks import Finding
from benchmarks.gpu.place import KEEP_EVERY_S

OVERTIME_S = 20.0
"""What a process has begun when the time is up may take this much longer."""

GRACE_S = 6.0
"""A process that is told to end has so long for its file."""

POLL_S = 0.1
NUM_THREADS = "2"
"""Of torch in each process."""


@dataclass(frozen=True)
class Piece:
    """Every `of`-th check of a group, from `number` on. names: of its checks; None where only they know them."""

    group: str
    number: int = 0
    of: int = 1
    names: tuple[str, ...] | None = None

    def arguments(self) -> list[str]:
        return ["--only", self.group, "--piece", f"{self.number}/{self.of}", "--jobs", "1"]


@dataclass
class _Process:
    piece: Piece
    process: subprocess.Popen[bytes]
    path: Path
    log: Path
    began: float = field(default_factory=time.monotonic)
    is_late: bool = False


class SideBySide:
    """Pieces in the order given, `jobs` at a time. command: of a piece, its file and its seconds."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        there: Mapping[Piece, Sequence[Finding]],
        jobs: int,
        folder: Path,
        deadline: float,
        command: Callable[[Piece, Path, float], Sequence[str]],
        kept: Callable[[Piece], Mapping[str, Any]],
    ) -> None:
        """there: findings of pieces that need not run. kept: what the file of another one holds at its beginning."""
        self._waiting = deque(piece for piece in pieces if piece not in there)
        self._running = list[_Process]()
        self._jobs, self._folder, self._deadline, self._command = jobs, folder, deadline, command
        self._kept = kept
        self._found = {piece: list(there.get(piece, ())) for piece in pieces}
        self.whole: list[str] = []

    def run(self) -> Iterator[None]:
        """Whenever there may be new findings."""
        shown = time.monotonic()
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._jobs:
                self._running.append(self._start(self._waiting.popleft()))
            time.sleep(POLL_S)
            now = time.monotonic()
            for one in [one for one in self._running if one.process.poll() is not None]:
                self._take(one)
                yield
            for one in self._running:
                if now > self._deadline + OVERTIME_S and not one.is_late:
                    one.is_late = True
                    one.process.terminate()
                elif now > self._deadline + OVERTIME_S + GRACE_S:
                    kill_session(one.process)
            if now - shown > KEEP_EVERY_S:
                shown = now
                for one in self._running:
                    self._found[one.piece] = list(_findings(_read(one.path)))
                yield

    def end(self) -> None:
        """End those that run, and take what they have found. The others' checks are left out."""
        for piece in self._waiting:
            there = {each.name for each in self._found[piece]}
            names = [name for name in piece.names or ("all",) if name not in there]
            self._found[piece] += [Finding(piece.group, name, None, "left out: not begun") for name in names]
        for one in self._running:
            one.is_late = True
            one.process.terminate()
        until = time.monotonic() + GRACE_S
        for one in [*self._running]:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, until - time.monotonic()))
            self._take(one)

    def findings(self, group: str) -> list[Finding]:
        """Of the group's pieces, dealt out again: in the order of its checks."""
        pieces = [found for piece, found in self._found.items() if piece.group == group]
        longest = max(map(len, pieces), default=0)
        return [found[i] for i in range(longest) for found in pieces if i < len(found)]

    def _start(self, piece: Piece) -> _Process:
        path, log = (self._folder / f"{piece.group}-{piece.number}.{kind}" for kind in ("json", "log"))
        path.write_text(json.dumps(self._kept(piece)))
        self._found[piece] = list(_findings(_read(path)))
        command = self._command(piece, path, max(1e-3, self._deadline - time.monotonic()))
        environment = {**os.environ, "OMP_NUM_THREADS": NUM_THREADS}
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        return _Process(piece, process, path, log)

    def _take(self, one: _Process) -> None:
        """What a process that has ended found, and a finding for each check that it did not come to."""
        kill_session(one.process)
        remove_scratch(one.process.pid)
        self._running.remove(one)
        piece, code, figures = one.piece, one.process.returncode, _read(one.path)
        found = list(_findings(figures))
        if code in (0, 1):
            self.whole += figures.get("whole", [])
        else:
            found += _missing(piece, found, one, code)
        self._found[piece] = found


def _missing(piece: Piece, found: Sequence[Finding], one: _Process, code: int) -> Iterator[Finding]:
    """A process that fell has failed at the first of them."""
    names = ["the rest"] if piece.names is None else piece.names
    there = {each.name for each in found}
    late = f"left out: not done in {time.monotonic() - one.began:.0f} s"
    last = next(reversed(one.log.read_text(errors="replace").splitlines()), "")[:200]
    for number, name in enumerate(name for name in names if name not in there):
        if one.is_late:
            yield Finding(piece.group, name, None, late)
        elif number == 0:
            yield Finding(piece.group, name, False, f"its process ended with exit code {code}: {last}")
        else:
            yield Finding(piece.group, name, None, "left out: its process had ended")


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """All of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def _findings(figures: Mapping[str, Any]) -> Iterator[Finding]:
    for one in figures.get("findings", ()):
        yield Finding(**one)


def python(*arguments: str) -> list[str]:
    """A command of these scripts."""
    return [sys.executable, "-m", "benchmarks.gpu.check", *arguments]
