"""Random sequences of everything that may happen to deals, with the invariants about money checked after every step."""

import dataclasses
import random

import pytest

import app as application
import deals
import operations
import payments
import sandbox
import transfers
from db import sqlite3
from facilitators import Outcome, Verdict
from parties import SECRET, Buyer, Scripted, Seller, balance, nonce

FATES = [
    {}, {}, {}, {"outcome": Outcome("unknown", reason="no answer")},
    {"outcome": Outcome("unknown", reason="no answer"), "moves": True}, {"outcome": Outcome("settled", "0x" + "ab" * 32)},
    {"outcome": Outcome("refused", reason="insufficient_funds")}, {"outcome": Outcome("refused", reason="insufficient"), "moves": True},
    {"outcome": Outcome("unsent", reason="unreachable")}, {"verdict": Verdict(None, "HTTP 500")},
]  # fmt: skip
FREE = (400, 410, 413, 422, 429, 500, 502, 503)
TERMINAL = ("released", "refunded", "split")


class Story:
    """A few buyers and sellers who do things at random, and a facilitator that is never the same twice."""

    def __init__(self, world, db, wallets, clock, seed):
        self.db, self.wallets, self.clock, self.dice = db, wallets, clock, random.Random(seed)
        self.real = world.facilitators[0]
        self.peer = Scripted(self.real)
        self.world = dataclasses.replace(world, facilitators=(self.peer,))
        self.client = application.create_app(world=self.world).test_client()
        self.buyers = [Buyer(self.client, self.world, number).funded() for number in (11, 12)]
        self.sellers = [Seller(self.client, self.world, number) for number in (21, 22)]
        self.total = self.money()
        self.offers, self.deals, self.ended = [], {}, {}

    def money(self):
        return self.db.execute("SELECT sum(units) FROM sandbox_balances").fetchone()[0]

    def fate(self, **fate):
        fate = fate or self.dice.choice(FATES)
        self.peer.outcome, self.peer.moves, self.peer.verdict = fate.get("outcome"), fate.get("moves"), fate.get("verdict")

    # -- What may happen

    def quote(self):
        buyer, seller = self.dice.choice(self.buyers), self.dice.choice(self.sellers)
        body = buyer.request(seller, ref=f"story {len(self.offers)}", instant=self.dice.random() < 0.3)
        self.offers.append((body, buyer.quote(body), seller))

    def signed(self):
        """Return one of a few offers, a payer and a nonce that may well have been used before."""
        if not self.offers:
            self.quote()
        body, quote, seller = self.dice.choice(self.offers[-4:])
        buyer, number = self.dice.choice(self.buyers + self.buyers[:1]), self.dice.randrange(3)
        ahead = self.dice.choice((5, 30, 300, 900))
        return body, quote, seller, buyer, {"nonce": nonce(len(self.offers) // 3 * 10 + number), "valid_before": int(self.clock()) + ahead}

    def pay(self):
        body, quote, seller, buyer, changes = self.signed()
        self.fate()
        payment = buyer.x402(quote, **changes)
        held = sum(balance(self.world, one.address) for one in self.buyers)
        answer = self.client.post("/mpp/deal", json=body, headers=payment)
        deal = quote.json["extensions"]["deal"]["info"]["id"]
        self.deals[deal] = seller
        assert answer.status_code != 500, answer.text
        if answer.status_code in FREE and self.peer.moves is not True:
            assert sum(balance(self.world, one.address) for one in self.buyers) == held
        if answer.status_code == 200:
            assert answer.json[0]["id"] == deal and answer.json[0]["funded_at"]

    def stranger(self):
        """A third party submits, or the payer cancels, an authorization."""
        body, quote, _, buyer, changes = self.signed()
        authorization = buyer.authorization(quote, **changes)
        try:
            if self.dice.random() < 0.2:
                sandbox.cancel(self.db, buyer.address, authorization.nonce)
            else:
                sandbox.transfer(self.db, self.world.terminal.token, authorization, buyer.sign(authorization),
                                 now=self.world.now())  # fmt: skip
        except (sandbox.Refused, sqlite3.IntegrityError):
            pass

    def act(self):
        if not self.deals:
            return
        deal = self.dice.choice(list(self.deals))
        action = self.dice.choice(("accept", "accept", "accept", "deliver", "deliver", "refund", "confirm", "cancel", "dispute", "dispute", "split"))
        fields = {"dispute": {"reason": "late"}, "split": {"seller_usd": self.dice.choice(("5.00", "20.00"))}}.get(action, {})
        if action in ("accept", "deliver", "refund") or (action == "split" and self.dice.random() < 0.5):
            answer = self.deals[deal].act(deal, action, fields)
        else:
            answer = self.client.post(f"/v1/deals/{deal}/{action}", json={**fields, "secret": SECRET})
        assert answer.status_code in (200, 404, 409), answer.text

    def wait(self):
        self.clock.now += self.dice.choice((1, 10, 10, 60, 60, 400, 400, 4000, 90_000))

    def read(self):
        if self.deals:
            assert self.client.get(f"/v1/deals/{self.dice.choice(list(self.deals))}").status_code in (200, 404)

    def sweep(self):
        self.fate()
        self.counted(transfers.sweep(self.db, self.world, self.wallets))

    def resolve(self):
        for deal in self.db.execute("SELECT id FROM deals WHERE state = 'disputed'").fetchall()[:1]:
            outcome = self.dice.choice(("release", "refund"))
            try:
                operations.resolve_dispute(self.db, self.world, deal["id"], outcome, note="decided")
            except deals.Refusal as refusal:
                assert refusal.code == "invalid_state"

    def counted(self, counts):
        assert counts["errors"] == 0, counts

    # -- What must hold

    def check(self):
        assert self.money() == self.total
        for row in self.db.execute("SELECT id, state, deposit_address, funded_at FROM deals").fetchall():
            came, went = (
                self.db.execute(
                    f"SELECT coalesce(sum(units), 0) FROM sandbox_authorizations WHERE {side} = ?", (row["deposit_address"],)
                ).fetchone()[0]
                for side in ("payee", "authorizer")
            )
            assert came - went == balance(self.world, row["deposit_address"]) >= 0
            assert row["state"] in ("pending", "lapsed") or row["funded_at"] and came >= 20_292_000
            assert self.ended.setdefault(row["id"], row["state"]) == row["state"] or self.ended[row["id"]] not in TERMINAL
            self.ended[row["id"]] = row["state"]
        twice = "SELECT 1 FROM payments WHERE status = 'settled' GROUP BY {} HAVING count(*) > 1"
        assert not self.db.execute(twice.format("payer, nonce")).fetchall()
        assert not self.db.execute(twice.format("deal_id")).fetchall()

    def end(self):
        """Let all faults stop and time go by: everything reaches its end and the books close."""
        self.fate(outcome=None)
        self.run_on()
        states = {row["state"] for row in self.db.execute("SELECT state FROM deals").fetchall()}
        assert states <= {*TERMINAL, "lapsed"}
        for body, quote, _ in self.offers:  # what strangers sent where no deal was, or after its end, comes back too
            deal = deals.find(self.db, quote.json["extensions"]["deal"]["info"]["id"])
            payee = deal["buyer_address"] if deal else self.buyers[0].address
            operations.recover(self.db, self.world, payments.check_terms(self.world, body), payee, act=True)
        self.run_on()
        assert operations.audit(self.db, self.world) == []
        deposits = [row["deposit_address"] for row in self.db.execute("SELECT deposit_address FROM deals").fetchall()]
        assert [balance(self.world, address) for address in deposits] == [0] * len(deposits)

    def run_on(self):
        """Sweep for weeks; every sweep finds its facilitator well."""
        for pause in (100, 1000, 5000, 90_000, 90_000, 700_000, 3_000_000, 1000, 1000, 1000):
            self.clock.now += pause
            for _ in range(3):
                self.counted(transfers.sweep(self.db, self.world, self.wallets))
            self.check()
        assert not self.db.execute("SELECT * FROM transfers WHERE next_at IS NOT NULL").fetchall()


@pytest.mark.parametrize("seed", range(12))
def test_no_sequence_of_events_loses_money_pays_twice_or_reopens_what_has_ended(seed, world, db, wallets, clock):
    db.execute("PRAGMA synchronous = OFF")  # nothing here crashes
    story = Story(world, db, wallets, clock, seed)
    steps = [story.quote, story.pay, story.pay, story.pay, story.stranger, story.act, story.act, story.act, story.wait,
             story.read, story.sweep, story.sweep, story.resolve]  # fmt: skip
    for _ in range(160):
        step = story.dice.choice(steps)
        step()
        story.check()
    assert any(state in TERMINAL for state in story.ended.values())
    story.end()
