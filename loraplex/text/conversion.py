"""A tokenizer.json for directories that have another tokenizer file, made by transformers (the `hf` extra).

sentencepiece (`tokenizer.model`) and tiktoken files say nothing of special tokens, prefixes and pre-tokenisation: the
tokenizer class of the model's family in transformers does. It is imported in a process of its own, which ends: it takes
seconds and hundreds of megabytes that a server has no other use for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from loraplex.errors import ModelConfigError, shown
from loraplex.processes.environment import child_environment

TOKENIZER_FILE = "tokenizer.json"
OTHER_FILES = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt", "spiece.model")
"""Beside `*.tiktoken`."""

CONVERSION_S = 300.0
MAX_REASON_CHARS = 500
MIN_TOKENS = 64
NEEDED = "it needs transformers, sentencepiece and tiktoken: pip install 'loraplex[hf]'"


def other_files(directory: Path) -> list[str]:
    """What a directory has that a tokenizer.json could be made of."""
    named = [name for name in OTHER_FILES if (directory / name).is_file()]
    return [*named, *sorted(file.name for file in directory.glob("*.tiktoken"))]


def has_tokenizer(directory: Path) -> bool:
    """Whether there is anything that `with_tokenizer` could read."""
    return (directory / TOKENIZER_FILE).is_file() or bool(other_files(directory))


@contextmanager
def with_tokenizer(directory: Path) -> Iterator[Path]:
    """The directory, or where it has no tokenizer.json a folder with one, and with a tokenizer_config.json, for now.

    Raises ModelConfigError, which says what is missing.
    """
    others = other_files(directory)
    if (directory / TOKENIZER_FILE).is_file() or not others:
        yield directory
        return
    with TemporaryDirectory(prefix="loraplex-tokenizer-") as folder:
        _convert(directory, Path(folder), others)
        yield Path(folder)


def _convert(directory: Path, folder: Path, others: list[str]) -> None:
    where = f"{directory} has no {TOKENIZER_FILE}, and its {', '.join(others)} cannot be converted"
    command = [sys.executable, "-P", "-m", "loraplex.text.conversion", str(directory.resolve()), str(folder)]
    environment = child_environment() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONVERSION_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelConfigError(f"{where} within {CONVERSION_S:g} s; put a {TOKENIZER_FILE} beside them") from error
    if child.returncode == 0 and (folder / TOKENIZER_FILE).is_file():
        return
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"the process ended with {child.returncode}"
    raise ModelConfigError(f"{where}: {shown(reason[:MAX_REASON_CHARS], MAX_REASON_CHARS)}")


# ------------------------------------------------------------------------------------------------- in the process


def main() -> None:
    source, target = sys.argv[1:]
    try:
        import sentencepiece  # noqa: F401
        import tiktoken  # noqa: F401
        from transformers import AutoTokenizer
    except ImportError as error:
        sys.exit(f"{error}; {NEEDED}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its own and those of its converters
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
    if not tokenizer.is_fast:
        sys.exit(f"transformers has no {TOKENIZER_FILE} for a {type(tokenizer).__name__}")
    if len(tokenizer) < MIN_TOKENS:  # it makes an empty one of a file that it does not know
        sys.exit(f"transformers finds {len(tokenizer)} tokens in it")
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
