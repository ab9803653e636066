"""What is installed and what runs here: `loraplex doctor`, and the judgement of an adapter against a base model."""

from __future__ import annotations

import os
import platform
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from loraplex import __version__
from loraplex.adapters.files import TEXT_NAMES
from loraplex.adapters.inspect import AdapterReport, Weigher, inspect_adapter
from loraplex.adapters.source import AdapterSource
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.cpu import chosen_threads, cpu_limit
from loraplex.errors import LoraplexError, shown
from loraplex.frontend.frontend import texts_beside
from loraplex.logs import printable
from loraplex.views.remote import RemoteServer

if TYPE_CHECKING:
    from loraplex.models.decoder import Decoder

NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "jinja2")
FOR_SERVING = (
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "pyzmq",
    "msgspec",
    "prometheus-client",
    "cyclopts",
    "rich",
    "sqlalchemy",
)
OPTIONAL = ("huggingface-hub", "transformers", "peft", "triton")


def report_on(path: str, base: str | None, lora_config: LoRAConfig) -> AdapterReport:
    """What an adapter has that is honoured or refused, by a base model if named. Raises AdapterError, ModelError."""
    directory = AdapterSource().fetch(path)
    if base is None:
        return inspect_adapter(directory, None, lora_config)
    from loraplex.models.source import resolve_model

    base_directory = resolve_model(base)
    model = decoder_of(str(base_directory))
    contexts = model.config.long_contexts(lora_config.long_lora_scaling_factors)
    targets = model.lora_targets()
    judged = directory, targets, lora_config, contexts, _weigher_of(model, targets, lora_config)
    if not lora_config.adapter_text or not any(os.path.lexists(Path(directory) / name) for name in TEXT_NAMES):
        return inspect_adapter(*judged)  # a base's tokenizer takes its time
    with closing(texts_beside(base_directory, model.config.vocab_size, base_directory)) as texts:
        return inspect_adapter(*judged, texts.read)


def _weigher_of(model: Decoder, targets: tuple[LoraTarget, ...], lora_config: LoRAConfig) -> Weigher | None:
    """None for int8, which a CPU has no blocks of."""
    import torch

    from loraplex.kernels.ops import get_backend
    from loraplex.memory.weights.weighing import weigher_of

    if lora_config.lora_dtype == "int8":
        return None
    dtype: torch.dtype = getattr(torch, model.config.effective_dtype("auto"))
    return weigher_of(targets, get_backend("auto", torch.device("cpu")), dtype)


def targets_of(base: str) -> tuple[LoraTarget, ...]:
    """What a base model offers to adapters."""
    return decoder_of(base).lora_targets()


def decoder_of(base: str) -> Decoder:
    """A base model from its config.json alone: no weight is read."""
    import torch

    from loraplex.kernels.ops import get_backend
    from loraplex.models.config import ModelConfig
    from loraplex.models.decoder import Decoder
    from loraplex.models.source import resolve_model

    config = ModelConfig.from_dir(resolve_model(base))
    meta = torch.device("meta")
    return Decoder(config, get_backend("auto", meta), torch.float32, meta, enable_lora=True)


def print_doctor(url: str | None = None) -> None:
    """On standard output. url: of a server to be asked, too; LoraplexError without its answer."""
    served = [] if url is None else [_server(url)]
    console = Console()
    table = Table(title=f"loraplex {__version__} on Python {platform.python_version()}", title_justify="left")
    table.add_column("package")
    table.add_column("version")
    table.add_column("for")
    for names, purpose in ((NEEDED, "always"), (FOR_SERVING, "loraplex serve"), (OPTIONAL, "hub ids, tests, GPUs")):
        for name in names:
            table.add_row(name, _version(name), purpose)
    console.print(table)
    for line in (*_hardware(), *served):
        console.print(line, markup=False, highlight=False, soft_wrap=True)  # a path in one piece, brackets and all


def _server(url: str) -> str:
    try:
        found = RemoteServer(url).get_json("/version")
    except OSError as error:
        raise LoraplexError(f"{url} did not answer: {error}") from error
    names = ("version", "backend", "model")
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in names):
        raise LoraplexError(f"{url} is no server of Loraplex of this version: {shown(found)}")
    version, backend, model = (printable(found[name]) for name in names)
    return f"{url}: loraplex {version}\n    model: {model}\n    kernels: {backend}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "[red]not installed[/]"


def _hardware() -> list[str]:
    import torch

    from loraplex.kernels.ops import get_backend

    lines = [f"CPU: {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {_threads()}"]
    lines += _cpu_kernels()
    if torch.cuda.is_available():
        backend = get_backend("auto", torch.device("cuda"))
        lines.append(f"GPU: {torch.cuda.get_device_name()}, kernels: {backend.description}")
        if backend.name == "triton":
            lines += _flash_attention(torch.cuda.get_device_capability())
    else:
        lines.append("GPU: none that torch can use")
    return lines


def _threads() -> str:
    """How many an engine would use, and what bounds them; torch has as many from now on."""
    import torch

    limit, usual = cpu_limit(), torch.get_num_threads()
    num_threads = chosen_threads(None, usual)
    torch.set_num_threads(num_threads)
    bound = limit.bound if num_threads == limit.num_threads else "OMP_NUM_THREADS, or torch's choice"
    return f"{num_threads} thread{'s' if num_threads > 1 else ''} ({bound})"


def _flash_attention(capability: tuple[int, int]) -> list[str]:
    """Nothing where it is not installed, which few have."""
    from loraplex.kernels.triton.flash_attention import NOT_INSTALLED, flash_attention_absence

    absence = flash_attention_absence(capability)
    if absence == NOT_INSTALLED:
        return []
    return [f"    FlashAttention 3: {absence or 'for prompts, where an engine measures that it is faster'}"]


def _cpu_kernels() -> list[str]:
    """Which kernels `auto` takes on a CPU, from where, and why no better ones."""
    import torch

    from loraplex.kernels.native.choice import NoLibrary, open_library
    from loraplex.kernels.ops import get_backend

    library = open_library()
    if isinstance(library, NoLibrary):
        return [f"kernels on cpu: stock torch ({library.reason})"]
    description = get_backend("auto", torch.device("cpu")).description
    return [f"kernels on cpu: {description}", f"    from {library.path}"]
