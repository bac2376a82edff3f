"""Writers that share a commit: each gets its own result or its own error, and nobody returns before the disk has it."""

import threading
import time

import pytest

import db as database
from db import sqlite3

NOTE = "INSERT INTO meta (key, value) VALUES (:key, 'x')"


def note(key, error=None, last=""):
    def work(db):
        db.execute(NOTE, {"key": key})
        if last:
            db.execute(last)
        if error:
            raise error
        return key

    return work


def queue(settings, works):
    """Let a thread for each work wait behind a transaction, then end that; returns what each got, and every commit."""
    found, commits, threads = [None] * len(works), [], []
    holder = database.connect(settings.database)
    holder.door.connection().set_trace_callback(lambda statement: statement == "COMMIT" and commits.append(1))

    def run(number, work):
        db = database.connect(settings.database)
        try:
            found[number] = database.together(db, work)
        except Exception as error:
            found[number] = error

    with database.transaction(holder):
        for number, work in enumerate(works):
            threads.append(threading.Thread(target=run, args=(number, work)))
            threads[-1].start()
            while len(holder.door.waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    return found, commits


def kept(db):
    return [row["key"] for row in db.execute("SELECT key FROM meta WHERE value = 'x' ORDER BY key")]


def test_all_that_wait_share_one_commit_and_get_their_own_results(db, settings):
    found, commits = queue(settings, [note(key) for key in "abcdef"])
    assert found == list("abcdef") == kept(db)
    assert len(commits) == 1


def test_what_one_raises_undoes_only_its_own(db, settings):
    error = ValueError("no")
    found, commits = queue(settings, [note("a"), note("b", error), note("c"), note("c")])
    assert found[:3] == ["a", error, "c"] and isinstance(found[3], sqlite3.IntegrityError)
    assert kept(db) == ["a", "c"] and len(commits) == 1


def test_one_that_is_alone_and_fails_leaves_nothing(db, settings):
    with pytest.raises(ValueError):
        database.together(db, note("a", ValueError("no")))
    assert kept(db) == [] and not db.in_transaction
    assert database.together(db, note("b")) == "b"


def test_a_commit_that_fails_fails_for_all_and_nothing_is_kept(db, settings):
    lasting = "INSERT INTO deal_events VALUES ('deal_none', 1, 1, 'pay', 'buyer', 'pending', NULL)"

    def late(db):  # a broken reference that only the commit notices
        db.execute("PRAGMA defer_foreign_keys = ON")
        db.execute(lasting)

    found, _ = queue(settings, [note("a"), late, note("c")])
    assert all(isinstance(got, sqlite3.IntegrityError) for got in found)
    assert kept(db) == []
    assert database.together(db, note("d")) == "d"


def test_an_error_that_ends_the_whole_transaction_is_everybodys(db, settings):
    found, _ = queue(settings, [note("a"), note("b", ValueError("no"), last="ROLLBACK"), note("c")])
    assert all(isinstance(got, ValueError) for got in found)
    assert kept(db) == []


def test_who_waits_too_long_is_told_and_its_work_is_never_done(db, settings, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    other = database.connect(settings.database)
    with database.transaction(other):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            database.together(db, note("late"))
        with pytest.raises(sqlite3.OperationalError, match="locked"), database.transaction(db):
            pass
    database.together(db, note("later"))
    assert kept(db) == ["later"]


def test_another_process_that_holds_the_lock_file_is_waited_for_only_so_long(db, settings, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    monkeypatch.setattr(database, "_doors", {})  # as another process has its own
    other = database.connect(settings.database)
    with database.transaction(other), pytest.raises(sqlite3.OperationalError, match="locked"):
        database.together(db, note("late"))
    assert kept(db) == [] and database.together(db, note("later")) == "later"
