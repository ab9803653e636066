"""Many clients, many adapters: `python examples/load_test.py [--url URL] [--clients 16] [--requests 200]`.

Clients choose adapters by Zipf's law, so that a few are popular and most are rare, as in production. The table has the
time to first token by adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import defaultdict
from statistics import median

from demo_server import call, demo_server
from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, name: str, first_token_s: dict[str, list[float]]) -> int:
    """One streamed request; returns how many chunks came."""
    began = time.perf_counter()
    num_chunks = 0
    async for _ in await client.completions.create(
        model=name, prompt="good morning=", max_tokens=32, temperature=0, stream=True
    ):
        if num_chunks == 0:
            first_token_s[name].append(time.perf_counter() - began)
        num_chunks += 1
    return num_chunks


async def run(url: str, num_clients: int, num_requests: int, seed: int) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="not needed: the server listens on loopback") as client:
        names = [model.id async for model in client.models.list()]
        weights = [1 / rank for rank in range(1, len(names) + 1)]
        choices = iter(random.Random(seed).choices(names, weights, k=num_requests))
        first_token_s: dict[str, list[float]] = defaultdict(list)
        chunks: list[int] = []

        async def one_client() -> None:
            for name in choices:
                chunks.append(await ask(client, name, first_token_s))

        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(num_clients)))
        seconds = time.perf_counter() - began

    print(f"{'model':20} {'requests':>8} {'first token, median ms':>24} {'slowest ms':>12}")
    for name, times in sorted(first_token_s.items(), key=lambda item: -len(item[1])):
        print(f"{name:20} {len(times):8} {1e3 * median(times):24.1f} {1e3 * max(times):12.1f}")
    print(f"{num_requests} requests in {seconds:.2f} s: {num_requests / seconds:.0f} requests/s, {sum(chunks)} chunks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server (default: the demo's is started)")
    parser.add_argument("--clients", type=int, default=16, help="requests at a time")
    parser.add_argument("--requests", type=int, default=200, help="requests in all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of adapters")
    arguments = parser.parse_args()
    with demo_server(arguments.url) as url:
        asyncio.run(run(url, arguments.clients, arguments.requests, arguments.seed))
        adapters = call("GET", f"{url}/v1/adapters")["data"]
        print(f"{sum(card['tier'] == 'device' for card in adapters)} of {len(adapters)} adapters on the device")


if __name__ == "__main__":
    main()
