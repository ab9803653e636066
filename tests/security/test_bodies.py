"""Bodies that cost a server much more than their sender: each is refused soon, and others are answered meanwhile.

The stall is measured from outside, against a server in a process of its own. What is promised is 100 ms on a quiet
machine; the bound here is wide, since a test may run beside others. `python -m tests.security.test_bodies` prints what
each body costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.security.http_target import HealthProbe, HttpTarget, Reply

MIB = 2**20
MAX_STALL_S = 1.0
MAX_PEAK_BYTES = 700 * MIB
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def repeated(head: str, item: str, tail: str, num_bytes: int) -> bytes:
    """`head item,item,...,item tail`, about as long as `num_bytes`."""
    return (head + ",".join([item] * (num_bytes // (len(item) + 1))) + tail).encode()


def completion(field: str, item: str, num_bytes: int = 6 * MIB) -> tuple[str, bytes]:
    prompt = "" if field == "prompt" else '"prompt": "hi", '
    return COMPLETIONS, repeated(f'{{"model": "base", {prompt}"{field}": [', item, "]}", num_bytes)


def chat(field: str, item: str, num_bytes: int = 6 * MIB) -> tuple[str, bytes]:
    messages = "" if field == "messages" else '"messages": [{"role": "user", "content": "hi"}], '
    return CHAT, repeated(f'{{"model": "base", {messages}"{field}": [', item, "]}", num_bytes)


def message(content: str) -> bytes:
    return f'{{"model": "base", "messages": [{{"role": "user", "content": {content}}}]}}'.encode()


def arguments(*texts: bytes) -> bytes:
    """JSON inside of a JSON text: the values in there are none of the body's own."""
    calls = [{"function": {"name": "f", "arguments": text.decode()}} for text in texts]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "hi"}]
    return json.dumps({"model": "base", "messages": messages}).encode()


def blocks(item: str, num_bytes: int) -> bytes:
    head = '{"model": "base", "max_tokens": 1, "messages": [{"role": "user", "content": ['
    return repeated(head, item, "]}]}", num_bytes)


CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f"}
BETWEEN_TWO_DOUBLES = "1.322882927203610480834580903098775642457e301"
"""Halfway: a decoder has to compare it with many digits of both."""
MESSAGE = '{"role": "user", "content": "x"}'
HOSTILE: dict[str, Callable[[], tuple[str, bytes]]] = {
    "messages of numbers": lambda: chat("messages", "1"),
    "messages without role": lambda: chat("messages", '{"content": ""}'),
    "short messages": lambda: chat("messages", MESSAGE, 15 * MIB),
    "few enough short messages": lambda: chat("messages", MESSAGE, 60_000),
    "parts of numbers": lambda: (CHAT, message(repeated("[", "1", "]", 6 * MIB).decode())),
    "parts": lambda: (CHAT, message(repeated("[", '{"type": "text", "text": ""}', "]", 15 * MIB).decode())),
    "tools of numbers": lambda: chat("tools", "1"),
    "tools": lambda: chat("tools", '{"a": {"b": [1, 2, 3]}}', 15 * MIB),
    "tools that fit": lambda: chat("tools", '{"a": {"b": [1, 2, 3]}}', 24_000),
    "arguments of a tool call": lambda: (CHAT, arguments(repeated("[", "[]", "]", 12 * MIB))),
    "arguments of names": lambda: (CHAT, arguments(json.dumps({f"x{i}": {} for i in range(900_000)}).encode())),
    "arguments behind an open string": lambda: (CHAT, arguments(b'"', repeated("[", "[]", "]", 12 * MIB))),
    "documents of numbers": lambda: chat("documents", "1"),
    "stop of numbers": lambda: completion("stop", "1"),
    "stop of texts": lambda: completion("stop", '"ab"'),
    "prompts of objects": lambda: completion("prompt", "{}"),
    "prompts of texts": lambda: completion("prompt", '"ab"', 15 * MIB),
    "prompts that fit": lambda: completion("prompt", '"ab"', 5000),
    "prompts of mixed types": lambda: completion("prompt", '"a", 1'),
    "empty lists": lambda: completion("prompt", "[]", 15 * MIB),
    "nested lists": lambda: completion("prompt", "[[[]]]", 15 * MIB),
    "ids": lambda: completion("prompt", "5", 15 * MIB),
    "ids that may be counted": lambda: completion("prompt", "5", 500_000),
    "negative ids": lambda: completion("prompt", "-5", 600_000),
    "stop token ids": lambda: completion("stop_token_ids", "-1"),
    "lora paths": lambda: completion("lora_path", "null"),
    "unknown field": lambda: completion("foo", "1"),
    "refused field": lambda: completion("guided_choice", '"ab"', 200_000),
    "logit bias": lambda: (
        COMPLETIONS,
        json.dumps({"model": "base", "prompt": "", "logit_bias": {f"x{i}": 1 for i in range(100_000)}}).encode(),
    ),
    "many fields": lambda: (COMPLETIONS, json.dumps({f"x{index}": None for index in range(150_000)}).encode()),
    "metadata": lambda: (
        COMPLETIONS,
        json.dumps({"model": "base", "prompt": "hi", "metadata": {f"x{i}": {} for i in range(50_000)}}).encode(),
    ),
    "long text": lambda: (COMPLETIONS, b'{"model": "base", "prompt": "' + b"a" * (15 * MIB) + b'"}'),
    "long text with marks": lambda: (COMPLETIONS, b'{"model": "base", "prompt": "' + b"[{,:" * (4 * MIB - 99) + b'"}'),
    "long text of escapes": lambda: (COMPLETIONS, b'{"model": "base", "prompt": "' + b'\\"' * (7 * MIB) + b'"}'),
    "text of one type of byte": lambda: (COMPLETIONS, b'{"model": "base", "prompt": "' + b"a" * (2 * MIB - 9) + b'"}'),
    "long message": lambda: (CHAT, message('"' + "\\u00e9" * (2 * MIB) + '"')),
    "open string": lambda: (COMPLETIONS, b'{"model": "' + b"a" * (15 * MIB)),
    "spaces": lambda: (COMPLETIONS, b" " * (15 * MIB)),
    "digits": lambda: (COMPLETIONS, b'{"n": ' + b"9" * (15 * MIB) + b"}"),
    "floats between two doubles": lambda: completion("prompt", BETWEEN_TWO_DOUBLES, 15 * MIB),
    "few enough such floats": lambda: completion("prompt", BETWEEN_TWO_DOUBLES, 20_000),
    "such floats to count": lambda: ("/tokenize", repeated('{"tokens": [', BETWEEN_TWO_DOUBLES, "]}", 4 * MIB)),
    "such floats in arguments": lambda: (CHAT, arguments(repeated("[", BETWEEN_TWO_DOUBLES, "]", 4 * MIB))),
    "long integers": lambda: completion("prompt", "1" * 4000, 15 * MIB),
    "smallest floats in documents": lambda: chat("documents", '{"a": [5e-324, 5e-324]}', 450_000),
    "long integers in documents": lambda: chat("documents", '{"a": ' + "1" * 4000 + "}", 15 * MIB),
    "short floats in documents": lambda: chat("documents", '{"a": 0.1234567890123456}', 1_000_000),
    "deep lists": lambda: (COMPLETIONS, b"[" * (15 * MIB)),
    "deep objects": lambda: (COMPLETIONS, b'{"a":' * (3 * MIB)),
    "text to count": lambda: ("/tokenize", b'{"prompt": "' + b"ab " * (5 * MIB) + b'"}'),
    "chat to count": lambda: ("/tokenize", repeated('{"messages": [', MESSAGE, "]}", 15 * MIB)),
    "ids to text": lambda: ("/detokenize", repeated('{"tokens": [', "5", "]}", 7 * MIB)),
    "few enough ids to text": lambda: ("/detokenize", repeated('{"tokens": [', "5", "]}", 140_000)),
    "items": lambda: ("/v1/responses", repeated('{"model": "base", "input": [', MESSAGE, "]}", 15 * MIB)),
    "items that fit": lambda: ("/v1/responses", repeated('{"model": "base", "input": [', MESSAGE, "]}", 60_000)),
    "items of numbers": lambda: ("/v1/responses", repeated('{"model": "base", "input": [', "1", "]}", 200_000)),
    "arguments of an item": lambda: (
        "/v1/responses",
        json.dumps({"model": "base", "input": [{**CALL_ITEM, "arguments": "[" + "[]," * MIB + "[]]"}]}).encode(),
    ),
    "blocks": lambda: ("/v1/messages", blocks('{"type": "text", "text": ""}', 15 * MIB)),
    "blocks that fit": lambda: ("/v1/messages", blocks('{"type": "tool_result", "tool_use_id": ""}', 40_000)),
    "blocks of numbers": lambda: ("/v1/messages", blocks("1", 100_000)),
    "tools of messages": lambda: (
        "/v1/messages",
        repeated('{"model": "base", "max_tokens": 1, "messages": [], "tools": [', "{}", "]}", 100_000),
    ),
    "adapter": lambda: ("/v1/adapters", repeated('{"name": [', "1", "]}", 6 * MIB)),
    "short adapter": lambda: ("/v1/adapters", repeated('{"name": "x", "path": [', "1", "]}", 30_000)),
    "profile": lambda: ("/v1/profile/start", repeated('{"seconds": [', "1", "]}", 6 * MIB)),
}


@pytest.fixture(scope="module")
def target() -> Iterator[HttpTarget]:
    with HttpTarget() as target:
        yield target
    assert "Traceback" not in target.stderr


def check_reply(reply: Reply) -> None:
    assert reply.status in (200, 400, 413), reply.body[:500]
    if reply.status != 200:
        assert len(reply.body) < 4096
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("name", HOSTILE)
def test_nobody_waits_for_a_hostile_body(
    target: HttpTarget, name: str, record_property: Callable[[str, object], None]
) -> None:
    path, body = HOSTILE[name]()
    with HealthProbe(target) as probe:
        reply = target.send(path, body)
    record_property("longest_s", probe.longest_s)
    check_reply(reply)
    assert probe.longest_s < MAX_STALL_S
    assert target.peak_bytes < MAX_PEAK_BYTES


def test_many_at_a_time_hold_up_nobody(target: HttpTarget, record_property: Callable[[str, object], None]) -> None:
    """One client sends eight long bodies at once: those that do not fit in its queue are 429, others are answered."""
    path, body = HOSTILE["ids"]()
    with HealthProbe(target) as probe, ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: target.send(path, body), range(8)))
    record_property("longest_s", probe.longest_s)
    assert {reply.status for reply in replies} <= {400, 429}
    assert probe.longest_s < MAX_STALL_S


SECRET = "a" * 41


@pytest.mark.parametrize(
    "fields",
    [
        {SECRET: 1},
        {"model": SECRET},
        {"model": "base", "lora_path": SECRET},
        {"model": "base", "prompt": {SECRET: SECRET}},
        {"model": "base", "temperature": SECRET},
        {"model": "base", "guided_regex": SECRET + "("},
        {"model": "base", "guided_json": {"type": "string", "format": SECRET}},
        {"model": "base", "guided_json": {"not": {SECRET: SECRET}}},
        {"model": "base", "response_format": {"type": SECRET}},
        {"model": "base", "logit_bias": {SECRET: 1}},
        {"model": "base", "logit_bias": {SECRET: "x"}},
        {"model": "base", "stop": [7, SECRET]},
        {"model": "base", "stream_options": {SECRET: 1}},
        {"model": "base", "messages": [{"role": SECRET}]},
        {"model": "base", "messages": [{"role": "user", "content": [{"type": SECRET, "text": ""}]}]},
        {"model": "base", "messages": [{"role": "user", "content": "", SECRET: ""}]},
        {"model": "base", "request_id": SECRET + "/"},
        {"n": int("1" * 4000)},
        {"metadata": SECRET},
    ],
    ids=lambda fields: " ".join(fields),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_errors_do_not_send_back_what_came(target: HttpTarget, path: str, fields: dict[str, object]) -> None:
    reply = target.send(path, json.dumps({"prompt": "hi", **fields} if path != CHAT else fields).encode())
    assert reply.status in (400, 404), reply.body
    assert SECRET.encode() not in reply.body
    assert b"1" * 41 not in reply.body
    assert len(reply.body) < 2000


def test_long_urls_and_headers_are_not_sent_back(target: HttpTarget) -> None:
    for path, method in ((f"/{SECRET}", "GET"), (f"/v1/models/{SECRET}", "GET"), (f"/v1/models?{SECRET}=1", "GET")):
        assert SECRET.encode() not in target.send(path, method=method).body
    for header in ("Content-Type", "Content-Encoding"):
        headers = {"Content-Type": "application/json", header: SECRET}
        assert SECRET.encode() not in target.send(COMPLETIONS, b"{}", headers=headers).body


def main() -> None:
    with HttpTarget() as target:
        for name, make in HOSTILE.items():
            path, body = make()
            with HealthProbe(target) as probe:
                reply = target.send(path, body)
            shown = reply.body[:80].decode(errors="replace")
            figures = (
                f"{reply.seconds * 1e3:7.0f} ms, others {probe.longest_s * 1e3:4.0f} ms, {target.peak_bytes // MIB} MiB"
            )
            print(f"{name:26} {len(body) / MIB:5.1f} MiB {reply.status} {figures} {shown}", flush=True)


if __name__ == "__main__":
    main()
