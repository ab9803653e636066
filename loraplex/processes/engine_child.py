"""The process of an engine, from the moment it is made: it imports what an engine needs, and waits to be told more.

Torch's import is most of a start, so the process is made before its parent has imported what speaks with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from loraplex import logs
from loraplex.processes.environment import child_environment

ENGINE_MODULE = "loraplex.frontend.process"

POLL_S = 0.1
"""Between looks whether the process is over, where the system has no thread that waits for it."""

SPINNING = {"GOMP_SPINCOUNT": "1000"}
"""For stock torch, where there are no native kernels: its threads sleep after microseconds of waiting, not after
milliseconds, so that a process beside them costs a share of the throughput and not nearly all of it. The environment's
own value goes before."""


class EngineChild:
    """`python -m module ADDRESS`. The socket at `address` may come to be later: the process asks again until then.

    `wait` is of one event loop; all else may be called without one.
    """

    def __init__(self, module: str = ENGINE_MODULE) -> None:
        self._module = module
        self.folder = Path(tempfile.mkdtemp(prefix="loraplex-"))
        self.address = f"ipc://{self.folder / 'engine'}"
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None

    @property
    def is_made(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_over(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def make(self) -> None:
        """Unless it was made. Raises OSError."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",  # a file in the working directory must not stand in for a module
                "-m",
                self._module,
                self.address,
                *logs.arguments(),
            ],
            env={
                **SPINNING,
                **child_environment(),
                # the engine imports what this process would
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            stdin=subprocess.PIPE,  # its end tells the engine that this process is gone
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which ends the engine in order
        )

    async def wait(self) -> int:
        """Its exit code, which is that of a signal with a minus."""
        if self._ended is None:
            ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            thread = threading.Thread(target=self._await_end, args=(ended,), name="engine-end", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has none
                return await self._poll()
            self._ended = ended
        return await asyncio.shield(self._ended)

    async def _poll(self) -> int:
        assert self._process is not None
        while (code := self._process.poll()) is None:
            await asyncio.sleep(POLL_S)
        return code

    def _await_end(self, ended: asyncio.Future[int]) -> None:
        assert self._process is not None
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            ended.get_loop().call_soon_threadsafe(_set, ended, code)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # does nothing to one that is over

    def end(self) -> None:
        """Nothing of it stays. A second time it does nothing."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.kill()
            if self._ended is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
        shutil.rmtree(self.folder, ignore_errors=True)


def _set(ended: asyncio.Future[int], code: int) -> None:
    if not ended.done():
        ended.set_result(code)
