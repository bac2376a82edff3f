"""The public record: its fields, its cache, what it must never say, and how a pending deal is looked at."""

import copy
import dataclasses
import hashlib
import logging
import pathlib

import pytest
import sandbox
from conftest import NOON
from facilitators import Outcome
from parties import Buyer
from states import reach

import app as application
import transfers

BUYER_ADDRESS = "0x7E5F4552091A69125d5DfCb7b8C2659029395Bdf"  # of the private key 1
SELLER_ADDRESS = "0x2B5AD5c4795c026514f8317c7a215E218DcCD6cF"  # of the private key 2
FIELDS = (
    "id state mode network amount_usd price_usd seller_address buyer_address ref instant deadline_hours review_hours"
    " deposit_address created_at funded_at accepted_at delivered_at ended_at deliver_by review_ends_at decide_by payment"
    " delivery dispute offers transfers refund_guarantee actions next history"
).split()


def read(client, deal_id, **headers):
    return client.get(f"/v1/deals/{deal_id}", headers=headers)


# Fields.


@pytest.mark.parametrize("state", "pending funded accepted delivered disputed released refunded split lapsed".split())
def test_every_record_has_every_field_and_no_other(db, world, client, state):
    record = read(client, reach(db, world, state)).json
    assert sorted(record) == sorted(FIELDS)
    assert record["state"] == state
    assert sorted(record["payment"]) == ["amount_usd", "payer", "protocol", "settled_at", "transaction"]
    assert sorted(record["offers"]) == ["buyer", "seller"]
    for line in record["history"]:
        assert sorted(line) == ["at", "by", "event", "state"]


def test_the_record_of_a_funded_deal_reads_as_published(client, buyer, seller, db):
    deal_id = buyer.deal(seller, ref="job 7", deadline_hours=10, review_hours=5)
    record = read(client, deal_id).json
    deposit, transaction = record.pop("deposit_address"), record["payment"].pop("transaction")
    assert deposit.lower() == db.execute("SELECT deposit_address FROM deals").fetchone()[0]
    assert transaction == db.execute("SELECT transaction_hash FROM sandbox_authorizations").fetchone()[0]
    assert [(a.pop("action"), a.pop("by")) for a in record["actions"]] == [
        ("accept", "seller"), ("refund", "seller"), ("cancel", "buyer"),
    ]  # fmt: skip
    paths = [f"/v1/deals/{deal_id}/{action}" for action in ("accept", "refund", "cancel")]
    assert [a["path"] for a in record["actions"]] == paths
    assert {a["until"] for a in record.pop("actions")} == {"2026-09-22T00:13:20Z"}
    assert record == {
        "id": deal_id,
        "state": "funded",
        "mode": "sandbox",
        "network": "base",
        "amount_usd": "20.00",
        "price_usd": "20.292",
        "seller_address": SELLER_ADDRESS,
        "buyer_address": BUYER_ADDRESS,
        "ref": "job 7",
        "instant": False,
        "deadline_hours": 10,
        "review_hours": 5,
        "created_at": "2026-09-21T14:13:20Z",
        "funded_at": "2026-09-21T14:13:20Z",
        "accepted_at": None,
        "delivered_at": None,
        "ended_at": None,
        "deliver_by": "2026-09-22T00:13:20Z",
        "review_ends_at": None,
        "decide_by": None,
        "payment": {"protocol": "x402", "payer": BUYER_ADDRESS, "amount_usd": "20.292", "settled_at": "2026-09-21T14:13:20Z"},
        "delivery": None,
        "dispute": None,
        "offers": {"seller": None, "buyer": None},
        "transfers": [],
        "refund_guarantee": None,  # until the sweep, which alone can sign, has run
        "next": {"event": "expire", "at": "2026-09-22T00:13:20Z", "state": "refunded"},
        "history": [
            {"at": "2026-09-21T14:13:20Z", "event": "pay", "by": "buyer", "state": "pending"},
            {"at": "2026-09-21T14:13:20Z", "event": "fund", "by": "chain", "state": "funded"},
        ],
    }


def test_what_parties_say_is_shown_and_what_they_leave_out_is_null(db, world, client, seller, buyer):
    deal_id = reach(db, world, "accepted")
    assert seller.act(deal_id, "deliver", {"sha256": "AB" * 32}).json["delivery"] == {
        "url": None, "sha256": "AB" * 32, "note": None,
    }  # fmt: skip
    assert buyer.act(deal_id, "dispute", {"reason": "Nein – 🗝"}).json["dispute"] == {
        "reason": "Nein – 🗝", "statement": None, "decision": None,
    }  # fmt: skip
    record = seller.act(deal_id, "statement", {"statement": "Doch."}).json
    assert (record["dispute"]["statement"], record["history"][-1]["event"]) == ("Doch.", "statement")


@pytest.mark.parametrize(
    "state, instant, possible, following",
    [
        ("pending", False, "", "lapse lapsed"),
        ("funded", False, "accept:seller refund:seller cancel:buyer", "expire refunded"),
        ("funded", True, "accept:seller deliver:seller refund:seller confirm:buyer cancel:buyer", "expire refunded"),
        ("accepted", False, "deliver:seller refund:seller split:seller split:buyer", "expire refunded"),
        ("accepted", True, "deliver:seller refund:seller confirm:buyer split:seller split:buyer", "expire refunded"),
        ("delivered", False, "refund:seller confirm:buyer dispute:buyer split:seller split:buyer", "release released"),
        ("disputed", False, "refund:seller confirm:buyer split:seller split:buyer statement:seller", "undecided refunded"),
        ("released", False, "", None),
        ("refunded", False, "", None),
        ("split", False, "", None),
        ("lapsed", False, "", None),
    ],
)
def test_the_record_lists_what_can_be_done_now_and_what_the_clock_does_next(
    db, world, client, state, instant, possible, following
):
    record = read(client, reach(db, world, state, instant=instant)).json
    assert [f"{a['action']}:{a['by']}" for a in record["actions"]] == possible.split()
    found = record["next"] and f"{record['next']['event']} {record['next']['state']}"
    assert found == following


def test_a_signed_transfer_and_the_guarantee_are_published_flat(db, world, client, sweep, settings):
    deal_id = reach(db, world, "funded")
    sweep(1)
    guarantee = read(client, deal_id).json["refund_guarantee"]
    assert list(guarantee) == "from to value validAfter validBefore nonce signature asset chainId".split()
    assert (guarantee["to"], guarantee["value"], guarantee["chainId"]) == (BUYER_ADDRESS, "20292000", 8453)
    assert guarantee["validAfter"] == str(NOON + (10 + 5 + 168 + 168) * 3600)
    assert guarantee["asset"].lower() == "0x5a4db0c5a4db0c5a4db0c5a4db0c5a4db0c5a4db"
    deal_id = reach(db, world, "released")
    sweep(1)
    leg = read(client, deal_id).json["transfers"][0]
    assert (leg["leg"], leg["status"], leg["authorization"]["to"]) == ("seller", "confirmed", SELLER_ADDRESS)
    assert (leg["authorization"]["value"], leg["authorization"]["validAfter"]) == ("20000000", "0")


# The cache.


def test_a_reader_that_has_the_record_gets_304(db, world, client):
    deal_id = reach(db, world, "funded")
    first = read(client, deal_id)
    etag = first.headers["ETag"]
    assert etag.startswith('"') and first.headers["Cache-Control"] == "no-cache"
    for known in (etag, f'"other", {etag}', "*", "W/" + etag):
        again = read(client, deal_id, **{"If-None-Match": known})
        assert (again.status_code, again.data, again.headers["ETag"]) == (304, b"", etag), known
    for other in ('"other"', etag[:-2] + '"', "nonsense"):
        assert read(client, deal_id, **{"If-None-Match": other}).data == first.data


def test_two_workers_give_one_record_one_etag(db, world, client):
    deal_id = reach(db, world, "disputed")
    other = application.create_app(world=dataclasses.replace(world, records={})).test_client()
    assert read(client, deal_id).headers["ETag"] == read(other, deal_id).headers["ETag"]


def test_every_change_that_a_reader_can_see_changes_the_etag(db, world, client, clock, buyer, seller, wallets):
    other = application.create_app(world=dataclasses.replace(world, records={})).test_client()
    deal_id = buyer.deal(seller)
    seen = [read(client, deal_id)]

    def changed(answer=None):
        assert answer is None or answer.status_code == 200
        seen.append(read(client, deal_id))
        assert seen[-1].headers["ETag"] != seen[-2].headers["ETag"]
        assert seen[-1].data == read(other, deal_id).data
        return seen[-1].json

    transfers.sweep(db, world, wallets)
    assert changed()["refund_guarantee"]
    changed(seller.act(deal_id, "accept"))
    changed(seller.act(deal_id, "split", {"seller_usd": "5"}))
    changed(seller.act(deal_id, "deliver", {"note": "done"}))
    changed(buyer.act(deal_id, "dispute", {"reason": "No."}))
    changed(seller.act(deal_id, "statement", {"statement": "Yes."}))
    changed(buyer.act(deal_id, "confirm"))
    for statuses in (["confirmed", "due"], ["confirmed", "confirmed"]):
        clock.sleep(10)
        transfers.sweep(db, world, wallets)
        assert [leg["status"] for leg in changed()["transfers"]] == statuses
    sandbox.mint(db, seen[0].json["deposit_address"].lower(), 500_000)
    db.execute("UPDATE deals SET look_at = 0")
    transfers.sweep(db, world, wallets)
    assert changed()["transfers"][-1]["leg"] == "surplus-1"


def test_an_action_answers_with_the_record_as_a_read_gives_it(client, buyer, seller):
    deal_id = buyer.deal(seller)
    acted = seller.act(deal_id, "accept")
    now = read(client, deal_id)
    assert (acted.data, acted.headers["ETag"]) == (now.data, now.headers["ETag"])
    assert acted.headers["Cache-Control"] == "no-store"


def test_a_head_request_has_the_headers_alone(db, world, client):
    deal_id = reach(db, world, "funded")
    answer = client.head(f"/v1/deals/{deal_id}")
    assert (answer.status_code, answer.data, answer.headers["ETag"]) == (200, b"", read(client, deal_id).headers["ETag"])


# What is never said.


def test_the_secret_is_in_no_file_no_log_and_no_answer(client, buyer, seller, settings, caplog, capfd, sweep):
    caplog.set_level(logging.DEBUG)
    secret = "a secret that nobody else ever says"
    wrong = "a guess that is nobody's business"
    answers = [buyer.pay(seller, secret_hash=hashlib.sha256(secret.encode()).hexdigest())]
    deal_id = answers[0].json[0]["id"]
    answers += [
        seller.act(deal_id, "accept"),
        buyer.reveal(deal_id, "split", {"seller_usd": "3"}, secret=secret),
        buyer.reveal(deal_id, "split", {"seller_usd": "99"}, secret=secret),
        buyer.reveal(deal_id, "cancel", secret=secret),
        buyer.reveal(deal_id, "cancel", secret=wrong),
        buyer.reveal(deal_id, "cancel", {"extra": 1}, secret=secret),
        buyer.reveal(deal_id, "cancel", secret=secret * 40),
        buyer.reveal(deal_id, "cancel", secret=[secret]),
        buyer.reveal(deal_id, "accept", secret=secret),
        client.post(f"/v1/deals/{deal_id}/cancel", data='{"secret": "' + secret, content_type="application/json"),
        client.post(f"/v1/deals/{deal_id}/cancel", data={"secret": secret}),
        seller.act(deal_id, "deliver"),
        buyer.reveal(deal_id, "dispute", {"reason": "No."}, secret=secret),
        buyer.reveal(deal_id, "confirm", secret=secret),
        buyer.reveal(deal_id, "confirm", secret=secret),
    ]
    assert [a.status_code for a in answers] == [200, 200, 200, 400, 409, 403, 400, 400, 400, 400, 400, 415, 200, 200, 200, 200]
    sweep()
    answers.append(read(client, deal_id))
    said = "".join(a.text + str(a.headers) for a in answers) + caplog.text + "".join(capfd.readouterr())
    kept = b"".join(path.read_bytes() for path in pathlib.Path(settings.database).parent.iterdir())
    for text in (secret, wrong):
        assert text not in said and text.encode() not in kept
    digest = hashlib.sha256(secret.encode()).hexdigest()
    assert digest not in "".join(a.text for a in answers)


def test_no_proof_is_kept(client, buyer, seller, settings):
    deal_id = buyer.deal(seller)
    body = seller.proof(deal_id, "accept")
    answer = seller.post(deal_id, "accept", body)
    assert answer.status_code == 200 and body["signature"] not in answer.text
    assert body["signature"][2:].encode() not in pathlib.Path(settings.database).read_bytes()


# Pending deals.


class Counting(sandbox.Ledger):
    """The sandbox's ledger, counting how often a payment is looked for."""

    def payment(self, *args, **options):
        self.looks += 1
        return super().payment(*args, **options)


class Losing(sandbox.Facilitator):
    """The sandbox's facilitator, whose answers to /settle are lost; the money moves or it does not."""

    moves = False

    def settle(self, *args, **options):
        if self.moves:
            super().settle(*args, **options)
        return Outcome("unknown", reason="no answer")


@pytest.fixture
def dark(world):
    """The world with a facilitator that is never heard again, and a ledger that counts."""
    ledger, facilitator = copy.copy(world.ledger), copy.copy(world.facilitators[0])
    ledger.__class__, facilitator.__class__, ledger.looks = Counting, Losing, 0
    return dataclasses.replace(world, ledger=ledger, facilitators=(facilitator,))


@pytest.fixture
def payer(dark):
    return Buyer(application.create_app(world=dark).test_client(), dark, 1).funded()


def test_a_pending_deal_is_looked_at_every_few_seconds_whoever_asks(payer, dark, clock, seller):
    answer = payer.pay(seller)
    assert answer.status_code == 202
    deal_id, dark.ledger.looks = answer.json["id"], 0
    other = application.create_app(world=dataclasses.replace(dark, records={})).test_client()

    def ask(times=20):
        for number in range(times):
            client = (payer.client, other)[number % 2]
            answer = client.get(f"/v1/deals/{deal_id}", environ_base={"REMOTE_ADDR": f"203.0.113.{number}"})
            assert (answer.status_code, answer.json["state"]) == (200, "pending")

    start, looks = clock.now, []
    for second in (0, 4, 5, 5, 10, 11):  # the pauses grow slowly with the payment's age
        clock.now = start + second
        ask()
        looks.append(dark.ledger.looks)
    assert looks == [0, 0, 1, 1, 1, 2]


def test_reading_a_pending_deal_shows_it_funded_once_the_money_is_there(payer, dark, clock, seller):
    dark.facilitators[0].moves = True
    lost = dataclasses.replace(dark.settings, chain_patience=-1.0)  # the answer goes out before any look at the chain
    client = application.create_app(world=dataclasses.replace(dark, settings=lost)).test_client()
    answer = Buyer(client, dark, 1).pay(seller)
    deal_id = answer.json["id"]
    assert (answer.status_code, answer.headers["Location"]) == (202, f"/v1/deals/{deal_id}")
    assert read(payer.client, deal_id).json["state"] == "pending"
    clock.sleep(5)
    record = read(payer.client, deal_id).json
    assert (record["state"], record["payment"]["amount_usd"]) == ("funded", "20.292")
    assert [a["action"] for a in record["actions"]] == ["accept", "refund", "cancel"]


def test_a_read_never_submits_a_payment(payer, dark, clock, seller):
    deal_id = payer.pay(seller).json["id"]
    dark.facilitators[0].moves = True
    for _ in range(70):
        clock.sleep(5)
        state = read(payer.client, deal_id).json["state"]
    assert (state, sandbox.balance(payer.world.ledger.connect(), payer.address)) == ("pending", 10_000_000_000)
    clock.sleep(60)
    assert read(payer.client, deal_id).json["state"] == "lapsed"


@pytest.mark.parametrize("action", ["accept", "confirm", "cancel"])
def test_nobody_can_act_on_a_pending_deal(payer, dark, seller, action):
    deal_id = payer.pay(seller).json["id"]
    party = seller if action == "accept" else payer
    answer = party.act(deal_id, action)
    assert (answer.status_code, answer.json["state"], answer.json["actions"]) == (409, "pending", [])
