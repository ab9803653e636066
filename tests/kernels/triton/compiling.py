"""Compiles what the Triton backend would launch on a GPU, as Triton's JIT would specialise it, without one.

    python -m tests.kernels.triton.compiling --arch 90 --match add_lora

One line of JSON for each kernel: the cases that launched it, what it was specialised for, what it takes of the GPU, and
its instructions of interest. The last line is a summary. It runs without Triton's interpreter, whose @jit makes no
kernels: in a process of its own. Tensors are on the CPU and hold nothing; no kernel runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import loraplex.kernels.triton as kernels
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.launch import A100, H100, L4, GpuTarget
from tests.kernels.triton.compile_cases import Case, cases_for

TARGETS = {80: A100, 89: L4, 90: H100}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

INSTRUCTIONS = {
    "HGMMA": r"HGMMA\.", "HMMA": r"HMMA\.", "IMMA": r"I[G]?MMA\.", "LDG.128": r"LDG\.\S*128",
    "LDGSTS.128": r"LDGSTS\.\S*128", "LDG": r"LDG\.", "STG.128": r"STG\.\S*128", "local": r"(?:LDL|STL)\b",
}  # fmt: skip
"""Of the matrix units, wide loads and stores, copies to shared memory, and local memory (spilt registers)."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU. cases: all that launched it; shared_bytes: a program's, dynamic; local_bytes: a
    thread's."""

    cases: list[str]
    kernel: str
    arch: int
    constants: dict[str, Any]
    signature: list[str]
    num_warps: int
    num_stages: int
    shared_bytes: int
    registers: int
    local_bytes: int
    has_dot: bool
    instructions: dict[str, int]


class FellBackError(Exception):
    """Stock torch would run this."""


class CompilingBackend(TritonBackend):
    """The backend as it would be on that GPU, with no stock torch behind it."""

    def _fall_back(self, operator: str, reason: str) -> None:
        raise FellBackError(f"{operator}: {reason}")


class _NoDriver:
    """What Triton's JIT asks of a driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class CompilingLauncher:
    """A Launcher that compiles instead: `compiled` is what it made, by hash: each kernel once for equal launches."""

    def __init__(self, arch: int) -> None:
        assert not triton.knobs.runtime.interpret, "kernels are interpreted in this process; unset TRITON_INTERPRET"
        driver.set_active(_NoDriver(arch))
        self.arch = arch
        self.target: GpuTarget = TARGETS[arch]
        self.case = ""
        self._kernels = all_kernels()
        self.compiled: dict[str, Compiled] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
    ) -> None:
        assert kernel_name(kernel) in self._kernels, f"{kernel} is named like a helper, or is not in this package"
        assert 1 <= len(grid) <= 3, f"{kernel} in a grid of {grid}"
        assert all(0 <= n <= limit for n, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=False)), f"grid {grid}"
        if not all(grid):
            return
        made = kernel.warmup(*args, grid=grid, num_warps=num_warps, num_stages=num_stages, **constants)
        found = self.compiled.get(made.hash)
        if found is None:
            found = self.compiled[made.hash] = self._describe(kernel, made, num_warps, num_stages)
        if self.case not in found.cases:
            found.cases.append(self.case)

    def _describe(self, kernel: Any, made: Any, num_warps: int, num_stages: int) -> Compiled:
        usage, sass = _disassembled(made.asm["cubin"])
        names = kernel.arg_names
        return Compiled(
            cases=[],
            kernel=kernel_name(kernel),
            arch=self.arch,
            constants={names[path[0]]: str(value) for path, value in made.src.constants.items()},
            signature=[f"{name}: {kind}" for name, kind in made.src.signature.items() if kind != "constexpr"],
            num_warps=num_warps,
            num_stages=num_stages,
            shared_bytes=made.metadata.shared,
            registers=usage["REG"],
            local_bytes=usage["STACK"] + usage["LOCAL"],
            has_dot="tt.dot" in made.asm["ttir"],
            instructions={name: len(re.findall(pattern, sass)) for name, pattern in INSTRUCTIONS.items()},
        )


def _disassembled(cubin: bytes) -> tuple[dict[str, int], str]:
    """(registers, stack and local bytes of a thread, the machine code)"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tools = ("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "--no-dataflow", "--print-code")
        shown = [
            subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True).stdout
            for tool, *options in tools
        ]
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown[0])}
    return usage, shown[1]


def kernel_name(kernel: Any) -> str:
    """E.g. `glue.rms_norm_kernel`."""
    module: str = kernel.fn.__module__
    return f"{module.removeprefix(f'{kernels.__name__}.')}.{kernel.fn.__name__}"


def all_kernels() -> dict[str, list[str]]:
    """The names of the arguments of everything that a module of loraplex/kernels/triton has for Triton's JIT, but for
    its helpers, by name.

    A helper's name begins with an underscore.
    """
    found = {}
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, triton.runtime.JITFunction) and value.fn.__module__ == module.__name__:
                found[kernel_name(value)] = value.arg_names
    return {name: arguments for name, arguments in found.items() if not name.partition(".")[2].startswith("_")}


def compile_cases(arch: int, cases: Sequence[Case]) -> tuple[list[Compiled], list[str]]:
    """(what the cases launch, each kernel once; a text for each where stock torch would run instead, or a kernel does
    not compile)"""
    launcher = CompilingLauncher(arch)
    failed = []
    for case in cases:
        backend = CompilingBackend(torch.device("cpu"), launcher, **case.options)
        launcher.case = case.name
        try:
            with torch.inference_mode():
                case.run(backend)
        except FellBackError as error:
            failed.append(f"{case.name}: stock torch runs {error}")
        except triton.CompilationError as error:
            failed.append(f"{case.name}: {_root(error)}")
    return list(launcher.compiled.values()), failed


def _root(error: BaseException) -> str:
    """Of an error in a function that a kernel calls: that function's."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=tuple(TARGETS), default=90)
    parser.add_argument("--match", default="", help="only cases whose name has this text")
    parser.add_argument("--core", action="store_true", help="each kernel in each dtype, at one shape")
    args = parser.parse_args(arguments)
    cases = [case for case in cases_for(args.arch, args.core) if args.match in case.name]
    compiled, failed = compile_cases(args.arch, cases)
    for found in compiled:
        print(json.dumps(asdict(found)))
    counted = Counter(found.kernel for found in compiled)
    missing = sorted(all_kernels().keys() - counted.keys())
    print(json.dumps({"arch": args.arch, "compiled": counted, "never": missing, "failed": failed}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
