"""The `openai` SDK against a server: the `model` field chooses the adapter.
`python examples/openai_client.py [--url URL]`."""

from __future__ import annotations

import argparse

from demo_server import demo_server
from openai import NotFoundError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server with the demo's adapters (default: one is started)")
    with demo_server(parser.parse_args().url) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="not needed: the server listens on loopback")
        names = [model.id for model in client.models.list()]
        print("models:", ", ".join(names))

        for name in ("upper", "reverse"):
            completion = client.completions.create(model=name, prompt="good morning=", max_tokens=32, temperature=0)
            print(f"{name:8} {completion.choices[0].text}")

        print(f"{'rot13':8} ", end="")
        for chunk in client.completions.create(
            model="rot13", prompt="good morning=", max_tokens=32, temperature=0, stream=True
        ):
            print(chunk.choices[0].text, end="", flush=True)
        print()

        try:
            client.completions.create(model="no-such-adapter", prompt="good morning=")
        except NotFoundError as error:
            print("unknown name:", error.body["message"])  # never the base model instead


if __name__ == "__main__":
    main()
