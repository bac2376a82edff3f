"""One thread of a worker pays at a time, and lets others go on while it waits: for them, for the disk, for anybody."""

import threading

import pytest

import baton
import db as database

SECONDS = 20  # until a test gives up on threads that wait for each other


def run(*works):
    """Run each work in a thread of its own; all have to end. Returns what they returned."""
    found = [None] * len(works)

    def carry_out(number, work):
        found[number] = work()

    threads = [threading.Thread(target=carry_out, args=each, daemon=True) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "threads wait for each other for ever"
    return found


def test_one_thread_works_at_a_time():
    inside, most = [], []

    def work():
        for _ in range(200):
            with baton.held():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    run(work, work, work)
    assert max(most) == 1


def test_a_thread_that_waits_for_something_outside_lets_others_work():
    waits, worked = threading.Event(), threading.Event()

    def waiting():
        with baton.held():
            with baton.aside():
                waits.set()
                return worked.wait(SECONDS)

    def working():
        waits.wait(SECONDS)
        with baton.held():
            worked.set()

    assert run(waiting, working)[0]


def test_what_fails_hands_the_baton_on():
    with pytest.raises(ZeroDivisionError), baton.held(), baton.aside():
        1 / 0
    with pytest.raises(ZeroDivisionError), baton.held():
        1 / 0
    assert baton._baton.acquire(blocking=False)
    baton._baton.release()


def test_without_it_there_is_nothing_to_lay_aside():
    with baton.held():
        pass
    with baton.aside():
        assert baton._baton.acquire(blocking=False)
        baton._baton.release()


def test_others_work_while_the_disk_takes_its_time(settings, db):
    worked, seen = threading.Event(), []

    def writing():
        mine = database.connect(settings.database)
        mine.set_trace_callback(lambda statement: statement == "COMMIT" and seen.append(worked.wait(SECONDS)))
        with baton.held(), database.transaction(mine) as open_one:
            database.set_meta(open_one, "slow", 1)
            began.set()

    def working():
        began.wait(SECONDS)
        with baton.held():
            worked.set()

    began = threading.Event()
    run(writing, working)
    assert seen == [True]


def test_writers_with_and_without_it_never_wait_for_each_other_for_ever(settings, db):
    def note(key):
        return lambda db: database.set_meta(db, key, 1)

    def paying(name):
        def work():
            mine = database.connect(settings.database)
            for number in range(40):
                with baton.held():
                    database.together(mine, note(f"{name} {number}"))
                    with baton.aside():
                        pass
                    with database.transaction(mine):
                        database.set_meta(mine, f"{name} {number} again", 1)

        return work

    def acting():
        mine = database.connect(settings.database)
        for number in range(40):
            with database.transaction(mine):
                database.set_meta(mine, f"act {number}", 1)

    run(*(paying(name) for name in "abcdef"), acting)
    assert db.execute("SELECT count(*) FROM meta WHERE value = '1'").fetchone()[0] == 6 * 80 + 40
