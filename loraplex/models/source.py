"""Where a base model is: a directory, or a repository of the Hugging Face hub, to be fetched. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from loraplex.errors import ModelNotFoundError

GGUF_SUFFIX = ".gguf"
MAX_NAMED = 8
"""So many files are named by one error."""

HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
HUB_IGNORED = ["consolidated*", "*/*"]  # the same weights in other formats


def resolve_model(name: str, revision: str | None = None) -> Path:
    """A local directory or GGUF file as it is, or a hub id (`org/name`), fetched; the GGUF file of a directory that
    has no safetensors. Raises ModelNotFoundError, which says why.
    """
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
    return _fetch(name, revision)


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


def _fetch(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as e:
        raise ModelNotFoundError(
            f"model {name!r} is no local directory, and huggingface_hub, which could fetch it, is not installed"
        ) from e
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(f"model {name!r}{at} is no local directory and the hub did not give it: {e}") from e
