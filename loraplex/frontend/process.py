"""The engine as a process of its own: `python -m loraplex.frontend.process ADDRESS`, started by `EngineClient`.

The process ends when its parent does (its standard input closes) or says so.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import zmq

from loraplex import logs
from loraplex.errors import EngineError, LoraplexError
from loraplex.processes.environment import leave_to_parent

logger = logging.getLogger("loraplex.frontend.process")

SWITCH_INTERVAL_S = 0.001
"""For which a thread that compiles or loads keeps the interpreter from the steps."""


def _end_with_parent(address: str) -> None:
    """Standard input is a pipe that only the parent holds: its end is the parent's end."""
    while os.read(0, 1):  # not sys.stdin: its lock would still be held when the interpreter ends
        pass
    _remove(address)
    os._exit(1)


def _remove(address: str) -> None:
    """The socket's file and its folder: not needed once the one connection is there: a kill leaves none."""
    path = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def main(address: str) -> int:
    leave_to_parent()  # which says Shutdown
    threading.Thread(target=_end_with_parent, args=(address,), name="parent-watch", daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:  # too long: its parent says so
        logger.debug("no socket at %s: %s", address, error)
        return 1
    engine = None
    was_killed = False
    gc.disable()  # each of a dozen collections would look at all that torch has made until then
    from loraplex.engine.build import build_engine
    from loraplex.frontend import messages as msg
    from loraplex.frontend.engine_loop import EngineProcess
    from loraplex.kernels.native.choice import open_library

    gc.enable()
    gc.freeze()
    try:
        if not socket.poll(0):
            open_library()  # a spare has time, and the check of the library takes a while
        start = msg.decode_to_engine(socket.recv())
        _remove(address)
        engine = build_engine(
            start.config, progress=lambda what, done, total: socket.send(msg.encode(msg.Progress(what, done, total)))
        )
        if engine.grammars is not None:
            engine.grammars.prepare()
        EngineProcess(socket, engine).run()
    except Exception as error:
        if not isinstance(error, LoraplexError):
            logger.exception("the engine cannot start or go on")
            error = EngineError(f"{type(error).__name__}: {error}")
        was_killed = isinstance(error, EngineError) and error.was_killed
        if was_killed and engine is None:  # Fatal would say that the start failed
            logger.error("the engine cannot start: %s", error)
        else:
            socket.send(msg.encode(msg.Fatal(error.to_payload())))
        if not was_killed:
            return 1
    finally:
        context.destroy(linger=1000)
    if was_killed:  # a kill of a rank is one of the engine, which its parent sees by the signal
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    logs.configure_from(sys.argv[2:])
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sys.exit(main(sys.argv[1]))
