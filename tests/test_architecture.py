"""The direction of imports, what may not know what, and what the offline engine needs: checked against the files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "loraplex"

ORDER = (
    "errors",
    "bounds",
    "logs",
    "interrupt",
    "processes",
    "private_folder",
    "config",
    "structured",
    "sampling_params",
    "core",
    "adapter_store",
    "routing",
    "cpu",
    "events",
    "metrics",
    "performance",
    "distributed",
    "kernels",
    "adapters",
    "cli_help",
    "tenants",
    "text",
    "memory",
    "kvcache",
    "layers",
    "models",
    "ranks",
    "engine",
    "frontend",
    "server",
    "testing",
    "demo",
    "views",
    "router",
    "bench",
    "profile",
    "doctor",
    "progress",
    "lora_modules",
    "serve",
    "twin",
    "commands",
    "cli",
    "__main__",
    "compat",  # names of the field: nothing in the product imports them
)
FORBIDDEN = (("adapters", "kernels"), ("kernels", "adapters"), ("layers", "memory"), ("memory", "layers"))
TORCH_FREE_FOLDERS = (
    "adapters/journal",
    "adapters/registry",
    "bounds",
    "frontend",
    "kvcache",
    "performance",
    "router",
    "routing",
    "server",
    "tenants",
    "testing",
    "text",
    "views",
    ".",
)
NEEDS_TORCH = {
    "loraplex.frontend.llm": "an engine in this process",
    "loraplex.frontend.engine_loop": "an engine as a process",
    "loraplex.bench": "runs an offline engine",
    "loraplex.profile": "runs an offline engine",
    "loraplex.doctor": "tries kernels",
    "loraplex.distributed": "slices tensors",
}
"""Modules in those folders that torch comes with, and why."""

TORCH_FREE = ("loraplex.engine.scheduler",)
"""In folders of which the rest needs torch."""

MAX_FILES = 17
LARGER_FOLDERS = {
    ".": (21, "one file a noun that several packages share, and one a command"),
    "frontend": (18, "one file a part of the front, one for the entry of an engine's process and one for its loop"),
    "kernels": (19, "what kernels read, one file a backend, and what is counted of them"),
    "kernels/triton": (19, "one file a kernel or two that work together, and one for what launches them"),
    "server": (48, "one file a route and one a bound of the protocol; each is opened alone"),
}
"""Folders with more files, how many they may have, and why. A number may only fall."""

MAX_LINE_WIDTH = 120
OWN_SUFFIXES = (".py", ".cpp", ".h", ".html", ".js", ".css", ".md")
PEOPLES_WORDS = re.compile(
    r"\b((no|some)body|who(ever|m)|(un)asked|(a)new|for (ever)|in (vain)|(fare)well|(make|give)s? way)\b", re.IGNORECASE
)
"""In groups, so that this line is none of them."""

MAX_FILE_LINES, MAX_FUNCTION_LINES, SMALL_FILE_LINES = 600, 55, 60
SMALL_FILES = {
    "loraplex.commands.route": "a group of commands; the command line imports the one that is called",
    "loraplex.commands.state": "a group of commands; the command line imports the one that is called",
    "loraplex.commands.watching": "a group of commands; the command line imports the one that is called",
    "loraplex.compat.deltas": "names of the field, for users; nothing in the product imports them",
    "loraplex.models.checkpoints.forms": "the one that knows all forms, each of which is a file",
    "loraplex.models.checkpoints.mxfp4": "a form of its own; experts of gpt-oss have it beside compressed-tensors",
    "loraplex.models.commands": "a group of commands, beside what it shows; cli.py imports the one that is called",
    "loraplex.progress": "draws on a terminal; cli.py is at its size",
    "loraplex.ranks.start": "a process runs it; it acts before the follower's imports",
    "loraplex.serve.ray_router": "Ray Serve imports it by its name, where nothing else of the deployment is",
    "loraplex.server.telemetry.collector": "imports requests, which loraplex[otel] alone brings",
    "loraplex.server.verb_turns": "a bound of the protocol, tested alone; its route does not decide which verb waits",
}
"""Files under SMALL_FILE_LINES that one module imports, and why they are not a part of it."""

OFFLINE_ONLY = ("torch", "numpy", "safetensors", "tokenizers", "jinja2")
NOT_ON_A_BARE_MACHINE = (
    "msgspec",
    "zmq",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "cyclopts",
    "rich",
    "prometheus_client",
    "huggingface_hub",
    "transformers",
    "peft",
    "psutil",
    "llguidance",
    "sqlalchemy",
    "httpx",
)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part_of(module: str) -> str | None:
    """`loraplex.memory.space.arena` -> `memory`; the package itself has no part."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def imports_of(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, at any depth, but not those for the type checker only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("loraplex"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loraplex"):
            assert node.module is not None
            yield from (
                (f"{node.module}.{alias.name}" for alias in node.names) if node.module == "loraplex" else [node.module]
            )


def test_every_part_has_its_place_in_the_order() -> None:
    assert {part_of(name) for name, _ in modules()} - {None} <= set(ORDER)


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_imports_go_one_way(name: str, path: Path) -> None:
    own = part_of(name)
    if own is None:
        return
    for imported in imports_of(path):
        part = part_of(imported)
        if part is None or part not in ORDER:
            continue  # a name of the package itself, such as __version__
        assert ORDER.index(part) <= ORDER.index(own), f"{name} imports {imported}, against the order"
        assert (own, part) not in FORBIDDEN, f"{name} must not know {imported}"


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def torch_free_modules() -> list[str]:
    found = [*TORCH_FREE]
    for folder in TORCH_FREE_FOLDERS:
        paths = set((PACKAGE / folder).glob("*.py" if folder == "." else "**/*.py"))
        found += [name for name, path in modules() if path in paths and name not in NEEDS_TORCH]
    return found


def test_what_needs_no_torch_imports_none() -> None:
    """All in one fresh interpreter: torch must not come in through another module either."""
    names = torch_free_modules()
    assert {"loraplex", "loraplex.cli", "loraplex.text.tokenizer", "loraplex.frontend.client"} <= set(names)
    run_python(
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )


def test_the_offline_engine_needs_five_packages_only(tmp_path: Path) -> None:
    """With everything else blocked, `LLM` loads a model and an adapter, and generates."""
    from loraplex.demo.tasks import adapter_path, assets_path

    run_python(
        "import sys\n"
        f"for name in {NOT_ON_A_BARE_MACHINE!r}:\n"
        "    sys.modules[name] = None\n"
        "import torch; torch.set_num_threads(1)\n"
        "from loraplex import LLM, LoRARequest, SamplingParams\n"
        f"with LLM({str(assets_path() / 'base')!r}) as llm:\n"
        f"    adapter = LoRARequest('upper', 1, {str(adapter_path('upper'))!r})\n"
        "    params, prompts = SamplingParams(temperature=0, max_tokens=20), ['banana bread='] * 2\n"
        "    outputs = llm.generate(prompts, params, lora_request=[adapter, None])\n"
        "assert outputs[0].outputs[0].text == 'BANANA BREAD', outputs[0].outputs[0].text\n"
    )


def test_a_process_takes_no_module_from_the_working_directory() -> None:
    """A file `pickle.py` where a server was started ran in its ranks."""
    started = [
        (str(path), ast.literal_eval(words[1]))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if (words := getattr(node, "args" if isinstance(node, ast.Call) else "elts", None))
        and ast.unparse(words[0]) == "sys.executable"
    ]
    assert len(started) >= 5
    assert [each for each in started if each[1] not in ("-P", "-I")] == []


def test_exports_are_what_they_say() -> None:
    import loraplex

    assert set(loraplex.__all__) == set(loraplex._HOME_OF)
    for name in loraplex.__all__:
        assert getattr(loraplex, name).__name__ == name
        assert name in dir(loraplex)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = loraplex.LMM


def test_step_is_a_paragraph() -> None:
    """`EngineCore.step` stays under 20 lines."""
    tree = ast.parse((PACKAGE / "engine" / "engine.py").read_text())
    (step,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno + 1 < 20


def test_folders_are_small() -> None:
    """A folder is read as a whole: what does not fit into one is two packages."""
    for folder in {path.parent for _, path in modules()}:
        name = str(folder.relative_to(PACKAGE))
        most, _ = LARGER_FOLDERS.get(name, (MAX_FILES, ""))
        num_files = len(list(folder.glob("*.py")))
        assert num_files <= most, f"{name} has {num_files} files, and may have {most}"


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of every file in loraplex/ and csrc/ that is written here, and of README.md."""
    files = [path for folder in (PACKAGE, ROOT / "csrc") for path in folder.rglob("*") if path.suffix in OWN_SUFFIXES]
    for path in [*files, ROOT / "README.md"]:
        if not {"swagger-ui", "assets"} & set(path.parts):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_no_line_is_wider_than_120_columns() -> None:
    for name, text in texts():
        for number, line in enumerate(text.splitlines(), 1):
            assert len(line) <= MAX_LINE_WIDTH, f"{name}:{number} has {len(line)} columns"


def test_the_subject_of_a_sentence_is_a_thing_in_the_code() -> None:
    """Also where such words are at the end of one line and the start of the next."""
    for name, text in texts():
        found = PEOPLES_WORDS.search(re.sub(r"\s+(?:#|//)?\s*", " ", text))
        assert not found, f"{name} says {found and found[0]!r}: name the thing that acts"


def test_files_and_functions_stay_readable() -> None:
    """Kernels may have longer functions; nothing else has."""
    for name, path in modules():
        text = path.read_text()
        is_kernel = part_of(name) == "kernels"
        assert text.count("\n") <= MAX_FILE_LINES, f"{name} has {text.count(chr(10))} lines"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel:
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, f"{name}.{node.name} has {length} lines"


@cache
def import_graph() -> dict[str, set[str]]:
    """Every module and those that it imports at any depth, for types too; `from package import module` is the
    module."""
    paths = dict(modules())
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(tree_of(path)):
            found: list[str] = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [each if each in paths else node.module for each in inner]
            graph[name].update(each for each in found if each in paths and each != name)
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph()
    reached = {name: reachable(graph, name) for name in graph}
    for name in graph:
        circle = {other for other in reached[name] if name in reached[other]}
        assert not circle, f"they import each other: {sorted(circle)}"


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def test_small_files_stand_for_something() -> None:
    """Else a reader opens one file more for what one module alone uses."""
    graph, paths = import_graph(), dict(modules())
    assert SMALL_FILES.keys() <= paths.keys()
    for name, path in paths.items():
        importers = [other for other, imported in graph.items() if name in imported]
        num_lines = path.read_text().count("\n")
        if path.name != "__init__.py" and num_lines < SMALL_FILE_LINES and len(importers) <= 1:
            assert name in SMALL_FILES, f"{name} has {num_lines} lines, and only {importers} imports it: make them one"


# ------------------------------------------------------------------------------------------------------ the verb ladder

VERBS = ("load", "unload", "switch", "move", "pin", "unpin", "evict", "preload", "describe")
OF_NAMES = {
    "loraplex.adapters.registry.registry",  # where it is done
    "loraplex.server.adapter_api",  # its routes: HTTP, AsyncEngine, LLM
    "loraplex.frontend.adapter_verbs",
    "loraplex.frontend.llm",
}
OF_IDS = {
    "loraplex.memory.manager",  # where it is done
    "loraplex.adapter_store",  # of which the engine's wire is made
    "loraplex.testing.fake_adapter_store",  # its double
}
OTHER_PINS = {"loraplex.memory.space.arena"}  # page-locks memory


def declared_in(*names: str) -> set[str]:
    """Modules that declare a function, a class or an attribute of such a name."""
    return {module for module, path in modules() if not declarations_of(path).isdisjoint(names)}


@cache
def declarations_of(path: Path) -> frozenset[str]:
    """Names of the functions, classes and attributes that a file declares, at any depth."""
    declared: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            declared.add(node.name)
        elif isinstance(node, ast.Assign):
            targets = [each for each in node.targets if isinstance(each, ast.Name | ast.Attribute)]
            declared.update(each.id if isinstance(each, ast.Name) else each.attr for each in targets)
    return frozenset(declared)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_written_where_it_is_done_at_its_routes_and_in_its_double(verb: str) -> None:
    """In between, `on_registry` and `CallStore` carry any verb; no other file has a line for each."""
    spellings = (f"{verb}_adapter", f"{verb}_lora", f"{verb.capitalize()}Adapter")
    assert declared_in(*spellings) <= OF_NAMES | OF_IDS
    if verb in ("pin", "unpin", "preload", "unload"):  # words of the verbs alone
        assert declared_in(verb) - OTHER_PINS == {
            "loraplex.adapters.registry.registry",
            "loraplex.server.adapter_api",
        }


def test_the_engines_wire_has_no_message_for_a_verb() -> None:
    from loraplex.adapter_store import AdapterStore
    from loraplex.frontend.store import STORE_METHODS

    assert "pin_adapter" in STORE_METHODS
    assert all(callable(getattr(AdapterStore, name)) for name in STORE_METHODS)
    assert declared_in(*STORE_METHODS) <= OF_IDS | {"loraplex.engine.engine", "loraplex.engine.scheduler"} | {
        "loraplex.frontend.store",  # an engine's abort; a drop that came with the end of its process
        "loraplex.frontend.adapter_verbs",
        "loraplex.adapters.registry.registry",  # list_adapters of names
        "loraplex.adapters.registry.views",
        "loraplex.server.engine_surface",
    }


# ------------------------------------------------------------------------------------------------ the adapters' memory

MEMORY = PACKAGE / "memory"
STATE_OF_WEIGHTS = {"state", "host", "device", "job", "layout", "failure"}
TRANSITIONS = {"begin_load", "loaded", "publish_shared", "begin_copy", "landed", "leave_device", "leave_host"}


def memory_files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(MEMORY.rglob("*.py")):
        yield str(path.relative_to(MEMORY)), ast.parse(path.read_text())


def written_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes of other objects than `self` that are assigned or deleted."""
    for node in ast.walk(tree):
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and not is_own:
            yield node


def test_residency_has_one_writer() -> None:
    """`StoredWeights.state`, `host`, `device`, `job`, `layout` `failure`: residency/store.py alone writes them."""
    for name, tree in memory_files():
        written = {each.attr for each in written_attributes(tree)} & STATE_OF_WEIGHTS
        assert name == "residency/store.py" or not written, f"memory/{name} writes {sorted(written)}"


def test_the_seven_transitions_stand_in_the_table() -> None:
    tree = ast.parse((MEMORY / "residency" / "store.py").read_text())
    table = (ast.get_docstring(tree) or "").partition("\n\n")[2]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    writers = {each.name for each in functions if "state" in {node.attr for node in written_attributes(each)}}
    assert {name.strip("_").removesuffix("_locked") for name in writers} == TRANSITIONS
    assert set(table.split()) >= TRANSITIONS


def test_care_and_transfers_see_protocols_and_not_the_store() -> None:
    for name, tree in memory_files():
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert name == "manager.py" or "loraplex.memory.residency.store" not in imported, f"memory/{name}"
        for node in ast.walk(tree):
            is_inside = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
            if is_inside and not name.startswith("residency/"):
                assert node.value.attr not in ("store", "_store"), f"memory/{name}:{node.lineno}"
            if isinstance(node, ast.ClassDef) and node.name in ("Residents", "Transitions"):
                assert len(node.body) - 1 <= 12, f"{node.name} has {len(node.body) - 1} methods"


def test_the_store_is_no_blackboard() -> None:
    """What is not in residency/ calls methods of the store, and reads none of its attributes."""
    for name, tree in memory_files():
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            owner = node.value if isinstance(node, ast.Attribute) else None
            if isinstance(owner, ast.Attribute) and owner.attr in ("_residency", "_residents"):
                assert id(node) in called, f"memory/{name}:{node.lineno} reads {node.attr}"


def test_the_lock_is_private_to_residency() -> None:
    """No file takes the lock of another object; `care/` and the manager have none of their own."""
    for name, tree in memory_files():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("lock", "_lock"):
                assert isinstance(node.value, ast.Name), f"memory/{name}:{node.lineno}"
                assert node.value.id == "self", f"memory/{name}:{node.lineno}"
                assert not name.startswith(("care/", "manager.py", "stats.py")), f"memory/{name}:{node.lineno}"


def test_locked_methods_are_called_with_the_lock_held() -> None:
    """In a method with `_locked` in its name, or inside `with ... held()` (`with self._lock` in the store)."""
    for name, tree in memory_files():
        if name.startswith(("residency/", "care/", "manager.py")):
            lines = list(unlocked_calls(tree, is_held=False))
            assert lines == [], f"memory/{name} calls `_locked` methods without the lock in these lines"


def unlocked_calls(node: ast.AST, is_held: bool) -> Iterator[int]:
    if isinstance(node, ast.FunctionDef):
        is_held = node.name.endswith("_locked")
    if isinstance(node, ast.With):
        taken = [ast.unparse(item.context_expr) for item in node.items]
        is_held |= any(text.endswith(".held()") or text == "self._lock" for text in taken)
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr.endswith("_locked") and not is_held:
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from unlocked_calls(child, is_held)
