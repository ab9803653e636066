"""Adapters of the Hugging Face hub, by `huggingface_hub.snapshot_download` (imported when the first hub id is given)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loraplex.adapters.files import BIN_NAME, CONFIG_NAME, INDEX_NAME, SAFETENSORS_NAME, WEIGHT_NAMES
from loraplex.errors import (
    AdapterFetchError,
    AdapterFetchTimeoutError,
    AdapterLoadError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
)

WANTED = (CONFIG_NAME, SAFETENSORS_NAME, INDEX_NAME, "adapter_model-*.safetensors")
REQUEST_TIMEOUT_S = 10.0


def fetch_from_hub(repo: str, revision: str | None, cache: Path | None, timeout_s: float) -> Path:
    """The snapshot's directory, named by commit: its content never changes. Only adapter files are downloaded, `.bin` only if need be."""
    result: list[Path | AdapterLoadError] = []

    def work() -> None:
        try:
            result.append(_download(repo, revision, cache, timeout_s))
        except Exception as error:
            result.append(_as_adapter_error(error, repo, revision))

    # huggingface_hub cannot be cancelled: past the deadline the thread is left to end by huggingface_hub's own timeouts.
    thread = threading.Thread(target=work, name=f"fetch {repo}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not result:
        raise AdapterFetchTimeoutError(
            f"adapter {repo!r}: the hub did not deliver it within {timeout_s:g} s; try again later"
        )
    if isinstance(result[0], AdapterLoadError):
        raise result[0]
    return result[0]


def _download(repo: str, revision: str | None, cache: Path | None, timeout_s: float) -> Path:
    snapshot = _snapshot(repo, revision, cache, timeout_s, WANTED)
    if not any((snapshot / name).exists() for name in WEIGHT_NAMES):
        snapshot = _snapshot(repo, revision, cache, timeout_s, (*WANTED, BIN_NAME))
    return snapshot


def _snapshot(repo: str, revision: str | None, cache: Path | None, timeout_s: float, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class NoProgressBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    path = snapshot_download(
        repo,
        revision=revision,
        cache_dir=cache,
        allow_patterns=list(patterns),
        etag_timeout=min(REQUEST_TIMEOUT_S, timeout_s),
        tqdm_class=NoProgressBar,
    )
    return Path(path)


def _as_adapter_error(error: Exception, repo: str, revision: str | None) -> AdapterLoadError:
    """The error of this package for one of huggingface_hub or of the network below it."""
    if isinstance(error, ImportError):
        return AdapterFetchError(
            f"adapter {repo!r}: hub ids need huggingface_hub; pip install huggingface_hub, or give a directory"
        )
    from huggingface_hub import errors as hub

    what = f"adapter {repo!r}" + (f" at revision {revision!r}" if revision else "")
    causes = tuple(_causes(error))
    if any(isinstance(cause, hub.GatedRepoError) or _status(cause) == 403 for cause in causes):
        return AdapterPermissionError(f"{what}: the hub refuses access; ask for it there and set HF_TOKEN")
    if any(isinstance(cause, hub.RevisionNotFoundError) for cause in causes):
        return AdapterPathNotFoundError(f"{what}: the hub has no such revision")
    if any(isinstance(cause, hub.RepositoryNotFoundError | hub.HFValidationError) for cause in causes):
        return AdapterPathNotFoundError(
            f"{what}: no such directory, and the hub has no such repository (or it is private: set HF_TOKEN)"
        )
    if any("Timeout" in type(cause).__name__ for cause in causes):
        return AdapterFetchTimeoutError(f"{what}: the hub did not answer in time; try again later")
    if any(isinstance(cause, hub.OfflineModeIsEnabled) for cause in causes):
        return AdapterFetchError(
            f"{what} is not in the local cache, and HF_HUB_OFFLINE is set; unset it or give a directory"
        )
    return AdapterFetchError(f"{what}: the hub cannot be reached or failed: {_first_line(error)}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
