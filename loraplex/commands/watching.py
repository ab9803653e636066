"""The commands `loraplex top | doctor`. What they need is imported when they run."""

from __future__ import annotations


def top(url: str = "http://127.0.0.1:8000", /, *, interval: float = 1.0, once: bool = False) -> int:
    """Watch a running server: throughput, latency, tiers, chunks, adapters, events. Ctrl-C ends it.

    Parameters
    ----------
    url
        Address of the server: http://host:port or host:port. Its key is in the variable LORAPLEX_ADMIN_API_KEY or
        LORAPLEX_API_KEY.
    interval
        Seconds between two frames.
    once
        One frame on standard output, and the end.
    """
    from loraplex.views.top import run_top

    return run_top(url, interval, once)


def doctor(*, url: str | None = None) -> int:
    """Say what is installed, which kernels run here and why, and in which form a running server has its model.

    Parameters
    ----------
    url
        Address of a server: http://host:port or host:port.
    """
    from loraplex.doctor import print_doctor

    print_doctor(url)
    return 0
