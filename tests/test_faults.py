"""What goes wrong between the buyer's signature and the chain: the answer, the state, and where the money ends."""

import dataclasses
import os
import signal

import pytest

import chain
import operations
import sandbox
import transfers
from conftest import NOON
from facilitators import Outcome, Verdict
from parties import Scripted, balance, error, files, fork, nonce, send, serving

PRICE = 20_292_000
GRANT = 10_000_000_000
UNKNOWN = Outcome("unknown", reason="no answer: timed out")
OUTCOMES = {
    "no answer": UNKNOWN,
    "pending": Outcome("unknown", reason="settlement_pending"),
    "success without a hash": Outcome("settled", None),
    "success with a wrong hash": Outcome("settled", "0x" + "ab" * 32),
    "success with no hash at all": Outcome("settled", "soon"),
    "nonce already used": Outcome("unknown", reason="invalid_exact_evm_nonce_already_used"),
    "insufficient funds": Outcome("refused", reason="insufficient_funds"),
    "blacklisted": Outcome("refused", reason="address is blacklisted"),
    "unreachable": Outcome("unsent", reason="unreachable: connection refused"),
}
NO = ("insufficient funds", "blacklisted", "unreachable")  # final unless the chain shows the money


class Peer(Scripted):
    """A facilitator during whose settle something else happens too."""

    def __init__(self, real, *, before=lambda: None, after=lambda: None, **options):
        super().__init__(real, **options)
        self.before, self.after = before, after

    def settle(self, *args, **options):
        self.before()
        found = super().settle(*args, **options)
        self.after()
        return found


class Ledger:
    """The sandbox's ledger behind a node that can be switched off."""

    def __init__(self, real):
        self.real, self.down = real, False

    def __getattr__(self, name):
        if self.down:
            raise chain.ChainUnknown("the node is down")
        return getattr(self.real, name)


@pytest.fixture
def body(buyer):
    return buyer.request()


@pytest.fixture
def quote(buyer, body):
    return buyer.quote(body)


@pytest.fixture
def payment(buyer, quote):
    return buyer.x402(quote)


@pytest.fixture
def lands(buyer, quote, world, db):
    """Have a third party submit the buyer's authorization to the token."""
    authorization = buyer.authorization(quote)
    return lambda: sandbox.transfer(db, world.terminal.token, authorization, buyer.sign(authorization), now=world.now())


@pytest.fixture
def cancelled(buyer, quote, db):
    return lambda: sandbox.cancel(db, buyer.address, buyer.authorization(quote).nonce)


@pytest.fixture
def state(client, quote):
    return lambda: client.get(f"/v1/deals/{quote.json['extensions']['deal']['info']['id']}").json["state"]


@pytest.fixture
def held(world, quote):
    return lambda: balance(world, quote.json["accepts"][0]["payTo"])


def settle_once(db):
    return db.execute("SELECT count(*) FROM sandbox_authorizations WHERE units = 20292000").fetchone()[0]


# -- One facilitator, every answer, money moved and not moved -------------------------------------------------


@pytest.mark.parametrize("fault", OUTCOMES)
def test_money_that_moved_funds_the_deal_whatever_the_facilitator_says(fault, world, db, buyer, body, payment, held):
    client = serving(world, Scripted(world.facilitators[0], outcome=OUTCOMES[fault], moves=True))
    answer = send(client, body, payment)
    assert (answer.status_code, answer.json[0]["state"]) == (200, "funded")
    shown = db.execute("SELECT transaction_hash FROM sandbox_authorizations").fetchone()[0]
    assert answer.json[0]["payment"]["transaction"] == shown  # the chain's hash, not the facilitator's
    assert (held(), balance(world, buyer.address)) == (PRICE, GRANT - PRICE)
    assert operations.audit(db, world) == []


@pytest.mark.parametrize("fault", OUTCOMES)
def test_money_that_did_not_move_leaves_no_deal_funded(fault, world, db, buyer, body, payment, state, held, clock, sweep):
    status, now, at_last = (202, "pending", "funded") if fault not in NO else (502, "lapsed", "lapsed")
    status = 402 if fault == "insufficient funds" else status
    client = serving(world, Scripted(world.facilitators[0], outcome=OUTCOMES[fault]))
    answer = send(client, body, payment)
    assert (answer.status_code, held(), balance(world, buyer.address)) == (status, 0, GRANT)
    assert ("WWW-Authenticate" in answer.headers) == (status == 402)
    assert state() == now
    clock.now += 90
    sweep()  # the sweep's facilitator works: an open payment is sent again, one that is over is not
    assert (state(), held()) == (at_last, PRICE if at_last == "funded" else 0)
    assert operations.audit(db, world) == []


@pytest.mark.parametrize("fault", OUTCOMES)
def test_money_that_lands_after_the_answer_funds_or_goes_back(
    fault, world, db, buyer, body, payment, lands, state, held, clock, sweep
):
    client = serving(world, Scripted(world.facilitators[0], outcome=OUTCOMES[fault]))
    assert send(client, body, payment).status_code == (202 if fault not in NO else 402 if "funds" in fault else 502)
    lands()
    assert held() == PRICE
    clock.now += 90
    sweep()
    clock.now += 600
    sweep()
    if fault in NO:  # the attempt was over: late money is surplus, and the payer's again
        assert (state(), held(), balance(world, buyer.address)) == ("lapsed", 0, GRANT)
    else:
        assert (state(), held(), balance(world, buyer.address)) == ("funded", PRICE, GRANT - PRICE)
    assert settle_once(db) == (2 if fault in NO else 1)  # its way in, and its way back
    assert operations.audit(db, world) == []


@pytest.mark.parametrize("fault", [name for name in OUTCOMES if name not in NO])
def test_an_outcome_that_stays_unknown_lapses_when_the_authorization_is_dead(
    fault, world, db, buyer, body, payment, state, held, clock, wallets
):
    dead = dataclasses.replace(world, facilitators=(Scripted(world.facilitators[0], outcome=OUTCOMES[fault]),))
    assert send(serving(world, *dead.facilitators), body, payment).status_code == 202
    clock.now = NOON + 300 + 60
    transfers.sweep(db, dead, wallets)
    assert state() == "pending"  # validBefore and its margin are past only with the next second
    clock.now += 301
    transfers.sweep(db, dead, wallets)
    assert (state(), held(), balance(world, buyer.address)) == ("lapsed", 0, GRANT)
    answer = send(serving(world, *dead.facilitators), body, payment)
    assert answer.status_code == 402 and "expires too soon" in answer.json["error"]


@pytest.mark.parametrize("pauses, status", [(1, 200), (5, 200), (6, 202)])
def test_money_on_its_way_is_waited_for_some_seconds_and_no_longer(pauses, status, world, body, payment, lands, state, clock):
    naps = []

    def sleep(seconds):
        clock.sleep(seconds)
        naps.append(seconds)
        if len(naps) == pauses:
            lands()

    peer = Scripted(world.facilitators[0], outcome=Outcome("settled", "0x" + "ab" * 32))
    answer = send(serving(dataclasses.replace(world, sleep=sleep), peer), body, payment)
    assert (answer.status_code, state()) == (status, "funded" if status == 200 else "pending")
    assert sum(naps) <= 6


def test_a_worker_that_wakes_up_after_its_payment_was_given_up_funds_nothing(
    world, db, body, payment, buyer, lands, state, held, clock, wallets, sweep
):
    real = world.facilitators[0]

    def long_sleep():
        clock.now += 200
        lands()  # in time for the token, but the sweep's node does not see it yet
        hidden = db.execute("SELECT nonce, (SELECT units FROM sandbox_balances WHERE address = ?) AS units"
                            " FROM sandbox_authorizations", (landed,)).fetchone()  # fmt: skip
        db.execute("UPDATE sandbox_authorizations SET nonce = 'unseen'")
        db.execute("UPDATE sandbox_balances SET units = 0 WHERE address = ?", (landed,))
        clock.now += 200
        transfers.sweep(db, dataclasses.replace(world, facilitators=(Scripted(real, outcome=UNKNOWN),)), wallets)
        assert state() == "lapsed"
        db.execute("UPDATE sandbox_authorizations SET nonce = ?", (hidden["nonce"],))
        db.execute("UPDATE sandbox_balances SET units = ? WHERE address = ?", (hidden["units"], landed))

    landed = buyer.authorization(buyer.quote(body)).to
    answer = send(serving(world, Peer(real, outcome=UNKNOWN, after=long_sleep)), body, payment)
    assert error(answer) == (502, "settlement_failed") and state() == "lapsed"
    clock.now += 600
    sweep()
    assert (held(), balance(world, buyer.address), operations.audit(db, world)) == (0, GRANT, [])


# -- Two facilitators -----------------------------------------------------------------------------------------

YES, SILENT, REFUSES, GONE = None, UNKNOWN, OUTCOMES["insufficient funds"], OUTCOMES["unreachable"]


@pytest.mark.parametrize(
    "first, second, status, calls",
    [
        (SILENT, YES, 200, 1), (SILENT, REFUSES, 202, 1), (SILENT, GONE, 202, 1), (SILENT, SILENT, 202, 1),
        (GONE, YES, 200, 1), (GONE, REFUSES, 402, 1), (GONE, GONE, 502, 1), (GONE, SILENT, 202, 1),
        (REFUSES, YES, 402, 0), (YES, REFUSES, 200, 0), (OUTCOMES["success without a hash"], YES, 202, 0),
    ],
)  # fmt: skip
def test_the_second_facilitator_is_asked_when_the_first_did_not_answer(
    first, second, status, calls, world, body, payment, state, clock, sweep
):
    real = world.facilitators[0]
    one, two = Scripted(real, outcome=first), Scripted(real, outcome=second, url="https://two.test")
    assert send(serving(world, one, two), body, payment).status_code == status
    assert (one.calls, two.calls) == (["verify", "settle"], ["settle"] * calls)
    clock.now += 90
    sweep()
    assert state() == ("lapsed" if status in (402, 502) else "funded")


def test_a_no_after_an_earlier_silence_does_not_end_a_payment_that_lands(world, body, payment, lands, state, clock, sweep):
    real = world.facilitators[0]
    peers = Scripted(real, outcome=SILENT), Peer(real, outcome=REFUSES, after=lands, url="https://two.test")
    assert send(serving(world, *peers), body, payment).status_code == 200
    assert state() == "funded"


@pytest.mark.parametrize("late", ["nonce already used", "insufficient funds", "blacklisted", "unreachable"])
def test_a_late_no_never_ends_a_payment_that_may_have_been_sent_before(
    late, world, client, body, payment, lands, state, held
):
    real = world.facilitators[0]
    assert send(serving(world, Scripted(real, outcome=SILENT)), body, payment).status_code == 202
    answer = send(serving(world, Scripted(real, outcome=OUTCOMES[late])), body, payment)
    assert (answer.status_code, state()) == (202, "pending")
    lands()
    answer = send(client, body, payment)  # a real "nonce already used" now, on a payment that landed
    assert (answer.status_code, state(), held()) == (200, "funded", PRICE)


@pytest.mark.parametrize("verdict, status, calls", [(None, 200, ["verify"]), (Verdict(None, "no answer"), 503, ["verify"]),
                                                    (Verdict(False, "invalid"), 402, ["verify"])])  # fmt: skip
def test_verify_goes_on_to_the_next_facilitator_only_for_want_of_a_verdict(verdict, status, calls, world, body, payment):
    real, before = world.facilitators[0], files(world)
    one = Scripted(real, verdict=Verdict(None, "HTTP 500"))
    two = Scripted(real, verdict=verdict, url="https://two.test")
    answer = send(serving(world, one, two), body, payment)
    assert (answer.status_code, two.calls[:1]) == (status, calls)
    assert (files(world) == before) == (status != 200)


# -- The chain's word -----------------------------------------------------------------------------------------


def test_a_node_that_is_down_after_settling_answers_202_and_later_the_truth(world, db, body, payment, quote, held, clock):
    ledger = Ledger(world.ledger)
    world = dataclasses.replace(world, ledger=ledger)
    peer = Peer(world.facilitators[0], after=lambda: setattr(ledger, "down", True))
    client = serving(world, peer)
    answer = send(client, body, payment)
    assert (answer.status_code, held()) == (202, PRICE)
    path = answer.headers["Location"]
    clock.now += 10
    assert client.get(path).json["state"] == "pending"
    assert send(client, body, payment).status_code == 202
    ledger.down = False
    clock.now += 10
    assert client.get(path).json["state"] == "funded"
    peer.after = lambda: None
    assert send(client, body, payment).status_code == 200
    assert settle_once(db) == 1


@pytest.mark.parametrize("outcome", [REFUSES, GONE])
def test_a_no_that_the_chain_cannot_confirm_is_unknown(outcome, world, body, payment, state, clock, sweep):
    ledger = Ledger(world.ledger)
    peer = Peer(world.facilitators[0], outcome=outcome, after=lambda: setattr(ledger, "down", True))
    assert send(serving(dataclasses.replace(world, ledger=ledger), peer), body, payment).status_code == 202
    clock.now += 90
    sweep()
    assert state() == "funded"


def test_a_node_that_is_down_while_a_used_nonce_is_looked_up_answers_503(world, body, payment, lands, held):
    ledger = Ledger(world.ledger)
    lands()
    ledger.down = True
    client, before = serving(dataclasses.replace(world, ledger=ledger), world.facilitators[0]), files(world)
    assert error(send(client, body, payment)) == (503, "unavailable")
    assert files(world) == before
    ledger.down = False
    assert send(client, body, payment).status_code == 200
    assert held() == PRICE


@pytest.mark.parametrize("when", ["before verify", "before settle", "after settle"])
def test_an_authorization_that_a_third_party_submitted_funds_once(when, world, db, body, payment, buyer, lands, held):
    peer = Peer(world.facilitators[0], before=lands if when == "before settle" else lambda: None)
    if when == "before verify":
        lands()
    if when == "after settle":
        peer.outcome, peer.after = SILENT, lands
    answer = send(serving(world, peer), body, payment)
    assert (answer.status_code, answer.json[0]["state"]) == (200, "funded")
    assert peer.calls == (["verify"] if when == "before verify" else ["verify", "settle"])
    assert (held(), balance(world, buyer.address), settle_once(db)) == (PRICE, GRANT - PRICE, 1)


def test_an_authorization_cancelled_before_verify_is_refused_without_a_trace(world, client, body, payment, cancelled):
    cancelled()
    before = files(world)
    answer = send(client, body, payment)
    assert answer.status_code == 402 and "nonce" in answer.json["error"]
    assert files(world) == before


def test_an_authorization_cancelled_between_verify_and_settle_is_over_at_once(world, body, payment, cancelled, state, held):
    peer = Peer(world.facilitators[0], before=cancelled)
    assert error(send(serving(world, peer), body, payment)) == (502, "settlement_failed")
    assert (state(), held()) == ("lapsed", 0)


def test_money_beside_a_cancelled_authorization_never_funds_and_goes_back(
    world, db, body, payment, cancelled, quote, buyer, state, held, clock, sweep
):
    # The buyer cancels its authorization and sends the price by itself: not the payment it signed for these terms.
    pay_to = quote.json["accepts"][0]["payTo"].lower()
    peer = Peer(world.facilitators[0], before=lambda: (cancelled(), sandbox.mint(db, pay_to, PRICE)))
    assert send(serving(world, peer), body, payment).status_code == 202
    for _ in range(30):
        clock.now += 300
        sweep(2)
    assert (state(), held(), balance(world, buyer.address)) == ("lapsed", 0, GRANT + PRICE)


def test_a_nonce_used_for_another_payee_pays_no_deal(world, client, db, buyer, body, quote, payment):
    away = buyer.authorization(quote, to="0x" + "77" * 20)
    sandbox.transfer(db, world.terminal.token, away, buyer.sign(away), now=NOON)
    before = files(world)
    assert send(client, body, payment).status_code == 402
    assert files(world) == before


AUTHORIZATION = chain.Authorization("0x" + "11" * 20, "0x" + "22" * 20, PRICE, 0, NOON + 300, nonce(7))


def receipt(address, **changes):
    word = lambda value: "0x" + value.removeprefix("0x").rjust(64, "0")
    found = {"payer": AUTHORIZATION.payer, "to": AUTHORIZATION.to, "nonce": AUTHORIZATION.nonce, "units": PRICE,
             "token": address, "status": "0x1", **changes}  # fmt: skip
    used = {"address": found["token"], "topics": [chain.AUTHORIZATION_USED, word(found["payer"]), found["nonce"]], "data": "0x"}
    moved = {"address": found["token"], "topics": [chain.TRANSFER, word(found["payer"]), word(found["to"])],
             "data": word(hex(found["units"]))}  # fmt: skip
    return {"status": found["status"], "logs": [used, moved]}


@pytest.mark.parametrize("changes, proves", [
    ({}, True), (None, False), ({"status": "0x0"}, False), ({"status": None}, False), ({"nonce": nonce(8)}, False),
    ({"to": "0x" + "33" * 20}, False), ({"payer": "0x" + "33" * 20}, False), ({"units": PRICE - 1}, False),
    ({"units": PRICE + 1}, False), ({"token": "0x" + "44" * 20}, False),
])  # fmt: skip
def test_a_hash_counts_only_if_its_receipt_shows_this_very_authorization(world, changes, proves, monkeypatch):
    token = world.terminal.token
    found = None if changes is None else receipt(token.address, **changes)
    ledger = chain.Ledger("http://node.test", token)
    results = {"eth_call": hex(PRICE), "eth_getTransactionReceipt": found, "eth_getLogs": [],
               "eth_getBlockByNumber": {"number": "0x1000", "timestamp": hex(NOON)}}  # fmt: skip
    monkeypatch.setattr(ledger, "_ask", lambda *calls: [results[method] for method, _ in calls])
    claimed = "0x" + "ab" * 32
    assert ledger.payment(AUTHORIZATION, since=NOON, hint=claimed) == (PRICE, claimed if proves else None)
    assert ledger.payment(AUTHORIZATION, since=NOON, hint="soon") == (PRICE, None)


# -- The circuit breaker and the slots ------------------------------------------------------------------------


def test_a_facilitator_that_keeps_failing_is_rested_and_probed_back(world, buyer, clock):
    peer = Scripted(world.facilitators[0], verdict=Verdict(None, "HTTP 500"))
    client = serving(world, peer)

    def pay(ref):
        body = buyer.request(ref=ref)
        quote = buyer.quote(body)
        return send(client, body, buyer.x402(quote)).status_code

    assert [pay(f"failing {n}") for n in range(5)] == [503] * 5
    assert len(peer.calls) == 5
    assert (pay("resting"), len(peer.calls)) == (503, 5)
    clock.now += 30
    assert (pay("probe"), len(peer.calls)) == (503, 6)
    assert (pay("resting again"), len(peer.calls)) == (503, 6)
    clock.now += 30
    peer.verdict = None
    assert [pay("works"), pay("works on")] == [200, 200]
    assert len(peer.calls) == 10


def test_a_resting_facilitator_leaves_the_call_to_the_next(world, buyer):
    real = world.facilitators[0]
    one, two = Scripted(real, verdict=Verdict(None, "HTTP 500")), Scripted(real, url="https://two.test")
    client = serving(world, one, two)
    for number in range(7):
        body = buyer.request(ref=str(number))
        one.outcome = UNKNOWN
        assert send(client, body, buyer.x402(buyer.quote(body))).status_code == 200
    assert one.calls.count("verify") + one.calls.count("settle") == 5


def test_payers_whose_payments_fail_do_not_rest_a_facilitator_for_the_others(world, db, buyer):
    peer = Peer(world.facilitators[0])
    client = serving(world, peer)
    for number in range(8):
        body = buyer.request(ref=str(number))
        quote = buyer.quote(body)
        used = buyer.authorization(quote).nonce
        peer.before = lambda: sandbox.cancel(db, buyer.address, used)
        assert send(client, body, buyer.x402(quote)).status_code == 502
    peer.before = lambda: None
    body = buyer.request(ref="honest")
    assert send(client, body, buyer.x402(buyer.quote(body))).status_code == 200


def nested(world, buyer, statuses, address, **limits):
    """Pay while another paid call from ``address`` is being settled; note the status of the inner call."""
    inner, outer = buyer.request(ref=f"inner {address}"), buyer.request(ref=f"outer {address}")
    inner_payment, outer_payment = buyer.x402(buyer.quote(inner)), buyer.x402(buyer.quote(outer))
    peer = Peer(world.facilitators[0])
    client = serving(world, peer, **limits)

    def during():
        peer.before = lambda: None
        found = client.post("/x402/deal", json=inner, headers=inner_payment, environ_overrides={"REMOTE_ADDR": address})
        statuses.append((found.status_code, found.headers.get("Retry-After")))
        assert client.post("/x402/deal", json=buyer.request(ref="free")).status_code == 402  # quotes take no slot

    peer.before = during
    assert send(client, outer, outer_payment).status_code == 200
    again = client.post("/x402/deal", json=inner, headers=inner_payment, environ_overrides={"REMOTE_ADDR": address})
    assert again.status_code == 200


@pytest.mark.parametrize("limits, address, status", [
    ({"max_in_flight": 1}, "198.51.100.7", (429, "5")), ({"max_in_flight": 2}, "198.51.100.7", (200, None)),
    ({"max_in_flight_per_client": 1}, "127.0.0.1", (429, "5")), ({"max_in_flight_per_client": 1}, "198.51.100.7", (200, None)),
])  # fmt: skip
def test_too_many_calls_in_flight_are_told_to_come_back(limits, address, status, world, buyer):
    statuses = []
    nested(world, buyer, statuses, address, **limits)
    assert statuses == [status]


def test_the_slot_of_a_killed_worker_is_free_again(world, buyer):
    one, two = buyer.request(ref="one"), buyer.request(ref="two")
    first, second = buyer.x402(buyer.quote(one)), buyer.x402(buyer.quote(two))
    ready, told = os.pipe()
    stuck = Peer(world.facilitators[0], before=lambda: (os.write(told, b"."), signal.pause()))
    pid = fork(lambda: send(serving(world, stuck, max_in_flight=1), one, first))
    try:
        assert os.read(ready, 1) == b"."
        client = serving(world, world.facilitators[0], max_in_flight=1)
        refused = send(client, two, second)
        assert error(refused) == (429, "rate_limited") and refused.headers["Retry-After"] == "5"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert send(client, two, second).status_code == 200
    assert error(send(client, one, first)) == (409, "payment_in_progress")  # until the dead worker's lease is over
    world.clock.now += 46
    assert send(client, one, first).status_code == 200
