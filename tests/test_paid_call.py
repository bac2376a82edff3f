"""The paid call over HTTP: every row of the published response table, and what retries get."""

import base64
import dataclasses
import json
import re

import pytest
from eth_account import Account
from eth_account.messages import encode_typed_data

import app as application
import facilitators
import operations
import sandbox
import settlement
import transfers
from conftest import NOON
from db import sqlite3
from parties import Buyer, Scripted, another, balance, error, files, nonce, send, serving
from test_quotes import PATHS, SECRET_HASH, TERMS, deal_id, deposit

BUYER = "0x7E5F4552091A69125d5DfCb7b8C2659029395Bdf"  # the wallet of key 1


@pytest.fixture
def paid(client, buyer, seller):
    """A deal that was paid for with a plain x402 payment: its body, header and answer."""
    body = buyer.request(seller)
    payment = buyer.x402(buyer.quote(body))
    answer = send(client, body, payment)
    assert answer.status_code == 200
    return Paid(body, payment, answer)


@dataclasses.dataclass
class Paid:
    body: dict
    payment: dict
    answer: object


# -- 200 ----------------------------------------------------------------------------------------------------


def test_a_paid_call_answers_an_array_of_one_funded_record(paid, world, buyer, wallets):
    answer = paid.answer
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Svc-Results-Requested"] == answer.headers["X-Svc-Results-Delivered"] == "1"
    assert "X-Svc-Refund" not in answer.headers and "Payment-Receipt" not in answer.headers
    (record,) = answer.json
    assert (record["id"], record["state"], record["mode"]) == (deal_id(wallets, TERMS), "funded", "sandbox")
    assert (record["amount_usd"], record["price_usd"]) == ("20.00", "20.292")
    assert record["deposit_address"] == deposit(wallets, TERMS)
    assert balance(world, record["deposit_address"]) == 20_292_000
    assert balance(world, buyer.address) == 10_000_000_000 - 20_292_000
    assert record["payment"]["payer"] == record["buyer_address"] == BUYER
    assert SECRET_HASH not in answer.text and paid.payment["PAYMENT-SIGNATURE"] not in answer.text


def test_an_x402_payment_gets_a_settlement_response_with_a_signed_receipt(paid, world):
    settled = json.loads(base64.b64decode(paid.answer.headers["PAYMENT-RESPONSE"], validate=True))
    transaction = paid.answer.json[0]["payment"]["transaction"]
    assert re.fullmatch("0x[0-9a-f]{64}", transaction)
    assert {name: settled[name] for name in ("success", "transaction", "network", "payer")} == {
        "success": True, "transaction": transaction, "network": "eip155:8453",
        "payer": BUYER,
    }  # fmt: skip
    receipt = settled["extensions"]["offer-receipt"]["info"]["receipt"]
    assert receipt["format"] == "eip712"
    assert receipt["payload"] == {
        "version": 1, "network": "eip155:8453", "resourceUrl": "http://deals.test/x402/deal",
        "payer": BUYER, "issuedAt": NOON, "transaction": transaction,
    }  # fmt: skip
    fields = [("version", "uint256"), ("network", "string"), ("resourceUrl", "string"), ("payer", "string"),
              ("issuedAt", "uint256"), ("transaction", "string")]  # fmt: skip
    typed = encode_typed_data(
        {"name": "x402 receipt", "version": "1", "chainId": 1},
        {"Receipt": [{"name": name, "type": kind} for name, kind in fields]},
        receipt["payload"],
    )
    assert Account.recover_message(typed, signature=receipt["signature"]) == Account.from_key(world.receipt_key).address


@pytest.mark.parametrize("path", PATHS)
def test_an_mpp_payment_gets_a_payment_receipt(buyer, seller, path):
    answer = buyer.pay(seller, protocol="mpp", path=path)
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "private" and "PAYMENT-RESPONSE" not in answer.headers
    assert answer.headers["X-Svc-Results-Requested"] == answer.headers["X-Svc-Results-Delivered"] == "1"
    receipt = json.loads(base64.urlsafe_b64decode(answer.headers["Payment-Receipt"] + "=="))
    assert len(receipt.pop("challengeId")) == 43
    assert receipt == {
        "status": "success", "method": "evm", "timestamp": "2026-09-21T14:13:20Z", "chainId": 8453,
        "reference": answer.json[0]["payment"]["transaction"],
    }  # fmt: skip


# -- What the terms already name (decisions 2) --------------------------------------------------------------


def test_an_unpaid_request_for_a_deal_that_exists_warns_and_repeats_its_deposit(paid, client):
    answer = client.post("/x402/deal", json=paid.body)
    record = paid.answer.json[0]
    assert answer.status_code == 402 and answer.headers["X-Svc-Invalid-Request"] == "1"
    assert record["id"] in answer.json["error"] and answer.json["error"].startswith("deal_exists")
    assert answer.json["accepts"][0]["payTo"] == record["deposit_address"]
    assert answer.json["accepts"][0]["amount"] == "20292000"


def test_the_same_payment_gets_the_stored_answer_byte_for_byte(paid, client, clock, seller, db):
    deal = paid.answer.json[0]["id"]
    seller.act(deal, "accept")
    clock.now += 86399
    again = send(client, paid.body, paid.payment)
    assert (again.status_code, again.data) == (200, paid.answer.data)
    assert again.headers["PAYMENT-RESPONSE"] == paid.answer.headers["PAYMENT-RESPONSE"]
    other = send(client, paid.body, paid.payment, "/mpp/deal")  # both paths are one endpoint
    assert (other.status_code, other.data) == (200, paid.answer.data)
    assert db.execute("SELECT count(*) FROM sandbox_authorizations").fetchone()[0] == 1


@pytest.mark.parametrize("pay", [Buyer.x402, Buyer.mpp])
def test_the_answer_stays_the_same_bytes_whatever_becomes_of_the_deal(client, buyer, seller, db, world, clock, sweep, pay):
    body = buyer.request(seller, ref="a long story")
    payment = pay(buyer, buyer.quote(body))
    first = send(client, body, payment)
    deal = first.json[0]["id"]
    steps = [
        lambda: seller.act(deal, "accept"),
        lambda: seller.act(deal, "deliver", {"url": "https://files.test/work.pdf", "note": "All of it."}),
        lambda: buyer.reveal(deal, "dispute", {"reason": "Half of it is missing."}),
        lambda: seller.act(deal, "statement", {"statement": "It is all there."}),
        lambda: seller.act(deal, "split", {"seller_usd": "15.00"}),
        lambda: buyer.act(deal, "split", {"seller_usd": "10.00"}),
        lambda: operations.resolve_dispute(db, world, deal, "split", note="Half of it.", seller_units=10_000_000),
        lambda: sandbox.mint(db, first.json[0]["deposit_address"].lower(), 5_000_000),  # somebody pays too much
        sweep, sweep, sweep,
    ]  # fmt: skip
    for number, step in enumerate(steps):
        clock.now += 60
        assert getattr(step(), "status_code", 200) == 200, number
        again = send(client, body, payment)
        assert (again.status_code, again.data) == (200, first.data)
        assert [again.headers.get(name) for name in ("PAYMENT-RESPONSE", "Payment-Receipt")] == [
            first.headers.get(name) for name in ("PAYMENT-RESPONSE", "Payment-Receipt")
        ]
    record = client.get(f"/v1/deals/{deal}").json
    assert record["state"] == "split" and {leg["leg"] for leg in record["transfers"]} >= {"seller", "buyer", "fee", "surplus-1"}


def test_the_answer_is_the_deals_record_of_that_moment(paid, client):
    record = client.get(f"/v1/deals/{paid.answer.json[0]['id']}")
    assert record.json == paid.answer.json[0]


def test_a_deal_paid_again_after_it_had_lapsed_has_its_own_receipt(world, client, buyer, clock, sweep):
    body = buyer.request()
    late = another(world, outcome=facilitators.Outcome("refused", reason="invalid_signature"))
    assert send(late, body, buyer.x402(buyer.quote(body))).status_code == 502
    payment = buyer.x402(buyer.quote(body), nonce=nonce(8))
    first = send(client, body, payment)
    assert [line["event"] for line in first.json[0]["history"]] == ["pay", "lapse", "pay", "fund"]
    assert first.json[0] == client.get(f"/v1/deals/{first.json[0]['id']}").json
    assert send(client, body, payment).data == first.data


def test_a_receipt_that_cannot_be_written_now_never_says_that_nothing_was_charged(client, buyer, monkeypatch, caplog):
    body = buyer.request()
    payment = buyer.x402(buyer.quote(body))

    def broken(*args):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(settlement, "receipt", broken)
        answers = [send(client, body, payment) for _ in range(2)]  # the call that paid, and a retry
    for answer in answers:
        assert answer.status_code == 202 and "Do not pay again" in answer.json["message"]
    assert "disk I/O error" in caplog.text
    assert client.get(answers[0].headers["Location"]).json["state"] == "funded"
    assert send(client, body, payment).status_code == 200


@pytest.mark.parametrize("swept", [False, True])
def test_a_stored_answer_expires_after_a_day_whenever_the_sweep_ran(paid, client, clock, sweep, world, buyer, swept):
    clock.now += 86400
    if swept:
        sweep()
    answer = send(client, paid.body, paid.payment)
    assert error(answer) == (410, "expired")
    assert answer.json["deal_id"] == paid.answer.json[0]["id"]
    assert send(client, paid.body, paid.payment).status_code == 410
    assert "PAYMENT-RESPONSE" not in answer.headers


def test_a_newly_signed_payment_of_the_same_payer_gets_the_record_and_is_not_settled(paid, client, buyer, seller, world):
    held = balance(world, buyer.address)
    quote = client.post("/x402/deal", json=paid.body)
    seller.act(paid.answer.json[0]["id"], "accept")
    for payment in (buyer.x402(quote, nonce=nonce(7)), buyer.mpp(quote)):
        answer = send(client, paid.body, payment)
        assert answer.status_code == 200
        assert (answer.json[0]["id"], answer.json[0]["state"]) == (paid.answer.json[0]["id"], "accepted")
        assert answer.headers["X-Svc-Results-Delivered"] == "1"
        assert ("PAYMENT-RESPONSE" in answer.headers) != ("Payment-Receipt" in answer.headers)
    assert balance(world, buyer.address) == held


def test_a_newly_signed_payment_sees_a_timer_that_ran_out_meanwhile(paid, client, buyer, clock):
    clock.now += 24 * 3600
    answer = send(client, paid.body, buyer.x402(client.post("/x402/deal", json=paid.body), nonce=nonce(7)))
    assert (answer.status_code, answer.json[0]["state"]) == (200, "refunded")


def test_a_payment_by_another_payer_is_refused_and_not_settled(paid, client, charlie, world):
    for payment in (charlie.x402(client.post("/x402/deal", json=paid.body)), charlie.mpp(charlie.quote(paid.body))):
        answer = send(client, paid.body, payment)
        assert error(answer) == (409, "deal_exists")
        assert answer.json["deal_id"] == paid.answer.json[0]["id"]
    assert balance(world, charlie.address) == 10_000_000_000


@pytest.fixture
def silent(world):
    """A service whose facilitator neither settles nor says so."""
    return another(world, outcome=facilitators.Outcome("unknown", reason="no answer"))


def test_an_unknown_outcome_answers_202_and_a_second_payment_is_not_settled(silent, client, buyer, charlie, world):
    body = buyer.request()
    quote = buyer.quote(body)
    answer = send(silent, body, buyer.x402(quote))
    deal = quote.json["extensions"]["deal"]["info"]["id"]
    assert answer.status_code == 202
    assert (answer.json["id"], answer.json["state"]) == (deal, "pending")
    assert answer.headers["Location"] == f"/v1/deals/{deal}" and int(answer.headers["Retry-After"]) >= 1
    for name in ("PAYMENT-REQUIRED", "WWW-Authenticate", "PAYMENT-RESPONSE", "Payment-Receipt"):
        assert name not in answer.headers
    second = send(client, body, buyer.x402(quote, nonce=nonce(7)))
    assert (second.status_code, second.json["id"]) == (202, deal)
    assert error(send(client, body, charlie.x402(quote))) == (409, "deal_exists")
    assert client.post("/x402/deal", json=body).headers["X-Svc-Invalid-Request"] == "1"
    assert balance(world, buyer.address) == balance(world, charlie.address) == 10_000_000_000
    retried = send(client, body, buyer.x402(quote))  # the same payment, and a facilitator that works again
    assert (retried.status_code, retried.json[0]["state"]) == (200, "funded")
    assert balance(world, buyer.address) == 10_000_000_000 - 20_292_000


@pytest.mark.parametrize("rival, status", [("buyer", 200), ("charlie", 409)])
@pytest.mark.parametrize("lapsed", [False, True])
def test_a_payment_that_loses_the_race_for_its_terms_is_not_settled(world, client, buyer, charlie, rival, status, lapsed, clock, sweep):
    body, payer = buyer.request(), {"buyer": buyer, "charlie": charlie}[rival]
    quote = buyer.quote(body)
    if lapsed:
        poor = another(world, outcome=facilitators.Outcome("refused", reason="insufficient_funds"))
        assert send(poor, body, buyer.x402(quote, nonce=nonce(8))).status_code == 402
        clock.now += 361

    class Slow(Scripted):
        def verify(self, *args, **options):
            assert send(client, body, payer.x402(quote, nonce=nonce(7))).status_code == 200
            sweep()
            return super().verify(*args, **options)

    slow = Slow(world.facilitators[0])
    answer = send(serving(world, slow), body, buyer.x402(quote))
    assert (answer.status_code, slow.calls) == (status, ["verify"])
    assert status == 200 or answer.json["error"] == "deal_exists"
    assert balance(world, buyer.address) + balance(world, charlie.address) == 20_000_000_000 - 20_292_000


@pytest.mark.parametrize("fresh", [False, True])
def test_a_lapsed_attempt_may_be_paid_again_at_the_same_address(world, client, buyer, clock, fresh):
    poor = another(world, outcome=facilitators.Outcome("refused", reason="insufficient_funds"))
    body = buyer.request()
    quote = buyer.quote(body)
    assert send(poor, body, buyer.x402(quote)).status_code == 402
    again = buyer.quote(body)
    assert "X-Svc-Invalid-Request" not in again.headers
    assert again.json["accepts"] == quote.json["accepts"]
    answer = send(client, body, buyer.x402(again, **({"nonce": nonce(7)} if fresh else {})))
    assert (answer.status_code, answer.json[0]["state"]) == (200, "funded")
    assert balance(world, answer.json[0]["deposit_address"]) == 20_292_000
    assert [event["event"] for event in answer.json[0]["history"]] == ["pay", "lapse", "pay", "fund"]


def test_another_payer_may_take_up_lapsed_terms_only_when_the_first_payment_is_dead(world, client, buyer, charlie, clock):
    poor = another(world, outcome=facilitators.Outcome("refused", reason="insufficient_funds"))
    body = buyer.request()
    assert send(poor, body, buyer.x402(buyer.quote(body))).status_code == 402
    assert error(send(client, body, charlie.x402(charlie.quote(body)))) == (409, "deal_exists")
    clock.now += 360  # validBefore and its margin have gone by, to the second
    assert error(send(client, body, charlie.x402(charlie.quote(body)))) == (409, "deal_exists")
    clock.now += 1
    assert send(client, body, charlie.x402(charlie.quote(body))).status_code == 200


def test_money_of_a_first_payer_that_landed_late_never_becomes_the_next_payers(world, client, buyer, charlie, clock, sweep):
    poor = another(world, outcome=facilitators.Outcome("refused", reason="insufficient_funds"))
    body = buyer.request()
    quote = buyer.quote(body)
    assert send(poor, body, buyer.x402(quote)).status_code == 402
    authorization = buyer.authorization(quote)
    sandbox.transfer(world.facilitators[0].connect(), world.terminal.token, authorization,
                     buyer.sign(authorization), now=NOON + 200)  # fmt: skip
    clock.now += 361
    assert error(send(client, body, charlie.x402(charlie.quote(body)))) == (409, "deal_exists")
    sweep()
    assert balance(world, buyer.address) == 10_000_000_000
    assert send(client, body, charlie.x402(charlie.quote(body))).status_code == 200
    assert balance(world, charlie.address) == 10_000_000_000 - 20_292_000


def test_no_new_attempt_starts_while_late_money_is_on_its_way_back(world, client, buyer, clock, db, wallets, sweep):
    poor = another(world, outcome=facilitators.Outcome("refused", reason="insufficient_funds"))
    body = buyer.request()
    quote = buyer.quote(body)
    assert send(poor, body, buyer.x402(quote)).status_code == 402
    authorization = buyer.authorization(quote)
    sandbox.transfer(db, world.terminal.token, authorization, buyer.sign(authorization), now=NOON)
    clock.now += 361
    stuck = Scripted(world.facilitators[0], outcome=facilitators.Outcome("unsent", reason="unreachable"))
    for _ in range(2):
        transfers.sweep(db, dataclasses.replace(world, facilitators=(stuck,)), wallets)
    again = buyer.x402(quote, nonce=nonce(7), valid_before=NOON + 800)
    assert error(send(client, body, again)) == (409, "payment_in_progress")
    clock.now += 60
    sweep()
    assert balance(world, buyer.address) == 10_000_000_000
    assert send(client, body, again).status_code == 200


@pytest.mark.parametrize("protocol", ["x402", "mpp"])
@pytest.mark.parametrize("path", PATHS)
def test_a_payment_for_a_quote_without_a_body_is_never_settled(client, world, buyer, path, protocol):
    quote, before = client.get(path), files(world)
    payment = getattr(buyer, protocol)(quote)
    answer = client.get(path, headers=payment)
    assert answer.status_code == 402 and "A GET starts no deal" in answer.json["error"]
    assert error(client.post(path, headers=payment)) == (415, "unsupported_media_type")
    answer = client.post(path, json=buyer.request(), headers=payment)
    assert answer.status_code == 402 and "The authorization pays" in answer.json["error"]
    assert files(world) == before and balance(world, world.treasury) == 0


# -- Idempotency (decisions 7) --------------------------------------------------------------------------------

IDENTIFIER = "order-2026-0117-a"


def tagged(identifier=IDENTIFIER):
    return {"payment-identifier": {"info": {"required": False, "id": identifier}}}


def test_an_idempotency_key_with_another_body_is_refused_and_not_charged(paid, client, buyer, world):
    first = buyer.request(ref="first")
    assert send(client, first, buyer.x402(buyer.quote(first)), Idempotency_Key="order-1").status_code == 200
    held, other = balance(world, buyer.address), buyer.request(ref="other")
    payment = buyer.x402(buyer.quote(other))
    answer = send(client, other, payment, Idempotency_Key="order-1")
    assert error(answer) == (422, "idempotency_conflict")
    assert error(send(client, paid.body, paid.payment, Idempotency_Key="order-1")) == (422, "idempotency_conflict")
    assert balance(world, buyer.address) == held
    assert send(client, other, payment, Idempotency_Key="order-2").status_code == 200


def test_the_same_key_and_body_with_a_newly_signed_payment_gets_the_stored_deal(client, buyer, world):
    body = buyer.request()
    quote = buyer.quote(body)
    first = send(client, body, buyer.x402(quote), Idempotency_Key="order-1")
    held = balance(world, buyer.address)
    again = send(client, body, buyer.x402(quote, nonce=nonce(7)), Idempotency_Key="order-1")
    assert (again.status_code, again.json) == (200, first.json)
    respelled = {**body, "amount_usd": "20"}
    assert send(client, respelled, buyer.x402(quote), Idempotency_Key="order-1").data == first.data
    assert balance(world, buyer.address) == held


def test_keys_of_two_payers_do_not_meet(client, buyer, charlie):
    one, two = buyer.request(ref="one"), buyer.request(ref="two")
    assert send(client, one, buyer.x402(buyer.quote(one)), Idempotency_Key="order-1").status_code == 200
    assert send(client, two, charlie.x402(charlie.quote(two)), Idempotency_Key="order-1").status_code == 200


def test_a_payment_identifier_with_another_body_conflicts_as_its_extension_says(client, buyer, world):
    one, two = buyer.request(ref="one"), buyer.request(ref="two")
    assert send(client, one, buyer.x402(buyer.quote(one), extensions=tagged())).status_code == 200
    held = balance(world, buyer.address)
    assert error(send(client, two, buyer.x402(buyer.quote(two), extensions=tagged()))) == (409, "idempotency_conflict")
    assert balance(world, buyer.address) == held
    again = send(client, one, buyer.x402(buyer.quote(one), nonce=nonce(7), extensions=tagged()))
    assert again.status_code == 200 and balance(world, buyer.address) == held
    assert send(client, two, buyer.x402(buyer.quote(two), extensions=tagged(IDENTIFIER + "2"))).status_code == 200


@pytest.mark.parametrize("identifier", ["", "short", "x" * 129, "has space in it...", 7, None, ["x" * 16]])
def test_a_payment_identifier_must_look_like_one(client, buyer, identifier):
    body = buyer.request()
    answer = send(client, body, buyer.x402(buyer.quote(body), extensions=tagged(identifier)))
    assert answer.status_code == (200 if identifier is None else 400)


@pytest.mark.parametrize("key, status", [("", 400), ("k" * 129, 400), ("k" * 128, 200), ("ключ".encode().decode("latin-1"), 200)])
def test_an_idempotency_key_has_1_to_128_characters(client, buyer, key, status):
    body = buyer.request()
    quote = buyer.quote(body)
    unpaid = client.post("/x402/deal", json=body, headers={"Idempotency-Key": key})
    assert unpaid.status_code == 402 and ("X-Svc-Invalid-Request" in unpaid.headers) == (status == 400)
    assert send(client, body, buyer.x402(quote), Idempotency_Key=key).status_code == status


def test_a_nonce_that_paid_one_deal_cannot_answer_for_another(paid, client, buyer, charlie, world):
    held, other = balance(world, buyer.address), buyer.request(ref="other")
    quote = buyer.quote(other)
    used = buyer.authorization(client.post("/x402/deal", json=paid.body)).nonce
    answer = send(client, other, buyer.x402(quote, nonce=used))
    assert answer.status_code == 402 and "nonce" in answer.json["error"]
    assert send(client, other, charlie.x402(quote)).status_code == 200  # the other deal now has another buyer
    assert send(client, other, buyer.x402(quote, nonce=used)).status_code in (402, 409)
    assert balance(world, buyer.address) == held


def test_a_nonce_that_is_on_its_way_to_one_deal_cannot_pay_another(silent, client, buyer, world):
    one, two = buyer.request(ref="one"), buyer.request(ref="two")
    assert send(silent, one, buyer.x402(buyer.quote(one), nonce=nonce(7))).status_code == 202
    answer = send(client, two, buyer.x402(buyer.quote(two), nonce=nonce(7)))
    assert answer.status_code == 402 and "nonce" in answer.json["error"]
    assert balance(world, buyer.address) == 10_000_000_000


# -- 402, 409, 429, 500, 502, 503 -----------------------------------------------------------------------------


def test_a_payment_that_would_not_settle_is_told_why_with_a_fresh_quote(client, world):
    poor = Buyer(client, world, 9).funded(20_291_999)
    body, before = poor.request(), files(world)
    answer = send(client, body, poor.x402(poor.quote(body)))
    assert answer.status_code == 402 and "insufficient_funds" in answer.json["error"]
    assert answer.headers["PAYMENT-REQUIRED"] and answer.headers["WWW-Authenticate"]
    assert "X-Svc-Invalid-Request" not in answer.headers
    assert files(world) == before


def test_a_refusal_at_settlement_that_the_payer_can_mend_answers_402(world, buyer):
    poor = another(world, outcome=facilitators.Outcome("refused", reason="insufficient_funds"))
    body = buyer.request()
    answer = send(poor, body, buyer.x402(buyer.quote(body)))
    assert answer.status_code == 402 and "insufficient_funds" in answer.json["error"]
    assert json.loads(base64.b64decode(answer.headers["PAYMENT-RESPONSE"])) == {
        "success": False, "errorReason": "insufficient_funds", "transaction": "", "network": "eip155:8453",
        "payer": BUYER,
    }  # fmt: skip


@pytest.mark.parametrize("kind, reason", [("refused", "address is blacklisted"), ("unsent", "unreachable")])
def test_a_final_refusal_that_cannot_be_mended_answers_502(world, buyer, kind, reason):
    closed = another(world, outcome=facilitators.Outcome(kind, reason=reason))
    body = buyer.request()
    answer = send(closed, body, buyer.x402(buyer.quote(body)))
    assert error(answer) == (502, "settlement_failed")
    assert "PAYMENT-REQUIRED" not in answer.headers and balance(world, buyer.address) == 10_000_000_000


def test_a_payment_being_worked_on_is_to_be_retried_later(world, client, buyer, charlie, db, clock):
    body, answers = buyer.request(), []
    payment = buyer.x402(buyer.quote(body))

    class Slow(Scripted):
        def settle(self, *args, **options):
            answers.append(send(client, body, payment))
            answers.append(send(client, body, charlie.x402(charlie.quote(body))))
            return super().settle(*args, **options)

    slow = application.create_app(world=dataclasses.replace(world, facilitators=(Slow(world.facilitators[0]),)))
    assert send(slow.test_client(), body, payment).status_code == 200
    assert [error(answer) for answer in answers] == [(409, "payment_in_progress"), (409, "deal_exists")]
    assert int(answers[0].headers["Retry-After"]) >= 1
    assert send(client, body, payment).status_code == 200


def test_a_bug_before_settlement_answers_500_and_charges_nothing(world, buyer, caplog):
    class Broken(Scripted):
        def verify(self, *args, **options):
            raise ZeroDivisionError("a bug")

    app = application.create_app(world=dataclasses.replace(world, facilitators=(Broken(world.facilitators[0]),)))
    body, before = buyer.request(), files(world)
    payment = buyer.x402(buyer.quote(body))
    answer = send(app.test_client(), body, payment)
    assert error(answer) == (500, "internal_error")
    assert "ZeroDivision" not in answer.text and "a bug" in caplog.text
    assert payment["PAYMENT-SIGNATURE"] not in caplog.text
    assert files(world) == before


def test_a_bug_after_the_claim_answers_202_and_the_sweep_finds_the_money(world, client, buyer, sweep, clock):
    class Broken(Scripted):
        def settle(self, *args, **options):
            super().settle(*args, **options)
            raise ZeroDivisionError("a bug")

    app = application.create_app(world=dataclasses.replace(world, facilitators=(Broken(world.facilitators[0]),)))
    body = buyer.request()
    answer = send(app.test_client(), body, buyer.x402(buyer.quote(body)))
    assert answer.status_code == 202
    clock.now += 90
    sweep()
    assert client.get(f"/v1/deals/{answer.json['id']}").json["state"] == "funded"


def test_no_facilitator_to_be_had_answers_503_and_writes_nothing(world, buyer):
    gone = another(world, verdict=facilitators.Verdict(None, "no answer"))
    body, before = buyer.request(), files(world)
    answer = send(gone, body, buyer.x402(buyer.quote(body)))
    assert error(answer) == (503, "unavailable") and int(answer.headers["Retry-After"]) >= 1
    assert files(world) == before


@pytest.mark.parametrize("switch", ["deal", "base"])
def test_a_switched_off_endpoint_quotes_and_takes_nothing_new_but_answers_for_the_old(
    paid, client, silent, buyer, db, world, switch
):
    waiting, fresh = buyer.request(ref="waiting"), buyer.request(ref="fresh")
    pending, payment = buyer.x402(buyer.quote(waiting)), buyer.x402(buyer.quote(fresh))
    assert send(silent, waiting, pending).status_code == 202
    wrong = buyer.x402(client.post("/x402/deal", json=paid.body), value=1)
    operations.switch(db, switch, on=False)
    held, before = balance(world, buyer.address), files(world)
    for answer in (client.get("/x402/deal"), client.post("/mpp/deal", json=fresh), send(client, fresh, payment),
                   send(client, fresh, wrong)):  # fmt: skip
        assert error(answer) == (503, "unavailable")
        assert int(answer.headers["Retry-After"]) >= 1 and "PAYMENT-REQUIRED" not in answer.headers
    assert files(world) == before and balance(world, buyer.address) == held
    # Somebody whose money the service already holds must never be told that nothing was charged.
    assert send(client, paid.body, paid.payment).data == paid.answer.data
    assert send(client, waiting, pending).status_code == 200
    operations.switch(db, switch, on=True)
    assert send(client, fresh, payment).status_code == 200


def test_a_pending_deal_is_looked_up_at_most_every_few_seconds_whoever_asks(silent, client, buyer, world, clock):
    body = buyer.request()
    answer = send(silent, body, buyer.x402(buyer.quote(body)))
    looks = []
    look = settlement._look
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settlement, "_look", lambda *args, **options: looks.append(1) or look(*args, **options))
        for _ in range(20):
            client.get(f"/v1/deals/{answer.json['id']}")
        assert len(looks) <= 1
        clock.now += 60
        client.get(f"/v1/deals/{answer.json['id']}")
        assert 1 <= len(looks) <= 2
