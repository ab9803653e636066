"""An adapter is replaced while a client streams from it: `python examples/hot_swap.py [--url URL]`.

The request that runs finishes on the version that it started with; the next one gets the new version; rollback goes
back.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from demo_server import call, demo_server
from openai import OpenAI

from loraplex.demo.tasks import adapter_path

PROMPT = "good morning="


def stream(client: OpenAI, name: str) -> Iterator[str]:
    chunks = client.completions.create(model=name, prompt=PROMPT, max_tokens=32, temperature=0, stream=True)
    return (chunk.choices[0].text for chunk in chunks)


def answer(client: OpenAI, name: str) -> str:
    return "".join(stream(client, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server with the demo's adapters (default: one is started)")
    with demo_server(parser.parse_args().url) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="not needed: the server listens on loopback")
        adapter = f"{url}/v1/adapters/production"

        call("PUT", adapter, {"path": str(adapter_path("upper"))})
        running = stream(client, "production")
        first = next(running)  # this request holds version 1 from here on

        card = call("PUT", adapter, {"path": str(adapter_path("reverse"))})
        print(f"replaced: production is version {card['version']}")
        print("request from before the change:", first + "".join(running))
        print("request after the change:      ", answer(client, "production"))

        card = call("POST", f"{adapter}/rollback")
        print(f"rolled back: production is version {card['version']}")
        print("request after the rollback:    ", answer(client, "production"))
        call("DELETE", adapter)


if __name__ == "__main__":
    main()
