"""What Open WebUI sends to a server of OpenAI's API, form by form, and what it reads of the answers.

Of its `routers/openai.py`, `routers/tasks.py`, `utils/payload.py` and `utils/middleware.py`: it is an application with
a database and a browser, so its requests are sent here as it makes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.conftest import HIDDEN, Served

pytestmark = pytest.mark.clients
USER = {"role": "user", "content": "good morning"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Says the time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"], "description": "Where"}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
TITLE = (
    "### Task:\nGenerate a concise, 3-5 word title summarizing the chat history.\n### Output:\nJSON format: "
    '{ "title": "your concise title here" }\n### Chat History:\n<chat_history>\nUSER: good morning\n</chat_history>'
)
"""Its beginning and end."""


@pytest.fixture
def webui(served: Served) -> Iterator[httpx.Client]:
    """With the headers of a connection that forwards its user, whose URL ends in /v1."""
    headers = {
        "Authorization": f"Bearer {served.key}",
        "X-OpenWebUI-User-Name": "Ada",
        "X-OpenWebUI-User-Id": "0c1f5f1e-6c0d-4f0e-9d5e-5d9a2d0f9a11",
        "X-OpenWebUI-User-Email": "ada@example.com",
        "X-OpenWebUI-User-Role": "user",
        "X-OpenWebUI-Chat-Id": "7d9f0b6e-4f5c-4e39-8d38-2f0a1c3d9e77",
    }
    with httpx.Client(base_url=f"{served.url}/v1", headers=headers, timeout=60, trust_env=False) as client:
        yield client


def ask(webui: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = webui.post("/chat/completions", json={"model": "reverse", "messages": [USER], **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def streamed(webui: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The chunks, as its middleware takes them from the lines."""
    body = {"model": "reverse", "messages": [USER], "stream": True, **fields}
    with webui.stream("POST", "/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        assert "text/event-stream" in answer.headers["content-type"]
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_connection_is_verified_and_its_models_are_listed(webui: httpx.Client, served: Served) -> None:
    listed = webui.get("/models").json()
    names = {card["id"] for card in listed["data"]}
    assert {"demo", "reverse", "upper"} <= names
    assert (HIDDEN in names) == (not served.blocked_key)


def test_a_chat_with_the_parameters_of_a_model(webui: httpx.Client) -> None:
    chunks = streamed(
        webui,
        temperature=0.0,
        top_p=0.9,
        min_p=0.0,
        max_tokens=64,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        seed=3,
        stop=["###"],
        logit_bias={"5": 0},
        stream_options={"include_usage": True},
    )
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == "gninrom doog"
    assert chunks[-1]["usage"]["total_tokens"] > 0


def test_parts_system_prompts_and_earlier_turns(webui: httpx.Client) -> None:
    earlier = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "olleh"}]
    messages = [
        {"role": "system", "content": "User Context:\n\n"},
        *earlier,
        {"role": "user", "content": [{"type": "text", "text": "good morning"}]},
    ]
    assert ask(webui, messages=messages, temperature=0, stream=False)["message"]["content"] == "gninrom doog"


@pytest.mark.parametrize("limit", ["max_completion_tokens", "max_tokens"])
def test_a_task(webui: httpx.Client, limit: str) -> None:
    """Titles, tags, follow-ups and queries are asked in this form."""
    choice = ask(webui, messages=[{"role": "user", "content": TITLE}], stream=False, **{limit: 50})
    assert choice["finish_reason"] in ("stop", "length")


def test_its_tools_are_called_and_answered(webui: httpx.Client) -> None:
    """Deltas are put together by their index, and come back with it."""
    chunks = streamed(webui, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls") or ():
            known = next((call for call in calls if call["index"] == delta["index"]), None)
            if known is None:
                delta.setdefault("function", {}).setdefault("arguments", "")
                calls.append(delta)
            else:
                known["function"]["arguments"] += delta["function"]["arguments"]
    assert [call["function"]["name"] for call in calls] == ["get_time"]
    assert json.loads(calls[0]["function"]["arguments"])["zone"] in ("UTC", "CET")
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "12:00"}
    after = streamed(webui, messages=[USER, turn, result], tools=[TOOL], temperature=0)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in after)
    assert text == "gninrom doog"


def test_a_form_and_errors(webui: httpx.Client, served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "zone", "schema": TOOL["function"]["parameters"]}}
    assert json.loads(ask(webui, response_format=form)["message"]["content"])["zone"] in ("UTC", "CET")
    unknown = webui.post("/chat/completions", json={"model": "nothing-of-this-name", "messages": [USER]})
    assert unknown.status_code == 404
    assert "does not exist" in unknown.json()["error"]["message"]
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    refused = webui.post("/chat/completions", json={"model": "upper", "messages": [{"role": "user", "content": image}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    if served.blocked_key:
        headers = {"Authorization": f"Bearer {served.blocked_key}"}
        limited = webui.post("/chat/completions", json={"model": "upper", "messages": [USER]}, headers=headers)
        assert (limited.status_code, limited.json()["error"]["code"]) == (429, "tenant_limit")
