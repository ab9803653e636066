"""A rank ends with its leader from its first moment, also one that is stopped; but not with the leader's threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from loraplex.config import EngineConfig
from loraplex.kernels.ops import get_backend
from loraplex.ranks.leader import LeadingRank
from tests.fixtures import ModelZoo

LEADER = """
import sys, torch
from loraplex.config import EngineConfig
from loraplex.kernels.ops import get_backend
from loraplex.ranks.leader import LeadingRank

config = EngineConfig(model=sys.argv[1], tensor_parallel_size=2, num_threads=1, lora_backend="torch")
LeadingRank(config, sys.argv[1], 1, get_backend("torch", torch.device("cpu"))).wait_until_ready()
"""


def test_a_rank_that_is_stopped_while_it_starts_ends_with_its_leader(zoo: ModelZoo, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    leader = subprocess.Popen([sys.executable, "-c", LEADER, str(zoo.base("qwen2"))], env=environment)
    try:
        until_s = time.monotonic() + 60
        while not (ranks := psutil.Process(leader.pid).children()) or not does_import_torch(ranks[0]):
            assert leader.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.01)
        ranks[0].send_signal(signal.SIGSTOP)
    finally:
        leader.kill()
        leader.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    for each in alive:
        each.kill()
    assert alive == []
    assert list(tmp_path.iterdir()) == []


def does_import_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_rank_leaves_signals_to_the_server(zoo: ModelZoo) -> None:
    """A rank that ends ends the engine, and with it requests that the server would let finish."""
    base = str(zoo.base("qwen2"))
    config = EngineConfig(model=base, tensor_parallel_size=2, num_threads=1, lora_backend="torch")
    leader = LeadingRank(config, base, 1, get_backend("torch", torch.device("cpu")))
    try:
        (rank,) = leader._processes
        rank.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.5)
    finally:
        leader.close()


def test_a_rank_outlives_the_thread_that_started_it(zoo: ModelZoo) -> None:
    """The kernel takes the end of that thread for the end of the leader."""
    base, leaders = str(zoo.base("qwen2")), list[LeadingRank]()
    config = EngineConfig(model=base, tensor_parallel_size=2, num_threads=1, lora_backend="torch")
    backend = get_backend("torch", torch.device("cpu"))
    thread = threading.Thread(target=lambda: leaders.append(LeadingRank(config, base, 1, backend)))
    thread.start()
    thread.join()
    try:
        time.sleep(0.5)  # the thread itself ends a moment later
        leaders[0].check()
    finally:
        leaders[0].close()
