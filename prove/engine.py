"""The scheduler: simulated time, workers that run one at a time, and death between any two statements.

Every request, sweep and command runs in a real thread of its own, but a baton lets exactly one of them run.
It changes hands only at *points*: before a statement outside a transaction, and around every call that
leaves the process. Death strikes there too, and before a COMMIT. Which thread goes on is drawn from the
seed, so a seed is a history.
"""

import collections
import contextlib
import dataclasses
import heapq
import logging
import os
import random
import threading

import db as database
import limits
from db import sqlite3

from .faults import FAULTS

NOON = 1_790_000_000  # 2026-09-21T13:33:20Z
JOURNAL = "WAL" if sqlite3.sqlite_version_info >= (3, 51, 3) else "MEMORY"  # as the service: see db.py
FAVOUR = 3  # how much oftener a seed's favourite fault strikes
SWITCH = {"statement": 0.04, "commit": 0.0, "foreign": 0.35}  # chance that the baton changes hands at a point


class Death(BaseException):
    """The process is gone: nothing after this runs, whatever the code would have liked to do."""


class Violation(BaseException):
    """A promise is broken. ``law`` names it, ``deal`` is the id of the deal concerned, if any."""

    def __init__(self, law, words, deal=None):
        super().__init__(f"{law}: {words}")
        self.law, self.words, self.deal = law, words, deal


class Connection(database.Connection):
    """A connection of the service whose statements are points of the simulation."""

    sim = None
    dead = False

    def execute(self, sql, parameters=()):
        if self.dead:
            raise Death
        if sql == "COMMIT":
            self.sim.point("commit", self)
        elif not self.in_transaction:
            self.sim.point("statement", self, writes=not sql.startswith("SELECT"))
        done = super().execute(sql, parameters)
        if not self.in_transaction and not sql.startswith("SELECT"):
            self.sim.changed = True
        return done


class Counters(database.Connection):
    """A connection to the counters; a dead process writes no more there either."""

    dead = False

    def execute(self, sql, parameters=()):
        if self.dead:
            raise Death
        return super().execute(sql, parameters)


class Task:
    """One request, sweep or command: ``work(worker)`` runs in a worker's thread."""

    def __init__(self, label, work, *, deal=None, client=None):
        self.label, self.work, self.deal, self.client = label, work, deal, client
        self.wake_at, self.worker = 0.0, None
        self.done = self.died = self.doomed = False
        self.result = self.error = None
        self.settled = []  # authorizations this task has handed to a facilitator: (payer, nonce)
        self.sent = set()  # (deal id, leg) of the payouts this task has sent
        self.disk_failed = self.stalled = False


@dataclasses.dataclass
class Job:
    """Something an operator runs: ``work(db, world)``."""

    label: str
    work: object
    deal: str | None = None


class Worker(threading.Thread):
    """A thread of one process of the service, with its own connections, as in production."""

    def __init__(self, sim, process):
        super().__init__(daemon=True)
        self.sim, self.process = sim, process
        self.go = threading.Lock()
        self.go.acquire()
        self.task = None
        self.opened = ()
        self.start()

    def run(self):
        while True:
            self.go.acquire()
            if self.task is None:
                break
            self._carry_out(self.task)
            self.sim.back.release()
        self.drop()
        self.sim.back.release()

    def _carry_out(self, task):
        try:
            self.connect()
            task.result = task.work(self)
        except Death:
            task.died = True
        except BaseException as error:  # a mistake of the simulator or a bug that nothing caught: told by the scheduler
            task.error = error
        if task.died or task.error:
            self.drop()
        task.done = True

    def connect(self):
        """Give this thread its own connections, under the names by which the service looks for them."""
        if self.opened:
            return
        path = self.sim.path
        self.db = self.sim.connect(Connection)
        counters = sqlite3.connect(f"{path}.counters", isolation_level=None, check_same_thread=False, factory=Counters)
        counters.row_factory = sqlite3.Row
        self.opened = (self.db, counters)
        database._thread.pid = os.getpid()
        database._thread.open = {(path, database.connect): self.db, (path, limits.connect): counters}

    def drop(self):
        """Lose the connections as a dying process does: what was not committed is gone."""
        for connection in self.opened:
            connection.rollback()
            connection.close()
        self.opened = ()


class Scheduler:
    """Time, chance and the baton. What happens in the world is in :mod:`prove.world`."""

    def __init__(self, seed, folder, *, faults=None, heat=1.0):
        self.seed, self.rng = seed, random.Random(f"prove/{seed}")
        self.path = os.path.join(folder, f"deals-{seed}.db")
        self.time, self.skew = float(NOON), 0.0  # true time, and how far the server's clock is off
        # Swarm testing: every seed goes without about half of the faults, so that each gets room to bite.
        swarm = {name for name in FAULTS if self.rng.random() < 0.5}
        # And every seed has a favourite, by its number, so that each fault meets every move. In every other round of
        # favourites, and in a round in every other seed, people quarrel.
        lap, place = divmod(seed, len(FAULTS))
        self.favourite, self.quarrels = list(FAULTS)[place], (lap + place) % 2 == 1
        self.enabled = swarm | {self.favourite} if faults is None else set(faults)
        self.heat = heat * self.rng.choice((0.5, 1.0, 1.0, 2.0))
        self.back = threading.Lock()
        self.back.acquire()
        self.tasks, self.agents, self.workers = [], [], []
        self.current = None
        self.changed, self.steps, self.deaths = False, 0, 0
        self.faults = collections.Counter()
        self.trace = []
        self.queue_order = 0

    # -- Chance ---------------------------------------------------------------------------------------------

    def happens(self, fault, *, deal=None, times=1.0):
        """Draw whether a fault strikes on this occasion; it is counted, told and remembered for the coverage."""
        if not self.drawn(fault, times):
            return False
        self.hit(fault, deal)
        return True

    def drawn(self, fault, times=1.0):
        """Draw whether a fault is to strike later; whoever lets it strike then calls :meth:`hit`."""
        if fault not in self.enabled:
            return False
        times *= FAVOUR if fault == self.favourite else 1
        return self.rng.random() < FAULTS[fault][0] * self.heat * times

    def hit(self, fault, deal=None):
        self.faults[fault] += 1
        self.say(f"FAULT {fault}: {FAULTS[fault][1]}", deal)
        self.struck(fault, deal)

    def struck(self, fault, deal):
        """Remember for the coverage table; overridden."""

    def say(self, words, deal=None):
        self.trace.append((self.time, self.current.label if self.current else "", deal, words))

    def clock(self):
        """Return what the server's clock shows."""
        return self.time + self.skew

    # -- The baton, from a worker's side ----------------------------------------------------------------------

    def connect(self, factory=database.Connection):
        """Open the database on its real file, without the waiting for a disk: a simulated crash loses no page."""
        db = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False, factory=factory)
        db.row_factory = sqlite3.Row
        if factory is Connection:
            db.sim = self
        for pragma in ("foreign_keys = ON", f"journal_mode = {JOURNAL}", "synchronous = OFF"):
            sqlite3.Connection.execute(db, f"PRAGMA {pragma}")
        return db

    def point(self, kind, connection=None, *, writes=False):
        """Let chance decide what happens between two steps of the running task."""
        task = self.current
        if self.rng.random() < SWITCH[kind]:
            self.hand_over(task)
        if task.doomed or self.happens("death", deal=task.deal, times=4.0 if kind != "statement" else 1.0):
            self.die(task)
        if connection is None:
            if self.happens("stall", deal=task.deal):
                task.stalled = True
                self.pause(self.rng.choice((30, 90, 600, 4000)))
        elif (writes or kind == "commit") and self.happens("disk_full", deal=task.deal):
            task.disk_failed = True
            raise sqlite3.OperationalError("database or disk is full")

    def foreign(self, what):
        """Leave the process. No transaction may be open while we are away."""
        task = self.current
        if task.worker.db.in_transaction:
            raise Violation("no transaction across a foreign call", f"{task.label} called {what} inside one", task.deal)
        self.point("foreign")

    def pause(self, seconds):
        """Let simulated time pass for the running task; others go on."""
        self.current.wake_at = self.time + seconds
        self.hand_over(self.current)

    def hand_over(self, task):
        self.back.release()
        task.worker.go.acquire()
        if task.doomed:
            self.die(task)

    def die(self, task):
        task.doomed = True
        for connection in task.worker.opened:
            connection.dead = True
        raise Death

    # -- The scheduler's side -----------------------------------------------------------------------------------

    def start(self, task, process):
        """Give a task to a free worker of a process; False when all are busy."""
        for worker in self.workers:
            if worker.process is process and worker.task is None:
                task.worker, worker.task = worker, task
                task.wake_at = self.time
                self.tasks.append(task)
                return True
        return False

    def turn(self, task):
        """Let one task run until it hands the baton back."""
        self.steps += 1
        self.current = task
        task.worker.go.release()
        self.back.acquire()
        self.current = None
        if task.done:
            self.tasks.remove(task)
            task.worker.task = None
            if task.died:
                self.deaths += 1

    def kill(self, process=None):
        """Kill every task of a process, or of all: each dies at the point where it stands."""
        for task in [t for t in self.tasks if process is None or t.worker.process is process]:
            task.doomed = True
            while not task.done:
                self.turn(task)
            self.finished(task)

    def agent(self, generator, at=0.0):
        """Enter a client, an operator or an event of the world: a generator that yields tasks and pauses."""
        self.queue_order += 1
        heapq.heappush(self.agents, (self.time + at, self.queue_order, generator, None))

    def run(self, until):
        """Interleave tasks and agents by chance until ``until()`` holds or nothing is left to do."""
        while not until():
            self.steps_are_bounded()
            ready = [task for task in self.tasks if task.wake_at <= self.time]
            due = bool(self.agents) and self.agents[0][0] <= self.time
            if not ready and not due:
                moments = [task.wake_at for task in self.tasks] + [entry[0] for entry in self.agents[:1]]
                if not moments:
                    return
                self.advance(max(self.time, min(moments)))
                continue
            pick = self.rng.randrange(len(ready) + due)
            if pick < len(ready):
                self.turn(ready[pick])
                if ready[pick].done:
                    self.finished(ready[pick])
            else:
                _, _, generator, value = heapq.heappop(self.agents)
                self.resume(generator, value)
            self.after_step()

    def stop(self):
        """End all threads and close everything."""
        self.kill()
        for worker in self.workers:
            worker.task = None
            worker.go.release()
            self.back.acquire()
        self.workers.clear()
        self.agents.clear()


@contextlib.contextmanager
def listening():
    """Collect what the service logs while a simulation runs, instead of printing it."""
    records = []

    class Ear(logging.Handler):
        def emit(self, record):
            records.append(self.format(record))

    ear, root = Ear(), logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = [ear]
    try:
        yield records
    finally:
        root.handlers[:] = before
