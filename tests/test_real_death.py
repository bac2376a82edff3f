"""Real processes killed with SIGKILL at random while real clients pay; and clocks that jump by a day."""

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

import chain
import db as database
import deals
import keys
import operations
import sandbox
import transfers
import world as worlds
from parties import SECRET, Buyer, Seller

ROOT = pathlib.Path(__file__).parent.parent
BUYERS, SECONDS, KILLS = 6, 30, 300  # the test ends at whichever comes first
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
    """The service as it is deployed, gunicorn and the sweep, and somebody who kills them."""

    def __init__(self, folder, settings):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DEALS_")}
        self.environ = {**clean, "DEALS_DATABASE": settings.database, "DEALS_WALLET": settings.wallets[0],
                        "DEALS_SERVICE_NAME": settings.service_name, "DEALS_BASE_URL": settings.base_url}  # fmt: skip
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
            self.server = self._start("-m", "gunicorn", "--bind", f"127.0.0.1:{self.port}", "app:create_app()")
        if self.sweeper is None or self.sweeper.poll() is not None:
            self.sweeper = self._start("cli.py", "sweep", "--watch", "0.05")

    def workers(self):
        """Return the process ids of gunicorn's workers: the children of its master."""
        path = pathlib.Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def kill_one(self, rng):
        """Kill a worker, the sweep, or now and then the server with all its workers. No warning, no clean-up."""
        draw, workers = rng.random(), self.workers()
        if draw < 0.6 and workers:
            os.kill(rng.choice(workers), signal.SIGKILL)
        elif draw < 0.95:
            self.sweeper.kill()
            self.sweeper.wait()
        else:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
        self.kills += 1

    def end(self):
        for process in (self.server, self.sweeper):
            if process is not None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
        self.log.close()


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
        for _ in range(100):
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


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds gunicorn's workers under /proc")
def test_a_service_killed_again_and_again_loses_nothing_and_pays_nobody_twice(victims, settings, db, world):
    rng, minted = random.Random(5), 10_000_000_000
    for number in range(1, BUYERS + 1):
        Buyer(None, world, number).funded(minted)
    real = types.SimpleNamespace(clock=time.time, terminal=world.terminal, settings=settings)
    victims.revive()
    until, told = time.monotonic() + SECONDS, []
    people = [
        threading.Thread(target=buy, args=(number, victims.url, real, until, told)) for number in range(1, BUYERS + 1)
    ]
    for person in people:
        person.start()
    while time.monotonic() < until and victims.kills < KILLS:
        time.sleep(rng.uniform(0.02, 0.2))
        victims.kill_one(rng)
        victims.revive()
    for person in people:
        while person.is_alive():
            victims.revive()
            person.join(0.5)
    victims.end()

    print(f"{victims.kills} kills, {len(told)} answers to payments, {len({t[:2] for t in told})} deals")
    assert victims.kills >= 30
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
