"""What the simulator found, as tests of their own."""

import chain
import json

import pytest

import deals
import operations
import sandbox
import transfers
from deals import Refusal


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
