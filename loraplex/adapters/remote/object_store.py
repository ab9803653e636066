"""Adapters of an object store, `s3://BUCKET/PREFIX`, by s3fs (imported when the first such source is given).

The bucket is asked once for what lies directly below the prefix: names, sizes and ETags. Names that a load reads are
taken from this list and no others, sizes are counted before a byte is read, and each object is read as the list has it
(`If-Match`). So nothing in a bucket leads elsewhere: there are no links and no parts `..`, and a name with a slash is
not below the prefix. What is read lies in CACHE/PREFIX'S DIGEST/LIST'S DIGEST/, which has its name when it is whole;
the same list is not read again. Credentials and endpoint are those of the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE,
AWS_ENDPOINT_URL, a role of the machine).
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from loraplex.adapters.remote.fetched import OBJECTS, PART_PREFIX, MakeRoom
from loraplex.adapters.remote.fetches import Fetches
from loraplex.adapters.remote.wanted import MAX_FILES, check_sizes, wanted_names
from loraplex.errors import (
    AdapterFetchError,
    AdapterFetchTimeoutError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterTruncatedError,
    ConfigError,
    LoraplexError,
    shown,
)
from loraplex.private_folder import default_folder, private_folder

OBJECT_PREFIX = "s3://"
MAX_OBJECTS = MAX_FILES
"""Directly below a prefix: one answer of the store."""

LIST_TIMEOUT_S = 30.0
MAX_KEY_CHARS = 900
CHUNK_BYTES = 2**20
LEFT_S = 3600.0
"""What a fetch that was killed left behind is removed after that."""

T = TypeVar("T")


class Within(Protocol):
    """Runs it before the deadline of its fetch."""

    def __call__(self, work: Callable[[], Awaitable[T]], /) -> T: ...


_BUCKET = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_KEY = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.=+@-]*)(?:/[A-Za-z0-9_][A-Za-z0-9_.=+@-]*)*")
_ETAG = re.compile(r"[!-~]{1,256}")
_TALKATIVE = ("botocore", "aiobotocore", "s3fs", "fsspec", "boto3", "urllib3")
"""Their debug lines have headers with tokens."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectAdapter:
    """A bucket and the key below which an adapter's files are ("": the bucket itself). called: what messages call it
    for a client that has not named the place; "": by the place."""

    bucket: str
    key: str
    called: str = ""

    @classmethod
    def parse(cls, given: str) -> ObjectAdapter | None:
        """None for another kind of source. Raises AdapterPathNotFoundError. Touches no disk and no network."""
        if not given.startswith(OBJECT_PREFIX):
            return None
        bucket, _, key = given.removeprefix(OBJECT_PREFIX).partition("/")
        key = key.removesuffix("/")
        if not _BUCKET.fullmatch(bucket) or len(key) > MAX_KEY_CHARS or (key and not _KEY.fullmatch(key)):
            raise AdapterPathNotFoundError(
                f"adapter {shown(given)}: this is no place in an object store; write s3://bucket/prefix, the prefix of "
                "letters, digits and _.=+@- with single slashes between"
            )
        return cls(bucket, key)

    def is_below(self, root: ObjectAdapter) -> bool:
        return self.bucket == root.bucket and (not root.key or f"{self.key}/".startswith(f"{root.key}/"))

    def __str__(self) -> str:
        if self.called:
            return f"adapter {shown(self.called)}"
        return f"adapter {shown(f'{OBJECT_PREFIX}{self.bucket}/{self.key}', 80)}"


@dataclass(frozen=True, slots=True)
class _Object:
    """What the store says of one: its name below the prefix, bytes, and the tag of its content."""

    name: str
    size: int
    etag: str


def fetch_objects(
    adapter: ObjectAdapter,
    folder: Path | None,
    max_bytes: int,
    timeout_s: float,
    make_room: MakeRoom,
    fetches: Fetches,
) -> Path:
    """The adapter's files as they are in the store now. folder: of what was fetched; None: in the user's cache.

    max_bytes: of all files together. make_room: is asked before anything is downloaded. fetches: those that may be of
    this adapter. Raises AdapterLoadError's kin, AdapterTooLargeError, AdapterNoRoomError.
    """
    deadline_s = time.monotonic() + timeout_s

    def within(work: Callable[[], Awaitable[T]]) -> T:
        async def bounded() -> T:
            import asyncio

            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await work()

        return _run(bounded)

    try:
        digest = hashlib.sha256(f"{adapter.bucket}/{adapter.key}".encode()).hexdigest()
        place = (folder or _default_folder()) / digest
        return fetches.run(place, lambda: _fetch(adapter, place, max_bytes, make_room, within), timeout_s)
    except LoraplexError:
        raise
    except Exception as error:
        raise _as_adapter_error(error, adapter, timeout_s) from None


def listed_prefixes(place: ObjectAdapter, start: str, timeout_s: float = LIST_TIMEOUT_S) -> tuple[list[str], bool]:
    """The parts directly below a place that have something below them, from `start` on, in the order of the store:
    `sql-1` comes before `sql`, as `sql-1/` does before `sql/`. One answer of it, and whether there is more."""
    import asyncio

    async def within() -> tuple[list[str], bool]:
        below = f"{place.key}/" if place.key else ""
        async with asyncio.timeout(timeout_s):
            answer: Mapping[str, Any] = await _store()._call_s3(
                "list_objects_v2",
                Bucket=place.bucket,
                Prefix=below,
                Delimiter="/",
                MaxKeys=MAX_OBJECTS,
                **({"StartAfter": below + start} if start else {}),
            )
        found = (str(each["Prefix"]) for each in answer.get("CommonPrefixes", ()))
        return [each.removeprefix(below).removesuffix("/") for each in found], bool(answer.get("IsTruncated"))

    try:
        return _run(within)
    except Exception as error:
        raise _as_adapter_error(error, place, timeout_s) from None


def object_folder_of(directory: Path) -> str | None:
    """Which list of a store a directory has the files of; None: it was not fetched from one."""
    is_one = len(directory.name) == len(directory.parent.name) == 64 and directory.parent.parent.name == OBJECTS
    return directory.name if is_one else None


def _run(work: Callable[[], Awaitable[T]]) -> T:
    from fsspec.asyn import get_loop, sync

    result: T = sync(get_loop(), work)
    return result


@cache
def _store() -> Any:
    """s3fs's file system of this process; it renews credentials by itself."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    import s3fs

    from loraplex.adapters.remote.store_session import BoundedSession

    config = {
        "connect_timeout": 5,
        "read_timeout": 20,
        "retries": {"max_attempts": 2},
        "http_session_cls": BoundedSession,
    }
    return s3fs.S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)


@cache
def _default_folder() -> Path:
    kept = default_folder()
    if kept is not None:
        return kept / OBJECTS
    folder = Path(tempfile.mkdtemp(prefix="loraplex-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / OBJECTS


def _fetch(adapter: ObjectAdapter, place: Path, max_bytes: int, make_room: MakeRoom, within: Within) -> Path:
    """In a thread of its own. within: runs what asks the store in the loop of all fetches, where nothing else waits."""
    objects = within(lambda: _listed(adapter))
    if not objects:
        raise AdapterPathNotFoundError(f"{adapter}: the store has nothing there")
    wanted = [objects[name] for name in wanted_names(objects)]
    check_sizes(adapter, {each.name: each.size for each in wanted}, max_bytes)
    content = hashlib.sha256(repr([(each.name, each.size, each.etag) for each in wanted]).encode()).hexdigest()
    target = place / content
    missing = 0 if _is_whole(target, wanted) else sum(each.size for each in wanted)
    make_room(adapter, target, missing)
    if _is_whole(target, wanted):
        return target.resolve()
    try:
        private_folder(place, "the folder of fetched adapters", "set LORAPLEX_CACHE to another")
    except ConfigError as error:
        _log.error("%s", error)
        raise AdapterFetchError(f"{adapter}: this server has no folder for it (see the log)") from None
    _remove_left(place.parent)
    part = Path(tempfile.mkdtemp(prefix=PART_PREFIX, dir=place))
    try:
        within(lambda: _download_all(adapter, wanted, part))
        if not _is_whole(target, wanted):  # else another process was quicker, and may read it
            shutil.rmtree(target, ignore_errors=True)  # one that a crash of the machine left without its content
            os.rename(part, target)
    except OSError:
        if not _is_whole(target, wanted):
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target.resolve()


async def _listed(adapter: ObjectAdapter) -> dict[str, _Object]:
    below = f"{adapter.key}/" if adapter.key else ""
    answer: Mapping[str, Any] = await _store()._call_s3(
        "list_objects_v2", Bucket=adapter.bucket, Prefix=below, Delimiter="/", MaxKeys=MAX_OBJECTS
    )
    contents = answer.get("Contents", ())
    if answer.get("IsTruncated") or len(contents) > MAX_OBJECTS:
        raise AdapterFileFormatError(f"{adapter} has more than {MAX_OBJECTS} objects beside it; give it a prefix alone")
    found = {}
    for each in contents:
        name, etag = str(each["Key"]).removeprefix(below), str(each["ETag"])
        if not _ETAG.fullmatch(etag):
            raise AdapterFetchError(f"{adapter}: the store lists an object with a tag that is none")
        size = int(each["Size"])
        if not 0 <= size < 2**63:
            raise AdapterFetchError(f"{adapter}: the store lists an object with a size that is none")
        found[name] = _Object(name, size, etag)
    return found


def _is_whole(target: Path, wanted: list[_Object]) -> bool:
    try:
        return all((target / each.name).stat().st_size == each.size for each in wanted)
    except OSError:
        return False


def _remove_left(folder: Path) -> None:
    for left in folder.glob(f"*/{PART_PREFIX}*"):
        with suppress(OSError):  # a fetch of another prefix has ended
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)


async def _download_all(adapter: ObjectAdapter, wanted: list[_Object], folder: Path) -> None:
    for each in wanted:
        await _download(adapter, each, folder / each.name)


async def _download(adapter: ObjectAdapter, wanted: _Object, file: Path) -> None:
    key = f"{adapter.key}/{wanted.name}" if adapter.key else wanted.name
    answer = await _store()._call_s3("get_object", Bucket=adapter.bucket, Key=key, IfMatch=wanted.etag)
    num_read = 0
    with file.open("xb") as out:
        async with answer["Body"] as body:
            while chunk := await body.read(CHUNK_BYTES):
                num_read += len(chunk)
                if num_read > wanted.size:
                    break
                out.write(chunk)
    if num_read != wanted.size:
        raise AdapterTruncatedError(
            f"{adapter}: the store gave {num_read} bytes of {wanted.name}, and said {wanted.size}; try again"
        )


def _as_adapter_error(error: Exception, adapter: ObjectAdapter, timeout_s: float) -> AdapterLoadError:
    if isinstance(error, ImportError):
        return AdapterFetchError(f"{adapter} cannot be fetched: s3fs is not installed; install loraplex[s3]")
    causes = list(_causes(error))
    answers = [getattr(each, "response", None) for each in causes]
    codes = {str(each.get("Error", {}).get("Code")) for each in answers if isinstance(each, dict)}
    kinds = {type(each).__name__ for each in causes}
    if kinds & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}:
        return AdapterPermissionError(f"{adapter}: this server has no credentials for the store")
    if "PreconditionFailed" in codes or "412" in codes:
        return AdapterFetchError(f"{adapter}: an object changed while it was being read; try again")
    if "PermissionError" in kinds or codes & {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403"}:
        return AdapterPermissionError(f"{adapter}: the store refuses access")
    if "FileNotFoundError" in kinds or codes & {"NoSuchBucket", "NoSuchKey", "404"}:
        return AdapterPathNotFoundError(f"{adapter}: the store has no such bucket or object")
    if "OddAnswerError" in kinds:
        return AdapterFileFormatError(f"{adapter}: the store's answer is no list of at most {MAX_OBJECTS} objects")
    if "RedirectError" in kinds:
        return AdapterFetchError(f"{adapter}: the store redirects elsewhere, which is not followed; give its address")
    if any("Timeout" in kind for kind in kinds):
        return AdapterFetchTimeoutError(f"{adapter}: the store did not deliver it within {timeout_s:g} s; try again")
    _log.warning("%s could not be fetched: %s", adapter, "; ".join(sorted(kinds)))
    return AdapterFetchError(f"{adapter}: the store cannot be reached or failed ({type(error).__name__}; see the log)")


def _causes(error: BaseException | None) -> Iterator[Any]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
