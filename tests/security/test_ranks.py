"""Ranks of a model open no port: what another user of the machine can connect to could take the place of a rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.fixtures import ModelZoo
from tests.ranks.engines import check, opened


def listening_sockets(processes: Sequence[psutil.Process]) -> list[str]:
    """Of TCP, by the inodes of the processes' descriptors."""
    inodes = set()
    for process in processes:
        for each in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the listing's own
                inodes.add(os.readlink(each).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.mark.parametrize("backend", ["auto", pytest.param("torch", marks=pytest.mark.ranks)])
def test_ranks_listen_on_no_port(zoo: ModelZoo, backend: str) -> None:
    """While they serve, whatever their kernels."""
    base, this = zoo.base("qwen2"), psutil.Process()
    before = listening_sockets([this])
    with opened(base, 2, lora_backend=backend) as driver:
        check(driver, [(None, zoo.fit_case(base))], 8)
        ranks = [each for each in this.children() if any("loraplex.ranks" in word for word in each.cmdline())]
        assert len(ranks) == 1
        assert listening_sockets([this, *ranks]) == before
