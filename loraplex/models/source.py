"""Where a base model is: a directory, or a repository of the Hugging Face hub, to be fetched. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loraplex.adapters.remote.hub_client import guard_client
from loraplex.errors import ModelNotFoundError, ModelWeightError
from loraplex.models.checkpoints.gguf_file import GgufHeader
from loraplex.text.conversion import has_tokenizer
from loraplex.text.gguf_tokenizer import tokenizer_of
from loraplex.text.tokenizer import Tokenizer

GGUF_SUFFIX = ".gguf"
MAX_NAMED = 8
"""So many files are named by one error."""

DESCRIPTION_PATTERNS = ["*.json", "*.jinja", "tokenizer*", "*.model", "*tiktoken*"]
HUB_PATTERNS = ["*.safetensors", *DESCRIPTION_PATTERNS]
HUB_IGNORED = ["consolidated*", "*/*"]  # the same weights in other formats


def resolve_model(name: str, revision: str | None = None) -> Path:
    """A local directory or GGUF file as it is, or a hub id (`org/name`), fetched; the GGUF file of a directory that
    has no safetensors. Raises ModelNotFoundError, which says why.
    """
    return local_model(name) or _fetch(name, revision)


def read_tokenizer(path: Path) -> Tokenizer | None:
    """Of a directory, or of a GGUF file; None where there is none. Raises ModelConfigError for one that is not read."""
    if path.is_file():
        return tokenizer_of(GgufHeader.read(path).metadata, str(path))
    return Tokenizer.from_dir(path) if has_tokenizer(path) else None


def fetch_description(name: str, revision: str | None = None) -> Path:
    """Of a hub id all but the weights. Raises as `resolve_model`."""
    return _fetch(name, revision, DESCRIPTION_PATTERNS)


def fetch_headers(name: str, revision: str | None = None) -> Mapping[str, Any]:
    """huggingface_hub's `TensorInfo` of each tensor of a hub id, read by range requests: a header has at most 25 MB.

    Raises as `resolve_model`, and ModelWeightError for a repository without safetensors or with a damaged one.
    """
    with _told_apart(name, revision):
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

        try:
            files = get_safetensors_metadata(name, revision=revision).files_metadata
        except (NotASafetensorsRepoError, SafetensorsParsingError) as e:
            raise ModelWeightError(f"model {name!r}: {e}") from e
        return {key: tensor for file in files.values() for key, tensor in file.tensors.items()}


def local_model(name: str) -> Path | None:
    """The directory or file of that name; None for what may be a hub id. ModelNotFoundError for what is neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _gguf_in(path) or path
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return path
    if path.exists():
        raise ModelNotFoundError(
            f"model {name!r} is a file that is no GGUF; give the directory with config.json and the weights"
        )
    if path.is_absolute() or name.startswith((".", "~")) or not 0 < name.count("/") + 1 <= 2:
        raise ModelNotFoundError(f"model {name!r}: there is no such directory")
    return None


def _gguf_in(directory: Path) -> Path | None:
    if any(directory.glob("*.safetensors*")):
        return None
    files = sorted(directory.glob(f"*{GGUF_SUFFIX}"))
    if len(files) > 1:
        raise ModelNotFoundError(
            f"model {str(directory)!r} has several GGUF files; give one of them: "
            + ", ".join(file.name for file in files[:MAX_NAMED])
        )
    return files[0] if files else None


def _fetch(name: str, revision: str | None, patterns: list[str] = HUB_PATTERNS) -> Path:
    with _told_apart(name, revision):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=HUB_IGNORED))


@contextmanager
def _told_apart(name: str, revision: str | None) -> Iterator[None]:
    """Whatever the hub's library raises is a ModelNotFoundError."""
    try:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as e:
        raise ModelNotFoundError(
            f"model {name!r} is no local directory, and huggingface_hub, which could fetch it, is not installed"
        ) from e
    guard_client()
    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(f"model {name!r}{at} is no local directory and the hub did not give it: {e}") from e
