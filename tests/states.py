"""Deals brought straight into any state, all at one instant, for tests that start there."""

import coincurve

import chain
import db as database
import deals
import sandbox
from parties import SECRET

AMOUNT, PRICE = 20_000_000, 20_292_000
BUYER, SELLER = (
    chain.address_of(coincurve.PublicKey.from_secret(number.to_bytes(32, "big")).format()) for number in (1, 2)
)
WAYS = {
    "pending": (),
    "funded": ("fund",),
    "accepted": ("fund", "accept"),
    "delivered": ("fund", "accept", "deliver"),
    "disputed": ("fund", "accept", "deliver", "dispute"),
    "released": ("fund", "accept", "deliver", "confirm"),
    "refunded": ("fund", "cancel"),
    "split": ("fund", "accept", "split"),
    "lapsed": ("lapse",),
}
CONTENT = {
    "deliver": {"url": "https://files.test/work.pdf", "sha256": None, "note": None},
    "dispute": {"reason": "Half of it is missing."},
    "lapse": {"look_at": None},
}


def reach(db, world, state, *, ref=None, hours=(10, 5), instant=False):
    """Make a deal of 20 dollars between parties 1 and 2 that is in ``state`` since now; returns its id.

    ``hours`` are those to deliver and to review. From ``funded`` on, the buyer's payment is on the chain. The payment of
    one that stays ``pending`` can settle no more, and is dead 60 seconds after the deadline that delivery would have.
    """
    now = world.now()
    terms = deals.Terms(
        amount_units=AMOUNT, seller_address=SELLER, secret_hash=chain.sha256(SECRET.encode()).hex(),
        deadline_hours=hours[0], review_hours=hours[1], instant=instant, ref=f"{state} {ref}",
    )  # fmt: skip
    master_key = world.terminal.master_key
    deal_id, deposit = terms.deal_id(master_key), chain.deposit_address(master_key, terms.canonical)
    authorization = chain.Authorization(BUYER, deposit, PRICE, 0, now + hours[0] * 3600 - 60, deals.leg_nonce(deal_id, "payment"))
    signature = "0x" + "5b" * 64 + "1c"
    if "fund" in WAYS[state]:
        signature = _settle(world, authorization)
    with database.transaction(db):
        deals.open_attempt(
            db, terms, deal_id=deal_id, deposit=deposit, master_key=master_key, price_units=PRICE, buyer=BUYER,
            decide_hours=168, now=now,
        )  # fmt: skip
        db.execute(
            "INSERT INTO payments (deal_id, attempt, payer, nonce, protocol, status, value_units, valid_after,"
            " valid_before, signature, resource_url, claimed_at, lease_until)"
            " VALUES (:deal, 1, :payer, :nonce, 'x402', :status, :value, 0, :before, :signature, '', :now, 0)",
            {"deal": deal_id, "payer": BUYER, "nonce": authorization.nonce, "value": PRICE,
             "status": {"pending": "unknown", "lapsed": "refused"}.get(state, "settled"),
             "before": authorization.valid_before, "signature": signature, "now": now},
        )  # fmt: skip
        for name in WAYS[state]:
            if name == "split":
                db.execute("UPDATE deals SET seller_offer_units = 7500000, buyer_offer_units = 7500000 WHERE id = ?", (deal_id,))
            actor = deals.MOVES[name].actors[0]
            moved = deals.move(
                db, deal_id, name, now=now, actor=actor, treasury=world.treasury, **CONTENT.get(name, {})
            )
            assert moved is not None, f"{name} did not happen"
    return deal_id


def _settle(world, authorization):
    """Give the buyer the price and have the token take it to the deposit; returns the buyer's signature."""
    token, chain_db = world.terminal.token, world.facilitators[0].connect()
    signature = chain.sign((1).to_bytes(32, "big"), authorization.digest(token))
    sandbox.mint(chain_db, BUYER, PRICE)
    sandbox.transfer(chain_db, token, authorization, signature, now=world.now())
    return signature
