"""Counters that all workers share and that may be lost: slots in flight, wrong proofs, failing facilitators.

They live in a file of their own beside the database, without durability: none of them is money.
"""

import contextlib
import functools
import ipaddress
import math
import os
import time
import zlib

import db as database
from db import sqlite3
from deals import Refusal

SLOT_SECONDS = 90  # a slot whose worker died without a trace is free again after this
PROOFS, PROOF_SECONDS = 10, 60
FREE_MOST, FREE_SECONDS = 120, 60
NOTES_MOST, NOTES_SECONDS = 10, 3600
PARTS = 8  # files that the sliding log is spread over
FAILURES, FAILURE_SECONDS, REST_SECONDS = 5, 60, 30  # so many failures in such a time rest a facilitator that long

TABLES = """
CREATE TABLE IF NOT EXISTS slots (
  id INTEGER PRIMARY KEY, client TEXT NOT NULL, pid INTEGER NOT NULL, expires_at REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS wrong_proofs (deal_id TEXT NOT NULL, client TEXT NOT NULL, at REAL NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS wrong_proofs_by ON wrong_proofs (deal_id, client, at);
CREATE TABLE IF NOT EXISTS circuits (
  url TEXT PRIMARY KEY, failures INTEGER NOT NULL, since REAL NOT NULL, open_until REAL NOT NULL, reason TEXT
) STRICT;
"""


VISITS = """
CREATE TABLE IF NOT EXISTS visits (client TEXT NOT NULL, at REAL NOT NULL, until REAL NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS visits_by ON visits (client, until);
CREATE INDEX IF NOT EXISTS visits_until ON visits (until);
-- Every visit clears two that are over, so the log never outgrows its window and no visit pays for many.
CREATE TRIGGER IF NOT EXISTS visits_over AFTER INSERT ON visits BEGIN
  DELETE FROM visits WHERE rowid IN (SELECT rowid FROM visits WHERE until <= new.at ORDER BY until LIMIT 2);
END;
"""


def connect(database_path):
    """Open the counters that belong to the database at ``database_path``, making the file if need be."""
    return _open(f"{database_path}.counters", TABLES)


def log(database_path, client):
    """Return this thread's connection to the part of the sliding log that has this client.

    Parts, because a lock on one file for every document would make all workers wait for each other.
    """
    return database.here(f"{database_path}.visits-{zlib.crc32(client.encode()) % PARTS}", _open_part)


def _open_part(path):
    return _open(path, VISITS)


def _open(path, tables):
    deadline = time.monotonic() + database.BUSY_SECONDS
    while True:
        try:
            counters = database.connect(path, durable=False)
            counters.executescript(tables)
            return counters
        except sqlite3.OperationalError:  # others are making the file at this moment, or the disk is full
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        except sqlite3.DatabaseError:
            # It may be lost, and a crash may have torn it: start anew rather than refuse paying customers.
            for part in (path, f"{path}-wal", f"{path}-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)


@contextlib.contextmanager
def slot(counters, client, *, now, most, most_per_client):
    """Occupy one place among the paid calls in flight; refuses with rate_limited when there is none."""
    taken = _take(counters, client, now, most, most_per_client)
    if taken is None and _free_the_dead(counters, now):
        taken = _take(counters, client, now, most, most_per_client)
    if taken is None:
        raise Refusal(
            "rate_limited", "Too many paid calls are in flight; nothing was charged. Retry with the same payment.",
            headers={"Retry-After": "5"},
        )  # fmt: skip
    try:
        yield
    finally:
        # Its time runs out anyway; an answer about money must not be lost over it.
        with contextlib.suppress(sqlite3.Error):
            counters.execute("DELETE FROM slots WHERE id = :id", {"id": taken})


def _take(counters, client, now, most, most_per_client):
    row = counters.execute(
        "INSERT INTO slots (client, pid, expires_at) SELECT :client, :pid, :expires"
        " WHERE (SELECT count(*) FROM slots) < :most"
        " AND (SELECT count(*) FROM slots WHERE client = :client) < :most_per_client RETURNING id",
        {"client": client, "pid": os.getpid(), "expires": now + SLOT_SECONDS, "most": most,
         "most_per_client": most_per_client},
    ).fetchone()  # fmt: skip
    return row and row["id"]


def _free_the_dead(counters, now):
    """Free the slots of workers that died; returns how many."""
    freed = counters.execute("DELETE FROM slots WHERE expires_at <= :now", {"now": now}).rowcount
    for (pid,) in counters.execute("SELECT DISTINCT pid FROM slots").fetchall():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            freed += counters.execute("DELETE FROM slots WHERE pid = :pid", {"pid": pid}).rowcount
        except PermissionError:
            pass  # alive, under another user
    return freed


def check_proofs(counters, deal_id, client, *, now):
    """Refuse a client that has sent ten wrong proofs for one deal within a minute; others are not affected."""
    recent = counters.execute(
        "SELECT at FROM wrong_proofs WHERE deal_id = :deal AND client = :client AND at > :since ORDER BY at DESC"
        " LIMIT 1 OFFSET :last",
        {"deal": deal_id, "client": client, "since": now - PROOF_SECONDS, "last": PROOFS - 1},
    ).fetchone()
    if recent:
        wait = max(1, int(recent["at"] + PROOF_SECONDS - now + 0.999))
        raise Refusal(
            "rate_limited", f"Too many wrong proofs for this deal; try again in {wait} s.",
            headers={"Retry-After": str(wait)},
        )  # fmt: skip


def wrong_proof(counters, deal_id, client, *, now):
    """Count one wrong proof."""
    counters.execute("DELETE FROM wrong_proofs WHERE at <= :old", {"old": now - PROOF_SECONDS})
    counters.execute(
        "INSERT INTO wrong_proofs (deal_id, client, at) VALUES (:deal, :client, :now)",
        {"deal": deal_id, "client": client, "now": now},
    )


# -- The sliding log of the free documents and of feedback -----------------------------------------------------


@functools.lru_cache(maxsize=4096)
def client_key(address):
    """Return what counts as one client: an IPv4 address, or the /64 that one IPv6 subscriber holds."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if ip.version == 6 and ip.ipv4_mapped:
        return str(ip.ipv4_mapped)
    return str(ip) if ip.version == 4 else f"{ipaddress.ip_network((ip, 64), strict=False).network_address}/64"


def visit(part, client, *, now, most=FREE_MOST, seconds=FREE_SECONDS):
    """Count one request of a client in its :func:`log`, if it has fewer than ``most`` in the last ``seconds``.

    Returns (admitted, requests left, seconds until the oldest one expires and a slot opens). Exact across
    workers, because it is one statement: SQLite lets in one writer at a time, and no Python runs while it
    holds the lock. A refused request is not counted; a visit far ahead of the clock, which then has been set
    back, is not either.
    """
    values = {
        "client": client, "now": now, "until": now + seconds, "ahead": now + 2 * seconds, "most": most,
    }  # fmt: skip
    row = part.execute(
        "INSERT INTO visits (client, at, until) SELECT :client, :now, :until WHERE"
        " (SELECT count(*) FROM visits WHERE client = :client AND until > :now AND until <= :ahead) < :most"
        " RETURNING (SELECT count(*) FROM visits WHERE client = :client AND until > :now AND until <= :ahead) AS count,"
        " (SELECT min(until) FROM visits WHERE client = :client AND until > :now) AS opens",
        values,
    ).fetchone()
    if row:
        return True, most - row["count"], max(1, math.ceil(row["opens"] - now))
    opens = part.execute(
        "SELECT min(until) AS opens FROM visits WHERE client = :client AND until > :now", {"client": client, "now": now}
    ).fetchone()["opens"]
    return False, 0, max(1, math.ceil((opens or now) - now))


def free(database_path, address, *, now):
    """Count one request to a free document by the client at ``address``; returns what :func:`visit` does."""
    key = client_key(address)
    return visit(log(database_path, key), key, now=now)


def too_many(reset):
    """Return the refusal of a request to a free document; a slot opens in ``reset`` seconds."""
    return Refusal(
        "rate_limited", f"More than {FREE_MOST} requests in {FREE_SECONDS} s; a slot opens in {reset} s.",
        headers={**dict(free_headers(0, reset)), "Retry-After": str(reset)},
    )  # fmt: skip


def free_headers(left, reset):
    """Return the four headers of a free document's answer."""
    return (
        ("RateLimit-Limit", str(FREE_MOST)),
        ("RateLimit-Policy", f"{FREE_MOST};w={FREE_SECONDS}"),
        ("RateLimit-Remaining", str(left)),
        ("RateLimit-Reset", str(reset)),
    )


# -- The circuit breaker of the facilitators ------------------------------------------------------------------


def usable(counters, url, *, now):
    """Whether a facilitator may be called: its circuit is closed, or this call is the one probe of its rest's end.

    Returns "" for no, "well" while nothing is known against it, or "troubled". Like what follows it fails never: a
    payment under way must not stop half-way because of a mere counter.
    """
    try:
        row = counters.execute("SELECT failures, open_until FROM circuits WHERE url = :url", {"url": url}).fetchone()
        if row is None:
            return "well"
        if row["open_until"] == 0:
            return "troubled"
        if now < row["open_until"]:
            return ""
        probe = counters.execute(
            "UPDATE circuits SET open_until = :until WHERE url = :url AND open_until = :seen",
            {"url": url, "until": now + REST_SECONDS, "seen": row["open_until"]},
        )
        return "troubled" if probe.rowcount == 1 else ""
    except sqlite3.Error:
        return "well"


def failed(counters, url, reason, *, now):
    """Count a failure; too many of them in a short time open the circuit."""
    with contextlib.suppress(sqlite3.Error):
        counters.execute(
            "INSERT INTO circuits (url, failures, since, open_until, reason) VALUES (:url, 1, :now, 0, :reason)"
            " ON CONFLICT (url) DO UPDATE SET reason = :reason,"
            " failures = CASE WHEN since > :now - :window THEN failures + 1 ELSE 1 END,"
            " since = CASE WHEN since > :now - :window THEN since ELSE :now END",
            {"url": url, "now": now, "reason": reason[:200], "window": FAILURE_SECONDS},
        )
        counters.execute(
            "UPDATE circuits SET open_until = :until WHERE url = :url AND failures >= :most AND open_until = 0",
            {"url": url, "until": now + REST_SECONDS, "most": FAILURES},
        )


def worked(counters, url, state):
    """Close the circuit after a success of a facilitator that was in this ``state``; costs nothing while all is well."""
    if state == "troubled":
        with contextlib.suppress(sqlite3.Error):
            counters.execute("DELETE FROM circuits WHERE url = :url", {"url": url})


def circuits(counters):
    """Return the facilitators that have failed lately, for /health."""
    return counters.execute("SELECT url, failures, open_until, reason FROM circuits ORDER BY url").fetchall()
