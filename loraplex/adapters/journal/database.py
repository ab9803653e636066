"""The database of `--database-url`: how sessions with it begin, and what may be said of it.

A URL may hold a password, and so may what a library says about one. So neither reaches a message: `Database.place` is
host, port and name.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import sqlalchemy as sa

from loraplex.errors import ConfigError

SCHEMES = ("postgresql://", "postgres://")
CONNECT_TIMEOUT_S = 2
PROBE_TIMEOUT_S = 0.5
DEFAULT_PORT = "5432"
DEFAULTS = {
    "application_name": "loraplex",
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 5000,
}
"""What the URL does not say: a host that is gone ends a session in seconds, not in a quarter of an hour."""

SESSION = "SET lock_timeout = '5s'; SET idle_in_transaction_session_timeout = '10s'"
"""A server that stands still in the middle of a turn loses it, and the others go on."""

STARTING = ("starting up", "shutting down", "recovery mode", "not yet accepting")
"""What PostgreSQL says to every client while it serves none."""


class Database:
    """Raises ConfigError for a URL that cannot be, or without psycopg."""

    def __init__(self, url: str) -> None:
        try:
            import psycopg
            from psycopg.conninfo import conninfo_to_dict
        except ImportError as error:
            raise ConfigError("database_url needs psycopg: install loraplex[postgres]") from error
        if not url.startswith(SCHEMES):
            raise ConfigError(
                "database_url must begin with postgresql://, such as postgresql://user@host:5432/loraplex"
            )
        try:
            given: Mapping[str, Any] = conninfo_to_dict(url)
        except psycopg.Error:
            given = {}
        if not given or not _is_plain(url, str(given.get("port", DEFAULT_PORT))):
            raise ConfigError(
                "database_url is no URL that PostgreSQL's client library reads; write "
                "postgresql://user@host:5432/loraplex, with what is special in a password as %XX"
            )
        self._settings = {**DEFAULTS, **given}
        self._engine = sa.create_engine("postgresql+psycopg://", creator=self._connect, poolclass=sa.NullPool)
        hosts = str(given.get("host") or given.get("hostaddr") or "the local socket")
        self.place = f"{hosts}:{given.get('port', DEFAULT_PORT)}/{given.get('dbname', '')}"

    def _connect(self, autocommit: bool = True) -> Any:
        import psycopg

        session = psycopg.connect(**self._settings, autocommit=True)
        session.execute(SESSION)
        session.autocommit = autocommit
        return session

    def pooled(self) -> sa.Engine:
        """At most two sessions, of which one is kept, with SQLAlchemy's own transactions."""
        return sa.create_engine(
            "postgresql+psycopg://",
            creator=partial(self._connect, False),
            pool_size=1,
            max_overflow=1,
            pool_pre_ping=True,
        )

    def connect(self) -> sa.Connection:
        """A session in which each statement is a transaction, unless `BEGIN` is one of them.

        Raises sqlalchemy's and psycopg's errors.
        """
        return self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def is_down(self, error: BaseException) -> bool:
        """Whether it serves no client at all, by what a new session met: a host of it refuses connections (each host,
        where there are several), or it says that it starts or ends."""
        if any(each in str(error) for each in STARTING):
            return True
        hosts = str(self._settings.get("hostaddr") or self._settings.get("host") or "")
        ports = str(self._settings.get("port", DEFAULT_PORT)).split(",")
        probed = hosts.split(",")
        return all(_refuses(host, ports[min(number, len(ports) - 1)]) for number, host in enumerate(probed))


def _is_plain(url: str, ports: str) -> bool:
    """Whether no part of a password can be taken for a host, a port or a database, and shown as one.

    The library ends the host at the first `/` and the password at the first `@`, so a plain one in a password moves
    the rest of it.
    """
    address = url.partition("://")[2].partition("?")[0]
    authority, _, path = address.partition("/")
    return "@" not in path and authority.count("@") <= 1 and all(each.isdigit() for each in ports.split(","))


def _refuses(host: str, port: str) -> bool:
    """Whether a host answers, and nothing listens there."""
    try:
        if not host or host.startswith(("/", "@")):
            return _socket_refuses(host or "/var/run/postgresql", port)
        with socket.create_connection((host, int(port)), PROBE_TIMEOUT_S):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False


def _socket_refuses(folder: str, port: str) -> bool:
    path = f"\0{folder[1:]}" if folder.startswith("@") else folder
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(f"{path}/.s.PGSQL.{port}")
        except OSError as error:
            return error.errno in (errno.ECONNREFUSED, errno.ENOENT)
        return False


def reason_of(error: BaseException) -> str:
    """One line about an error of the database: without SQL, values and links."""
    cause: Any = getattr(error, "orig", None) or error
    text = ""
    with suppress(AttributeError, TypeError):
        text = cause.diag.message_primary or ""
    lines = (text or str(cause)).strip().splitlines()
    return lines[0][:200] if lines else type(cause).__name__
