"""Real processes killed with SIGKILL at random while real clients pay, on a real EVM too; and clocks that jump by a day."""

import asyncio
import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import requests
from eth_account import Account

import chain
import db as database
import deals
import keys
import operations
import sandbox
import settings as configuration
import transfers
import world as worlds
from evm import rig
from parties import SECRET, Buyer, Seller

ROOT = pathlib.Path(__file__).parent.parent
TREASURY = "0x00000000000000000000000000000000deadbeef"
BUYERS = 6
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds gunicorn's workers under /proc")
GIVE_UP = 45  # seconds after which a client's last request counts as lost
DAY = 86_400


class Patient:
    """A test client's ``post`` and ``get`` over HTTP that repeats the very same request while the server is dead."""

    def __init__(self, url, until):
        self.url, self.until, self.lost = url, until, 0

    def post(self, path, **options):
        return self._ask("POST", path, options)

    def get(self, path, **options):
        return self._ask("GET", path, options)

    def _ask(self, method, path, options):
        while True:
            try:
                answer = requests.request(method, self.url + path, timeout=20, **options)
                break
            except requests.RequestException:
                self.lost += 1
                if time.monotonic() > self.until + GIVE_UP:
                    raise
                time.sleep(0.05)
        value = answer.json() if answer.content else None
        return types.SimpleNamespace(
            status_code=answer.status_code, headers=answer.headers, json=value, get_data=lambda as_text: answer.text
        )


class Victims:
    """The service, gunicorn and the sweep, and somebody who kills them.

    Gunicorn loads the application before it forks, and so does what starts the sweep: whoever is killed dies at its
    work, and not while it imports.
    """

    NURSERY = """
import os, eth_account, cli
while True:
    child = os.fork()
    if child == 0:
        cli.main(["sweep", "--watch", "0.05"])
    os.waitpid(child, 0)
"""

    def __init__(self, folder, settings, **environ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DEALS_")}
        self.environ = {**clean, "DEALS_DATABASE": settings.database, "DEALS_WALLET": settings.wallets[0],
                        "DEALS_SERVICE_NAME": settings.service_name,
                        "DEALS_BASE_URL": settings.base_url or self.url, **environ}  # fmt: skip
        self.log = open(folder / "log", "ab")
        self.server = self.sweeper = None
        self.kills = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def _start(self, *command):
        return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=self.environ, stdout=self.log,
                                stderr=self.log, start_new_session=True)  # fmt: skip

    def revive(self):
        """Start again whatever is dead."""
        if self.server is None or self.server.poll() is not None:
            self.server = self._start("-m", "gunicorn", "--preload", "--bind", f"127.0.0.1:{self.port}", "app:create_app()")
        if self.sweeper is None or self.sweeper.poll() is not None:
            self.sweeper = self._start("-c", self.NURSERY)

    def children(self, parent):
        """Return the process ids of gunicorn's workers, or of the running sweep."""
        path = pathlib.Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def kill_one(self, rng):
        """Kill a worker, the sweep, or now and then the server with all its workers. No warning, no clean-up."""
        if rng.random() < 0.02:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
        else:
            there = self.children(self.server if rng.random() < 0.75 else self.sweeper)
            try:
                os.kill(rng.choice(there), signal.SIGKILL)
            except (IndexError, ProcessLookupError):  # it is only just starting, or dead already
                return
        self.kills += 1

    def suffer(self, people, rng, *, seconds, pause):
        """Kill again and again while the people are at it, then keep everything alive until they are done."""
        until = time.monotonic() + seconds
        for person in people:
            person.start()
        while time.monotonic() < until:
            time.sleep(rng.uniform(0.5, 1.5) * pause)
            self.kill_one(rng)
            self.revive()
        for person in people:
            while person.is_alive():
                self.revive()
                person.join(0.5)
        self.end()

    def end(self):
        for process in (self.server, self.sweeper):
            if process is not None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
        self.log.close()


# -- In the sandbox ---------------------------------------------------------------------------------------------------


def buy(number, url, world, until, told):
    """Buy and finish deals one after the other until the time is up, whatever is killed meanwhile."""
    client = Patient(url, until)
    buyer, seller = Buyer(client, world, number), Seller(client, world, 100 + number)
    for turn in range(1000):
        if time.monotonic() > until:
            break
        secret = f"{SECRET} {number} {turn}"
        body = buyer.request(seller, secret_hash=chain.sha256(secret.encode()).hex(), ref=f"{number}/{turn}")
        quote = buyer.quote(body)
        if quote.status_code != 402:
            continue
        headers = (buyer.x402 if turn % 2 else buyer.mpp)(quote)
        for _ in range(40):
            answer = client.post("/x402/deal", json=body, headers=headers)
            told.append((number, turn, answer.status_code))
            if answer.status_code == 200:
                break
            time.sleep(0.1)  # the same payment again: 202, 409 in progress, 503
        if answer.status_code == 200:
            deal_id = answer.json[0]["id"]
            if turn % 3 == 0:
                buyer.reveal(deal_id, "cancel", secret=secret)
            elif seller.act(deal_id, "accept").status_code == 200:
                seller.act(deal_id, "deliver", {"note": "done"})
                buyer.reveal(deal_id, "confirm", secret=secret)


@pytest.fixture
def victims(tmp_path, settings):
    found = Victims(tmp_path, settings)
    yield found
    found.end()


@needs_proc
def test_a_service_killed_again_and_again_loses_nothing_and_pays_nobody_twice(victims, settings, db, world):
    rng, minted = random.Random(5), 10_000_000_000
    for number in range(1, BUYERS + 1):
        Buyer(None, world, number).funded(minted)
    real = types.SimpleNamespace(clock=time.time, terminal=world.terminal, settings=settings)
    victims.revive()
    until, told = time.monotonic() + 5, []
    people = [
        threading.Thread(target=buy, args=(number, victims.url, real, until, told)) for number in range(1, BUYERS + 1)
    ]
    victims.suffer(people, rng, seconds=5, pause=0.08)

    print(f"{victims.kills} kills, {len(told)} answers to payments, {len({t[:2] for t in told})} deals")
    assert victims.kills >= 20
    assert {status for _, _, status in told} <= {200, 202, 402, 409, 429, 503}
    settle_everything(settings, db)
    check_the_books(db, settings, {number: minted for number in range(1, BUYERS + 1)})
    assert db.execute("SELECT count(*) FROM deals WHERE state IN ('released', 'refunded')").fetchone()[0] >= BUYERS


def settle_everything(settings, db):
    """Let the sweep and the clock alone bring everything to its end, an hour at a time."""
    later = [time.time()]
    world = worlds.build(settings, db, clock=lambda: later[0])
    wallets = keys.open_wallets(settings)
    for _ in range(80):
        transfers.sweep(db, world, wallets)
        later[0] += 3600
    assert db.execute("SELECT count(*) FROM transfers WHERE next_at IS NOT NULL").fetchone()[0] == 0
    assert db.execute("SELECT count(*) FROM deals WHERE due_at IS NOT NULL").fetchone()[0] == 0
    assert db.execute("SELECT count(*) FROM deals WHERE state = 'pending'").fetchone()[0] == 0
    assert operations.audit(db, world) == []


def check_the_books(db, settings, minted):
    """Every unit that was made is somewhere, and exactly where the ends of the deals say."""
    assert db.execute("SELECT sum(units) FROM sandbox_balances").fetchone()[0] == sum(minted.values())
    rows = db.execute("SELECT * FROM deals").fetchall()
    for row in rows:
        assert sandbox.balance(db, row["deposit_address"]) == 0
    for number, units in minted.items():
        address = Buyer(None, None, number).address
        ended = [row for row in rows if row["buyer_address"] == address and row["seller_units"] is not None]
        spent = sum(row["price_units"] - (row["amount_units"] - row["seller_units"]) for row in ended)
        assert sandbox.balance(db, address) == units - spent
        seller = Seller(None, None, 100 + number).address
        assert sandbox.balance(db, seller) == sum(row["seller_units"] for row in ended)
    for deal in rows:
        settled = db.execute("SELECT count(*) FROM payments WHERE deal_id = ? AND status = 'settled'", (deal["id"],))
        assert settled.fetchone()[0] == (deal["funded_at"] is not None)


# -- On the chain -----------------------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path, anvil, facilitator):
    """The settings of a live service, prepared; its dollar is the token on the local chain."""
    found = configuration.Settings(
        mode="live", database=str(tmp_path / "live.db"), wallets=(str(tmp_path / "live.json"),), passphrase="test",
        treasury=TREASURY, rpc_url=anvil.url, facilitators=(facilitator.url,), service_name="Deal Test Service",
    )  # fmt: skip
    db = database.connect(found.database)
    database.init(db, mode="live")
    database.set_meta(db, "master_key", keys.create_wallet(found.wallets[0], "test", sandbox=True).hex())
    keys.create_secrets(found.secrets_path)
    db.close()
    return found


class Payer:
    """A user of an official client, unmodified, who does what a user does when it fails.

    MPP's client hands back the credential of a payment whose outcome it does not know, and the same payment is sent
    again; x402's does not, and is simply called again with the same terms.
    """

    def __init__(self, key, url):
        self.account, self.url = Account.from_key(key), url

    def x402(self, body):
        from x402.http.clients.requests import PaymentError

        try:
            answer = rig.x402_session(self.account).post(f"{self.url}/x402/deal", json=body, timeout=60)
        except (requests.RequestException, PaymentError) as error:
            return type(error).__name__, None
        return answer.status_code, answer.json()

    def mpp(self, body):
        import httpx
        from mpp.errors import PaymentError, PaymentOutcomeUnknownError

        async def once():
            async with rig.mpp_client(self.account) as session:
                return await session.fetch(f"{self.url}/mpp/deal", method="POST", json=body)

        try:
            answer = asyncio.run(once())
        except PaymentOutcomeUnknownError as error:
            return self._again(error)
        except (httpx.HTTPError, PaymentError) as error:
            return type(error).__name__, None
        return answer.status_code, answer.json()

    def _again(self, unknown):
        headers = {"Content-Type": "application/json", "Authorization": unknown.credential.to_authorization()}
        for _ in range(20):
            try:
                answer = requests.post(str(unknown.request.url), data=unknown.request.content, headers=headers, timeout=60)
                return answer.status_code, answer.json()
            except requests.RequestException:
                time.sleep(0.1)
        return type(unknown).__name__, None


def pay_on_chain(number, url, until, told):
    """Buy one deal after the other with an official client, and finish some of them, whatever is killed meanwhile."""
    client = Patient(url, until)
    service = types.SimpleNamespace(settings=types.SimpleNamespace(service_name="Deal Test Service"))
    buyer, seller = Buyer(client, service, number), Seller(client, service, 100 + number)
    payer = Payer(buyer.key, url)
    for turn in range(1000):
        secret = f"{SECRET} {number} {turn}"
        digest = chain.sha256(secret.encode()).hex()
        body = buyer.request(seller, secret_hash=digest, ref=f"{number}/{turn}", deadline_hours=1, review_hours=1)
        status = value = None
        for _ in range(8):
            if time.monotonic() > until:
                return
            status, value = (payer.x402 if number % 2 else payer.mpp)(body)
            told.append((number, turn, status))
            if status == 200:
                break
            time.sleep(0.25)
        if status == 200:
            finish(turn % 5, value[0]["id"], buyer, seller, secret)


def finish(way, deal_id, buyer, seller, secret):
    """Bring a deal to one of its ends, or leave that to the clock."""
    if way == 0:
        buyer.reveal(deal_id, "cancel", secret=secret)
    elif way == 1:
        seller.act(deal_id, "refund")
    elif way < 4 and seller.act(deal_id, "accept").status_code == 200:
        seller.act(deal_id, "deliver", {"note": "done"})
        if way == 2:
            buyer.reveal(deal_id, "confirm", secret=secret)


@needs_proc
def test_official_clients_that_pay_on_a_chain_a_service_killed_hundreds_of_times_are_charged_once(tmp_path, live, anvil):
    rng, minted = random.Random(6), 10_000_000_000
    people = {number: (Buyer(None, None, number).address, Seller(None, None, 100 + number).address)
              for number in range(1, BUYERS + 1)}  # fmt: skip
    for buyer, _ in people.values():
        anvil.mint(buyer, minted)
    victims = Victims(
        tmp_path, live, DEALS_MODE="live", DEALS_WALLET_PASSPHRASE="test", DEALS_TREASURY=TREASURY,
        DEALS_RPC_URL=anvil.url, DEALS_FACILITATORS=live.facilitators[0], DEALS_CONFIRMATIONS="0",
    )  # fmt: skip
    try:
        victims.revive()
        until, told = time.monotonic() + 22, []
        threads = [threading.Thread(target=pay_on_chain, args=(number, victims.url, until, told)) for number in people]
        victims.suffer(threads, rng, seconds=22, pause=0.08)
    finally:
        victims.end()

    db = database.here(live.database)
    resolve_on_chain(dataclasses.replace(live, base_url=victims.url), db, anvil)
    rows = db.execute("SELECT * FROM deals").fetchall()
    ended = [row for row in rows if row["seller_units"] is not None]
    answers = collections.Counter(status for _, _, status in told)
    swept = (tmp_path / "log").read_text().count(" sweep: ")
    print(f"{victims.kills} kills, {len(rows)} deals, {len(ended)} funded, {swept} sweeps to their end; to the clients: {dict(answers)}")
    assert victims.kills >= 100 and swept
    assert len(ended) >= BUYERS
    check_the_chain(anvil, rows, people, minted)
    audit = subprocess.run([sys.executable, "cli.py", "audit"], cwd=ROOT, env=victims.environ, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def resolve_on_chain(settings, db, anvil):
    """Let the sweep and the two clocks, the chain's and ours, bring everything to its end."""
    later = [time.time()]
    world = dataclasses.replace(worlds.build(settings, db, clock=lambda: later[0]), sleep=lambda seconds: None)
    wallets = keys.open_wallets(settings)

    def sweep(_):
        return transfers.sweep(database.here(settings.database), world, wallets, limit=1000)["errors"]

    for _ in range(60):
        for _ in range(2):
            with concurrent.futures.ThreadPoolExecutor(6) as several:  # most of a sweep is waiting for blocks
                assert not any(several.map(sweep, range(6)))
        if not db.execute(
            "SELECT 1 FROM deals WHERE due_at IS NOT NULL OR look_at IS NOT NULL"
            " UNION ALL SELECT 1 FROM transfers WHERE next_at IS NOT NULL"
        ).fetchone():
            break
        later[0] += 1200
        anvil.move_clock(1200)
    states = {row["state"] for row in db.execute("SELECT DISTINCT state FROM deals")}
    assert states <= {"released", "refunded", "lapsed"}
    assert db.execute("SELECT count(*) FROM transfers WHERE status NOT IN ('confirmed', 'offered')").fetchone()[0] == 0


def check_the_chain(anvil, rows, people, minted):
    """Every balance is what the ends of the deals say, to the unit, and each deal was paid once."""
    ended = [row for row in rows if row["seller_units"] is not None]
    for row in rows:
        assert anvil.balance(row["deposit_address"]) == 0
        topics = [chain.TRANSFER, None, "0x" + row["deposit_address"][2:].rjust(64, "0")]
        arrived = anvil.rpc("eth_getLogs", [{"fromBlock": "0x0", "toBlock": "latest", "address": rig.USDC, "topics": topics}])
        assert len(arrived) == (row in ended), f"deal {row['id']} is {row['state']}"
    for buyer, seller in people.values():
        own = [row for row in ended if row["buyer_address"] == buyer]
        spent = sum(row["price_units"] - (row["amount_units"] - row["seller_units"]) for row in own)
        assert anvil.balance(buyer) == minted - spent
        assert anvil.balance(seller) == sum(row["seller_units"] for row in own)
    assert anvil.balance(TREASURY) == sum(row["price_units"] - row["amount_units"] for row in ended)


# -- Clocks that jump -------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_a_day_ahead_ends_what_is_due_and_coming_back_changes_nothing(
    db, world, clock, buyer, seller, sweep
):
    deal_id = buyer.deal(seller, deadline_hours=10)
    clock.now += DAY
    assert buyer.client.get(f"/v1/deals/{deal_id}").json["state"] == "refunded"
    sweep()
    clock.now -= DAY
    sweep()
    record = buyer.client.get(f"/v1/deals/{deal_id}").json
    assert record["state"] == "refunded"
    assert {leg["leg"]: leg["status"] for leg in record["transfers"]} == {"buyer": "confirmed", "fee": "confirmed"}
    assert sandbox.balance(db, deals.find(db, deal_id)["deposit_address"]) == 0
    assert operations.audit(db, world) == []


def test_a_clock_that_jumps_a_day_back_delays_payouts_and_loses_none(db, world, clock, buyer, seller, sweep):
    deal_id = buyer.deal(seller, deadline_hours=48)
    clock.now -= DAY
    assert seller.act(deal_id, "accept").status_code == 200
    assert buyer.reveal(deal_id, "cancel").status_code == 409
    assert seller.act(deal_id, "refund").status_code == 200
    sweep()
    clock.now += DAY
    sweep()
    assert sandbox.balance(db, buyer.address) == 10_000_000_000 - 292_000  # the fee: 0.092 and one per cent of 20.00
    assert operations.audit(db, world) == []


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_payment_made_while_the_clock_is_a_day_off_is_one_deal_when_it_is_right_again(
    db, world, clock, buyer, seller, sweep, jump
):
    clock.now += jump
    deal_id = buyer.deal(seller, deadline_hours=100)
    clock.now -= jump
    sweep()
    assert buyer.client.get(f"/v1/deals/{deal_id}").json["state"] == "funded"
    buyer.reveal(deal_id, "cancel")
    clock.now += 2 * DAY
    sweep(12)
    assert sandbox.balance(db, buyer.address) == 10_000_000_000 - 292_000
    assert operations.audit(db, world) == []
