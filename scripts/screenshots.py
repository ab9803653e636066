"""The pictures of docs/guides/dashboard.md: a server of the demo's model under load, seen by Chromium.

    pip install playwright && python scripts/screenshots.py --chromium /usr/bin/chromium

It needs no other site: the server, its tenants, a few hundred adapters made of the demo's and the load are this
script's own, in a temporary folder. It ends with an error when the browser's console has one, or a refresh of the page
takes more than MAX_REFRESH_MS of the browser's main thread.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from playwright.async_api import Browser, Page, async_playwright
from safetensors.torch import load_file, save_file

from loraplex.demo.tasks import ADAPTERS, adapter_path, assets_path

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
ADMIN_KEY = "admin-key-of-the-screenshots"
MAX_REFRESH_MS = 100
REFRESH_S = 2
TENANTS = {"acme": {"tokens_per_minute": 2000000, "pins": 8}, "globex": {"concurrency": 32}, "initech": {}}
WORDS = ("sales", "support", "legal", "sql", "summaries", "claims", "triage", "search", "intake", "tone")


def make_adapters(folder: Path, num: int) -> Iterator[tuple[str, str, Path]]:
    """Tenant, name and directory of adapters that all have other weights."""
    for index in range(num):
        tenant, task = list(TENANTS)[index % len(TENANTS)], ADAPTERS[index % len(ADAPTERS)]
        path = folder / tenant / f"{WORDS[index % len(WORDS)]}-{task.name}-{index:04d}"
        shutil.copytree(adapter_path(task.name), path)
        weights = load_file(path / "adapter_model.safetensors")
        noise = torch.Generator().manual_seed(index)
        moved = {name: each + 1e-3 * torch.randn(each.shape, generator=noise) for name, each in weights.items()}
        save_file(moved, path / "adapter_model.safetensors", {"format": "pt"})
        yield tenant, path.name, path


@contextmanager
def server(folder: Path, port: int) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "loraplex", "serve", str(assets_path() / "base"), "--served-model-name", "demo"),
        *("--port", str(port), "--state-dir", str(folder / "state"), "--adapter-root", str(folder / "adapters")),
        *("--admin-api-key", ADMIN_KEY, "--disk-cache-dir", str(folder / "cache"), "--monitor-interval-s", "2"),
        *("--adapter-memory-bytes", str(24 << 20), "--host-memory-bytes", str(48 << 20)),
        *("--kv-cache-memory-bytes", str(64 << 20)),
    ]
    (folder / "adapters").mkdir()
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


async def prepare(client: httpx.AsyncClient, folder: Path, num: int) -> dict[str, str]:
    """Tenants, their keys and adapters; the keys by tenant."""
    for _ in range(600):
        try:
            if (await client.get("/health")).status_code == 200:
                break
        except httpx.TransportError:
            await asyncio.sleep(0.2)
    keys = {}
    for tenant, quota in TENANTS.items():
        body = {"name": tenant, "adapter_roots": [str(folder / "adapters" / tenant)], "quota": quota}
        (await client.post("/v1/tenants", json=body)).raise_for_status()
        key = await client.post("/v1/keys", json={"tenant": tenant, "label": "the app"})
        keys[tenant] = key.raise_for_status().json()["key"]
    for tenant, name, path in make_adapters(folder / "adapters", num):
        headers = {"Authorization": f"Bearer {keys[tenant]}"}
        loaded = await client.post("/v1/adapters", json={"name": name, "path": str(path)}, headers=headers)
        loaded.raise_for_status()
    (await client.put("/v1/shares", json={"adapter": f"acme/{name}", "public": True})).raise_for_status()
    return keys


async def load(client: httpx.AsyncClient, keys: dict[str, str]) -> None:
    """Requests of all tenants, most of them for few adapters, until it is cancelled."""
    chosen = random.Random(0)
    names = {}
    for tenant, key in keys.items():
        page = await client.get("/v1/adapters", headers={"Authorization": f"Bearer {key}"})
        names[tenant] = [card["name"] for card in page.json()["data"]]

    async def follow_one() -> None:
        while True:
            tenant = chosen.choices(list(keys), [5, 3, 1])[0]
            rank = min(int(chosen.paretovariate(0.7)), len(names[tenant])) - 1
            body = {"model": names[tenant][rank], "prompt": "good morning, world=", "max_tokens": chosen.randint(8, 48)}
            await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {keys[tenant]}"})
            await asyncio.sleep(chosen.random() * 0.3)

    await asyncio.gather(*(follow_one() for _ in range(20)))


async def open_page(browser: Browser, url: str, key: str, **options: Any) -> tuple[Page, list[str]]:
    """The dashboard with a key, and what the console complains of."""
    page = await (await browser.new_context(**options)).new_page()
    complaints: list[str] = []
    page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.add_init_script(f"sessionStorage.setItem('loraplex-key', {key!r})")
    await page.goto(f"{url}/dashboard")
    await page.wait_for_selector("#adapter-rows tr")
    return page, complaints


async def take(browser: Browser, url: str, keys: dict[str, str], seconds: float, out: Path) -> None:
    desktop, phone = {"width": 1360, "height": 1180}, {"width": 400, "height": 860}
    shots = {
        "dashboard-light": await open_page(browser, url, ADMIN_KEY, viewport=desktop, color_scheme="light"),
        "dashboard-dark": await open_page(browser, url, ADMIN_KEY, viewport=desktop, color_scheme="dark"),
        "dashboard-phone": await open_page(browser, url, ADMIN_KEY, viewport=phone, color_scheme="light"),
        "dashboard-tenant": await open_page(browser, url, keys["acme"], viewport=desktop, color_scheme="light"),
    }
    await asyncio.sleep(seconds)
    for name, (page, complaints) in shots.items():
        refresh_ms = await measure(page)
        print(f"{name}: {refresh_ms:.0f} ms of the main thread for a refresh")
        if await page.is_visible("#window"):
            await page.select_option("#window", "300")
        if name == "dashboard-dark":
            await page.locator("#adapter-rows button").first.click()
            await page.wait_for_selector("#adapter-verbs button")
        await page.screenshot(path=out / f"{name}.png")
        if complaints or refresh_ms > MAX_REFRESH_MS:
            raise SystemExit(f"{name}: {complaints or refresh_ms}")


async def measure(page: Page) -> float:
    """CPU milliseconds of the main thread for each refresh, of everything that the page does in ten of them."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})  # its own, on a busy machine too

    async def busy_s() -> float:
        metrics = await session.send("Performance.getMetrics")
        return next(float(each["value"]) for each in metrics["metrics"] if each["name"] == "TaskDuration")

    before = await busy_s()
    await asyncio.sleep(10 * REFRESH_S)
    return (await busy_s() - before) / 10 * 1e3


async def run(options: argparse.Namespace, folder: Path, url: str) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client, async_playwright() as play:
        keys = await prepare(client, folder, options.adapters)
        loading = asyncio.create_task(load(client, keys))
        browser = await play.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        try:
            await take(browser, url, keys, options.seconds, options.out)
        finally:
            await browser.close()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", help="a Chromium or Chrome; without it, playwright's own")
    parser.add_argument("--adapters", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60, help="of load before the pictures")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=FIGURES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, server(Path(name), options.port) as url:
        asyncio.run(run(options, Path(name), url))


if __name__ == "__main__":
    main()
