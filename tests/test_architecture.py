"""The direction of imports, what may not know what, and what the offline engine needs: checked against the files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "loraplex"

ORDER = (
    "errors",
    "logs",
    "interrupt",
    "environment",
    "private_folder",
    "config",
    "sampling_params",
    "core",
    "cpu",
    "events",
    "metrics",
    "profiler",
    "performance",
    "distributed",
    "kernels",
    "adapters",
    "text",
    "memory",
    "kvcache",
    "layers",
    "models",
    "engine",
    "frontend",
    "server",
    "testing",
    "demo",
    "views",
    "bench",
    "profile",
    "doctor",
    "progress",
    "lora_modules",
    "cli_help",
    "cli",
    "__main__",
    "compat",  # names of the field: nothing in the product imports them
)
FORBIDDEN = (("adapters", "kernels"), ("kernels", "adapters"), ("layers", "memory"), ("memory", "layers"))
TORCH_FREE = (
    "loraplex",
    "loraplex.errors",
    "loraplex.config",
    "loraplex.core",
    "loraplex.metrics",
    "loraplex.performance.profile",
    "loraplex.adapters.registry",
    "loraplex.kvcache.allocator",
    "loraplex.engine.scheduler",
    "loraplex.frontend.messages",
    "loraplex.frontend.client",
    "loraplex.frontend.async_engine",
    "loraplex.server.config",
    "loraplex.views.live_profile",
    "loraplex.views.top",
    "loraplex.cli",
)
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
    "sqlalchemy",
)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


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


def test_what_needs_no_torch_imports_none() -> None:
    """Each in the same fresh interpreter: torch must not come in through another module either."""
    names = ", ".join(map(repr, TORCH_FREE))
    run_python(
        "import importlib, sys\n"
        f"for name in ({names},):\n"
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
        "    outputs = llm.generate(['banana bread='] * 2, SamplingParams(temperature=0, max_tokens=20), lora_request=[adapter, None])\n"
        "assert outputs[0].outputs[0].text == 'BANANA BREAD', outputs[0].outputs[0].text\n"
    )


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


def test_files_and_functions_stay_readable() -> None:
    """Kernels may have longer functions; nothing else has."""
    for name, path in modules():
        text = path.read_text()
        is_kernel = part_of(name) == "kernels"
        assert text.count("\n") <= 600, f"{name} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel:
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                assert length <= 55, f"{name}.{node.name} has {length} lines"
