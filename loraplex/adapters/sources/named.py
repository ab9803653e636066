"""Sources that the operator names, `--adapter-source NAME=PLACE`: where an adapter of one lies, and which there are.

NAME=/path                 the directories in it
NAME=hf://ORG              the repositories of an organisation; hf:// alone is the whole hub, an adapter `org/repo`
NAME=hf://ORG/REPO[@REV]   the folders in a repository
NAME=s3://BUCKET/PREFIX    what lies below each prefix of one part more
TENANT/NAME=PLACE          the same for requests of one tenant alone

A client says the name of an adapter, never a place. A name is one part of a path (of the whole hub: two), so nothing
leads out of a source by its spelling; of a directory, links are resolved, and what leads outside is as if it were not
there. A client names no revision: on the hub, strangers may open one (refs/pr/1).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.adapters.files import CONFIG_NAME, AdapterFolder, read_files
from loraplex.adapters.remote.hub import HUB_PREFIX, HubAdapter
from loraplex.adapters.remote.object_store import OBJECT_PREFIX, ObjectAdapter, listed_prefixes
from loraplex.errors import AdapterLoadError, ConfigError, InvalidRequestError, LoraplexError, shortened, shown

if TYPE_CHECKING:
    from loraplex.adapters.registry import NameQuery

ORIGIN = "source:"
"""How the origin of a version begins that came by need; the source's name follows."""

MAX_SOURCES = 64
MAX_FILES = 64
"""Of an adapter's directory that are looked at before all that a load reads is."""

MAX_LISTED = 200_000
"""Entries of a directory that a page looks at."""

MAX_ANSWERS = 10
"""Of a store that a page asks for: they may have names that no adapter can have."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_log = logging.getLogger(__name__)


def kind_of(place: str) -> str:
    """`local`, `hub` or `s3`, as LoRAX calls them."""
    return "hub" if place.startswith(HUB_PREFIX) else "s3" if place.startswith(OBJECT_PREFIX) else "local"


@dataclass(frozen=True, slots=True)
class NamedSource:
    """tenant: the only one whose requests may use it; "": all may. place: as the operator wrote it, a directory with
    its links resolved."""

    name: str
    place: str
    tenant: str = ""

    @classmethod
    def parse(cls, given: str) -> NamedSource:
        """Of `NAME=PLACE` or `TENANT/NAME=PLACE`. Raises ConfigError."""
        names, equals, place = given.partition("=")
        tenant, slash, name = names.rpartition("/")
        if not (equals and place and _NAME.fullmatch(name) and (not slash or _NAME.fullmatch(tenant))):
            raise ConfigError(
                f"adapter source {shown(given)}: write NAME=PLACE or TENANT/NAME=PLACE, the names of a-z, 0-9, '.', "
                "'_', '-', the place a directory, hf://ORG, hf://ORG/REPO or s3://BUCKET/PREFIX"
            )
        source = cls(name, place.rstrip("/") if not place.endswith("://") else place, tenant)
        if source.is_directory:
            return cls(name, str(Path(place).expanduser().resolve()), tenant)
        try:
            if "://" in place and not place.startswith((HUB_PREFIX, OBJECT_PREFIX)):
                raise ConfigError(f"adapter source {shown(given)}: this kind of place is not known")
            ObjectAdapter.parse(source.place)
            source._remote("adapter/name" if place == HUB_PREFIX else "adapter")
        except AdapterLoadError as error:
            raise ConfigError(f"adapter source {shown(given)}: {error}") from error
        return source

    @property
    def kind(self) -> str:
        """`local`, `hub` or `s3`, as LoRAX calls them."""
        return kind_of(self.place)

    @property
    def is_directory(self) -> bool:
        return "://" not in self.place

    def path_of(self, adapter: str) -> str | None:
        """What the registry loads it from; None: this source cannot have it. Touches the disk of a directory alone, so
        call it in a thread: a place of the hub or a store may still turn out to have nothing."""
        if not _is_part(adapter, num_parts=2 if self.place == HUB_PREFIX else 1):
            return None
        if self.is_directory:
            return self._directory(adapter)
        try:
            return self._remote(adapter)
        except AdapterLoadError:
            return None

    def _directory(self, adapter: str) -> str | None:
        """Links are rare, and to resolve the path of each file takes ten times as long as to list a directory."""
        root = Path(self.place)
        try:
            real = (root / adapter).resolve()
            if not (real / CONFIG_NAME).exists():
                return None
            with os.scandir(real) as entries:
                found = list(islice(entries, MAX_FILES + 1))
            may_lead = any(entry.is_symlink() for entry in found) or len(found) > MAX_FILES
            files = read_files(AdapterFolder(real, shortened(adapter))) if may_lead else []
            is_inside = real != root and all(path.resolve().is_relative_to(root) for path in (real, *files))
        except (OSError, RuntimeError, ValueError, LoraplexError):  # a loop of links, no permission, too many files
            return None
        if not is_inside:
            _log.warning("adapter %.200r of source %s leads outside of it, and is not read", adapter, self.name)
        return str(real) if is_inside else None

    def _remote(self, adapter: str) -> str:
        """Raises AdapterPathNotFoundError."""
        place, at, revision = self.place.partition("@") if self.kind == "hub" else (self.place, "", "")
        path = f"{place.removesuffix('/')}/{adapter}" if not place.endswith("//") else place + adapter
        path += at + revision
        if self.kind == "hub":
            HubAdapter.parse(path)
        else:
            ObjectAdapter.parse(path)
        return path

    def names(self, query: NameQuery, limit: int) -> list[str]:
        """Of the adapters that it has, at most `limit` in the order of names (a store's: of names with a slash behind).
        Touches the disk or the network.

        Raises InvalidRequestError for a source on the hub, which has no pages of names, and AdapterLoadError.
        """
        if self.kind == "hub":
            raise InvalidRequestError(f"source {self.name!r} is on the hub, which this server does not list")
        if self.kind == "s3":
            if query.contains:
                text = f"source {self.name!r} is an object store, which lists by the beginning of names: send prefix"
                raise InvalidRequestError(text, param="contains")
            return list(islice(self._named_prefixes(query), limit))
        return list(islice(self._named_directories(query), limit))

    def _named_prefixes(self, query: NameQuery) -> Iterator[str]:
        place = ObjectAdapter.parse(self.place)
        assert place is not None
        start, has_more, num_answers = max(query.after, query.prefix), True, 0
        while has_more and num_answers < MAX_ANSWERS:
            found, has_more = listed_prefixes(replace(place, called=f"{self.name}/"), start)
            for name in found:
                is_after = f"{name}/" > f"{query.after}/" or not query.after
                if is_after and name.startswith(query.prefix) and _is_part(name):
                    yield name
            has_more = has_more and bool(found) and (found[-1].startswith(query.prefix) or found[-1] < query.prefix)
            start, num_answers = f"{found[-1]}/" if found else start, num_answers + 1

    def _named_directories(self, query: NameQuery) -> Iterator[str]:
        """Only those of a page are looked at: 10,000 names take milliseconds, 10,000 files would not."""
        try:
            with os.scandir(self.place) as entries:
                names = [entry.name for entry in islice(entries, MAX_LISTED)]
        except OSError as error:
            raise AdapterLoadError(f"source {self.name!r} cannot be listed: {error.strerror}") from error
        for name in replace(query, is_sorted=True).of(names):
            if _is_part(name) and self._directory(name) is not None:
                yield name


def _is_part(adapter: str, num_parts: int = 1) -> bool:
    """Whether it can be a name in a source: parts of a path without tricks, no revision, no version."""
    if adapter.count("/") != num_parts - 1 or "@" in adapter or any(part[:1] == "." for part in adapter.split("/")):
        return False
    from loraplex.adapters.registry.adapter_name import check_adapter_name  # --help would wait for its package

    try:
        check_adapter_name(adapter, ())
    except LoraplexError:
        return False
    return adapter[:1] != "/"


@dataclass(frozen=True, slots=True)
class NamedSources:
    """In the order of the command line."""

    sources: Sequence[NamedSource] = ()

    @classmethod
    def parse(cls, given: Iterable[str]) -> NamedSources:
        """Raises ConfigError."""
        sources = tuple(map(NamedSource.parse, given))
        if len(sources) > MAX_SOURCES:
            raise ConfigError(f"there are {len(sources)} adapter sources, at most {MAX_SOURCES} are allowed")
        names = [(each.tenant, each.name) for each in sources]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"adapter source {'/'.join(filter(None, twice))!r} is given twice; choose another name")
        return cls(sources)

    @property
    def directories(self) -> tuple[str, ...]:
        return tuple(each.place for each in self.sources if each.is_directory)

    def of(self, tenant: str) -> list[NamedSource]:
        """What a tenant ("": none) may use, its own first; one of its own hides another one of that name."""
        own = [each for each in self.sources if tenant and each.tenant == tenant]
        own_names = {each.name for each in own}
        return [*own, *(each for each in self.sources if not each.tenant and each.name not in own_names)]

    def named(self, name: str, tenant: str) -> NamedSource | None:
        """By its name, else the first of that kind (`local`, `hub`, `s3`)."""
        usable = self.of(tenant)
        by_name = (each for each in usable if each.name == name)
        return next(by_name, None) or next((each for each in usable if each.kind == name), None)

    def split(self, written: str, tenant: str) -> tuple[NamedSource, str] | None:
        """The source of an adapter, and its name there: `NAME/sql`, or `sql` in the first source. None: no source."""
        usable = self.of(tenant)
        head, slash, rest = written.partition("/")
        found = next((each for each in usable if slash and each.name == head), None)
        if found is not None:
            return found, rest
        return (usable[0], written) if usable else None
