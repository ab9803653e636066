"""Where a script runs: on a GPU, or in Triton's interpreter on a CPU; how it ends, and what it leaves behind."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.table import Table

from benchmarks.report import wide_console
from loraplex.errors import ConfigError
from loraplex.kernels.ops import KernelBackend, get_backend

KEEP_EVERY_S = 5.0
LEFT_OUT = "left out: --budget is spent"

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Place:
    """A device and its Triton kernels. may_capture: whether CUDA graphs can be made here."""

    device: torch.device
    backend: KernelBackend
    may_capture: bool

    @property
    def is_interpreted(self) -> bool:
        return self.device.type != "cuda"

    def lora_backend(self, **options: Any) -> KernelBackend:
        """Another one here; options of TritonBackend: block_dtype, attention."""
        from loraplex.kernels.triton.backend import TritonBackend

        return TritonBackend(self.device, **options)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those that kernels have here; the interpreter gets bfloat16 wrong."""
        return (FP32, FP16) if self.is_interpreted else (FP32, FP16, BF16)

    @property
    def card(self) -> str:
        return "Triton's interpreter" if self.is_interpreted else torch.cuda.get_device_name(self.device)

    @property
    def title(self) -> str:
        """What the figures depend on."""
        import triton

        where = f"{self.card}: no figure here means anything"
        if not self.is_interpreted:
            found = torch.cuda.get_device_properties(self.device)
            where = f"{self.card}, {found.multi_processor_count} SMs, CUDA {torch.version.cuda}"
        versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
        return f"{where}; {versions}; {time.strftime('%Y-%m-%d %H:%M')}"

    def synchronize(self) -> None:
        if not self.is_interpreted:
            torch.cuda.synchronize(self.device)


# --------------------------------------------------------------------------------------------------------------- ending


@dataclass
class Ending:
    """code: 0, or the exit code of a program that a signal ended."""

    code: int = 0


class _Ended(BaseException):
    """SIGTERM came."""


@contextmanager
def endable() -> Iterator[Ending]:
    """Ctrl-C and SIGTERM end what runs within, `finally`s and all, and what comes after it goes on."""
    ending = Ending()

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield ending
    except KeyboardInterrupt:
        ending.code = 128 + signal.SIGINT
    except _Ended:
        ending.code = 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(main: Callable[[], int]) -> int:
    """Of a script that may be ended before it measures anything: without a traceback then."""
    with endable() as ending:
        return main()
    return ending.code


# ------------------------------------------------------------------------------------------------------------ beginning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interpret", action="store_true", help="try the script out on a CPU, in Triton's interpreter, at tiny sizes"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures here (default: a file in $OUT, if that is set)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what succeeded in that file on the same card, torch and Triton, and run the rest",
    )


def find_place(is_interpreted: bool) -> Place:
    """Ends the program, in a line, where there is nothing to run on."""
    if is_interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    elif not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; --interpret tries this script out on a CPU")
    device = torch.device("cpu" if is_interpreted else "cuda")
    try:
        return Place(device, get_backend("triton", device), may_capture=not is_interpreted)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


def circumstances(place: Place) -> dict[str, str]:
    """Versions, and the commit where git knows it; empty texts for what is not known."""
    import triton

    root = Path(__file__).parents[2]
    return {
        "card": place.card,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "",
        "driver": ""
        if place.is_interpreted
        else _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": _said("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
    }


def _said(*command: str) -> str:
    """The first line that a program prints; empty where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter(said.stdout.splitlines()), "") if said.returncode == 0 else ""


# -------------------------------------------------------------------------------------------------------------- results


def dtype_name(dtype: torch.dtype) -> str:
    return {FP32: "fp32", FP16: "fp16", BF16: "bf16"}.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Sheet:
    """A table of texts. The first `num_texts` columns are texts, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_texts: int = 1

    def show(self, title: str) -> None:
        """A change of the first column begins a section."""
        table = Table(title=title, title_justify="left")
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if number < self.num_texts else "right", overflow="fold")
        previous = self.rows[0][0] if self.rows else ""
        for row in self.rows:
            if row[0] != previous:
                table.add_section()
            previous = row[0]
            table.add_row(*row)
        wide_console().print(table)

    def markdown(self) -> str:
        rules = [("---", "---:")[number >= self.num_texts] for number in range(len(self.headings))]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.headings, rules, *self.rows))


def json_path(path: Path | None, name: str) -> Path | None:
    """`path`, else NAME.json in the folder that $OUT names, else none."""
    if path is None and os.environ.get("OUT"):
        return Path(os.environ["OUT"]) / f"{name}.json"
    return path


class Output:
    """Where the figures of a script go while it runs: a run that is broken off leaves what it had found."""

    def __init__(self, path: Path | None, title: str, place: Place, earlier_commits: Sequence[str] = ()) -> None:
        """path None: nowhere. earlier_commits: of what was kept of an earlier call."""
        self._path = path
        kept = f"\nsome of it was measured before, at commit {', '.join(earlier_commits)}" if earlier_commits else ""
        self._title = title + kept
        self._circumstances = {**circumstances(place), "earlier_commits": [*earlier_commits]}
        self._written = -KEEP_EVERY_S

    def keep(self, sheet: Sheet, figures: Mapping[str, Any], is_last: bool = False) -> None:
        """Write everything, if the last time was a while ago."""
        if self._path is None or not (is_last or time.monotonic() - self._written > KEEP_EVERY_S):
            return
        self._written = time.monotonic()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        known = {"title": self._title, "machine": self._circumstances, "table": asdict(sheet)}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({**known, **figures}, indent=1))
        partial.replace(self._path)

    def finish(self, sheet: Sheet, figures: Mapping[str, Any]) -> None:
        self.keep(sheet, figures, is_last=True)
        sheet.show(self._title)
