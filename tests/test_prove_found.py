"""What the simulator found, as tests of their own."""

import dataclasses
import json
import types

import pytest

import app as application
import chain
import deals
import operations
import sandbox
import settlement
import transfers
from deals import Refusal
from facilitators import Outcome


def parsed(db, deal_id):
    """Return the Terms that a deal was made with."""
    row = db.execute("SELECT terms FROM deals WHERE id = ?", (deal_id,)).fetchone()
    return deals.Terms(**json.loads(row["terms"]))


def test_money_sent_to_a_deal_that_is_over_can_be_returned_by_the_operator(db, world, buyer, seller, sweep):
    deal_id = buyer.deal(seller)
    buyer.reveal(deal_id, "cancel")
    sweep(12)
    deal = deals.find(db, deal_id)
    sandbox.mint(db, deal["deposit_address"], 7_000_000)
    _, units = operations.recover(db, world, parsed(db, deal_id), buyer.address, act=True)
    assert units == 7_000_000
    sweep(12)
    assert sandbox.balance(db, deal["deposit_address"]) == 0
    assert operations.audit(db, world) == []


def test_recover_refuses_while_a_deal_still_owes_its_payouts(db, world, buyer, seller):
    deal_id = buyer.deal(seller)
    buyer.reveal(deal_id, "cancel")
    db.execute("UPDATE deals SET look_at = NULL")
    with pytest.raises(Refusal, match="the sweep looks after it"):
        operations.recover(db, world, parsed(db, deal_id), buyer.address, act=True)


def test_less_than_a_cent_at_a_deposit_is_no_difference_of_the_audit(db, world, buyer, seller):
    deal = deals.find(db, buyer.deal(seller))
    sandbox.mint(db, deal["deposit_address"], 9_999)
    assert operations.audit(db, world) == []
    sandbox.mint(db, deal["deposit_address"], 1)
    assert [found["difference"] for found in operations.audit(db, world)] == [
        "the deposit holds 20302000 units, the books say 20292000"
    ]


def test_no_surplus_is_owed_for_money_that_a_lagging_node_still_shows(db, world, buyer, seller, sweep, monkeypatch):
    deal_id = buyer.deal(seller)
    buyer.reveal(deal_id, "cancel")
    sweep(12)
    deal = deals.find(db, deal_id)
    db.execute("UPDATE deals SET look_at = 0")
    monkeypatch.setattr(world.ledger, "balance", lambda address, at=None: 20_292_000)
    monkeypatch.setattr(world.ledger, "used", lambda pairs, at=None: [False] * len(pairs))
    transfers.sweep(db, world, {})
    legs = [row["leg"] for row in db.execute("SELECT leg FROM transfers WHERE deal_id = ?", (deal["id"],))]
    assert sorted(legs) == ["buyer", "fee", "guarantee"]


def test_a_payer_that_looked_before_another_ones_attempt_lapsed_does_not_take_it_over(
    db, world, buyer, charlie, seller, monkeypatch
):
    """While charlie's payment is verified, the buyer's comes, is refused wrongly, and may land any moment."""
    facilitator = world.facilitators[0]
    body = buyer.request(seller)
    headers = charlie.x402(charlie.quote(body))
    verify = facilitator.verify

    def slow_verify(*args, **options):
        monkeypatch.setattr(facilitator, "verify", verify)
        monkeypatch.setattr(facilitator, "settle", lambda *args, **options: Outcome("refused", reason="insufficient_funds"))
        assert buyer.pay(seller).status_code == 402
        return verify(*args, **options)

    monkeypatch.setattr(facilitator, "verify", slow_verify)
    answer = charlie.client.post("/x402/deal", json=body, headers=headers)
    assert (answer.status_code, answer.json["error"]) == (409, "deal_exists")
    assert db.execute("SELECT buyer_address FROM deals").fetchone()["buyer_address"] == buyer.address


class OldPayout(chain.Ledger):
    """A node that refuses log ranges over 2,000 blocks; one payout was used in block 500,000 of 700,000."""

    def __init__(self, landed=500_000):
        super().__init__("http://node.test", chain.Token("0x" + "11" * 20, "USD Coin", "2", 8453))
        self.landed = landed

    def _ask(self, *calls):
        return [getattr(self, method)(params) for method, params in calls]

    def eth_getBlockByNumber(self, params):
        return {"number": hex(700_000), "timestamp": hex(1_790_000_000)}

    def eth_call(self, params):
        return "0x" + "1".rjust(64, "0")

    def eth_getLogs(self, params):
        first, last = int(params[0]["fromBlock"], 16), int(params[0]["toBlock"], 16)
        if last - first >= 2_000:
            raise chain.ChainUnknown("block range is too wide")
        return [{"transactionHash": "0x" + "ab" * 32}] if first <= self.landed <= last else []

    def eth_getTransactionReceipt(self, params):
        return {"status": "0x1", "logs": []}

    def _proves(self, receipt, authorization):
        return True


def test_a_payout_that_landed_long_after_it_was_owed_is_found_in_ranges_that_nodes_accept():
    owed = 1_790_000_000 - 2 * 230_000  # 230,000 blocks ago, hence 30,000 before it landed
    leg = chain.Authorization("0x" + "22" * 20, "0x" + "33" * 20, 1, 0, owed + deals.LEG_LIFE, "0x" + "44" * 32)
    assert OldPayout(landed=690_000).transaction_of(leg, since=owed) == "0x" + "ab" * 32


def test_a_payout_beyond_the_search_costs_a_bounded_number_of_calls_and_is_no_error():
    owed = 1_790_000_000 - 2 * 699_000
    leg = chain.Authorization("0x" + "22" * 20, "0x" + "33" * 20, 1, 0, owed + deals.LEG_LIFE, "0x" + "44" * 32)
    assert OldPayout(landed=100).transaction_of(leg, since=owed) is None


def test_a_payment_claimed_while_the_clock_was_a_day_ahead_is_found():
    claimed = 1_790_000_000 - 3_600 + 86_400
    paid = chain.Authorization("0x" + "22" * 20, "0x" + "33" * 20, 1, 0, claimed + 300, "0x" + "44" * 32)
    assert OldPayout(landed=698_200).transaction_of(paid, since=claimed - 1_800) == "0x" + "ab" * 32


def test_a_payment_made_under_an_earlier_master_key_is_still_answered(db, world, client, buyer, seller):
    body = buyer.request(seller)
    payment = buyer.x402(buyer.quote(body))
    first = client.post("/x402/deal", json=body, headers=payment)
    another = bytes.fromhex("0279be667ef9dcbbac55a06295ce870b07029bfcdb2dce28d959f2815b16f81798")
    terminal = dataclasses.replace(world.terminal, master_key=another)
    later = application.create_app(world=dataclasses.replace(world, terminal=terminal)).test_client()
    again = later.post("/x402/deal", json=body, headers=payment)
    assert (again.status_code, again.data) == (200, first.data)


def unanswered(world, buyer, seller):
    """Pay while the facilitator gives no answer."""
    body = buyer.request(seller)
    payment = buyer.x402(buyer.quote(body))
    silent = types.SimpleNamespace(url="silent", verify=world.facilitators[0].verify, settle=lambda *_, **__: Outcome("unknown"))
    slow = application.create_app(world=dataclasses.replace(world, facilitators=(silent,))).test_client()
    assert slow.post("/x402/deal", json=body, headers=payment).status_code == 202


def test_a_worker_that_slept_through_its_lease_never_ends_what_another_has_sent(db, world, clock, buyer, seller):
    unanswered(world, buyer, seller)
    db.execute("UPDATE payments SET status = 'claimed', lease_until = :until", {"until": world.now() + 45})
    stale = db.execute("SELECT * FROM payments").fetchone()
    clock.sleep(50)
    assert settlement.take_lease(db, world, stale["id"], now=world.now())
    unreachable = dataclasses.replace(world, facilitators=())
    deposit = deals.find(db, stale["deal_id"])["deposit_address"]
    assert settlement.settle(db, unreachable, stale, deposit, send=True)["status"] == "unknown"
    assert deals.find(db, stale["deal_id"])["state"] == "pending"
    assert db.execute("SELECT lease_until FROM payments").fetchone()["lease_until"] == world.now() + 45


def test_a_fee_whose_parties_are_paid_while_a_sweep_holds_its_turn_is_sent_by_the_next_one_alone(
    db, world, buyer, seller, wallets, monkeypatch
):
    deal_id = buyer.deal(seller)
    buyer.reveal(deal_id, "cancel")
    db.execute("UPDATE transfers SET next_at = next_at + 60 WHERE leg = 'buyer'")  # in another sweep's hands
    take_turn, sent = transfers._take_turn, []

    def meanwhile(db, world, row):
        taken = take_turn(db, world, row)
        if row["leg"] == "fee" and not sent:
            leg = db.execute(
                "SELECT t.*, d.master_key, d.terms, d.deposit_address FROM transfers t JOIN deals d ON d.id = t.deal_id"
                " WHERE leg = 'buyer'"
            ).fetchone()
            leg = transfers._sign(db, world, wallets, leg, transfers.Counts())
            transfers._confirm(db, world, leg, transfers.Counts())
        return taken

    monkeypatch.setattr(transfers, "_take_turn", meanwhile)
    monkeypatch.setattr(transfers, "_send", lambda db, world, row, counts: sent.append(row["leg"]))
    transfers.sweep(db, world, wallets)
    assert sent == []
    transfers.sweep(db, world, wallets)
    assert sent == ["fee"]


def test_a_claim_that_a_stalled_worker_made_late_still_finds_what_landed_long_before(db, world, clock, buyer, seller):
    unanswered(world, buyer, seller)
    landed = clock()
    clock.sleep(4_000)  # an hour after it had expired
    db.execute("UPDATE payments SET status = 'claimed', claimed_at = :now, lease_until = :now + 45", {"now": world.now()})
    row = db.execute("SELECT p.*, d.deposit_address FROM payments p JOIN deals d ON d.id = p.deal_id").fetchone()

    def found(authorization, *, since, hint=None):
        return authorization.value, "0x" + "ab" * 32 if since <= landed else None

    ledger = types.SimpleNamespace(payment=found, head=world.ledger.head, used=lambda *_, **__: [True], balance=world.ledger.balance)
    late = dataclasses.replace(world, ledger=ledger)
    assert settlement.settle(db, late, row, row["deposit_address"], send=False)["status"] == "settled"
