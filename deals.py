"""Deals: terms, identities, moves, timers and records. No HTTP, no chain, no clock: ``now`` is an argument."""

import dataclasses
import functools
import re
import time

import chain

ENDED = ("released", "refunded", "split")
HOUR = 3600
DEAL_ID = re.compile(r"deal_[a-z2-7]{26}")
GUARANTEE_GRACE = 7 * 24 * HOUR  # how long after the last possible decision the refund guarantee becomes valid
DEFAULT_HOURS = 24  # to deliver, and to review, when the buyer does not say
LEG_LIFE = 10 * 365 * 24 * HOUR  # a payout is a check that stays good; the nonce, not the date, stops a second one
SMALLEST_TRANSFER = 10_000  # refunds under a cent are not sent


class Refusal(Exception):
    """The one way to say no: a stable code, one sentence, and facts that help.

    ``status`` is the HTTP status of the code; ``facts`` go into the error body beside it.
    """

    STATUS = {
        "invalid_request": 400,
        "invalid_payment": 400,
        "payment_required": 402,
        "proof_required": 403,
        "invalid_signature": 403,
        "invalid_secret": 403,
        "not_found": 404,
        "method_not_allowed": 405,
        "payment_in_progress": 409,
        "invalid_state": 409,
        "deal_exists": 409,
        "idempotency_conflict": 422,
        "expired": 410,
        "body_too_large": 413,
        "unsupported_media_type": 415,
        "rate_limited": 429,
        "internal_error": 500,
        "upstream_failed": 502,
        "not_fetched": 502,
        "settlement_failed": 502,
        "unavailable": 503,
    }

    def __init__(self, code, message, *, headers=None, status=None, **facts):
        super().__init__(message)
        self.code, self.message, self.facts = code, message, facts
        self.status = status or self.STATUS[code]
        self.headers = headers or {}

    def body(self):
        return {"error": self.code, "message": self.message, **self.facts}


# -- Terms --------------------------------------------------------------------------------------------------

_TRUE = {True: "true", False: "false"}


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the buyer's payment signs: a validated request body, normalised, with its defaults filled in."""

    amount_units: int
    seller_address: str
    secret_hash: str
    deadline_hours: int
    review_hours: int
    instant: bool
    ref: str | None
    network: str = "base"

    @functools.cached_property
    def canonical(self):
        """The RFC 8785 bytes that the deposit address commits to: members in the order of their names, no spaces."""
        return (
            f'{{"amount_units":{self.amount_units},"deadline_hours":{self.deadline_hours},"instant":{_TRUE[self.instant]},'
            f'"network":"{self.network}","ref":{chain.canonical(self.ref).decode()},"review_hours":{self.review_hours},'
            f'"secret_hash":"{self.secret_hash}","seller_address":"{self.seller_address}"}}'
        ).encode()

    def deal_id(self, master_key):
        """Return the id of the deal with these terms under the master key (33 bytes)."""
        return _deal_id(master_key, self.canonical)


_DIGITS = "abcdefghijklmnopqrstuvwxyz234567"  # base32 in lower case, 5 bits each; Python's own encoder takes thrice as long
_PAIRS = [one + two for one in _DIGITS for two in _DIGITS]


@functools.lru_cache(maxsize=64)  # one call asks several times
def _deal_id(master_key, canonical):
    number = int.from_bytes(chain.sha256(b"deal" + master_key + chain.sha256(canonical))[:16], "big") << 2
    return "deal_" + "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])


def terms(body):
    """Build Terms from a body that has passed the published schema. Amounts become exact base units."""
    instant = body.get("instant", False)
    hours = 1 if instant else DEFAULT_HOURS
    return Terms(
        amount_units=units(body["amount_usd"]),
        seller_address=body["seller_address"].lower(),
        secret_hash=body["secret_hash"].lower(),
        deadline_hours=int(body.get("deadline_hours", hours)),  # 24.0 is an integer too, and the same one
        review_hours=int(body.get("review_hours", hours)),
        instant=instant,
        ref=body.get("ref"),
    )


def units(usd):
    """Parse dollars such as ``12.5`` into base units. The text has at most 6 decimals, checked before."""
    whole, _, fraction = usd.partition(".")
    return int(whole) * 1_000_000 + int(fraction.ljust(6, "0"))


def usd(amount_units):
    """Write base units as dollars with two to six decimals; None stays None."""
    if amount_units is None:
        return None
    whole, fraction = divmod(amount_units, 1_000_000)
    return f"{whole}.{f'{fraction:06d}'[:2]}{f'{fraction:06d}'[2:].rstrip('0')}"


def leg_nonce(deal_id, leg):
    """Return the EIP-3009 nonce of one leg of one deal: the token takes it once, however often it is sent."""
    return "0x" + chain.keccak(f"{deal_id}|{leg}".encode()).hex()


# -- Moves --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Move:
    """One way a deal changes state.

    ``before`` names a deadline column that must lie ahead, ``after`` one that must have come. ``instant``
    are source states only for deals made with ``instant``. ``sets`` is what the SQL also writes.
    """

    sources: tuple
    target: str
    actors: tuple
    before: str | None = None
    after: str | None = None
    instant: tuple = ()
    sets: str = ""


_END = "ended_at = :now, due_at = NULL, look_at = :now, "
_ALL, _NONE, _PART = "seller_units = amount_units", "seller_units = 0", "seller_units = :seller_units"

MOVES = {
    "fund": Move(
        ("pending",), "funded", ("chain",),
        sets="funded_at = :now, deliver_by = :now + deadline_hours * 3600,"
             " due_at = :now + deadline_hours * 3600",
    ),
    "lapse": Move(("pending",), "lapsed", ("clock",), sets="ended_at = :now, look_at = :look_at"),
    "accept": Move(("funded",), "accepted", ("seller",), before="deliver_by", sets="accepted_at = :now"),
    "deliver": Move(
        ("accepted",), "delivered", ("seller",), before="deliver_by", instant=("funded",),
        sets="delivered_at = :now, review_ends_at = :now + review_hours * 3600, due_at = :now + review_hours * 3600,"
             " delivery_url = :url, delivery_sha256 = :sha256, delivery_note = :note",
    ),
    "confirm": Move(
        ("delivered", "disputed"), "released", ("buyer",), instant=("funded", "accepted"), sets=_END + _ALL
    ),
    "cancel": Move(("funded",), "refunded", ("buyer",), sets=_END + _NONE),
    "dispute": Move(
        ("delivered",), "disputed", ("buyer",), before="review_ends_at",
        sets="disputed_at = :now, dispute_reason = :reason, decide_by = :now + decide_hours * 3600,"
             " due_at = :now + decide_hours * 3600",
    ),
    "refund": Move(("funded", "accepted", "delivered", "disputed"), "refunded", ("seller",), sets=_END + _NONE),
    "split": Move(
        ("accepted", "delivered", "disputed"), "split", ("seller", "buyer"),
        sets=_END + "seller_units = seller_offer_units",
    ),
    "expire": Move(("funded", "accepted"), "refunded", ("clock",), after="deliver_by", sets=_END + _NONE),
    "release": Move(("delivered",), "released", ("clock",), after="review_ends_at", sets=_END + _ALL),
    "undecided": Move(("disputed",), "refunded", ("clock",), after="decide_by", sets=_END + _NONE),
    "resolve_release": Move(
        ("disputed",), "released", ("operator",), sets=_END + _ALL + ", decision_note = :decision"
    ),
    "resolve_refund": Move(
        ("disputed",), "refunded", ("operator",), sets=_END + _NONE + ", decision_note = :decision"
    ),
    "resolve_split": Move(("disputed",), "split", ("operator",), sets=_END + _PART + ", decision_note = :decision"),
}
CLOCK_MOVES = {"funded": "expire", "accepted": "expire", "delivered": "release", "disputed": "undecided"}


def _move_sql(move):
    where = f"state IN ({', '.join(map(repr, move.sources))})"
    if move.instant:
        where = f"({where} OR (instant AND state IN ({', '.join(map(repr, move.instant + ('',)))})))"
    if move.before:
        where += f" AND :now < {move.before}"
    if move.after:
        where += f" AND :now >= {move.after}"
    sets = f"state = '{move.target}', " + (move.sets or "version = version")
    # Only what the rest of a move needs: to read all forty columns takes as long as to write them.
    needed = "id, state, amount_units, price_units, seller_units, seller_address, buyer_address, deadline_hours, review_hours, decide_hours"
    return f"UPDATE deals SET {sets} WHERE id = :id AND {where} RETURNING {needed}"


MOVE_SQL = {name: _move_sql(move) for name, move in MOVES.items()}


def move(db, deal_id, name, *, now, actor, treasury, content=None, **values):
    """Make one move if the deal still allows it; returns some of the deal's row, or None when it does not.

    The history event and the transfers that follow from the move are written in the same transaction, which
    the caller holds. ``treasury`` is the address that fees go to.
    """
    assert db.in_transaction
    assert actor in MOVES[name].actors
    row = db.execute(MOVE_SQL[name], {"id": deal_id, "now": now, **values}).fetchone()
    if row is None:
        return None
    record_event(db, deal_id, name, now=now, actor=actor, state=row["state"], content=content)
    if row["state"] in ENDED:
        _decide(db, row, now=now, treasury=treasury)
    if name == "fund":
        _guarantee(db, row, now=now)
    return row


def record_event(db, deal_id, event, *, now, actor, state, content=None):
    """Append one line to the deal's history."""
    db.execute(
        "INSERT INTO deal_events (deal_id, number, at, event, actor, state, content)"
        " VALUES (:id, (SELECT count(*) + 1 FROM deal_events WHERE deal_id = :id), :now, :event, :actor, :state, :content)",
        {"id": deal_id, "now": now, "event": event, "actor": actor, "state": state, "content": content},
    )


def _decide(db, deal, *, now, treasury):
    """Fix the legs of an ended deal: who gets what is decided here, once, and never again."""
    seller = deal["seller_units"]
    legs = [
        ("seller", deal["seller_address"], seller),
        ("buyer", deal["buyer_address"], deal["amount_units"] - seller),
        ("fee", treasury, deal["price_units"] - deal["amount_units"]),
    ]
    for leg, payee, value in legs:
        if value:
            add_leg(db, deal["id"], leg, payee, value, now=now)


def add_leg(db, deal_id, leg, payee, value_units, *, now):
    """Owe one payment out of the deposit; the sweep signs and sends it."""
    db.execute(
        "INSERT INTO transfers (deal_id, leg, payee, value_units, valid_before, nonce, status, created_at, next_at)"
        " VALUES (:deal, :leg, :payee, :units, :valid_before, :nonce, 'due', :now, :now)",
        {
            "deal": deal_id, "leg": leg, "payee": payee, "units": value_units,
            "valid_before": now + LEG_LIFE, "nonce": leg_nonce(deal_id, leg), "now": now,
        },
    )  # fmt: skip


def _guarantee(db, deal, *, now):
    """Owe the refund guarantee: the whole price back to the payer once no decision can come any more."""
    hours = deal["deadline_hours"] + deal["review_hours"] + deal["decide_hours"]
    db.execute(
        "INSERT INTO transfers"
        " (deal_id, leg, payee, value_units, valid_after, valid_before, nonce, status, created_at, next_at)"
        " VALUES (:deal, 'guarantee', :payee, :units, :after, :before, :nonce, 'due', :now, :now)",
        {
            "deal": deal["id"], "payee": deal["buyer_address"], "units": deal["price_units"],
            "after": now + hours * HOUR + GUARANTEE_GRACE, "before": now + LEG_LIFE,
            "nonce": leg_nonce(deal["id"], "guarantee"), "now": now,
        },
    )  # fmt: skip


# -- Timers -------------------------------------------------------------------------------------------------


def apply_due(db, deal_id, *, now, treasury):
    """Let the clock make the move that is due on this deal; returns the move's name or None."""
    assert db.in_transaction
    row = db.execute("SELECT state FROM deals WHERE id = :id AND due_at <= :now", {"id": deal_id, "now": now}).fetchone()
    name = row and CLOCK_MOVES[row["state"]]
    if name and move(db, deal_id, name, now=now, actor="clock", treasury=treasury):
        return name
    return None


def due(db, *, now, limit):
    """Return the ids of the deals whose timer has run out, longest overdue first."""
    rows = db.execute(
        "SELECT id FROM deals WHERE due_at <= :now ORDER BY due_at LIMIT :limit", {"now": now, "limit": limit}
    )
    return [row["id"] for row in rows]


# -- Creating -----------------------------------------------------------------------------------------------


def find(db, deal_id):
    """Return the deal's row or None."""
    return db.execute("SELECT * FROM deals WHERE id = :id", {"id": deal_id}).fetchone()


def glance(db, deal_id):
    """Return of the deal's row what a reader's cached record depends on. Refuses with not_found."""
    return get(db, deal_id, "SELECT id, version, state, due_at FROM deals WHERE id = :id")


def get(db, deal_id, query="SELECT * FROM deals WHERE id = :id"):
    """Return the deal's row. Refuses with not_found, so that callers never check."""
    row = db.execute(query, {"id": deal_id}).fetchone() if DEAL_ID.fullmatch(deal_id) else None
    if row is None:
        raise Refusal("not_found", "No deal has this id; a deal exists from the moment its payment is accepted.")
    return row


def open_attempt(
    db, deal_terms, *, deal_id, deposit, master_key, price_units, buyer, decide_hours, now, takes_over=None
):
    """Create the deal as ``pending``, or take up a lapsed one again. Returns the attempt's number or None.

    None: the deal exists and has not lapsed, or money of an earlier attempt is still on its way back, so
    this payment must not start it. ``takes_over`` is the attempt that is known to be dead for certain: only
    that one may be followed by another buyer's, so that the money of two payers never meets in one deposit.
    """
    assert db.in_transaction
    row = db.execute(
        "INSERT INTO deals (id, state, master_key, terms, deposit_address, amount_units, price_units, seller_address,"
        " buyer_address, secret_hash, ref, instant, deadline_hours, review_hours, decide_hours, created_at, look_at)"
        " VALUES (:id, 'pending', :master_key, :terms, :deposit, :amount, :price, :seller, :buyer, :secret_hash, :ref,"
        " :instant, :deadline_hours, :review_hours, :decide_hours, :now, :now + 30)"
        " ON CONFLICT (id) DO UPDATE SET state = 'pending', attempt = attempt + 1, buyer_address = :buyer,"
        " price_units = :price, decide_hours = :decide_hours, created_at = :now, ended_at = NULL, look_at = :now + 30"
        " WHERE state = 'lapsed' AND (buyer_address = :buyer OR attempt = :takes_over) AND NOT EXISTS"
        " (SELECT 1 FROM transfers WHERE deal_id = :id AND next_at IS NOT NULL) RETURNING attempt",
        {
            "id": deal_id, "master_key": master_key.hex(), "terms": deal_terms.canonical.decode(),
            "deposit": deposit, "amount": deal_terms.amount_units, "price": price_units,
            "seller": deal_terms.seller_address, "buyer": buyer, "secret_hash": deal_terms.secret_hash,
            "ref": deal_terms.ref, "instant": int(deal_terms.instant), "deadline_hours": deal_terms.deadline_hours,
            "review_hours": deal_terms.review_hours, "decide_hours": decide_hours, "now": now, "takes_over": takes_over,
        },
    ).fetchone()  # fmt: skip
    if row is None:
        return None
    record_event(db, deal_id, "pay", now=now, actor="buyer", state="pending")
    return row["attempt"]


# -- Records ------------------------------------------------------------------------------------------------

SELLER_ACTIONS = ("accept", "deliver", "refund")
BUYER_ACTIONS = ("confirm", "cancel", "dispute")
PROOFS = {"seller": "signature", "buyer": "secret, or signature if the secret is lost"}


@dataclasses.dataclass(frozen=True)
class Frame:
    """What every record says about the service itself."""

    mode: str
    asset: str  # checksummed
    chain_id: int


def record(db, deal, frame):
    """Build the public record of a deal's row, the same object in every answer. Never a secret or its hash.

    Deadlines are not compared with the clock here: :func:`apply_due` has run before, and in every state the
    actions that remain end exactly when the clock moves the deal.
    """
    values = {"id": deal["id"], "attempt": deal["attempt"]}
    payment = db.execute("SELECT * FROM payments WHERE deal_id = :id AND attempt = :attempt", values).fetchone()
    transfers = db.execute(
        "SELECT * FROM transfers WHERE deal_id = :id"
        " ORDER BY CASE leg WHEN 'seller' THEN 1 WHEN 'buyer' THEN 2 WHEN 'fee' THEN 3 ELSE 4 END, created_at",
        values,
    ).fetchall()
    return _compose(deal, frame, payment, transfers, _events(db, deal["id"]))


# What a deal's row has in these columns at its funding, before anything else happens to it.
_FUNDED = {
    "state": "funded",
    **dict.fromkeys(
        ("accepted_at", "delivered_at", "disputed_at", "ended_at", "review_ends_at", "decide_by", "delivery_url",
         "delivery_sha256", "delivery_note", "dispute_reason", "dispute_statement", "decision_note", "seller_offer_units",
         "buyer_offer_units")
    ),
}  # fmt: skip


def record_when_funded(db, payment, frame):
    """Build the record as it was when this settled payment had funded its deal, whatever has become of that since.

    It has no transfers: those of this payment are still to come, and those of earlier attempts are not its business.
    """
    row = db.execute(
        "SELECT id, attempt, amount_units, price_units, seller_address, buyer_address, deposit_address, ref, instant,"
        " deadline_hours, review_hours, created_at, funded_at, deliver_by, deliver_by AS due_at FROM deals WHERE id = :id",
        {"id": payment["deal_id"]},
    ).fetchone()
    events = _events(db, row["id"])
    events = events[: [event["event"] for event in events].index("fund") + 1]
    return _compose({**_FUNDED, **dict(zip(row.keys(), row))}, frame, payment, [], events)


def _events(db, deal_id):
    return db.execute(
        "SELECT at, event, actor, state FROM deal_events WHERE deal_id = :id ORDER BY number", {"id": deal_id}
    ).fetchall()


def _compose(deal, frame, payment, transfers, events):
    authorizations = {row["leg"]: _authorization(row, deal, frame) for row in transfers}
    return {
        "id": deal["id"],
        "state": deal["state"],
        "mode": frame.mode,
        "network": "base",
        "amount_usd": usd(deal["amount_units"]),
        "price_usd": usd(deal["price_units"]),
        "seller_address": chain.checksum(deal["seller_address"]),
        "buyer_address": chain.checksum(deal["buyer_address"]),
        "ref": deal["ref"],
        "instant": bool(deal["instant"]),
        "deadline_hours": deal["deadline_hours"],
        "review_hours": deal["review_hours"],
        "deposit_address": chain.checksum(deal["deposit_address"]),
        **{
            name: timestamp(deal[name])
            for name in ("created_at", "funded_at", "accepted_at", "delivered_at", "ended_at",
                         "deliver_by", "review_ends_at", "decide_by")
        },
        "payment": _payment(payment),
        "delivery": _delivery(deal),
        "dispute": _dispute(deal),
        "offers": {"seller": usd(deal["seller_offer_units"]), "buyer": usd(deal["buyer_offer_units"])},
        "transfers": [
            {
                "leg": row["leg"],
                "to": chain.checksum(row["payee"]),
                "amount_usd": usd(row["value_units"]),
                "status": row["status"],
                "transaction": row["transaction_hash"],
                "authorization": authorizations[row["leg"]],
            }
            for row in transfers
            if row["leg"] != "guarantee"
        ],
        "refund_guarantee": authorizations.get("guarantee"),
        "actions": actions(deal),
        "next": _next(deal, payment),
        "history": [
            {"at": timestamp(row["at"]), "event": row["event"], "by": row["actor"], "state": row["state"]}
            for row in events
        ],
    }  # fmt: skip


def actions(deal):
    """List what the parties can do now: the action, who, until when, and how it is proved."""
    state, found = deal["state"], []
    for name in SELLER_ACTIONS + BUYER_ACTIONS:
        rule = MOVES[name]
        if state in rule.sources or (deal["instant"] and state in rule.instant):
            found.append((name, rule.actors[0]))
    if state in MOVES["split"].sources:
        found += [("split", "seller"), ("split", "buyer")]
    if state == "disputed" and deal["dispute_statement"] is None:
        found.append(("statement", "seller"))
    return [
        {
            "action": name,
            "by": actor,
            "until": timestamp(deal["due_at"]),
            "proof": PROOFS[actor],
            "path": f"/v1/deals/{deal['id']}/{name}",
        }
        for name, actor in found
    ]


def _next(deal, payment):
    """Say what the clock does next if nobody does anything."""
    if deal["state"] == "pending":
        return {"event": "lapse", "at": timestamp(payment["valid_before"]), "state": "lapsed"}
    if deal["due_at"] is None:
        return None
    name = CLOCK_MOVES[deal["state"]]
    return {"event": name, "at": timestamp(deal["due_at"]), "state": MOVES[name].target}


def _payment(row):
    if row is None:
        return None
    return {
        "protocol": row["protocol"],
        "payer": chain.checksum(row["payer"]),
        "amount_usd": usd(row["value_units"]),
        "transaction": row["transaction_hash"],
        "settled_at": timestamp(row["settled_at"]),
    }


def _delivery(deal):
    if deal["delivered_at"] is None:
        return None
    return {"url": deal["delivery_url"], "sha256": deal["delivery_sha256"], "note": deal["delivery_note"]}


def _dispute(deal):
    if deal["disputed_at"] is None:
        return None
    return {
        "reason": deal["dispute_reason"],
        "statement": deal["dispute_statement"],
        "decision": deal["decision_note"],
    }


def _authorization(row, deal, frame):
    """The signed transfer as anyone may submit it to the token; null until the sweep has signed it."""
    if row["signature"] is None:
        return None
    return {
        "from": chain.checksum(deal["deposit_address"]),
        "to": chain.checksum(row["payee"]),
        "value": str(row["value_units"]),
        "validAfter": str(row["valid_after"]),
        "validBefore": str(row["valid_before"]),
        "nonce": row["nonce"],
        "signature": row["signature"],
        "asset": frame.asset,
        "chainId": frame.chain_id,
    }


@functools.lru_cache(maxsize=256)
def timestamp(seconds):
    """Write Unix seconds as RFC 3339 in UTC; None stays None."""
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
