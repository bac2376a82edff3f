"""One SQLite file: connecting, preparing and writing it.

Every function that touches data takes ``db``, a connection from :func:`connect`, as its first argument.
"""

import collections
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import threading
import time
import weakref
from collections.abc import Callable

import baton

try:
    from pysqlite3 import dbapi2 as sqlite3  # brings a newer SQLite than Python has nearly everywhere: see WAL_IS_SAFE
except ImportError:
    import sqlite3

SCHEMA = pathlib.Path(__file__).with_name("schema.sql")
VERSION = 1  # PRAGMA user_version of schema.sql; raise it together with a step in MIGRATIONS
MIGRATIONS: dict[int, str] = {}  # from version -> script that leads to the next one

# SQLite 3.7.0 to 3.51.2 can corrupt a WAL that several connections checkpoint at once
# (https://sqlite.org/wal.html, "the WAL-reset bug"), so older libraries get a rollback journal.
# It is kept between transactions (PERSIST): deleting it for every commit costs ten times the commit itself.
WAL_IS_SAFE = sqlite3.sqlite_version_info >= (3, 51, 3)
CHECKPOINT_PAGES = 4000  # 16 MB of journal: pages that change often are copied into the database once, not four times
BUSY_SECONDS = 5.0
TRY_EVERY = 0.00005  # SQLite's own waits grow to 100 ms, which starves some writers for seconds when many write


class Connection(sqlite3.Connection):
    """A connection whose transactions queue before they ask SQLite: at ``door`` the threads of this process, then at
    ``turnstile``, an open lock file, the processes."""

    turnstile = door = None


class NotReady(Exception):
    """The database is missing, was made by another version, or belongs to the other mode."""


def connect(path, *, durable=True):
    """Open the database at ``path`` (created if missing) in autocommit mode, rows by name.

    A commit is on the disk when it returns. ``durable=False`` is for counters that may be lost.
    """
    db = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, factory=Connection
    )  # fmt: skip
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA foreign_keys = ON")
    if durable:
        db.execute(f"PRAGMA journal_mode = {'WAL' if WAL_IS_SAFE else 'PERSIST'}")
        db.execute(f"PRAGMA synchronous = {'FULL' if WAL_IS_SAFE else 'EXTRA'}")
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        db.turnstile = open(f"{path}.turn", "a")
        db.door = _door(path)
    else:
        db.execute(f"PRAGMA journal_mode = {'WAL' if WAL_IS_SAFE else 'MEMORY'}")
        db.execute("PRAGMA synchronous = OFF")
    return db


_thread = threading.local()
_doors = weakref.WeakValueDictionary()  # by process and file; a door goes with the last connection before it
_doors_lock = threading.Lock()


def here(path, opener=connect):
    """Return this thread's own connection to ``path``, opened at first use and never carried across a fork."""
    if getattr(_thread, "pid", None) != os.getpid():
        _thread.pid, _thread.open = os.getpid(), {}
    if (path, opener) not in _thread.open:
        _thread.open[path, opener] = opener(path)
    return _thread.open[path, opener]


@contextlib.contextmanager
def transaction(db):
    """Hold the one write lock from the first statement on; commit at the end, roll back on any error."""
    with _through_door(db), _begun(db):
        yield db


def together(db, work):
    """Return ``work(db)``, from a transaction that it may share with what other threads want to write at this moment:
    one turn, one commit and one wait for the disk for all of them.

    ``work`` gets the connection to use, and stands alone: what it raises is raised here, and undoes only what it did.
    When this returns, the commit is on the disk.
    """
    if db.door is None:
        with transaction(db):
            return work(db)
    job = _Job(work)
    db.door.waiting.append(job)
    with _through_door(db, job):
        if not job.done:
            _lead(db, job)
    if job.error is not None:
        raise job.error
    return job.result


def _door(path):
    """Return the one door of this process to a file."""
    key = os.getpid(), os.path.realpath(path)
    with _doors_lock:
        found = _doors.get(key)
        if found is None:
            found = _doors[key] = _Door(path)
        return found


class _Door:
    """Where the threads of this process wait that want to write to one file.

    What they do together they do over one connection, whose pages are warmer than each one's own would be.
    """

    def __init__(self, path):
        self.path, self.lock, self.waiting, self._shared = path, threading.Lock(), collections.deque(), None

    def connection(self):
        """Return the connection for what threads do together; whoever uses it holds the door's lock."""
        if self._shared is None:
            self._shared = connect(self.path)
            self._shared.door = None  # it is inside
        return self._shared


@dataclasses.dataclass(eq=False)
class _Job:
    work: Callable
    result: object = None
    error: BaseException | None = None
    done: bool = False


def _lead(db, own):
    """Do the work of all who wait once the turn has come, in one transaction; ``own`` is one of them."""
    batch, door = [own], db.door
    door.waiting.remove(own)
    try:
        shared = door.connection()
        with _begun(shared):
            while door.waiting:
                batch.append(door.waiting.popleft())
            for job in batch:
                _carry_out(shared, job, alone=len(batch) == 1)
    except BaseException as error:
        for job in batch:  # nothing of any of them is kept
            job.error = error
    finally:
        for job in batch:
            job.done = True


def _carry_out(db, job, *, alone):
    if alone:
        job.result = job.work(db)
        return
    db.execute("SAVEPOINT job")
    try:
        job.result = job.work(db)
    except Exception as error:
        if not db.in_transaction:  # a full disk, say, has undone the others too
            raise
        db.execute("ROLLBACK TO job")
        job.error = error
    db.execute("RELEASE job")


@contextlib.contextmanager
def _through_door(db, job=None):
    """Wait for the other threads of this process, which may do the ``job`` meanwhile."""
    if db.door is None:
        yield
        return
    if not _acquired(db.door.lock, seconds=BUSY_SECONDS):
        try:
            db.door.waiting.remove(job)
        except ValueError:  # not waiting there (any more): then whoever has it is about to be done with it
            if job is None:
                raise sqlite3.OperationalError("database is locked") from None
            _acquired(db.door.lock, seconds=-1)
        else:
            raise sqlite3.OperationalError("database is locked")
    try:
        yield
    finally:
        db.door.lock.release()


def _acquired(lock, *, seconds):
    if lock.acquire(blocking=False):
        return True
    with baton.aside():
        return lock.acquire(timeout=seconds)


@contextlib.contextmanager
def _begun(db):
    """Wait for the other processes of ours, then begin; SQLite's own lock stays the one that protects the data."""
    if db.turnstile is not None:
        _pass(db.turnstile, time.monotonic() + BUSY_SECONDS)
    try:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            with baton.aside():  # the disk may take its time, and whoever is next need not wait until we go on
                db.execute("COMMIT")
                _let_in(db.turnstile)
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    finally:
        _let_in(db.turnstile)


def _let_in(turnstile):
    if turnstile is not None:
        fcntl.flock(turnstile, fcntl.LOCK_UN)


def _pass(turnstile, deadline):
    """Lock the file, trying often: there is no waiting for a lock that ends at a deadline."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(turnstile, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() > deadline:
            raise sqlite3.OperationalError("database is locked")
        with baton.aside():
            time.sleep(TRY_EVERY)


@contextlib.contextmanager
def snapshot(db):
    """Read several statements from one state of the database."""
    db.execute("BEGIN")
    try:
        yield db
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def init(db, *, mode):
    """Create or migrate the tables, and bind the file to ``mode`` (``sandbox`` or ``live``) for good."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        with transaction(db):
            for statement in _statements(SCHEMA.read_text()):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
    while 0 < version < VERSION:
        with transaction(db):
            for statement in _statements(MIGRATIONS[version]):
                db.execute(statement)
            version += 1
            db.execute(f"PRAGMA user_version = {version}")
    db.execute("INSERT INTO meta (key, value) VALUES ('mode', :mode) ON CONFLICT DO NOTHING", {"mode": mode})
    check(db, mode=mode)


def check(db, *, mode):
    """Refuse a file that this code and this mode must not touch. Raises :class:`NotReady`."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != VERSION:
        made = "is not initialised" if version == 0 else f"has schema version {version}, this code needs {VERSION}"
        raise NotReady(f"The database {made}: run `python cli.py init`.")
    found = meta(db, "mode")
    if found != mode:
        raise NotReady(f"The database belongs to the {found} mode and must not be used in {mode} mode.")


def meta(db, key, default=None):
    """Return one remembered value (text)."""
    row = db.execute("SELECT value FROM meta WHERE key = :key", {"key": key}).fetchone()
    return row["value"] if row else default


def set_meta(db, key, value):
    """Remember one value; None forgets it."""
    if value is None:
        db.execute("DELETE FROM meta WHERE key = :key", {"key": key})
    else:
        db.execute(
            "INSERT INTO meta (key, value) VALUES (:key, :value)"
            " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            {"key": key, "value": str(value)},
        )


def journal_mode(db):
    """Read back which journal SQLite really uses, such as ``delete`` or ``wal``."""
    return db.execute("PRAGMA journal_mode").fetchone()[0]


def backup(db, path):
    """Copy the live database to ``path`` with SQLite's backup API; the copy is consistent and complete."""
    target = sqlite3.connect(path)
    try:
        db.backup(target)
        if target.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError(f"The backup {path} failed its integrity check.")
    finally:
        target.close()


def restore(db, path, *, mode):
    """Replace all that the live database holds by the backup at ``path``, in one transaction; its journal goes with it.

    Raises :class:`NotReady` when the backup belongs to another version or mode, DatabaseError when it is damaged.
    """
    source = sqlite3.connect(path, factory=Connection)
    source.row_factory = sqlite3.Row
    try:
        if source.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError(f"The backup {path} failed its integrity check.")
        check(source, mode=mode)
        source.backup(db)
    finally:
        source.close()


def _statements(script):
    """Split a script into statements, so that it can run inside one transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement
