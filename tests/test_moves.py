"""Every move from every state, a second before, at and after its deadline; who may; what it does to the money."""


import pytest
from conftest import NOON
from parties import Seller
from states import BUYER, SELLER, reach

import actions
import db as database
import deals
import operations
import transfers
from db import sqlite3

STATES = "pending funded accepted delivered disputed released refunded split lapsed".split()
HOUR = 3600

# Ten hours to deliver, five to review, a week to decide, all counted from NOON. A pending deal's payment is dead a
# minute after it expires, which is made to be the same moment; in an ended deal that moment means nothing any more.
DEADLINE = {
    "pending": NOON + 10 * HOUR, "funded": NOON + 10 * HOUR, "accepted": NOON + 10 * HOUR,
    "delivered": NOON + 5 * HOUR, "disputed": NOON + 168 * HOUR,
    "released": NOON + 5 * HOUR, "refunded": NOON + 10 * HOUR, "split": NOON + 10 * HOUR, "lapsed": NOON + 10 * HOUR,
}  # fmt: skip
MOMENTS = {"one second before": -1, "at": 0, "one second after": 1}

# What each operation comes to, state by state in the order of STATES. A state: it is made and leads there. A dot: it is
# refused and changes nothing. ">state": it is refused, since the clock was first. "=": nothing was asked of it.
BEFORE = {
    #                  pending  funded    accepted   delivered  disputed  released refunded split lapsed
    "accept":          ".       accepted  .          .          .         .        .        .     .",
    "deliver":         ".       .         delivered  .          .         .        .        .     .",
    "confirm":         ".       .         .          released   released  .        .        .     .",
    "cancel":          ".       refunded  .          .          .         .        .        .     .",
    "dispute":         ".       .         .          disputed   .         .        .        .     .",
    "refund":          ".       refunded  refunded   refunded   refunded  .        .        .     .",
    "split":           ".       .         split      split      split     .        .        .     .",
    "statement":       ".       .         .          .          disputed  .        .        .     .",
    "resolve release": ".       .         .          .          released  .        .        .     .",
    "resolve refund":  ".       .         .          .          refunded  .        .        .     .",
    "resolve split":   ".       .         .          .          split     .        .        .     .",
    "read":            "=       =         =          =          =         =        =        =     =",
    "sweep":           "=       =         =          =          =         =        =        =     =",
}  # fmt: skip
BEFORE_INSTANT = BEFORE | {
    "deliver":         ".       delivered delivered  .          .         .        .        .     .",
    "confirm":         ".       released  released   released   released  .        .        .     .",
}  # fmt: skip
LATE_ASKED =           ".       >refunded >refunded  >released  >refunded .        .        .     ."  # fmt: skip
LATE_READ =            "=       refunded  refunded   released   refunded  =        =        =     ="  # fmt: skip
VERY_LATE_READ =       "lapsed  refunded  refunded   released   refunded  =        =        =     ="  # fmt: skip


def expected(operation, moment, instant):
    if moment == "one second before":
        return (BEFORE_INSTANT if instant else BEFORE)[operation].split()
    if operation in ("read", "sweep"):
        return (LATE_READ if moment == "at" else VERY_LATE_READ).split()
    return LATE_ASKED.split()


FIELDS = {
    "dispute": {"reason": "Half of it is missing."},
    "statement": {"statement": "It is all there."},
    "split": {"seller_usd": "5.00"},
}
SIDES = {"accept": "seller", "deliver": "seller", "refund": "seller", "statement": "seller", "split": "seller"}


class Service:
    """The parts that an operation goes through, on one database."""

    def __init__(self, db, world, wallets, client, clock, buyer, seller):
        self.db, self.world, self.wallets, self.client, self.clock = db, world, wallets, client, clock
        self.parties = {"buyer": buyer, "seller": seller}

    def state(self, deal_id):
        return self.db.execute("SELECT state FROM deals WHERE id = ?", (deal_id,)).fetchone()["state"]

    def attempt(self, operation, deal_id):
        """Try an operation and say what came of it in the words of the table."""
        old = self.state(deal_id)
        made = self.do(operation, deal_id)
        new = self.state(deal_id)
        if operation in ("read", "sweep"):
            return "=" if new == old else new
        if made:
            return new
        return "." if new == old else ">" + new

    def do(self, operation, deal_id):
        if operation == "sweep":
            return transfers.sweep(self.db, self.world, self.wallets)
        if operation == "read":
            answer = self.client.get(f"/v1/deals/{deal_id}")
            assert (answer.status_code, answer.json["state"]) == (200, self.state(deal_id))
            return True
        if operation.startswith("resolve"):
            return self.resolve(operation.split()[1], deal_id)
        if operation == "split":  # the buyer offers the same, so that the seller's word makes the split
            self.db.execute("UPDATE deals SET buyer_offer_units = 5000000 WHERE id = ?", (deal_id,))
        answer = self.parties[SIDES.get(operation, "buyer")].act(deal_id, operation, FIELDS.get(operation))
        assert answer.json["state"] == self.state(deal_id)
        assert answer.status_code == 200 or (answer.status_code, answer.json["error"]) == (409, "invalid_state")
        return answer.status_code == 200

    def resolve(self, outcome, deal_id):
        try:
            units = 5_000_000 if outcome == "split" else None
            return operations.resolve_dispute(self.db, self.world, deal_id, outcome, note="Seen.", seller_units=units)
        except deals.Refusal as refusal:
            assert refusal.code == "invalid_state"
            return None


@pytest.fixture
def service(db, world, wallets, client, clock, buyer, seller):
    return Service(db, world, wallets, client, clock, buyer, seller)


@pytest.mark.parametrize("instant", [False, True], ids=["", "instant"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("operation", BEFORE)
def test_an_operation_is_made_in_the_states_and_up_to_the_moment_that_the_table_says(service, operation, moment, instant):
    found = []
    for state in STATES:
        service.clock.now = NOON
        deal_id = reach(service.db, service.world, state, instant=instant)
        service.clock.now = DEADLINE[state] + MOMENTS[moment]
        found.append(service.attempt(operation, deal_id))
    assert found == expected(operation, moment, instant)


# The rows themselves, below HTTP: what a move does when nothing has let the clock go first.

CLOCK_MOVES = {"expire": "funded accepted", "release": "delivered", "undecided": "disputed"}
TIMED_MOVES = {"accept": "funded", "deliver": "accepted", "dispute": "delivered"}
UNTIMED = {"fund": "pending", "lapse": "pending"}


def moved(service, name, deal_id, *, actor):
    values = {"url": None, "sha256": None, "note": None, "reason": "No.", "look_at": None}
    with database.transaction(service.db):
        return deals.move(
            service.db, deal_id, name, now=service.world.now(), actor=actor, treasury=service.world.treasury, **values
        )


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", [*CLOCK_MOVES, *TIMED_MOVES, *UNTIMED])
def test_a_move_alone_keeps_its_states_and_its_half_open_deadline(service, name, moment):
    actor = {"fund": "chain", "accept": "seller", "deliver": "seller", "dispute": "buyer"}.get(name, "clock")
    sources = (CLOCK_MOVES | TIMED_MOVES | UNTIMED)[name].split()
    in_time = moment == "one second before"
    for state in STATES:
        service.clock.now = NOON
        deal_id = reach(service.db, service.world, state)
        service.clock.now = DEADLINE[state] + MOMENTS[moment]
        if name in CLOCK_MOVES:
            allowed = state in sources and not in_time
        else:
            allowed = state in sources and (in_time or name in UNTIMED)
        assert (moved(service, name, deal_id, actor=actor) is not None) == allowed, state


@pytest.mark.parametrize(
    "name, actor",
    [("fund", "seller"), ("fund", "clock"), ("accept", "buyer"), ("confirm", "seller"), ("cancel", "seller"),
     ("refund", "buyer"), ("expire", "seller"), ("release", "seller"), ("resolve_release", "seller"),
     ("resolve_split", "buyer"), ("undecided", "operator")],
)  # fmt: skip
def test_a_move_by_somebody_else_is_a_programmers_error(service, name, actor):
    deal_id = reach(service.db, service.world, "disputed")
    with pytest.raises(AssertionError):
        moved(service, name, deal_id, actor=actor)


@pytest.mark.parametrize("who", ["the other party", "a stranger"])
@pytest.mark.parametrize(
    "action, state, right",
    [("accept", "funded", "seller"), ("deliver", "accepted", "seller"), ("refund", "delivered", "seller"),
     ("statement", "disputed", "seller"), ("confirm", "delivered", "buyer"), ("cancel", "funded", "buyer"),
     ("dispute", "delivered", "buyer")],
)  # fmt: skip
def test_only_its_own_party_can_make_a_move(service, charlie, action, state, right, who):
    deal_id = reach(service.db, service.world, state)
    other = {"seller": "buyer", "buyer": "seller"}[right]
    wrong = charlie if who == "a stranger" else service.parties[other]
    account = {"seller": SELLER, "buyer": BUYER}[right]
    for claimed in (account, wrong.address):
        proof = wrong.proof(deal_id, action, FIELDS.get(action), account=claimed)
        answer = wrong.post(deal_id, action, proof)
        assert (answer.status_code, answer.json["error"]) == (403, "invalid_signature")
    assert service.state(deal_id) == state
    answer = service.parties[right].act(deal_id, action, FIELDS.get(action))
    assert answer.status_code == 200


def test_a_split_needs_the_parties_themselves(service, charlie):
    deal_id = reach(service.db, service.world, "accepted")
    assert service.parties["seller"].act(deal_id, "split", {"seller_usd": "5.00"}).json["state"] == "accepted"
    assert charlie.act(deal_id, "split", {"seller_usd": "5.00"}).status_code == 403
    assert service.state(deal_id) == "accepted"


def test_the_sweep_applies_what_is_due_even_if_nobody_ever_reads(service):
    late = [reach(service.db, service.world, state) for state in ("funded", "delivered", "disputed")]
    service.clock.now = NOON + 168 * HOUR
    counts = transfers.sweep(service.db, service.world, service.wallets)
    assert counts["timers"] == 3
    assert [service.state(deal_id) for deal_id in late] == ["refunded", "released", "refunded"]
    again = transfers.sweep(service.db, service.world, service.wallets)
    assert again["timers"] == 0


def test_timers_start_with_the_move_that_sets_them(service):
    seller, buyer = service.parties["seller"], service.parties["buyer"]
    deal_id = buyer.deal(seller, deadline_hours=10, review_hours=5)
    service.clock.now = NOON + 100
    record = seller.act(deal_id, "accept").json
    assert record["deliver_by"] == "2026-09-22T00:13:20Z"  # ten hours after NOON: accepting does not prolong it
    record = seller.act(deal_id, "deliver").json
    assert record["review_ends_at"] == "2026-09-21T19:15:00Z"  # five hours after the delivery
    service.clock.now = NOON + 200
    record = buyer.reveal(deal_id, "dispute", {"reason": "No."}).json
    assert record["decide_by"] == "2026-09-28T14:16:40Z"  # seven days after the dispute
    assert record["next"] == {"event": "undecided", "at": "2026-09-28T14:16:40Z", "state": "refunded"}


# Money: the legs that each ending fixes, out of 20.292 paid for a deal of 20.

ALL = [("seller", SELLER, 20_000_000), ("fee", None, 292_000)]
NONE = [("buyer", BUYER, 20_000_000), ("fee", None, 292_000)]
QUARTER = [("seller", SELLER, 5_000_000), ("buyer", BUYER, 15_000_000), ("fee", None, 292_000)]


@pytest.mark.parametrize(
    "operation, state, instant, legs",
    [
        ("confirm", "delivered", False, ALL),
        ("confirm", "disputed", False, ALL),
        ("confirm", "funded", True, ALL),
        ("confirm", "accepted", True, ALL),
        ("cancel", "funded", False, NONE),
        ("refund", "funded", False, NONE),
        ("refund", "accepted", False, NONE),
        ("refund", "delivered", False, NONE),
        ("refund", "disputed", False, NONE),
        ("split", "accepted", False, QUARTER),
        ("split", "delivered", False, QUARTER),
        ("split", "disputed", False, QUARTER),
        ("resolve release", "disputed", False, ALL),
        ("resolve refund", "disputed", False, NONE),
        ("resolve split", "disputed", False, QUARTER),
        ("the clock", "funded", False, NONE),
        ("the clock", "accepted", False, NONE),
        ("the clock", "delivered", False, ALL),
        ("the clock", "disputed", False, NONE),
    ],
)
def test_an_ending_fixes_who_gets_what_in_the_same_step(service, operation, state, instant, legs):
    deal_id = reach(service.db, service.world, state, instant=instant)
    if operation == "the clock":
        service.clock.now = DEADLINE[state]
        operation = "read"
    service.attempt(operation, deal_id)
    rows = service.db.execute(
        "SELECT leg, payee, value_units, status FROM transfers WHERE deal_id = ? AND leg <> 'guarantee'", (deal_id,)
    ).fetchall()
    wanted = {(leg, payee or service.world.treasury, units, "due") for leg, payee, units in legs}
    assert {tuple(row) for row in rows} == wanted
    assert len(rows) == len(wanted)
    held = service.db.execute("SELECT ended_at, due_at FROM deals WHERE id = ?", (deal_id,)).fetchone()
    assert tuple(held) == (service.world.now(), None)


@pytest.mark.parametrize(
    "seller_usd, legs",
    [
        ("0", NONE),
        ("0.01", [("seller", SELLER, 10_000), ("buyer", BUYER, 19_990_000), ("fee", None, 292_000)]),
        ("19.99", [("seller", SELLER, 19_990_000), ("buyer", BUYER, 10_000), ("fee", None, 292_000)]),
        ("20", ALL),
    ],
)
def test_a_split_at_the_edge_owes_nothing_to_whom_it_gives_nothing(service, seller_usd, legs):
    deal_id = reach(service.db, service.world, "accepted")
    for party in service.parties.values():
        party.act(deal_id, "split", {"seller_usd": seller_usd})
    assert service.state(deal_id) == "split"
    record = service.client.get(f"/v1/deals/{deal_id}").json
    assert [(leg["leg"], deals.units(leg["amount_usd"])) for leg in record["transfers"]] == [
        (leg, units) for leg, _, units in legs
    ]


def test_funding_owes_the_refund_guarantee_and_nothing_else(service):
    deal_id = reach(service.db, service.world, "funded")
    (row,) = service.db.execute("SELECT * FROM transfers WHERE deal_id = ?", (deal_id,)).fetchall()
    assert (row["leg"], row["payee"], row["value_units"]) == ("guarantee", BUYER, 20_292_000)
    assert row["valid_after"] == NOON + (10 + 5 + 168 + 7 * 24) * HOUR


@pytest.mark.parametrize("state", ["pending", "lapsed"])
def test_a_deal_that_was_never_funded_owes_nothing(service, state):
    deal_id = reach(service.db, service.world, state)
    assert service.db.execute("SELECT count(*) FROM transfers WHERE deal_id = ?", (deal_id,)).fetchone()[0] == 0


# What the database forbids by itself.


@pytest.mark.parametrize("ended", ["released", "refunded", "split"])
@pytest.mark.parametrize("state", STATES)
def test_the_database_keeps_an_ended_deal_ended(service, ended, state):
    deal_id = reach(service.db, service.world, ended)
    if state == ended:
        return
    units = {"released": 20_000_000, "refunded": 0, "split": 1}.get(state)
    due = NOON if state in ("funded", "accepted", "delivered", "disputed") else None
    with pytest.raises(sqlite3.IntegrityError, match="a deal that has ended stays ended"):
        service.db.execute(
            "UPDATE deals SET state = ?, seller_units = ?, due_at = ? WHERE id = ?", (state, units, due, deal_id)
        )


@pytest.mark.parametrize(
    "change",
    ["payee = '0x00'", "value_units = 1", "valid_after = 1", "valid_before = 1", "nonce = '0x00'",
     "signature = '0x00'", "signature = NULL, status = 'due'"],
)  # fmt: skip
def test_the_database_keeps_a_signed_transfer_as_it_was_signed(service, change):
    deal_id = reach(service.db, service.world, "released")
    transfers.sweep(service.db, service.world, service.wallets)
    with pytest.raises(sqlite3.IntegrityError, match="a signed transfer never changes"):
        service.db.execute(f"UPDATE transfers SET {change} WHERE deal_id = ? AND leg = 'seller'", (deal_id,))


@pytest.mark.parametrize(
    "state, change",
    [
        ("funded", "state = 'sold'"),
        ("funded", "state = 'released'"),  # without saying what the seller gets
        ("funded", "state = 'released', seller_units = 19999999, due_at = NULL"),
        ("funded", "state = 'refunded', seller_units = 1, due_at = NULL"),
        ("funded", "state = 'split', seller_units = 20000001, due_at = NULL"),
        ("funded", "state = 'split', seller_units = -1, due_at = NULL"),
        ("funded", "seller_units = 0"),  # not before it has ended
        ("funded", "due_at = NULL"),  # an open deal always has a timer
        ("funded", "seller_offer_units = 20000001"),
        ("funded", "buyer_offer_units = -1"),
        ("funded", "amount_units = 0"),
        ("funded", "price_units = 19999999"),
        ("funded", "buyer_address = seller_address"),
        ("funded", "instant = 2"),
        ("funded", "amount_units = 'much'"),
        ("pending", "state = 'funded', due_at = 1"),  # without a moment of funding
        ("pending", "due_at = 1"),
        ("released", "seller_units = NULL"),
        ("released", "seller_units = 0"),
        ("refunded", "seller_units = 20000000"),
    ],
)
def test_the_database_refuses_a_deal_that_contradicts_itself(service, state, change):
    deal_id = reach(service.db, service.world, state)
    with pytest.raises(sqlite3.IntegrityError):
        service.db.execute(f"UPDATE deals SET {change} WHERE id = ?", (deal_id,))


@pytest.mark.parametrize(
    "leg, units, status, signature, next_at",
    [
        ("seller", 1, "due", None, 1),  # there is one already
        ("bonus", 1, "due", None, 1),
        ("surplus-0", 1, "due", None, 1),
        ("buyer", 0, "due", None, 1),
        ("buyer", 1, "signed", None, 1),
        ("buyer", 1, "due", "0x00", 1),
        ("buyer", 1, "due", None, None),
        ("buyer", 1, "confirmed", "0x00", 1),
        ("buyer", 1, "paid", "0x00", 1),
    ],
)
def test_the_database_refuses_a_transfer_that_contradicts_itself(service, leg, units, status, signature, next_at):
    deal_id = reach(service.db, service.world, "released")
    row = (deal_id, leg, BUYER, units, 9, f"0x{leg}", signature, status, 1, next_at)
    with pytest.raises(sqlite3.IntegrityError):
        service.db.execute(
            "INSERT INTO transfers (deal_id, leg, payee, value_units, valid_before, nonce, signature, status, created_at,"
            " next_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )


def test_two_deals_never_share_a_deposit_or_a_payment(service):
    first, second = (reach(service.db, service.world, "funded", ref=ref) for ref in ("one", "two"))
    with pytest.raises(sqlite3.IntegrityError, match="deposit_address"):
        service.db.execute(
            "UPDATE deals SET deposit_address = (SELECT deposit_address FROM deals WHERE id = ?) WHERE id = ?",
            (first, second),
        )
    with pytest.raises(sqlite3.IntegrityError, match="payer, payments.nonce"):
        service.db.execute(
            "UPDATE payments SET nonce = (SELECT nonce FROM payments WHERE deal_id = ?) WHERE deal_id = ?",
            (first, second),
        )


@pytest.mark.parametrize("state", ["released", "refunded", "split"])
def test_nothing_that_anyone_does_changes_an_ended_deal(service, charlie, state):
    deal_id = reach(service.db, service.world, state)
    for _ in range(5):
        transfers.sweep(service.db, service.world, service.wallets)
    before = service.client.get(f"/v1/deals/{deal_id}").data
    service.clock.now = NOON + 10_000 * HOUR
    for action in actions.ACTORS:
        for party in (*service.parties.values(), charlie, Seller(service.client, service.world, 9)):
            assert party.act(deal_id, action, FIELDS.get(action)).status_code in (403, 409)
            service.clock.sleep(10)  # ten wrong proofs a minute would be stopped as such
    for outcome in ("release", "refund", "split"):
        assert service.resolve(outcome, deal_id) is None
    transfers.sweep(service.db, service.world, service.wallets)
    assert service.client.get(f"/v1/deals/{deal_id}").data == before
