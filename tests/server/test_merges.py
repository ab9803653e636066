"""Merges in the background, exports, and clones, over HTTP: real adapter files, and an engine without weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from loraplex.adapters import tensors
from loraplex.adapters.merging import export as exporting
from loraplex.adapters.merging import merge as merging
from loraplex.adapters.merging import outline as outlines
from loraplex.adapters.merging.outline import Origin, Outline, reader_limits
from loraplex.adapters.merging.part_folder import PART_PREFIX, remove_parts
from loraplex.adapters.merging.wish import MergeWish
from loraplex.adapters.merging.written import write_directory
from loraplex.adapters.registry import OpenedAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.demo.tasks import adapter_path
from loraplex.errors import (
    AdapterConflictError,
    AdapterNoRoomError,
    AdapterTooLargeError,
    ConfigError,
    LoraplexError,
    RequestAbortedError,
)
from loraplex.events import EventKind
from loraplex.frontend import making, merge_process
from loraplex.server import ServerConfig, create_app
from loraplex.server.config import output_folder
from loraplex.testing import FakeAsyncEngine
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of

MERGE, EXPORT = "/v1/adapters/merge", "/v1/adapters/{}/export"
PAIR = [{"name": "upper", "weight": 0.7}, {"name": "reverse", "weight": -0.3}]


def opened(path: str) -> OpenedAdapter:
    model = Outline.read(Origin(path, path, AdapterSource()), reader_limits(0)).model(reader_limits(0))
    return OpenedAdapter(path, model.adapter_digest, model.nbytes, model.rank)


@pytest.fixture
def engine() -> FakeAsyncEngine:
    return FakeAsyncEngine({name: str(adapter_path(name)) for name in ("upper", "reverse")}, open_adapter=opened)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return tmp_path / "made"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges are made in this process, where a test can stop them."""

    def make(
        process: Any, plan: Any, folder: Path, max_bytes: int, on_progress: Any, is_cancelled: Callable[[], bool]
    ) -> None:
        write_directory(merging.run_merge(plan, max_bytes, on_progress, is_cancelled), folder)

    monkeypatch.setattr(merge_process.MergeProcess, "make", make)


@pytest.fixture
async def client(engine: FakeAsyncEngine, made: Path, here: None) -> AsyncIterator[httpx.AsyncClient]:
    async for client in clients(engine, made):
        yield client


@pytest.fixture
async def client_with_process(engine: FakeAsyncEngine, made: Path) -> AsyncIterator[httpx.AsyncClient]:
    async for client in clients(engine, made):
        yield client


async def clients(engine: FakeAsyncEngine, made: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerConfig(adapter_output_dir=str(made)))
    async with client_of(app) as client:
        yield client
    app.state.context.maker.close()
    assert engine.registry is not None
    engine.registry.check_integrity()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Merges stop before their first module until it is set."""
    opening, combine = threading.Event(), merging.combine

    def wait(*args: Any) -> Any:
        assert opening.wait(60)
        return combine(*args)

    monkeypatch.setattr(merging, "combine", wait)
    return opening


async def over(client: httpx.AsyncClient, merge_id: str) -> dict[str, Any]:
    """The job when it has ended."""
    async with asyncio.timeout(240):
        while True:
            card: dict[str, Any] = (await client.get(f"/v1/merges/{merge_id}")).json()
            if card["state"] not in ("waiting", "running"):
                return card
            await asyncio.sleep(0.01)


async def started(client: httpx.AsyncClient, name: str = "both", **fields: Any) -> dict[str, Any]:
    response = await client.post(MERGE, json={"name": name, "adapters": PAIR, **fields})
    assert response.status_code == 202, response.text
    card: dict[str, Any] = response.json()
    return card


# ------------------------------------------------------------------------------------------------------------- merges


async def test_a_merge_is_made_beside_requests_and_loaded_under_its_name(
    client_with_process: httpx.AsyncClient, made: Path
) -> None:
    card = await started(client_with_process, combination_type="cat", is_pinned=True)
    assert (card["id"], card["name"], card["combination_type"]) == ("merge-1", "both", "cat")
    assert card["adapters"] == {"upper": 0.7, "reverse": -0.3}
    assert card["adapter"] is None
    card = await over(client_with_process, "merge-1")
    assert (card["state"], card["progress"], card["error"]) == ("done", 1.0, None)
    assert (card["adapter"]["status"], card["adapter"]["name"]) == ("loaded", "both")
    shown = (await client_with_process.get("/v1/adapters/both")).json()
    (folder,) = made.iterdir()
    assert shown["path"] == str(folder)
    assert folder.name.startswith("both-")
    assert shown["is_pinned"]
    assert shown["digest"] == card["adapter"]["digest"] == opened(str(folder)).adapter_digest
    assert card["bytes"] == sum(tensor.nbytes for tensor in load_all(folder))
    assert [each["id"] for each in (await client_with_process.get("/v1/merges")).json()["data"]] == ["merge-1"]


def load_all(folder: Path) -> list[Any]:
    return list(load_file(folder / "adapter_model.safetensors").values())


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"adapters": []}, 400, "adapters"),
        ({"adapters": PAIR * 9}, 400, "adapters"),
        ({"adapters": [{"name": "upper"}]}, 400, "adapters"),
        ({"adapters": [{"name": "upper", "weight": 1, "path": "/etc"}]}, 400, "path"),
        ({"adapters": [{"name": "nothing", "weight": 1}]}, 404, None),
        ({"combination_type": "average"}, 400, "combination_type"),
        ({"combination_type": "ties"}, 400, "density"),
        ({"combination_type": "linear", "seed": 1}, 400, "seed"),
        ({"svd_rank": 513}, 400, "svd_rank"),
        ({"svd_driver": "gesvd"}, 400, "svd_driver"),
        ({"output": "/tmp/x"}, 400, "output"),
        ({"name": "upper"}, 400, "name"),
        ({"name": "base"}, 400, "name"),
        ({"name": "../up"}, 400, "name"),
        ({"name": "a/b"}, 400, "name"),
    ],
    ids=str,
)
async def test_what_cannot_be_merged_is_refused_at_once(
    client: httpx.AsyncClient, made: Path, fields: dict[str, Any], status: int, param: str | None
) -> None:
    response = await client.post(MERGE, json={"name": "both", "adapters": PAIR, **fields})
    assert response.status_code == status, response.text
    assert (response.json()["error"]["param"] or "").partition("[")[0].partition(".")[0] == (param or "")
    assert (await client.get("/v1/merges")).json()["data"] == []
    assert list(made.iterdir()) == []


async def test_fields_of_pefts_call_that_change_no_result_are_accepted(client: httpx.AsyncClient) -> None:
    await started(client, svd_full_matrices=False, svd_driver=None)
    assert (await over(client, "merge-1"))["state"] == "done"


async def test_a_merge_beyond_the_bound_is_refused_before_it_is_made(engine: FakeAsyncEngine, made: Path) -> None:
    config = ServerConfig(adapter_output_dir=str(made), max_merge_bytes=2**20)
    async with client_of(create_app(engine, config)) as client:
        body = {"name": "both", "adapters": PAIR, "combination_type": "ties_svd", "density": 0.5, "svd_rank": 128}
        response = await client.post(MERGE, json=body)
    assert response.status_code == 400
    assert "max_merge_bytes" in response.text
    assert list(made.iterdir()) == []


async def test_a_cancelled_merge_leaves_nothing(client: httpx.AsyncClient, made: Path, gate: threading.Event) -> None:
    await started(client)
    await started(client, "later")
    for merge_id in ("merge-1", "merge-2"):
        assert (await client.delete(f"/v1/merges/{merge_id}")).status_code == 200
    gate.set()
    for merge_id in ("merge-1", "merge-2"):
        card = await over(client, merge_id)
        assert (card["state"], card["adapter"]) == ("cancelled", None)
        assert card["progress"] < 1
    assert (await client.get("/v1/adapters/both")).status_code == 404
    assert list(made.iterdir()) == []
    await started(client)
    assert (await over(client, "merge-3"))["state"] == "done"
    assert (await client.delete("/v1/merges/merge-3")).json()["state"] == "done"
    assert (await client.get("/v1/adapters/both")).status_code == 200


async def test_merges_that_wait_when_the_server_ends_are_cancelled(
    engine: FakeAsyncEngine, made: Path, here: None, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(engine, ServerConfig(adapter_output_dir=str(made)))
    async with client_of(app) as client:
        for name in ("first", "second", "third"):
            await started(client, name)
        app.state.context.maker.close()
        gate.set()
        assert [(await over(client, f"merge-{number}"))["state"] for number in (1, 2, 3)] == ["cancelled"] * 3
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_one_merge_runs_at_a_time_and_so_many_wait(client: httpx.AsyncClient, gate: threading.Event) -> None:
    for number in range(making.MAX_WAITING + 1):
        await started(client, f"m{number}")
    response = await client.post(MERGE, json={"name": "late", "adapters": PAIR})
    assert response.status_code == 429
    states = [card["state"] for card in (await client.get("/v1/merges")).json()["data"]]
    assert states == ["running", *["waiting"] * making.MAX_WAITING]
    assert (await client.post(MERGE, json={"name": "m3", "adapters": PAIR})).json()["error"]["param"] == "name"
    gate.set()
    for number in range(making.MAX_WAITING + 1):
        assert (await over(client, f"merge-{number + 1}"))["state"] == "done"


async def test_a_name_that_was_taken_meanwhile_is_kept(
    client: httpx.AsyncClient, made: Path, gate: threading.Event
) -> None:
    await started(client)
    response = await client.post("/v1/adapters", json={"name": "both", "path": str(adapter_path("reverse"))})
    assert response.status_code == 200
    gate.set()
    card = await over(client, "merge-1")
    assert card["state"] == "failed"
    assert "another source" in card["error"]
    assert (await client.get("/v1/adapters/both")).json()["digest"] == response.json()["digest"]
    assert list(made.iterdir()) == []


async def test_a_merge_that_cannot_be_loaded_leaves_nothing(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise AdapterNoRoomError("no room")

    await started(client)
    monkeypatch.setattr(engine.store, "add_adapter", refuse)
    card = await over(client, "merge-1")
    assert (card["state"], card["error"]) == ("failed", "no room")
    assert list(made.iterdir()) == []


async def test_a_mistake_of_ours_ends_the_job_alone(
    client: httpx.AsyncClient, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(merging, "combine", lambda *args: 1 / 0)
        await started(client)
        card = await over(client, "merge-1")
    assert card["state"] == "failed"
    assert "its log" in card["error"]
    await started(client)
    assert (await over(client, "merge-2"))["state"] == "done"
    assert len(list(made.iterdir())) == 1


# ------------------------------------------------------------------------------------------- the process of the merges


@pytest.fixture
def process() -> Iterator[merge_process.MergeProcess]:
    process = merge_process.MergeProcess()
    yield process
    process.end()


def plan() -> merging.MergePlan:
    origins = [Origin(name, str(adapter_path(name)), AdapterSource()) for name in ("upper", "reverse")]
    return merging.plan_merge(origins, MergeWish(adapters=(("upper", 1.0), ("reverse", 0.5))), 2**30)


def pid_of(process: merge_process.MergeProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_a_process_makes_one_merge_after_the_other(process: merge_process.MergeProcess, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    pids = []
    for name in ("first", "second"):
        if pids:
            os.kill(pids[0], signal.SIGTERM)  # what all processes of a service get is the server's
        process.make(plan(), tmp_path / name, 2**30, lambda done, total: seen.append((done, total)), lambda: False)
        pids.append(pid_of(process))
    assert opened(str(tmp_path / "first")).adapter_digest == opened(str(tmp_path / "second")).adapter_digest
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] == [(done, seen[0][1]) for done in range(seen[0][1] + 1)]
    assert pids[0] == pids[1]
    assert os.getpriority(os.PRIO_PROCESS, pids[0]) == merge_process.LOWEST_PRIORITY
    assert os.getsid(pids[0]) != os.getsid(0)


def test_a_process_whose_server_was_killed_ends_without_a_word(
    process: merge_process.MergeProcess, tmp_path: Path
) -> None:
    child, _ = process._running()
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.close()
    child.stdin.write(json.dumps(merge_process._question(plan(), tmp_path / "made", 2**30)) + "\n")
    child.stdin.flush()
    assert child.wait(timeout=120) == 1


def test_errors_of_a_merge_come_from_its_process(process: merge_process.MergeProcess, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(AdapterConflictError, match="is there already"):
        process.make(plan(), tmp_path / "there", 2**30, lambda *_: None, lambda: False)
    with pytest.raises(AdapterTooLargeError, match="max_merge_bytes"):
        process.make(plan(), tmp_path / "small", 2**10, lambda *_: None, lambda: False)
    process.make(plan(), tmp_path / "out", 2**30, lambda *_: None, lambda: False)


def test_a_process_that_waited_for_long_or_died_is_started_again(
    process: merge_process.MergeProcess, tmp_path: Path
) -> None:
    process.make(plan(), tmp_path / "first", 2**30, lambda *_: None, lambda: False)
    os.kill(pid_of(process), signal.SIGKILL)  # may be noticed by the question alone
    process.make(plan(), tmp_path / "second", 2**30, lambda *_: None, lambda: False)
    with pytest.raises(LoraplexError, match="ended unexpectedly"):
        process.make(
            plan(),
            tmp_path / "third",
            2**30,
            lambda done, _: os.kill(pid_of(process), signal.SIGKILL) if done == 1 else None,
            lambda: False,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_cancelled_process_is_ended_at_once(process: merge_process.MergeProcess, tmp_path: Path) -> None:
    is_cancelled = threading.Event()

    def cancel(done: int, _total: int) -> None:
        if done == 1:
            is_cancelled.set()
            process.kill()

    with pytest.raises(RequestAbortedError):
        process.make(plan(), tmp_path / "out", 2**30, cancel, is_cancelled.is_set)
    assert list(tmp_path.iterdir()) == []


async def test_a_merge_that_runs_is_cancelled_with_its_process(
    client_with_process: httpx.AsyncClient, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the least priority takes long to end on a busy machine. The event loop does not wait for it."""
    waiting: list[threading.Thread] = []
    wait = subprocess.Popen.wait

    def noted(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        waiting.append(threading.current_thread())
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", noted)
    await started(client_with_process)
    while (await client_with_process.get("/v1/merges/merge-1")).json()["state"] == "waiting":
        await asyncio.sleep(0.01)
    (made / f"{PART_PREFIX}both-other").mkdir()
    assert (await client_with_process.delete("/v1/merges/merge-1")).status_code == 200
    assert (await over(client_with_process, "merge-1"))["state"] == "cancelled"
    assert [path.name for path in made.iterdir()] == [f"{PART_PREFIX}both-other"], "of another folder"
    assert waiting, "the process was not ended"
    assert threading.main_thread() not in waiting


def test_what_an_ended_process_left_of_a_folder_is_removed(tmp_path: Path) -> None:
    for name in ("sql-1-x", "sql-12-x", "sql-2-x"):
        (tmp_path / f"{PART_PREFIX}{name}").mkdir()
    remove_parts(tmp_path / "sql-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PART_PREFIX}sql-12-x", f"{PART_PREFIX}sql-2-x"]


async def test_an_unknown_merge_is_404(client: httpx.AsyncClient) -> None:
    for call in (client.get, client.delete):
        assert (await call("/v1/merges/merge-9")).status_code == 404


async def test_without_a_folder_nothing_is_written(engine: FakeAsyncEngine) -> None:
    async with client_of(create_app(engine, ServerConfig())) as client:
        for path, body in ((MERGE, {"name": "both", "adapters": PAIR}), ("/v1/adapters/upper/export", None)):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "no_adapter_output_dir"
            assert "--adapter-output-dir" in response.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", MERGE),
        ("GET", "/v1/merges"),
        ("GET", "/v1/merges/merge-1"),
        ("DELETE", "/v1/merges/merge-1"),
        ("POST", "/v1/adapters/upper/export"),
        ("POST", "/v1/adapters/upper/clone"),
    ],
)
async def test_making_is_an_admins(engine: FakeAsyncEngine, made: Path, method: str, path: str) -> None:
    keys = ServerConfig(api_keys=("inference-key-0123",), admin_api_keys=("admin-key-0123456",))
    async with client_of(create_app(engine, replace(keys, adapter_output_dir=str(made)))) as client:
        response = await client.request(method, path, headers={"Authorization": "Bearer inference-key-0123"})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "admin_key_required"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made").chmod(0o777)
    with pytest.raises(ConfigError, match="--adapter-output-dir"):
        output_folder(ServerConfig(adapter_output_dir=str(tmp_path / "made")))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        output_folder(ServerConfig(adapter_output_dir=str(tmp_path / "file")))
    folder = output_folder(ServerConfig(adapter_output_dir=str(tmp_path / "new")))
    assert folder == tmp_path / "new"
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_a_folder_that_is_gone_is_made_again(client: httpx.AsyncClient, made: Path) -> None:
    made.rmdir()
    assert (await over(client, (await started(client))["id"]))["state"] == "done"
    shutil.rmtree(made)
    assert (await client.post("/v1/adapters/upper/export")).status_code == 200


async def test_a_folder_that_others_may_write_to_by_now_is_not_written_to(
    client: httpx.AsyncClient, made: Path
) -> None:
    made.chmod(0o777)
    card = await over(client, (await started(client))["id"])
    assert (card["state"], "by other users" in card["error"]) == ("failed", True)
    exported = await client.post("/v1/adapters/upper/export")
    assert (exported.status_code, "by other users" in exported.text) == (500, True)
    assert list(made.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- exports


async def test_an_export_is_written_into_the_servers_folder(client: httpx.AsyncClient, made: Path) -> None:
    digest = (await client.get("/v1/adapters/upper")).json()["digest"]
    first, second = [(await client.post("/v1/adapters/upper/export")).json() for _ in range(2)]
    assert first["digest"] == digest
    assert first["bytes"] == sum(tensor.nbytes for tensor in load_all(Path(first["path"])))
    assert {first["path"], second["path"]} == {str(path) for path in made.iterdir()}
    assert opened(first["path"]).adapter_digest == digest
    versioned = (await client.post("/v1/adapters/upper@1/export")).json()
    assert versioned["digest"] == digest
    assert (await client.post("/v1/adapters/nothing/export")).status_code == 404


async def test_files_that_changed_are_not_exported_as_what_is_served(
    client: httpx.AsyncClient, tmp_path: Path, made: Path
) -> None:
    shutil.copytree(adapter_path("upper"), tmp_path / "copy")
    assert (await client.post("/v1/adapters", json={"name": "c", "path": str(tmp_path / "copy")})).status_code == 200
    config = tmp_path / "copy" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))
    response = await client.post("/v1/adapters/c/export")
    assert response.status_code == 409, response.text
    merge = await client.post(MERGE, json={"name": "m", "adapters": [{"name": "c", "weight": 1}]})
    assert (await over(client, merge.json()["id"]))["state"] == "failed"
    assert list(made.iterdir()) == []


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Exports stop before their first step until it is set."""
    opening, export_adapter = threading.Event(), exporting.export_adapter

    def wait(*args: Any) -> Any:
        assert opening.wait(60)
        return export_adapter(*args)

    monkeypatch.setattr(exporting, "export_adapter", wait)
    yield opening
    opening.set()


async def test_what_a_merge_or_an_export_reads_stays_until_it_is_made(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, gate: threading.Event, exports: threading.Event
) -> None:
    """An upload's files go with its last version, and left a merge that waited without its parts."""
    registry = engine.registry
    assert registry is not None
    await started(client)
    exporting_upper = asyncio.ensure_future(client.post("/v1/adapters/upper/export"))
    while registry.num_references < 3:
        await asyncio.sleep(0.005)
    unloaded = (await client.delete("/v1/adapters/upper")).json()
    assert (unloaded["is_drained"], unloaded["references"]) == (False, 2)
    gate.set()
    exports.set()
    assert (await exporting_upper).status_code == 200
    assert (await over(client, "merge-1"))["state"] == "done"
    async with asyncio.timeout(60):
        while registry.num_references:  # the job is over a moment before it lets go
            await asyncio.sleep(0.005)
    missing = await client.post(MERGE, json={"name": "m", "adapters": PAIR[::-1]})
    assert (missing.status_code, registry.num_references) == (404, 0)


async def test_so_many_exports_run_or_wait_and_the_next_is_refused(
    client: httpx.AsyncClient, exports: threading.Event, made: Path
) -> None:
    calls = {asyncio.create_task(client.post(EXPORT.format("upper"))) for _ in range(making.MAX_EXPORTS + 1)}
    (refused,), waiting = await asyncio.wait(calls, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert refused.result().status_code == 429
    exports.set()
    assert [(await task).status_code for task in waiting] == [200] * making.MAX_EXPORTS
    assert (await client.post(EXPORT.format("upper"))).status_code == 200
    assert len(list(made.iterdir())) == making.MAX_EXPORTS + 1


async def test_an_export_ends_with_its_clients_connection(
    engine: FakeAsyncEngine, exports: threading.Event, made: Path
) -> None:
    app = create_app(engine, ServerConfig(adapter_output_dir=str(made)))
    calls = [AsgiCall(app, EXPORT.format("upper"), {}) for _ in range(3)]
    await asyncio.sleep(0.05)
    for call in calls:
        call.disconnect()
        await asyncio.wait_for(call.task, 60)
    exports.set()
    async with client_of(app) as client:
        assert (await client.post("/v1/adapters/reverse/export")).status_code == 200
    (folder,) = made.iterdir()
    assert folder.name.startswith("reverse-")
    app.state.context.maker.close()


# ----------------------------------------------------------------------------------------------------- plans of .bin


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """`upper` as a .bin."""
    path = Path(shutil.copytree(adapter_path("upper"), tmp_path / "pickled"))
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()
    return path


async def test_a_bin_beyond_the_bound_is_not_read_to_plan_a_merge(
    engine: FakeAsyncEngine, made: Path, pickled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve plans of a .bin of 30 MB took 700 MB, and were refused for their size."""
    app = create_app(engine, ServerConfig(adapter_output_dir=str(made), max_merge_bytes=2**20))
    async with client_of(app) as client:
        assert (await client.post("/v1/adapters", json={"name": "p", "path": str(pickled)})).status_code == 200
        with (pickled / "adapter_model.bin").open("ab") as file:
            file.truncate(2**20)
        monkeypatch.setattr(tensors, "read_bin", lambda *args: pytest.fail("it was read"))
        for path, body in ((MERGE, {"name": "m", "adapters": [{"name": "p", "weight": 1}]}), (EXPORT.format("p"), {})):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert "would take 3145728 bytes of memory and 1048576 are the limit" in response.text
    app.state.context.maker.close()


async def test_plans_parse_one_file_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen plans of an adapter with 14,000 long names held up the event loop for 0.4 s again and again."""
    running, most, read_modules = 0, 0, outlines._modules

    def read(*args: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.02)  # others may come to it meanwhile, if anything lets them
        running -= 1
        return read_modules(*args)

    monkeypatch.setattr(outlines, "_modules", read)
    origins = [Origin(name, str(adapter_path(name)), AdapterSource()) for name in ("upper", "reverse")]
    wish = MergeWish(adapters=(("upper", 1.0), ("reverse", 1.0)))
    await asyncio.gather(*(asyncio.to_thread(merging.plan_merge, origins, wish, 2**30) for _ in range(4)))
    assert most == 1


async def test_plans_have_one_bin_in_memory(pickled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most, read_bin = [0], tensors.read_bin

    class Loaded(dict[str, torch.Tensor]):
        """That a weak reference may be to."""

    def read(*args: Any) -> Any:
        loaded = Loaded(read_bin(*args))
        alive.append(weakref.ref(loaded))
        most.append(sum(each() is not None for each in alive))
        threading.Event().wait(0.05)  # others may come to it meanwhile, if anything lets them
        return loaded

    monkeypatch.setattr(tensors, "read_bin", read)
    origins, wish = [Origin("p", str(pickled), AdapterSource())], MergeWish(adapters=(("p", 1.0),))
    plans = [asyncio.to_thread(merging.plan_merge, origins, wish, 2**30) for _ in range(6)]
    assert len(await asyncio.gather(*plans)) == len(alive) == 6
    assert max(most) == 1


# -------------------------------------------------------------------------------------------------------------- clones


async def test_a_clone_is_the_same_content_under_a_name_of_its_own(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    response = await client.post("/v1/adapters/upper/clone", json={"name": "copy", "lora_int_id": 7})
    assert response.status_code == 200
    original, copy = [(await client.get(f"/v1/adapters/{name}")).json() for name in ("upper", "copy")]
    assert (copy["digest"], copy["path"]) == (original["digest"], original["path"])
    assert (copy["version"], copy["lora_int_id"], response.json()["status"]) == (1, 7, "loaded")
    again = await client.post("/v1/adapters/upper/clone", json={"name": "copy"})
    assert again.json()["status"] == "already_loaded"
    assert (await client.delete("/v1/adapters/upper")).status_code == 200
    assert (await client.get("/v1/adapters/copy")).status_code == 200


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("nothing", {"name": "copy"}, 404),
        ("upper", {"name": "reverse"}, 400),
        ("upper", {"name": "base"}, 400),
        ("upper", {"name": "a/b"}, 400),
        ("upper", {"name": "x@2"}, 400),
        ("upper", {}, 400),
        ("upper", {"name": "copy", "path": "/etc"}, 400),
    ],
    ids=str,
)
async def test_a_clone_that_cannot_be(client: httpx.AsyncClient, name: str, body: dict[str, Any], status: int) -> None:
    assert (await client.post(f"/v1/adapters/{name}/clone", json=body)).status_code == status


async def test_verbs_of_making_have_audit_events(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    await started(client)
    await client.post("/v1/adapters/upper/clone", json={"name": "copy"})
    await client.post("/v1/adapters/upper/export")
    await client.delete("/v1/merges/merge-1")
    events = [numbered.event for numbered in engine.events.after(0).events]
    texts = [event.text for event in events if event.kind is EventKind.AUDIT]
    expected: list[Callable[[str], bool]] = [
        lambda text: "/merge" in text and "'both', 'upper', 'reverse'" in text and text.endswith("202"),
        lambda text: "/clone" in text and "'upper'" in text,
        lambda text: "/export" in text and "'upper'" in text,
        lambda text: "DELETE" in text and "'both'" in text,
    ]
    assert len(texts) == len(expected)
    assert all(fits(text) for fits, text in zip(expected, texts, strict=True)), texts
