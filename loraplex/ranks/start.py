"""A rank's first moment: `python -m loraplex.ranks.start LEADER ARENA MAILBOX BOARD`, started by the leader.

LEADER is the process that the rank ends with, whatever it does then: it may be stopped, or in the middle of imports.
0: the rank reads the end of its pipe, no more. ARENA, MAILBOX, BOARD are file descriptors.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(leader: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != leader:  # it ended before that
        os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] != "0":
        end_with(int(sys.argv[1]))
    from loraplex import logs
    from loraplex.ranks.follower import main

    logs.configure_from(sys.argv[5:])
    sys.exit(main(*map(int, sys.argv[2:5])))
