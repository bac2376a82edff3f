"""Many at once, on real threads, each with its own connection to one real file: one winner, one set of legs."""

import contextlib
import copy
import dataclasses
import itertools
import threading

import pytest
import sandbox
from conftest import NOON
from facilitators import Outcome
from parties import Buyer, Seller
from states import BUYER, SELLER, reach

import app as application
import db as database
import deals
import operations
import transfers
from db import sqlite3

LEGS = {
    "released": [("fee", 292_000), ("seller", 20_000_000)],
    "refunded": [("buyer", 20_000_000), ("fee", 292_000)],
    "split": [("buyer", 15_000_000), ("fee", 292_000), ("seller", 5_000_000)],
}
ENDINGS = {
    "confirm": "released", "release": "released", "resolve_release": "released", "refund": "refunded",
    "cancel": "refunded", "expire": "refunded", "undecided": "refunded", "resolve_refund": "refunded",
    "split": "split", "resolve_split": "split",
}  # fmt: skip


def together(*jobs):
    """Run the jobs at the same moment, each on its own thread; returns what they returned, in order."""
    gate, results = threading.Barrier(len(jobs)), [None] * len(jobs)

    def run(number, job):
        gate.wait()
        try:
            results[number] = job()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture
def crowd(app, world):
    """Make parties that each have a client of their own."""
    return lambda kind, number: kind(app.test_client(), world, number)


@pytest.fixture
def here(settings):
    """Return the calling thread's own connection."""
    return lambda: database.here(settings.database)


def ended_once(db, deal_id):
    """Check that exactly one move ended the deal and that the legs are those of that ending; returns its name."""
    state = db.execute("SELECT state FROM deals WHERE id = ?", (deal_id,)).fetchone()["state"]
    events = [row["event"] for row in db.execute("SELECT event FROM deal_events WHERE deal_id = ?", (deal_id,))]
    endings = [event for event in events if event in ENDINGS]
    assert len(endings) == 1 and ENDINGS[endings[0]] == state, events
    legs = db.execute(
        "SELECT leg, value_units FROM transfers WHERE deal_id = ? AND leg <> 'guarantee' ORDER BY leg", (deal_id,)
    ).fetchall()
    assert [tuple(leg) for leg in legs] == LEGS[state]
    return endings[0]


# The end of a deal.


@pytest.mark.parametrize("seconds", [-10, 0, 10])
@pytest.mark.parametrize("round", range(4))
def test_confirm_refund_read_and_sweep_around_the_deadline_have_one_winner(
    db, world, clock, wallets, crowd, here, seconds, round
):
    deal_id = reach(db, world, "delivered")
    clock.now = NOON + 5 * 3600 + seconds
    buyer, seller, reader = crowd(Buyer, 1), crowd(Seller, 2), crowd(Buyer, 4)
    confirmed, refunded, seen, _ = together(
        lambda: buyer.reveal(deal_id, "confirm"),
        lambda: seller.act(deal_id, "refund"),
        lambda: reader.client.get(f"/v1/deals/{deal_id}"),
        lambda: transfers.sweep(here(), world, wallets),
    )
    winner = ended_once(db, deal_id)
    assert sorted([confirmed.status_code, refunded.status_code, seen.status_code]) == [200, *([200, 409] if seconds < 0 else [409, 409])]
    if seconds < 0:
        assert winner == ("confirm" if confirmed.status_code == 200 else "refund")
    else:
        assert winner == "release"


@pytest.mark.parametrize("round", range(4))
def test_the_deadline_itself_may_pass_while_everybody_acts(db, world, clock, wallets, crowd, here, round):
    deal_id = reach(db, world, "delivered")
    clock.now = NOON + 5 * 3600 - 1
    buyer, seller = crowd(Buyer, 1), crowd(Seller, 2)
    answers = together(
        lambda: buyer.reveal(deal_id, "dispute", {"reason": "No."}),
        lambda: seller.act(deal_id, "refund"),
        lambda: clock.sleep(1),
        lambda: transfers.sweep(here(), world, wallets),
    )
    transfers.sweep(db, world, wallets)
    disputed, refunded = answers[:2]
    events = [row["event"] for row in db.execute("SELECT event FROM deal_events WHERE deal_id = ?", (deal_id,))]
    assert ("dispute" in events) == (disputed.status_code == 200)
    if (disputed.status_code, refunded.status_code) == (200, 409):
        pytest.fail("a disputed deal can be refunded by its seller")
    winner = ended_once(db, deal_id)
    assert winner == ("refund" if refunded.status_code == 200 else "release")


def test_the_operator_the_parties_and_the_clock_have_one_winner(db, world, clock, wallets, crowd, here):
    resolved = set()
    for number in range(6):
        clock.now = NOON
        deal_id = reach(db, world, "disputed", ref=f"{number}")
        clock.now = NOON + 168 * 3600 - 1
        buyer, seller = crowd(Buyer, 1), crowd(Seller, 2)

        def resolve(outcome):
            try:
                units = 5_000_000 if outcome == "split" else None
                return operations.resolve_dispute(here(), world, deal_id, outcome, note="", seller_units=units)
            except deals.Refusal as refusal:
                assert refusal.code == "invalid_state"

        together(
            lambda: resolve("split"),
            lambda: resolve("release"),
            lambda: clock.sleep(1),
            lambda: transfers.sweep(here(), world, wallets),
            lambda: buyer.reveal(deal_id, "confirm"),
            lambda: seller.act(deal_id, "refund"),
        )
        transfers.sweep(db, world, wallets)
        resolved.add(ended_once(db, deal_id))
    assert resolved <= set(ENDINGS)


def test_cancel_and_accept_have_one_winner(db, world, crowd):
    for number in range(8):
        deal_id = reach(db, world, "funded", ref=f"{number}")
        buyer, seller = crowd(Buyer, 1), crowd(Seller, 2)
        cancelled, accepted = together(
            lambda: buyer.reveal(deal_id, "cancel"), lambda: seller.act(deal_id, "accept")
        )
        assert sorted([cancelled.status_code, accepted.status_code]) == [200, 409]
        state = db.execute("SELECT state FROM deals WHERE id = ?", (deal_id,)).fetchone()["state"]
        assert state == ("refunded" if cancelled.status_code == 200 else "accepted")


def test_the_same_action_twenty_times_at_once_happens_once(db, world, crowd):
    deal_id = reach(db, world, "delivered")
    buyers = [crowd(Buyer, 1) for _ in range(20)]
    answers = together(*(lambda buyer=buyer: buyer.reveal(deal_id, "confirm") for buyer in buyers))
    assert {(a.status_code, a.json["state"]) for a in answers} == {(200, "released")}
    assert ended_once(db, deal_id) == "confirm"


def test_split_offers_that_cross_meet_once_or_not_at_all(db, world, crowd):
    for number in range(6):
        deal_id = reach(db, world, "accepted", ref=f"{number}")
        buyer, seller = crowd(Buyer, 1), crowd(Seller, 2)
        offer = lambda party, figure: party.act(deal_id, "split", {"seller_usd": figure})
        answers = together(lambda: offer(buyer, "4"), lambda: offer(seller, "6"))
        assert {a.json["state"] for a in answers} == {"accepted"}
        answers = together(lambda: offer(buyer, "5.00"), lambda: offer(seller, "5.00"))
        assert {"split"} <= {a.json["state"] for a in answers} <= {"accepted", "split"}
        assert ended_once(db, deal_id) == "split"


def test_split_offers_that_change_places_either_meet_or_pass(db, world, crowd):
    for number in range(6):
        deal_id = reach(db, world, "accepted", ref=f"{number}")
        buyer, seller = crowd(Buyer, 1), crowd(Seller, 2)
        offer = lambda party, figure: party.act(deal_id, "split", {"seller_usd": figure})
        offer(buyer, "5"), offer(seller, "6")
        answers = together(lambda: offer(buyer, "6"), lambda: offer(seller, "5"))
        # One came first and met the other's standing offer, so the second found the deal split.
        assert sorted(a.status_code for a in answers) == [200, 409]
        row = db.execute("SELECT state, seller_units FROM deals WHERE id = ?", (deal_id,)).fetchone()
        assert tuple(row) == ("split", 6_000_000 if answers[0].status_code == 200 else 5_000_000)


# Sweeps.


def test_four_sweeps_at_once_send_every_leg_once(db, world, clock, wallets, here):
    ids = [reach(db, world, "released", ref=f"{number}") for number in range(8)]
    ids += [reach(db, world, "refunded", ref=f"{number}") for number in range(4)]
    totals = []
    for _ in range(3):
        totals += together(*[lambda: transfers.sweep(here(), world, wallets)] * 4)
        clock.sleep(1000)
    assert sum(counts["errors"] for counts in totals) == 0
    assert sum(counts["sent"] for counts in totals) == sum(counts["confirmed"] for counts in totals) == 24
    assert sum(counts["guarantees"] for counts in totals) == 12
    assert sandbox.balance(db, SELLER) == 160_000_000
    assert sandbox.balance(db, BUYER) == 80_000_000
    assert sandbox.balance(db, world.treasury) == 12 * 292_000
    assert db.execute("SELECT count(*) FROM transfers WHERE next_at IS NOT NULL").fetchone()[0] == 0
    assert operations.audit(db, world) == []
    assert {ended_once(db, deal_id) for deal_id in ids} == {"confirm", "cancel"}


def test_sweeps_at_once_return_a_surplus_once(db, world, clock, wallets, here):
    deal_id = reach(db, world, "refunded")
    deposit = db.execute("SELECT deposit_address FROM deals WHERE id = ?", (deal_id,)).fetchone()[0]
    sandbox.mint(db, deposit, 1_000_000)
    for _ in range(5):
        together(*[lambda: transfers.sweep(here(), world, wallets)] * 3)
        clock.sleep(1000)
    assert sandbox.balance(db, BUYER) == 21_000_000
    assert sandbox.balance(db, deposit) == 0
    assert operations.audit(db, world) == []


# Paying.


class Counting(sandbox.Facilitator):
    """The sandbox's facilitator, counting what it is asked to settle; it may keep the answers to itself."""

    silent = False

    def settle(self, *args, **options):
        self.settled.append(threading.get_ident())
        outcome = super().settle(*args, **options)
        return Outcome("unknown", reason="no answer") if self.silent else outcome


@pytest.fixture
def counted(world):
    facilitator = copy.copy(world.facilitators[0])
    facilitator.__class__, facilitator.settled = Counting, []
    return dataclasses.replace(world, facilitators=(facilitator,))


@pytest.fixture
def shop(counted):
    return application.create_app(world=counted)


def send(shop, path, body, headers, number=itertools.count()):
    """Send one paid request from an address of its own."""
    return shop.test_client().post(
        path, json=body, headers=headers, environ_base={"REMOTE_ADDR": f"198.51.100.{next(number) % 250}"}
    )


@pytest.mark.parametrize("protocol", ["x402", "mpp"])
def test_fifty_identical_paid_requests_make_one_deal_and_one_settlement(db, counted, shop, seller, protocol):
    buyer = Buyer(shop.test_client(), counted, 1).funded()
    body, path = buyer.request(seller), f"/{protocol}/deal"
    headers = getattr(buyer, protocol)(buyer.quote(body, path))
    answers = together(*[lambda: send(shop, path, body, headers)] * 50)
    paid = [a for a in answers if a.status_code == 200]
    busy = [a for a in answers if a.status_code == 409]
    assert len(paid) >= 1 and len(paid) + len(busy) == 50, [a.status_code for a in answers]
    assert {a.json["error"] for a in busy} <= {"payment_in_progress"} and all(a.headers["Retry-After"] for a in busy)
    last = send(shop, path, body, headers)
    assert {a.data for a in paid} == {last.data}
    assert len({a.headers.get("PAYMENT-RESPONSE") or a.headers["Payment-Receipt"] for a in [*paid, last]}) == 1
    assert len(counted.facilitators[0].settled) == 1
    assert db.execute("SELECT count(*) FROM deals").fetchone()[0] == 1
    assert sandbox.balance(db, BUYER) == 10_000_000_000 - 20_292_000


def test_one_buyer_that_signs_anew_for_every_request_pays_once(db, counted, shop, seller):
    buyer = Buyer(shop.test_client(), counted, 1).funded()
    body = buyer.request(seller)
    quote = buyer.quote(body)
    payments = [buyer.x402(quote, nonce="0x" + f"{number:064x}") for number in range(20)]
    answers = together(*(lambda headers=headers: send(shop, "/x402/deal", body, headers) for headers in payments))
    assert {a.status_code for a in answers} <= {200, 202}
    assert len(counted.facilitators[0].settled) == 1
    assert sandbox.balance(db, BUYER) == 10_000_000_000 - 20_292_000


def test_two_buyers_with_the_same_terms_make_one_deal_and_one_of_them_pays(db, counted, shop, seller):
    for number in range(5):
        buyers = [Buyer(shop.test_client(), counted, key).funded() for key in (1, 3)]
        before = [sandbox.balance(db, buyer.address) for buyer in buyers]
        body = buyers[0].request(seller, ref=f"{number}")
        headers = [buyer.x402(buyer.quote(body)) for buyer in buyers]
        answers = together(*(lambda h=h: send(shop, "/x402/deal", body, h) for h in headers))
        assert sorted(a.status_code for a in answers) == [200, 409]
        assert {a.json["error"] for a in answers if a.status_code == 409} == {"deal_exists"}
        won = answers[0].status_code != 200
        after = [sandbox.balance(db, buyer.address) for buyer in buyers]
        assert before[won] - after[won] == 20_292_000 and before[not won] == after[not won]


def test_retries_reads_and_sweeps_of_a_lost_answer_fund_the_deal_once(db, counted, shop, clock, wallets, here, seller):
    counted.facilitators[0].silent = True
    impatient = dataclasses.replace(counted.settings, chain_patience=-1.0)
    first = application.create_app(world=dataclasses.replace(counted, settings=impatient))
    buyer = Buyer(first.test_client(), counted, 1).funded()
    body = buyer.request(seller)
    headers = buyer.x402(buyer.quote(body))
    answer = send(first, "/x402/deal", body, headers)
    assert answer.status_code == 202
    path = f"/v1/deals/{answer.json['id']}"
    clock.sleep(60)
    answers = together(
        *[lambda: send(shop, "/x402/deal", body, headers)] * 6,
        *[lambda: shop.test_client().get(path)] * 6,
        *[lambda: transfers.sweep(here(), counted, wallets)] * 2,
    )
    assert {a.status_code for a in answers[:6]} <= {200, 409}
    assert {a.json["state"] for a in answers[6:12]} <= {"pending", "funded"}
    events = [row["event"] for row in db.execute("SELECT event FROM deal_events ORDER BY number")]
    assert events == ["pay", "fund"]
    assert db.execute("SELECT count(*) FROM transfers WHERE leg = 'guarantee'").fetchone()[0] == 1
    assert sandbox.balance(db, BUYER) == 10_000_000_000 - 20_292_000
    assert send(shop, "/x402/deal", body, headers).json[0]["state"] == "funded"


def test_a_reader_never_sees_half_of_a_move(db, world, settings, crowd):
    deal_id, reader, came = reach(db, world, "delivered"), crowd(Buyer, 4), []
    other = database.connect(settings.database)
    other.execute("PRAGMA busy_timeout = 0")

    def move_in_between(statement):
        """Confirm on another connection once the reader has the deal's row but not yet its history and transfers."""
        if "FROM payments" in statement and not came:
            came.append(statement)
            with contextlib.suppress(sqlite3.OperationalError), database.transaction(other):
                deals.move(other, deal_id, "confirm", now=NOON, actor="buyer", treasury=world.treasury)

    db.set_trace_callback(move_in_between)
    record = reader.client.get(f"/v1/deals/{deal_id}").json
    db.set_trace_callback(None)
    assert came
    assert (record["state"], record["history"][-1]["state"], record["transfers"]) == ("delivered", "delivered", [])


def test_a_proof_of_an_earlier_buyer_never_moves_the_deal_of_the_next(db, world, charlie):
    """The first buyer's wallet is a contract, whose slow answer arrives when somebody else's payment has funded the deal."""
    deal_id = reach(db, world, "lapsed", instant=True)

    class Slow(sandbox.Ledger):
        def signed_by_contract(self, account, digest, signature):
            with database.transaction(db):
                db.execute(
                    "UPDATE deals SET state = 'pending', attempt = 2, buyer_address = ?, ended_at = NULL WHERE id = ?",
                    (charlie.address, deal_id),
                )
                deals.move(db, deal_id, "fund", now=NOON, actor="chain", treasury=world.treasury)
            return account == BUYER

    ledger = copy.copy(world.ledger)
    ledger.__class__ = Slow
    client = application.create_app(world=dataclasses.replace(world, ledger=ledger)).test_client()
    answer = client.post(f"/v1/deals/{deal_id}/confirm", json={"signature": "0x00"})
    assert (answer.status_code, answer.json["error"]) == (409, "invalid_state")
    assert db.execute("SELECT state FROM deals").fetchone()[0] == "funded"
