"""One seed: the service, its world, its people; then, faults off, the end at which the books must close."""

import collections
import contextlib
import functools
import io
import json
import os

import coincurve
from werkzeug.datastructures import Headers

import app as application
import chain
import db as database
import deals
import limits
import protocols
import settings as configuration
import world as worlds
from db import sqlite3

from . import agents, engine, operators, parties
from .chainmodel import Chain, Node
from .engine import Task, Violation, Worker
from .laws import Laws
from .peers import Peer

chain.keccak = functools.lru_cache(1 << 15)(chain.keccak)  # slow, pure, and asked the same again and again by every law
MASTER = chain.sha256(b"prove: the operator's master key")
RECEIPT = chain.sha256(b"prove: the receipt key")
MASTER_KEY = coincurve.PublicKey.from_secret(MASTER).format()
MOST_STEPS = 60_000
ENVIRON = {
    "SERVER_NAME": "deals.test", "SERVER_PORT": "443", "HTTP_HOST": "deals.test", "SERVER_PROTOCOL": "HTTP/1.1",
    "SCRIPT_NAME": "", "QUERY_STRING": "", "CONTENT_TYPE": "application/json", "wsgi.version": (1, 0),
    "wsgi.url_scheme": "https", "wsgi.multithread": True, "wsgi.multiprocess": True, "wsgi.run_once": False,
}  # fmt: skip


class Socket:
    """A world to plug worlds into: an application is built upon it once, and then serves one seed after the other.

    Compiling its routes takes as long as a third of a seed's life. Of what happens it keeps nothing itself.
    """

    def __getattr__(self, name):
        return getattr(self.world, name)


SERVERS = {}  # number of a web process -> its application and the socket under it


class Process:
    """One process of the service: its own world and record cache over the shared files."""

    def __init__(self, sim, number=None):
        self.sim, self.number = sim, number
        self.boot()

    def boot(self):
        """Start, or start again after a death: nothing in memory survives."""
        self.world = self.sim.make_world()

    def serve(self, ask, address):
        """Answer one request as a WSGI server has it answered."""
        if self.number not in SERVERS:
            socket = Socket()
            socket.world = self.world
            SERVERS[self.number] = application.create_app(world=socket), socket
        app, socket = SERVERS[self.number]
        socket.world = self.world
        body = b"" if ask.body is None else json.dumps(ask.body).encode()
        environ = {**ENVIRON, "REQUEST_METHOD": ask.method, "PATH_INFO": ask.path, "REMOTE_ADDR": address,
                   "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body), "wsgi.errors": self.sim.noise}  # fmt: skip
        for name, value in ask.headers.items():
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
        told = []
        chunks = app(environ, lambda status, headers, error=None: told.extend((status, headers)))
        try:
            raw = b"".join(chunks)
        finally:
            getattr(chunks, "close", bool)()
        return agents.Answer(int(told[0][:3]), Headers(told[1]), raw)


class Simulation(engine.Scheduler):
    """The whole of one seed."""

    def __init__(self, seed, folder, *, count=10, faults=None, heat=1.0):
        super().__init__(seed, folder, faults=faults, heat=heat)
        self.settings = configuration.Settings(
            mode="live", database=self.path, base_url=parties.HOST, service_name="Deal Holding Service",
            confirmations=5, facilitators=("https://one.test", "https://two.test", "https://three.test"),
        )  # fmt: skip
        self.token = chain.Token(self.settings.asset, *self.settings.asset_domain, configuration.CHAIN_ID)
        self.chain = Chain(self.token, self.time)
        self.secrets = [chain.sha256(b"challenge secret 0")]
        self.purse, self.stranger = "0x" + "e5" * 20, parties.Party("a stranger", 7)
        self.master, self.wallets = MASTER_KEY, {MASTER_KEY: MASTER}  # the public key in use; all of them with their secrets
        self.treasury = chain.address_of(MASTER_KEY)
        db = self.connect()
        database.init(db, mode="live")
        database.set_meta(db, "master_key", MASTER_KEY.hex())
        db.close()
        limits.connect(self.path).close()
        self.deals = [parties.intend(index, seed, MASTER_KEY, _price) for index in range(count)]
        self._index()
        self.hits = collections.defaultdict(set)  # deal id -> faults that have struck it
        self.cells = collections.Counter()  # (move, fault): how often it was made on a deal that the fault had struck
        self.moves = collections.Counter()
        self.laws = Laws(self)
        self.chain.told = self.laws.landed
        self.web = [Process(self, 1), Process(self, 2)]
        self.office = Process(self)
        self.workers = [Worker(self, process) for process in (*self.web, *self.web, self.office, self.office, self.office)]
        self.busy, self.asked_at = 0, self.time
        self._fund_people()

    def make_world(self):
        """Build the world the service sees, with everything outside the database simulated."""
        settings = self.settings
        return worlds.World(
            settings=settings,
            terminal=protocols.Terminal(
                token=self.token, master_key=self.master, mode="live", description="simulated",
                secrets=self.challenge_secrets(),
            ),
            frame=deals.Frame("live", chain.checksum(self.token.address), configuration.CHAIN_ID),
            treasury=self.treasury,
            ledger=Node(self, self.chain),
            facilitators=tuple(Peer(self, url) for url in settings.facilitators),
            counters=lambda: database.here(settings.database, limits.connect),
            receipt_key=RECEIPT,
            clock=self.clock,
            sleep=self.pause,
            working=contextlib.nullcontext,  # threads change places at every statement here
        )  # fmt: skip

    def begin_wallet(self):
        """Put a new master key to use; whatever nobody has asked a quote for begins under it."""
        secret = chain.sha256(f"prove: wallet {len(self.wallets)}".encode())
        self.master = coincurve.PublicKey.from_secret(secret).format()
        self.wallets[self.master] = secret
        for deal in self.deals:
            if not deal.quoted:
                deal.master, deal.id = self.master, deal.terms.deal_id(self.master)
                deal.deposit = chain.deposit_address(self.master, deal.terms.canonical)
        self._index()

    def _index(self):
        self.by_id = {deal.id: deal for deal in self.deals}
        self.by_deposit = {deal.deposit: deal.id for deal in self.deals}

    def challenge_secrets(self):
        return tuple(self.secrets[-2:][::-1])

    def _fund_people(self):
        for deal in self.deals:
            for party in (deal.buyer, deal.rival):
                if party.contract:
                    self.chain.wallets[party.address] = party.own
                self.mend(party)
            if deal.seller.contract:
                self.chain.wallets[deal.seller.address] = deal.seller.own

    # -- What agents and faults use -----------------------------------------------------------------------------

    def mend(self, party):
        if self.chain.balance(party.address) < 1_100_000_000:
            self.chain.mint(party.address, 1_200_000_000)

    def submit(self, kind, *args, by, delay):
        transaction = self.chain.submit(kind, *args, by=by, delay=delay)
        self.say(f"{by} sends the chain a {kind} (to be mined in {delay:g} s or more)", self._deal_in(args))
        return transaction

    def _deal_in(self, args):
        return self.deal_of(args[0]) if isinstance(args[0], chain.Authorization) else None

    def deal_of(self, authorization):
        return self.by_deposit.get(authorization.to) or self.by_deposit.get(authorization.payer)

    def read_check(self, flat):
        """Read a published payout as anyone could: the authorization and its signature."""
        return protocols.read_authorization(flat), flat["signature"]

    def struck(self, fault, deal):
        """Remember that a fault struck a deal, or every open deal when it strikes the world."""
        for one in [deal] if deal else self.by_id:
            self.hits[one].add(fault)

    def moved(self, deal_id, event):
        self.moves[event] += 1
        self.cells.update((event, fault) for fault in self.hits[deal_id])

    # -- Agents -----------------------------------------------------------------------------------------------------

    def resume(self, generator, value):
        """Go on with one agent: its next pause, request or job."""
        try:
            item = generator.send(value)
        except StopIteration:
            if getattr(generator, "gi_code", None) in operators.CLIENTS:
                self.busy -= 1
            return
        if isinstance(item, (int, float)):
            self._later(generator, item, None)
        elif isinstance(item, agents.Ask):
            self._ask(generator, item)
        else:
            self._job(generator, item)

    def _later(self, generator, seconds, value):
        self.queue_order += 1
        engine.heapq.heappush(self.agents, (self.time + seconds, self.queue_order, generator, value))

    def _ask(self, generator, ask):
        process, self.asked_at = self.rng.choice(self.web), self.time
        address = f"10.0.{ask.deal.index}.{1 + (ask.by == 'a stranger')}"
        task = Task(f"{ask.by}: {ask.method} {ask.path}", lambda worker: process.serve(ask, address), deal=ask.deal.id)
        task.generator, task.ask = generator, ask
        task.began = self.clock()
        if not self.start(task, process):
            self._later(generator, 1.0, None)

    def quiet(self):
        """Return how long no client has asked anything: what merely repeats itself may then go slower."""
        return self.time - self.asked_at

    def _job(self, generator, job):
        task = Task(job.label, lambda worker: job.work(worker.db, worker.process.world), deal=job.deal)
        task.generator, task.ask, task.began = generator, None, self.clock()
        if not self.start(task, self.office):
            self._later(generator, 1.0, None)

    def command(self, label, work):
        """Run one command of the operator to its end and return what it returned."""
        found = []

        def once():
            found.append((yield engine.Job(label, work)))

        self.agent(once())
        self.run(lambda: found)
        return found[0]

    def finished(self, task):
        """A task has ended or died: judge its answer, and tell its agent, unless the answer is lost."""
        answer = None
        if task.error is not None:
            if not (task.disk_failed and isinstance(task.error, sqlite3.OperationalError)):
                raise task.error
            self.say(f"FAILED: {task.label}: {task.error}", task.deal)
        elif task.died:
            self.say(f"DIED: {task.label}", task.deal)
        elif task.ask is not None:
            answer = task.result
            self.say(f"{task.label} -> {answer.status} {_gist(answer)}", task.deal)
            self.laws.answered(task, task.ask, answer)
            if self.happens("lost_answer", deal=task.deal):
                answer = None
        else:
            answer = task.result
            self.laws.job_done(task)
        self._later(task.generator, 0.0, answer)

    # -- Time -----------------------------------------------------------------------------------------------------------

    def advance(self, moment):
        self.time = moment
        self.chain.advance(moment)

    def steps_are_bounded(self):
        if self.steps > MOST_STEPS:
            raise Violation("the simulation ends", f"more than {MOST_STEPS} steps: something goes round in circles")

    def after_step(self):
        if self.changed:
            self.changed = False
            self.laws.step()
        operators.weather(self)

    # -- A whole life -----------------------------------------------------------------------------------------------------

    def live(self):
        """Run the seed: its people with faults, then the calm in which everything must come to its end."""
        noise = io.StringIO()
        with engine.listening() as self.log, contextlib.redirect_stderr(noise):
            self.noise = noise
            try:
                operators.enter(self)
                self.run(lambda: self.busy <= 0)
                operators.calm(self)
                self.laws.final()
            finally:
                self.enabled = set()
                self.stop()
                self.laws.close()
                for suffix in ("", "-wal", "-shm", ".counters", ".backup"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.path + suffix)


def _price(amount_units):
    """The published price, written out by hand: 0.092 and 1.01 of the amount."""
    return 92_000 + amount_units * 101 // 100


def _gist(answer):
    try:
        value = answer.json
    except ValueError:
        return ""
    if isinstance(value, list):
        return f"receipt, {value[0]['state']}"
    if "error" in value:
        return f"{value['error'][:90]} {value.get('message', '')[:90]}"
    return value.get("state", "")
