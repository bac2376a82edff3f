"""The law of one move: who may make it, from which state, and on which side of which deadline.

Written by hand from the published table of moves; the code's own table is not consulted.
"""

HOUR = 3600
TIMED = {"funded": "deliver_by", "accepted": "deliver_by", "delivered": "review_ends_at", "disputed": "decide_by"}

# event: (from, to, by whom); "same" leaves the state as it is
LAW = {
    "pay": ((None, "lapsed"), "pending", ("buyer",)),
    "fund": (("pending",), "funded", ("chain",)),
    "lapse": (("pending",), "lapsed", ("clock",)),
    "accept": (("funded",), "accepted", ("seller",)),
    "deliver": (("accepted",), "delivered", ("seller",)),
    "confirm": (("delivered", "disputed"), "released", ("buyer",)),
    "cancel": (("funded",), "refunded", ("buyer",)),
    "dispute": (("delivered",), "disputed", ("buyer",)),
    "refund": (("funded", "accepted", "delivered", "disputed"), "refunded", ("seller",)),
    "offer": (("accepted", "delivered", "disputed"), "same", ("seller", "buyer")),
    "split": (("accepted", "delivered", "disputed"), "split", ("seller", "buyer")),
    "statement": (("disputed",), "same", ("seller",)),
    "expire": (("funded", "accepted"), "refunded", ("clock",)),
    "release": (("delivered",), "released", ("clock",)),
    "undecided": (("disputed",), "refunded", ("clock",)),
    "resolve_release": (("disputed",), "released", ("operator",)),
    "resolve_refund": (("disputed",), "refunded", ("operator",)),
    "resolve_split": (("disputed",), "split", ("operator",)),
}
INSTANT = {"deliver": ("funded",), "confirm": ("funded", "accepted")}
CLOCK = ("expire", "release", "undecided")
MONEY = {"confirm": "all", "release": "all", "resolve_release": "all", "cancel": "none", "refund": "none",
         "expire": "none", "undecided": "none", "resolve_refund": "none"}  # fmt: skip


def check_event(laws, deal, state, event):
    """Judge one line of a deal's history against the law, and against the chain where it speaks of money."""
    name, deal_id = event["event"], deal["id"]
    sources, target, actors = LAW[name]
    sources += INSTANT.get(name, ()) if deal["instant"] else ()
    if state not in sources:
        laws.broken("a move only from its states", f"{name} from {state}", deal_id)
    if event["state"] != (state if target == "same" else target):
        laws.broken("a move leads to its state", f"{name} led to {event['state']}", deal_id)
    if event["actor"] not in actors:
        laws.broken("a move only by whom it belongs to", f"{name} by {event['actor']}", deal_id)
    _check_deadline(laws, deal, state, event)
    if name == "fund":
        _check_funded(laws, deal)
    if name == "lapse":
        _check_lapsed(laws, deal)
    if name in MONEY and deal["seller_units"] != (deal["amount_units"] if MONEY[name] == "all" else 0):
        laws.broken("the money follows the decision", f"{name}: {deal['seller_units']} to the seller", deal_id)
    if name == "split" and not deal["seller_offer_units"] == deal["buyer_offer_units"] == deal["seller_units"]:
        laws.broken("a split needs two equal offers", f"{deal['seller_offer_units']} {deal['buyer_offer_units']}", deal_id)


def _check_deadline(laws, deal, state, event):
    """Half-open: parties strictly before the deadline, the clock at or after it."""
    due = deal[TIMED[state]] if state in TIMED else None
    if due is None:
        return
    wanted = {
        "deliver_by": lambda: deal["funded_at"] + deal["deadline_hours"] * HOUR,
        "review_ends_at": lambda: deal["delivered_at"] + deal["review_hours"] * HOUR,
        "decide_by": lambda: deal["disputed_at"] + 168 * HOUR,
    }[TIMED[state]]()
    if due != wanted:
        laws.broken("deadlines are what was agreed", f"{TIMED[state]} is {due}, not {wanted}", deal["id"])
    if event["event"] in CLOCK:
        if event["at"] < due:
            laws.broken("the clock moves at or after the deadline", f"{event['event']} {due - event['at']} s early", deal["id"])
    elif event["at"] >= due:
        laws.broken("the parties move before the deadline", f"{event['event']} {event['at'] - due} s late", deal["id"])


def _check_funded(laws, deal):
    """Funded: this payer's own authorization was used on the chain, and its money reached this deposit."""
    row = laws.db.execute(
        "SELECT * FROM payments WHERE deal_id = ? AND status = 'settled' AND attempt = ?", (deal["id"], deal["attempt"])
    ).fetchone()
    if row is None:
        laws.broken("funded by one settled payment", "there is none", deal["id"])
    proofs = laws.proofs.get((row["payer"], row["nonce"]), ())
    if row["transaction_hash"] not in proofs:
        laws.broken("the chain's word before funded", f"{row['transaction_hash']} is not a payment of this deal", deal["id"])
    if row["value_units"] != deal["price_units"] or row["payer"] != deal["buyer_address"]:
        laws.broken("funded at the price, by the buyer", f"{row['value_units']} by {row['payer']}", deal["id"])


def _check_lapsed(laws, deal):
    """Lapsed: a clear no, or an authorization that is dead for certain; never while its money is in plain sight."""
    row = laws.db.execute(
        "SELECT * FROM payments WHERE deal_id = ? AND attempt = ?", (deal["id"], deal["attempt"])
    ).fetchone()
    model, key = laws.sim.chain, (row["payer"], row["nonce"]) if row else None
    if row is None:  # entered by the operator's recover
        return
    use = model.use(*key)
    there = use and use.payee == deal["deposit_address"] and model.balance(use.payee) >= use.units  # and not given back
    if there and use.block < model.number - 50 and not laws.was_restored:
        laws.broken("no lapse while the money is there", f"landed in block {use.block} of {model.number}", deal["id"])
    dead = use is not None or model.time_of(model.number) > row["valid_before"]
    if not dead and laws.doubts[key] and not laws.was_restored:  # a restored backup has forgotten its doubts
        laws.broken("lapsed only when nothing can land, or after a clear no", f"{row['reason']!r}, but a facilitator has it", deal["id"])
