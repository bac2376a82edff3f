"""The process killed at every commit and every foreign call; a disk that fills, a database that locks."""

import dataclasses
import os
import signal

import pytest

import db as database
import limits
import operations
import sandbox
import transfers
from facilitators import Outcome
from parties import Buyer, Scripted, balance, error, fork, send, serving, writers

PRICE = 20_292_000
GRANT = 10_000_000_000
WRITES = ("BEGIN", "COMMIT", "INSERT", "UPDATE", "DELETE")


def quick(db):
    """Skip the disk's own cache flush: a killed process, unlike a lost power supply, does not need it."""
    db.execute("PRAGMA synchronous = OFF")
    return db


class Doom:
    """Count commits and foreign calls; kill this process for real at the one numbered ``at``."""

    def __init__(self, at):
        self.left = at

    def point(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()

    def statement(self, text):
        """Die before a write or a COMMIT; dying before the next point is dying after it."""
        if text.lstrip().startswith(WRITES):
            self.point()


class Doomed:
    """A facilitator or ledger each of whose calls is a place to die: before it, and after it with its work done."""

    def __init__(self, real, doom):
        self._real, self._doom = real, doom

    def __getattr__(self, name):
        found = getattr(self._real, name)
        if name not in ("verify", "settle", "payment", "head", "used", "balance", "transaction_of", "refusal"):
            return found

        def call(*args, **options):
            self._doom.point()
            result = found(*args, **options)
            self._doom.point()
            return result

        return call


def killed_at(number, world, job):
    """Run ``job(world)`` in a child that dies at its point ``number``; False when it came to its end alive."""

    def run():
        doom = Doom(number)
        # The sandbox's chain shares the file, but it stands for another machine: its own writes are no points of ours.
        apart = {}
        chain_db = lambda: apart.setdefault(0, quick(database.connect(world.settings.database)))
        real = sandbox.Facilitator(chain_db, world.terminal.token, world.clock, "sandbox")
        peers = tuple(Doomed(_move(peer, real), doom) for peer in world.facilitators)
        ledger = sandbox.Ledger(chain_db, world.terminal.token, world.clock)
        for connection in writers(world.settings.database):
            quick(connection).set_trace_callback(doom.statement)
        job(dataclasses.replace(world, facilitators=peers, ledger=Doomed(ledger, doom)))

    _, status = os.waitpid(fork(run), 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed by itself"
    return os.WIFSIGNALED(status)


def _move(peer, real):
    return Scripted(real, outcome=peer.outcome, moves=peer.moves) if isinstance(peer, Scripted) else real


def every_point(world, job, check, prepare):
    """Kill ``job`` at its first point, its second, and so on, each time on a fresh deal, until it survives."""
    number, alive = 0, False
    for connection in writers(world.settings.database):
        quick(connection)
    while not alive:
        number += 1
        assert number < 400, "the run does not end"
        deal = prepare(number)
        alive = not killed_at(number, world, lambda doomed: job(doomed, deal))
        check(deal, number)
    return number - 1


def settled(db, payee):
    query = "SELECT count(*) FROM sandbox_authorizations WHERE payee = ?"
    return db.execute(query, (payee.lower(),)).fetchone()[0]


@dataclasses.dataclass
class Case:
    body: dict
    payment: dict
    deposit: str
    id: str
    held: int


@pytest.fixture
def fresh(buyer, world):
    """Prepare a deal to be paid by a buyer of its own body and payment."""

    def prepare(number):
        body = buyer.request(ref=f"point {number} {world.clock()}")
        quote = buyer.quote(body)
        pay_to = quote.json["accepts"][0]["payTo"]
        deal = quote.json["extensions"]["deal"]["info"]["id"]
        return Case(body, buyer.x402(quote), pay_to, deal, balance(world, buyer.address))

    return prepare


def pay(doomed, case):
    send(serving(doomed, *doomed.facilitators), case.body, case.payment)


FATES = {
    "settles": {},
    "settles and says nothing": {"outcome": Outcome("unknown", reason="no answer"), "moves": True},
    "does nothing and says nothing": {"outcome": Outcome("unknown", reason="no answer")},
    "refuses": {"outcome": Outcome("refused", reason="insufficient_funds")},
}


@pytest.mark.parametrize("recovery", ["retry", "sweep"])
@pytest.mark.parametrize("fate", FATES)
def test_a_paid_call_killed_anywhere_neither_loses_nor_repeats_the_payment(
    fate, recovery, world, db, client, buyer, fresh, sweep, clock
):
    scripted = Scripted(world.facilitators[0], **FATES[fate]) if FATES[fate] else world.facilitators[0]

    def retried(case, number):
        answer = send(client, case.body, case.payment)
        if answer.status_code == 409:  # the dead worker's lease
            clock.now += 46
            answer = send(client, case.body, case.payment)
        assert (answer.status_code, answer.json[0]["state"]) == (200, "funded"), (number, answer.text)
        assert send(client, case.body, case.payment).data == answer.data
        check(case, number, True)

    def swept(case, number):
        known = client.get(f"/v1/deals/{case.id}")
        clock.now += 120
        sweep(3)
        clock.now += 400
        sweep(3)
        state = client.get(f"/v1/deals/{case.id}").json.get("state")
        if known.status_code == 404:
            assert state is None, number
        else:
            ended = ("funded", "lapsed") if fate == "refuses" else ("funded",)
            assert state in ended, (number, state)
        check(case, number, state == "funded")

    def check(case, number, funded):
        assert settled(db, case.deposit) == funded, number
        assert balance(world, case.deposit) == PRICE * funded, number
        assert balance(world, buyer.address) == case.held - PRICE * funded, number
        assert operations.audit(db, world) == [], number

    points = every_point(
        dataclasses.replace(world, facilitators=(scripted,)), pay, retried if recovery == "retry" else swept, fresh
    )
    assert points >= 10
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


@pytest.fixture
def ended(buyer, seller, world, db, client):
    """Prepare a funded deal that ends by a split, with some money more at its deposit than its price."""

    def prepare(number):
        deal = buyer.deal(seller, ref=f"point {number}")
        seller.act(deal, "accept")
        seller.act(deal, "split", {"seller_usd": "12.00"})
        assert buyer.reveal(deal, "split", {"seller_usd": "12.00"}).json["state"] == "split"
        record = client.get(f"/v1/deals/{deal}").json
        sandbox.mint(db, record["deposit_address"].lower(), 1_000_000)
        held = {name: balance(world, address) for name, address in
                (("seller", seller.address), ("buyer", buyer.address), ("fee", world.treasury))}  # fmt: skip
        return Case({}, {}, record["deposit_address"], deal, held)

    return prepare


LEGS = {"seller": 12_000_000, "buyer": 8_000_000, "fee": 292_000}


@pytest.mark.parametrize("moves", [True, False], ids=["answers", "settles and says nothing"])
def test_a_sweep_killed_anywhere_pays_everybody_exactly_once(moves, world, db, buyer, seller, ended, wallets, clock, sweep):
    silent = Scripted(world.facilitators[0], outcome=Outcome("unknown", reason="no answer"), moves=True)
    doomed_world = world if moves else dataclasses.replace(world, facilitators=(silent,))

    def run(doomed, case):
        connection = database.here(doomed.settings.database)
        for _ in range(4):
            transfers.sweep(connection, doomed, wallets)

    def check(case, number):
        for _ in range(5):
            clock.now += 1000
            sweep(1)
        legs = {row["leg"]: row["status"] for row in
                db.execute("SELECT leg, status FROM transfers WHERE deal_id = ?", (case.id,))}  # fmt: skip
        assert legs == {"guarantee": "offered", "seller": "confirmed", "buyer": "confirmed", "fee": "confirmed",
                        "surplus-1": "confirmed"}, (number, legs)  # fmt: skip
        now = {"seller": seller.address, "buyer": buyer.address, "fee": world.treasury}
        gained = {name: balance(world, address) - case.held[name] for name, address in now.items()}
        assert gained == {**LEGS, "buyer": 8_000_000 + 1_000_000}, (number, gained)
        assert balance(world, case.deposit) == 0
        spent = db.execute("SELECT count(*) FROM sandbox_authorizations WHERE authorizer = ?", (case.deposit.lower(),))
        assert spent.fetchone()[0] == 4, number
        assert operations.audit(db, world) == [], number

    points = every_point(doomed_world, run, check, ended)
    assert points >= 40
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


# -- A disk that fills, a database that cannot be written -------------------------------------------------------


class Trouble:
    """Ways to keep the service from writing, and to let it write again."""

    def __init__(self, path):
        self.path, self.other = path, None
        self.dbs = writers(path)
        self._all("PRAGMA busy_timeout = 1")

    def _all(self, pragma):
        for db in self.dbs:
            db.execute(pragma)

    def readonly(self):
        self._all("PRAGMA query_only = ON")

    def locked(self):
        self.other = database.connect(self.path)
        self.other.execute("BEGIN IMMEDIATE")

    def over(self):
        self._all("PRAGMA query_only = OFF")
        if self.other:
            self.other.execute("ROLLBACK")
            self.other.close()
            self.other = None


@pytest.fixture
def trouble(settings):
    return Trouble(settings.database)


KINDS = ("readonly", "locked")


@pytest.mark.parametrize("kind", KINDS)
def test_a_database_that_cannot_be_written_before_the_claim_answers_503_and_charges_nothing(
    kind, trouble, world, client, buyer, fresh
):
    case = fresh(0)
    getattr(trouble, kind)()
    assert client.post("/x402/deal", json=case.body).status_code == 402  # a quote needs no writing
    answer = send(client, case.body, case.payment)
    assert error(answer) == (503, "unavailable") and int(answer.headers["Retry-After"]) >= 1
    trouble.over()
    assert (balance(world, case.deposit), balance(world, buyer.address)) == (0, GRANT)
    assert send(client, case.body, case.payment).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
def test_a_database_that_cannot_be_written_after_the_claim_answers_202_and_recovers(
    kind, trouble, world, db, client, buyer, fresh, clock, sweep
):
    class Peer(Scripted):
        def settle(self, *args, **options):
            found = super().settle(*args, **options)
            getattr(trouble, kind)()
            return found

    first, second = fresh(1), fresh(2)
    hampered = serving(world, Peer(world.facilitators[0]))
    for case in (first, second):
        assert send(hampered, case.body, case.payment).status_code == 202
        clock.now += 46
        # A retry meanwhile must not say that nothing was charged: its money has moved.
        assert send(client, case.body, case.payment).status_code == 202
        trouble.over()
        assert balance(world, case.deposit) == PRICE
    assert send(client, first.body, first.payment).status_code == 200
    clock.now += 60
    sweep()
    assert client.get(f"/v1/deals/{second.id}").json["state"] == "funded"
    assert balance(world, buyer.address) == GRANT - 2 * PRICE
    assert operations.audit(db, world) == []


def test_a_slot_that_cannot_be_given_back_does_not_lose_the_answer(world, buyer, fresh):
    class Peer(Scripted):
        def settle(self, *args, **options):
            database.here(world.settings.database, limits.connect).execute("PRAGMA query_only = ON")
            return super().settle(*args, **options)

    case = fresh(1)
    assert send(serving(world, Peer(world.facilitators[0])), case.body, case.payment).status_code == 200


def test_a_disk_that_fills_while_deals_are_paid_loses_no_money(world, db, client, buyer, clock, sweep):
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    for connection in (db, *writers(world.settings.database)):
        connection.execute(f"PRAGMA max_page_count = {pages + 8}")
    paid = []
    for number in range(40):
        body = buyer.request(ref=f"{number} " + "x" * 150)
        quote = buyer.quote(body)
        before = balance(world, buyer.address)
        answer = send(client, body, buyer.x402(quote))
        paid.append((answer.status_code, quote.json["extensions"]["deal"]["info"]["id"]))
        assert answer.status_code in (200, 202, 503), answer.text
        if answer.status_code == 503:
            assert balance(world, buyer.address) == before
    statuses = {status for status, _ in paid}
    assert {200, 503} <= statuses and paid[-1][0] != 200
    for connection in (db, *writers(world.settings.database)):
        connection.execute("PRAGMA max_page_count = 1000000")
    for _ in range(3):
        clock.now += 120
        sweep(3)
    for status, deal in paid:
        found = client.get(f"/v1/deals/{deal}")
        assert (found.status_code, found.json.get("state")) == {
            200: (200, "funded"), 202: (200, "funded"), 503: (404, None)
        }[status]  # fmt: skip
    funded = sum(status in (200, 202) for status, _ in paid)
    assert balance(world, buyer.address) == GRANT - funded * PRICE
    assert operations.audit(db, world) == []
    assert Buyer(client, world, 1).deal(ref="all is well again")
