"""A real PostgreSQL for tests: a cluster of its own in a temporary folder, and a new schema for each test.

It is found as the operating system installs it (`pg_config`, PATH, Debian's /usr/lib/postgresql). PostgreSQL refuses to
run as root, so there it runs as the user `postgres` that its package makes.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path

TIMEOUT_S = 60


class Cluster:
    """`new_schema` gives what `--database-url` takes. It listens on loopback, and trusts every client there."""

    def __init__(self, bin_dir: Path, folder: Path) -> None:
        self._bin = bin_dir
        self._data = folder / "data"
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user is not None:
            about = pwd.getpwnam(self._user)
            os.chown(folder, about.pw_uid, about.pw_gid)
        self._run("initdb", "-D", self._data, "-U", "loraplex", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._options = f"-c listen_addresses=127.0.0.1 -p {self.port} -k {folder} -c fsync=off -c max_connections=200"
        self._num_schemas = 0
        self.start()

    def _run(self, program: str, *arguments: object) -> str:
        done = subprocess.run(
            [self._bin / program, *map(str, arguments)],
            user=self._user,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> None:
        log = self._data.parent / "log"
        self._run("pg_ctl", "-D", self._data, "-l", log, "-w", "-o", self._options, "start")

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-m", mode, "stop")

    @property
    def pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split()[0])

    @property
    def url(self) -> str:
        return f"postgresql://loraplex@127.0.0.1:{self.port}/postgres"

    def sql(self, statement: str, url: str | None = None) -> list[tuple[object, ...]]:
        import psycopg

        with psycopg.connect(url or self.url, autocommit=True) as session:
            cursor = session.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def new_schema(self) -> str:
        """Its URL. A database would be 7 MB."""
        self._num_schemas += 1
        name = f"test_{self._num_schemas}"
        self.sql(f"CREATE SCHEMA {name}")
        return f"{self.url}?options=-csearch_path%3D{name}"


def bin_dir() -> Path | None:
    """Where PostgreSQL's programs are; None: it is not installed, or there is no user to run it."""
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return None
    places = [Path(each) for each in sorted(glob("/usr/lib/postgresql/*/bin"), reverse=True)]
    found = shutil.which("initdb")
    if found:
        places.append(Path(found).resolve().parent)
    with suppress(OSError, subprocess.SubprocessError):
        places.append(Path(subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True).stdout.strip()))
    return next((place for place in places if (place / "initdb").exists() and (place / "pg_ctl").exists()), None)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Raises RuntimeError with a reason where there is none."""
    place = bin_dir()
    if place is None:
        raise RuntimeError("PostgreSQL's programs are not installed (apt-get install postgresql)")
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise RuntimeError("psycopg is not installed (pip install loraplex[postgres])") from None
    folder = Path(tempfile.mkdtemp(prefix="loraplex-postgres-"))
    try:
        running = Cluster(place, folder)
        try:
            yield running
        finally:
            with suppress(AssertionError, FileNotFoundError):
                running.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
