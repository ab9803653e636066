"""Adapters as the command line names them: `name=path`, or vLLM's JSON; and whether they can be served together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from json import loads as from_json

from loraplex.errors import ConfigError, LoraplexError

OPTIONS = "--lora-modules or --lora-paths"


def parse_lora_modules(
    given: Iterable[str], *, base_names: Sequence[str] = (), is_name_optional: bool = False
) -> tuple[tuple[str, str], ...]:
    """(name, path) of each `name=path` or `{"name": ..., "path": ...}`; a path alone, where it may be, is its own name.

    `base_model_name` in JSON must be one of `base_names`. Raises ConfigError.
    """
    return tuple(
        _lora_module_of_json(text, base_names)
        if text.lstrip().startswith("{")
        else _lora_module(text, is_name_optional)
        for text in given
    )


def check_lora_modules(modules: Iterable[tuple[str, str]], base_names: Sequence[str]) -> None:
    """Raises ConfigError for a name of two adapters, and for one that the registry would refuse."""
    from loraplex.adapters.registry.adapter_name import check_adapter_name

    path_of: dict[str, str] = {}
    for name, path in modules:
        try:
            check_adapter_name(name, base_names)
        except LoraplexError as error:
            raise ConfigError(f"{OPTIONS}, path {path!r}: {error}") from error
        first = path_of.setdefault(name, path)
        if first.rstrip("/") != path.rstrip("/"):
            raise ConfigError(
                f"{OPTIONS}: adapter {name!r} is given twice, as {first!r} and as {path!r}; give each a name of its own"
            )


def _lora_module_of_json(text: str, base_names: Sequence[str]) -> tuple[str, str]:
    try:
        fields = from_json(text)
        name, path = fields.pop("name"), fields.pop("path")
    except (ValueError, KeyError) as error:
        raise ConfigError(f"adapter {text!r}: not JSON with name and path ({error})") from error
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise ConfigError(f"adapter {text!r}: name and path must be texts that are not empty")
    base_name = fields.pop("base_model_name", None)
    if base_name not in (None, *base_names):
        raise ConfigError(
            f"adapter {name!r}: base_model_name is {base_name!r}, this base model is {', '.join(base_names)}"
        )
    if fields:
        raise ConfigError(f"adapter {name!r}: unknown keys {', '.join(sorted(fields))}")
    return name, path


def _lora_module(text: str, is_name_optional: bool) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if equals and name and path:
        return name, path
    if is_name_optional and not equals:
        return text.rstrip("/") or text, text
    raise ConfigError(f"adapter {text!r}: write name=path, or JSON with name and path")
