"""The commands `loraplex adapter`. What they need is imported when they run."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps as to_json
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from cyclopts import App, Parameter

from loraplex.adapters.merging.wish import MAX_MERGE_BYTES
from loraplex.cli_help import Flat, group_engine_fields
from loraplex.config import LoRAConfig
from loraplex.errors import ConfigError, LoraplexError

group_engine_fields()
adapter_app = App(name="adapter", help="Look at adapters, and make new ones of them.")


@adapter_app.command
def inspect(
    path: str, /, *, base: str | None = None, json: bool = False, lora: Annotated[LoRAConfig | None, Flat] = None
) -> int:
    """Say what of an adapter would be honoured or refused, and why. Exit code 1 when it would be refused.

    Parameters
    ----------
    path
        Directory or hub id of the adapter.
    base
        Directory or hub id of the base model, to check names and shapes against.
    json
        Output as JSON.
    """
    from loraplex.doctor import report_on

    report = report_on(path, base, lora or LoRAConfig())
    print(to_json(asdict(report), indent=2) if json else report.describe())
    return 0 if report.is_honoured else 1


@adapter_app.command
def merge(
    adapters: Annotated[tuple[str, ...], Parameter(negative=())],
    /,
    *,
    output: Path,
    combination_type: Annotated[str | None, Parameter(name=("--combination-type", "--combination"))] = None,
    density: float | None = None,
    majority_sign_method: str | None = None,
    svd_rank: int | None = None,
    svd_clamp: float | None = None,
    seed: int | None = None,
    max_merge_bytes: int = MAX_MERGE_BYTES,
) -> int:
    """Make a new adapter of several, as peft's add_weighted_adapter does. A server merges by POST /v1/adapters/merge.

    Parameters
    ----------
    adapters
        PATH=WEIGHT of each: a directory or hub id of a LoRA, and a number.
    output
        Directory of the new adapter, which must not exist.
    combination_type
        linear, cat, svd, ties, ties_svd, dare_linear, dare_linear_svd, dare_ties, dare_ties_svd, magnitude_prune or
        magnitude_prune_svd (default: svd, of one adapter linear).
    density
        Share of the numbers that ties, dare and magnitude_prune keep, above 0 and at most 1.
    majority_sign_method
        Election of signs by ties and dare_ties: total (default) or frequency.
    svd_rank
        Rank of a result of svd (default: the highest of the adapters).
    svd_clamp
        Quantile beyond which the factors of an svd are cut off, above 0 and at most 1.
    seed
        Seed of what dare draws (default: 0).
    max_merge_bytes
        Most memory of the merge; a larger one is refused.
    """
    from loraplex.adapters.merging.merge import merge_directories
    from loraplex.adapters.merging.wish import MergeWish, parse_weighted

    wish = MergeWish(
        adapters=tuple(map(parse_weighted, adapters)),
        combination_type=combination_type,
        density=density,
        majority_sign_method=majority_sign_method,
        svd_rank=svd_rank,
        svd_clamp=svd_clamp,
        seed=seed,
    )
    made = merge_directories(wish, output, max_merge_bytes)
    rank = f"rank {made.config['r']}, " if "r" in made.config else ""
    print(f"{output}: {made.origin}, {rank}{made.nbytes} bytes")
    return 0


@adapter_app.command
def export(
    adapter: str,
    /,
    *,
    output: Path | None = None,
    url: str | None = None,
    max_merge_bytes: int = MAX_MERGE_BYTES,
) -> int:
    """Write an adapter as it is served, as a PEFT directory: converted kinds as the LoRA that they became.

    Parameters
    ----------
    adapter
        Directory or hub id of the adapter; with --url its name on the server.
    output
        Directory of the copy, which must not exist.
    url
        Address of a server, which writes the copy into its own --adapter-output-dir. Its key is in the variable
        LORAPLEX_ADMIN_API_KEY or LORAPLEX_API_KEY.
    max_merge_bytes
        Most memory of the export; a larger one is refused.
    """
    if (output is None) == (url is None):
        raise ConfigError("give --output, or the --url of a server, which writes into its own folder")
    if url is not None:
        return _ask_server(url, adapter, "export", {})
    from loraplex.adapters.merging.export import export_directory

    assert output is not None
    made = export_directory(adapter, output, max_merge_bytes)
    print(f"{output}: {made.origin}, {made.nbytes} bytes")
    return 0


@adapter_app.command
def clone(adapter: str, name: str, /, *, url: str = "http://127.0.0.1:8000") -> int:
    """Give an adapter of a running server a further name. Both share memory, and are reloaded and unloaded apart.

    Parameters
    ----------
    adapter
        Name of the adapter.
    name
        Name of the copy.
    url
        Address of the server. Its key is in the variable LORAPLEX_ADMIN_API_KEY or LORAPLEX_API_KEY.
    """
    return _ask_server(url, adapter, "clone", {"name": name})


def _ask_server(url: str, adapter: str, verb: str, body: dict[str, str]) -> int:
    """A verb of a running server, whose answer is printed."""
    from loraplex.views.remote import RemoteServer

    try:
        answer = RemoteServer(url).post(f"/v1/adapters/{quote(adapter)}/{verb}", body or None)
    except OSError as error:
        raise LoraplexError(f"{url} did not answer: {error}") from error
    print(answer.decode())
    return 0
