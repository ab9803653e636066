"""Users of locust: plain requests, and its users of OpenAI's API; they end after 60 requests."""

from __future__ import annotations

import json
import random
from typing import Any

from calls import ANSWERS, KEY, PHRASE, USER
from locust import HttpUser, constant, task
from locust.contrib.oai import OpenAIClient

HEADERS = {"Authorization": f"Bearer {KEY}"}
NUM_REQUESTS = 60


class Ends(HttpUser):
    abstract = True
    wait_time = constant(0)

    def judge(self, response: Any, found: str, model: str) -> None:
        if found == ANSWERS[model]:
            response.success()
        else:
            response.failure(f"{model} answered {found!r}")
        if self.environment.stats.total.num_requests >= NUM_REQUESTS:
            self.environment.runner.quit()


class PlainUser(Ends):
    @task
    def complete(self) -> None:
        model = random.choice([*ANSWERS])
        body = {"model": model, "prompt": f"{PHRASE}=", "temperature": 0}
        with self.client.post("/v1/completions", json=body, headers=HEADERS, catch_response=True) as response:
            self.judge(response, response.json()["choices"][0]["text"] if response.ok else response.text, model)

    @task
    def stream(self) -> None:
        model = random.choice([*ANSWERS])
        body = {"model": model, "messages": USER, "temperature": 0, "stream": True}
        with self.client.post(
            "/v1/chat/completions", json=body, headers=HEADERS, stream=True, catch_response=True
        ) as response:
            lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line.startswith(b"data: {")]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            self.judge(response, "".join(delta.get("content") or "" for delta in deltas), model)


class SdkUser(HttpUser):
    """By the client of OpenAI that locust counts."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.sdk = OpenAIClient(self.environment.events.request, base_url=f"{self.host}/v1", api_key=KEY, user=self)

    @task
    def chat(self) -> None:
        model = random.choice([*ANSWERS])
        chat = self.sdk.chat.completions.create(model=model, messages=USER, temperature=0)
        assert chat.choices[0].message.content == ANSWERS[model]
