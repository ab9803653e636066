"""`loraplex serve` as a user starts it, with the demo's model and its eight adapters, for the real `openai` client."""

from __future__ import annotations

import asyncio
import functools
import http.client
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlsplit

import httpx
import jsonschema
import openai
import psutil
import pytest
from pydantic import BaseModel, ConfigDict, Field

import loraplex
from loraplex.demo.tasks import TASKS, adapter_path, phrases, prompt_of
from tests.frontend.processes import MAX_MODEL_LEN, stretched_base
from tests.structured.schemas import schema_of

PATIENCE_S = 120.0
REPOSITORY = Path(__file__).parents[1]
ADAPTERS = tuple(task.name for task in TASKS)
MODELS = ("demo", *ADAPTERS)
APPLY: dict[str, Callable[[str], str]] = {"demo": str, **{task.name: task.apply for task in TASKS}}
PHRASES = tuple(phrases("held_out", 32, seed=5))
WITH_ADAPTERS = ("--lora-modules", *(f"{name}={adapter_path(name)}" for name in ADAPTERS))
SMALL = ("--num-threads", "1", "--kv-cache-memory-bytes", "64MiB", "--log-level", "warning", "--no-access-log")


class Server:
    """A server in a process of its own; `url` once it is ready."""

    def __init__(self, folder: Path, *flags: str, port: int = 0) -> None:
        self._errors = folder / "stderr.txt"
        self.base = str(folder / "base")
        if not Path(self.base).exists():
            stretched_base(Path(self.base))
        command = (sys.executable, "-m", "loraplex", "serve", self.base, "--served-model-name", "demo")
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                (*command, *SMALL, "--port", str(port), *flags),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=REPOSITORY,
            )
        self.url = ""

    @property
    def _stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def __enter__(self) -> Server:
        line = self._stdout.readline()
        match = re.match(r"Loraplex is ready: (http://127\.0\.0\.1:\d+) serves demo \((.+)\)", line)
        assert match is not None, line + self.stderr
        self.url = match[1]
        return self

    def __exit__(self, *exception: object) -> None:
        """Kill what still runs; the engine ends with it."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._stdout.close()

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    @property
    def engine_processes(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "loraplex.frontend.process" in child.cmdline()]

    @property
    def engine(self) -> psutil.Process:
        """Not the spare one, which is started when this one is ready."""
        return min(self.engine_processes, key=psutil.Process.create_time)

    def sdk(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), *WITH_ADAPTERS) as server:
        yield server
        lines = server.stderr.splitlines()
        expected = ("no native kernels, ", "could not be loaded from ")
        assert [line for line in lines if not any(part in line for part in expected)] == []


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with server.sdk() as sdk:
        yield sdk


@pytest.fixture
async def async_sdk(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as sdk:
        yield sdk


@pytest.fixture
def http_client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def user(phrase: str) -> Any:
    """The demo's chat template makes the same prompt of it."""
    return [{"role": "user", "content": phrase}]


# -------------------------------------------------------------------------------------------------------------- see it


def test_memory_events_profile_and_top(server: Server, http_client: httpx.Client, tmp_path: Path) -> None:
    """What a person would do who looks at a server under load."""
    memory = http_client.get("/v1/memory?adapters=true&top=3").json()
    assert {tier["tier"] for tier in memory["tiers"]} >= {"device", "host"}
    assert len(memory["top_adapters"]) == 3
    assert memory["chunks_by_owner"]["kv"] * memory["chunk_bytes"] >= memory["kv"]["max_bytes"]
    loaded = {event["adapter"] for event in http_client.get("/v1/events?stream=false&kind=load").json()["data"]}
    assert loaded >= set(ADAPTERS)
    page = tmp_path / "out.html"
    command = (
        sys.executable,
        "-m",
        "loraplex",
        "profile",
        "--url",
        server.url,
        "--seconds",
        "600",
        "--report",
        str(page),
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as profile:
        deadline = time.monotonic() + PATIENCE_S
        while not http_client.get("/v1/profile").json()["is_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for model in MODELS:
            body = {"model": model, "prompt": "banana=", "max_tokens": 8}
            assert http_client.post("/v1/completions", json=body).status_code == 200
        profile.send_signal(signal.SIGINT)  # ends it early, with a report
        out, _ = profile.communicate(timeout=PATIENCE_S)
    assert profile.returncode == 0
    assert f"{len(MODELS)} requests and" in out
    assert all(name in page.read_text() for name in ADAPTERS)
    shown = subprocess.run(
        (sys.executable, "-m", "loraplex", "top", server.url, "--once"), capture_output=True, text=True, check=True
    )
    assert "mode normal" in shown.stdout
    assert f"adapters {len(ADAPTERS)}" in shown.stdout


def test_events_come_as_they_happen(server: Server, http_client: httpx.Client) -> None:
    with http_client.stream("GET", "/v1/events?kind=evict") as response:
        lines = response.iter_lines()
        assert next(lines) == "retry: 2000"
        httpx.post(f"{server.url}/v1/adapters/sort/evict", timeout=PATIENCE_S)
        (data,) = itertools.islice((line for line in lines if line.startswith("data: ")), 1)
    assert json.loads(data.removeprefix("data: "))["adapter"] == "sort"


# --------------------------------------------------------------------------------------------------------- many at once


def ask(sdk: openai.OpenAI, index: int) -> str:
    """One of 32 requests: over 8 adapters and the base, completions and chat, streaming and not."""
    model, phrase = MODELS[index % 9], PHRASES[index]
    how = index % 4
    if how == 0:
        return (
            sdk.completions.create(model=model, prompt=prompt_of(phrase), max_tokens=64, temperature=0).choices[0].text
        )
    if how == 1:
        chunks = sdk.completions.create(
            model=model, prompt=prompt_of(phrase), max_tokens=64, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks)
    if how == 2:
        chat = sdk.chat.completions.create(model=model, messages=user(phrase), temperature=0)
        return chat.choices[0].message.content or ""
    deltas = sdk.chat.completions.create(model=model, messages=user(phrase), temperature=0, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in deltas)


def test_32_requests_at_once_answer_as_one_at_a_time(sdk: openai.OpenAI) -> None:
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda index: ask(sdk, index), range(32)))
    assert together == [ask(sdk, index) for index in range(32)]
    assert together == [APPLY[MODELS[index % 9]](PHRASES[index]) for index in range(32)]


async def ask_async(sdk: openai.AsyncOpenAI, index: int) -> str:
    model, prompt = MODELS[index % 9], prompt_of(PHRASES[index])
    if index % 2:
        answer = await sdk.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0)
        return answer.choices[0].text
    chunks = await sdk.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0, stream=True)
    return "".join([chunk.choices[0].text async for chunk in chunks])


async def test_32_requests_at_once_of_the_async_client(async_sdk: openai.AsyncOpenAI) -> None:
    together = await asyncio.gather(*(ask_async(async_sdk, index) for index in range(32)))
    assert together == [APPLY[MODELS[index % 9]](PHRASES[index]) for index in range(32)]


def test_a_list_of_prompts_is_one_batch(sdk: openai.OpenAI) -> None:
    prompts = [prompt_of(phrase) for phrase in PHRASES[:8]]
    answer = sdk.completions.create(model="reverse", prompt=prompts, max_tokens=64, temperature=0)
    assert [choice.text for choice in answer.choices] == [phrase[::-1] for phrase in PHRASES[:8]]


# ----------------------------------------------------------------------------------------------------------- the routes


def test_models(server: Server, sdk: openai.OpenAI) -> None:
    cards = [model.model_dump() for model in sdk.models.list()]
    assert [card["id"] for card in cards] == list(MODELS)
    assert (cards[0]["root"], cards[0]["parent"], cards[0]["max_model_len"]) == (server.base, None, MAX_MODEL_LEN)
    assert {card["parent"] for card in cards[1:]} == {"demo"}
    assert [card["root"] for card in cards[1:]] == [str(adapter_path(name)) for name in ADAPTERS]
    assert sdk.models.retrieve("rot13").id == "rot13"


def test_version_says_which_kernels_run(http_client: httpx.Client) -> None:
    body = http_client.get("/version").json()
    assert body["version"] == loraplex.__version__
    assert body["model"] == "llama; weights: float32; KV cache: float32"
    assert re.fullmatch(r"native (avx512|avx2|portable), 1 thread.*|stock torch \(.+\)", body["backend"])


def test_an_adapter_under_its_other_names(sdk: openai.OpenAI) -> None:
    """`base:adapter` and `lora_path` are SGLang's."""
    for model, extra in (("upper", None), ("demo:upper", None), ("demo", {"lora_path": "upper"})):
        answer = sdk.completions.create(model=model, prompt="banana=", temperature=0, extra_body=extra)
        assert (answer.choices[0].text, answer.model) == ("BANANA", "upper")


def test_usage_and_finish_reason(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="upper", prompt="banana=", temperature=0)
    assert answer.usage is not None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(
        sdk.completions.create(
            model="upper", prompt="banana=", temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert sdk.completions.create(model="upper", prompt="banana=", max_tokens=1).choices[0].finish_reason == "length"


def test_stop_logprobs_and_seed(sdk: openai.OpenAI) -> None:
    stopped = sdk.completions.create(model="upper", prompt="banana=", temperature=0, stop="NAN")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("BA", "stop")
    logprobs = sdk.completions.create(model="upper", prompt="banana=", temperature=0, logprobs=3).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens).startswith("BANANA")
    assert logprobs.token_logprobs is not None
    assert all(logprob is not None and logprob <= 0 for logprob in logprobs.token_logprobs)
    drawn = [
        sdk.completions.create(model="demo", prompt="banana=", temperature=3, seed=seed, n=3).choices
        for seed in (1, 1, 2)
    ]
    texts = [[choice.text for choice in choices] for choices in drawn]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_an_unknown_model_is_404_and_never_the_base(sdk: openai.OpenAI) -> None:
    for model in ("unknown", "demo:unknown"):
        with pytest.raises(openai.NotFoundError) as unknown:
            sdk.completions.create(model=model, prompt="banana=")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        assert model in unknown.value.message
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="unknown", messages=user("banana"), stream=True)
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="demo", prompt="banana=", extra_body={"lora_path": "unknown"})


def test_a_prompt_that_is_too_long(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {MAX_MODEL_LEN} tokens") as long:
        sdk.completions.create(model="upper", prompt="banana " * 1000)
    assert long.value.code == "context_length_exceeded"


def test_server_sent_events_as_they_are_on_the_wire(server: Server) -> None:
    """What curl would show."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    body = {"model": "upper", "prompt": "banana=", "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type", "").startswith("text/event-stream")
    events = response.read().decode().split("\n\n")
    connection.close()
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "BANANA"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]} <= {None}


def test_vllms_load_and_unload(http_client: httpx.Client, sdk: openai.OpenAI, tmp_path: Path) -> None:
    path = Path(shutil.copytree(adapter_path("sort"), tmp_path / "mine"))

    def load(name: str, where: Path, **fields: Any) -> httpx.Response:
        return http_client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(where), **fields})

    loaded = load("mine", path)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert sdk.completions.create(model="mine", prompt="banana=", temperature=0).choices[0].text == "aaabnn"
    assert "mine" in [model.id for model in sdk.models.list()]
    assert load("mine", path).status_code == 400
    shutil.rmtree(path)
    shutil.copytree(adapter_path("upper"), path)
    assert load("mine", path, load_inplace=True).status_code == 200
    assert sdk.completions.create(model="mine", prompt="banana=", temperature=0).choices[0].text == "BANANA"
    assert load("demo", path).status_code == 400
    assert load("other", tmp_path / "nowhere").status_code == 404
    unload = {"lora_name": "mine"}
    unloaded = http_client.post("/v1/unload_lora_adapter", json=unload)
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert http_client.post("/v1/unload_lora_adapter", json=unload).status_code == 404
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="mine", prompt="banana=")


def test_a_bad_adapter_is_refused_with_its_reasons(http_client: httpx.Client, tmp_path: Path) -> None:
    path = Path(shutil.copytree(adapter_path("sort"), tmp_path / "bad"))
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True, "lora_alpha": 0}))
    refused = http_client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(path)})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "use_dora" in message
    assert "lora_alpha" in message


def test_adapters_and_metrics_show_what_runs(http_client: httpx.Client, sdk: openai.OpenAI) -> None:
    sdk.completions.create(model="upper", prompt="banana=")
    cards = {card["name"]: card for card in http_client.get("/v1/adapters").json()["data"]}
    assert set(ADAPTERS) <= set(cards)
    assert cards["upper"]["tier"] == "device"
    assert http_client.get("/health").status_code == 200
    metrics = http_client.get("/metrics").text
    assert "vllm:lora_requests_info" in metrics
    assert re.search(r"^vllm:generation_tokens_total\{.*\} [1-9]", metrics, re.MULTILINE)


def test_a_client_that_leaves_ends_its_request(http_client: httpx.Client, sdk: openai.OpenAI) -> None:
    """In the engine too: it is counted as aborted, and the adapter's reference returns."""

    def num_aborted() -> float:
        found = re.search(
            r'^vllm:request_success_total\{[^}]*finished_reason="abort"[^}]*\} (\S+)',
            http_client.get("/metrics").text,
            re.MULTILINE,
        )
        return float(found[1]) if found else 0.0

    before = num_aborted()
    stream = long_stream(sdk, "upper")
    next(stream)
    stream.close()
    until(lambda: num_aborted() == before + 1)
    assert http_client.get("/v1/adapters/upper").json()["references"] == 0


def test_a_taken_port_is_said_at_once(server: Server, tmp_path: Path) -> None:
    second = Server(tmp_path, port=server.port)
    try:
        assert second.end() == 1
    finally:
        second.__exit__()
    assert second.stderr.startswith(f"error: cannot listen on 127.0.0.1:{server.port}: Address already in use")
    assert second.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------- life and death


def long_stream(
    sdk: openai.OpenAI, model: str, num_tokens: int = MAX_MODEL_LEN - 100
) -> openai.Stream[openai.types.Completion]:
    """So many tokens, whatever the model would say."""
    return sdk.completions.create(
        model=model,
        prompt="banana=",
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def status_of(server: Server) -> int:
    return httpx.get(server.url + "/health", timeout=PATIENCE_S).status_code


def test_a_dead_engine_and_the_end_of_a_server(tmp_path: Path) -> None:
    """The engine is killed under a stream and comes back; then Ctrl-C waits for a stream that runs; then the port is
    free."""
    with Server(tmp_path, *WITH_ADAPTERS) as server, server.sdk() as sdk:
        check_that_a_dead_engine_comes_back(server, sdk)
        stream = long_stream(sdk, "upper", 300)
        texts = [next(stream).choices[0].text]
        engine = server.engine
        server.process.send_signal(signal.SIGINT)
        until(lambda: not is_open(server.port))
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert "".join([*texts, *(chunk.choices[0].text for chunk in chunks)]).startswith("BANANA")
        assert server.end() == 0
        assert not engine.is_running()
    with Server(tmp_path, "--api-key", "secret", "--no-enable-lora", port=server.port) as again:
        assert again.port == server.port
        check_keys(again)
        check_that_adapters_are_refused(again)


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def check_that_a_dead_engine_comes_back(server: Server, sdk: openai.OpenAI) -> None:
    engine = server.engine
    streams = [long_stream(sdk, model) for model in ("upper", "demo", "sort")]
    for stream in streams:
        next(stream)
    engine.kill()
    for stream in streams:
        with pytest.raises(openai.APIError, match="the engine process exited unexpectedly") as failed:
            list(stream)
        assert failed.value.code == "engine_dead"
    until(lambda: status_of(server) == 200)
    for name in ADAPTERS:
        answer = sdk.completions.create(model=name, prompt="banana=", temperature=0)
        assert answer.choices[0].text == APPLY[name]("banana")
    assert "it is being restarted" in server.stderr
    assert "Traceback" not in server.stderr


def check_keys(server: Server) -> None:
    with server.sdk("secret") as sdk:
        assert [model.id for model in sdk.models.list()] == ["demo"]
        assert sdk.completions.create(model="demo", prompt="banana=", temperature=0).choices[0].text == "banana"
    with server.sdk("wrong") as sdk, pytest.raises(openai.AuthenticationError):
        sdk.completions.create(model="demo", prompt="banana=")
    assert status_of(server) == 200  # probes have no key


def check_that_adapters_are_refused(server: Server) -> None:
    headers = {"Authorization": "Bearer secret"}
    body = {"lora_name": "upper", "lora_path": str(adapter_path("upper"))}
    loaded = httpx.post(server.url + "/v1/load_lora_adapter", json=body, headers=headers, timeout=PATIENCE_S)
    assert (loaded.status_code, loaded.json()["error"]["code"]) == (400, "lora_disabled")
    with server.sdk("secret") as sdk:
        for model, extra in (("demo", {"lora_path": "upper"}), ("demo:upper", None)):
            with pytest.raises(openai.BadRequestError, match="without LoRA"):
                sdk.completions.create(model=model, prompt="banana=", extra_body=extra)
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="upper", prompt="banana=")


# --------------------------------------------------------------------------------------------- outputs in a form, tools


class Answer(BaseModel):
    """Without other properties, which could be as long as a draw has it."""

    model_config = ConfigDict(extra="forbid")
    count: int = Field(ge=0, le=99)
    kind: Literal["red", "blue"]


ADD: Any = {"type": "function", "function": {"name": "add", "parameters": Answer.model_json_schema()}}


def test_outputs_in_a_form(sdk: openai.OpenAI) -> None:
    """Of the base and adapters at once."""

    def ask(model: str) -> Any:
        answer = sdk.chat.completions.parse(
            model=model, messages=user("banana bread"), response_format=Answer, max_tokens=600
        )
        return answer.choices[0].message.parsed

    with ThreadPoolExecutor(len(MODELS)) as pool:
        assert all(isinstance(parsed, Answer) for parsed in pool.map(ask, MODELS))
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        sdk.completions.create(
            model="upper", prompt="x", extra_body={"guided_json": {"type": "array", "uniqueItems": True}}
        )


def test_tools_that_must_be_called_parse(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="upper",
        messages=user("banana bread"),
        tools=[ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=800,
        stream=True,
    )
    chunks = [chunk.choices[0] for chunk in stream]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function and call.function.name] == ["add"]
    Answer.model_validate_json("".join(call.function.arguments or "" for call in calls if call.function))
    assert chunks[-1].finish_reason == "tool_calls"


def test_calls_of_many_schemas_parse_streamed_and_whole_alike(sdk: openai.OpenAI) -> None:
    """Of the base and adapters at once; one of two functions, or the one that is named."""

    def functions(number: int) -> list[Any]:
        schemas = {"first": schema_of(2 * number), "second": schema_of(2 * number + 1)}
        return [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()
        ]

    def ask(number: int, is_streamed: bool) -> list[tuple[str, str]]:
        named = {"type": "function", "function": {"name": "second"}}
        wanted: Any = {
            "model": MODELS[number % len(MODELS)],
            "messages": user("banana bread"),
            "tools": functions(number),
            "tool_choice": named if number % 2 else "required",
            "parallel_tool_calls": False,
            "seed": number,
            "max_tokens": 3000,
        }
        if not is_streamed:
            calls = sdk.chat.completions.create(**wanted).choices[0].message.tool_calls
            return [(call.function.name, call.function.arguments) for call in calls]
        names, texts = [], []
        for chunk in sdk.chat.completions.create(**wanted, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                names += [delta.function.name] if delta.function.name else []
                texts.append(delta.function.arguments or "")
        return [(name, "".join(texts)) for name in names]

    numbers = range(3 * len(MODELS))
    with ThreadPoolExecutor(16) as pool:
        whole = list(pool.map(functools.partial(ask, is_streamed=False), numbers))
        streamed = list(pool.map(functools.partial(ask, is_streamed=True), numbers))
    assert whole == streamed
    for number, calls in zip(numbers, whole, strict=True):
        [(name, text)] = calls
        schema = schema_of(2 * number + (name == "second"))
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
