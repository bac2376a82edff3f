"""What becomes of one payment: submit it, ask the chain, record. Money in; money out is transfers.py.

Every step is committed before the next foreign call and no transaction is open across one. What a
facilitator says is never proof: a deal is funded when the chain shows this payer's own authorization used
and the deposit holding the price. "Unknown" is an outcome of its own, and never "failed".
"""

import baton
import chain
import db as database
import deals
import limits
import protocols
from facilitators import Outcome

LEASE_SLACK = 20  # seconds a lease outlives the time budget of settling
LOOK_EVERY = 5  # seconds between looks at the chain for one pending deal, whoever asks
MARGIN = 60  # seconds past validBefore until an unused authorization counts as dead
UNPROVEN = 3600  # seconds past validBefore until a used one whose transaction no node can show counts as cancelled
LOOK_BACK = 1800  # seconds before the claim in which the authorization may already have been submitted
LOOK_AFTER = (0, 0.3, 0.7, 1.0, 1.5, 2.5)  # pauses between looks right after settling, within chain_patience


def take_lease(db, world, payment_id, *, now):
    """Take over an open payment whose worker is gone. Returns its row, or None while somebody works on it."""
    return db.execute(
        "UPDATE payments SET lease_until = :lease, status = 'unknown' WHERE id = :id AND status IN ('claimed', 'unknown')"
        " AND lease_until <= :now RETURNING *",
        {"id": payment_id, "now": now, "lease": now + int(world.settings.settle_seconds) + LEASE_SLACK},
    ).fetchone()


def envelope(world, authorization, signature, url):
    """Return the x402 payload and requirements by which any facilitator settles an EIP-3009 authorization."""
    wanted = protocols.requirements(world.terminal, authorization.to, authorization.value)
    payload = {
        "x402Version": 2,
        "resource": {"url": url, "description": "", "mimeType": "application/json"},
        "accepted": wanted,
        "payload": {"signature": signature, "authorization": authorization.wire()},
    }
    return payload, wanted


def settle(db, world, payment, deposit, *, send):
    """Bring an open payment, whose lease the caller holds, as far as it goes; returns its row afterwards.

    ``deposit``: the address of its deal. ``send``: submit the authorization (the same bytes every time: the token
    takes its nonce once). The chain's word alone funds a deal; only a final refusal, or a dead authorization, ends
    the attempt.
    """
    authorization = authorization_of(payment, deposit)
    with baton.aside():
        outcome = submit(world, authorization, payment["signature"], payment["resource_url"]) if send else None
        reason = outcome.reason if outcome else ""
        hint = outcome and outcome.transaction or payment["claimed_hash"]
        transaction = over = None
        try:
            patient = outcome is not None and outcome.kind in ("settled", "unknown")
            transaction = _look(world, authorization, payment, hint=hint, patient=patient)
            over = transaction is None and (_refused(payment, outcome) or _dead(world, authorization))
        except chain.ChainUnknown as error:
            reason = f"chain: {error}"
    if transaction:
        return fund(db, world, payment, transaction)
    return _lapse(db, world, payment, reason) if over else _unknown(db, world, payment, hint=hint, reason=reason)


def authorization_of(payment, deposit):
    """Rebuild the authorization of a payment row that pays to ``deposit``."""
    return chain.Authorization(
        payer=payment["payer"], to=deposit, value=payment["value_units"],
        valid_after=payment["valid_after"], valid_before=payment["valid_before"], nonce=payment["nonce"],
    )  # fmt: skip


def submit(world, authorization, signature, url):
    """Send an authorization to the facilitators in order until one has clearly received it.

    Returns the most telling Outcome: ``unsent`` only when it certainly reached nobody. A no after an earlier
    silence proves nothing, for the silent one may have sent it.
    """
    payload, wanted = envelope(world, authorization, signature, url)
    deadline = world.clock() + world.settings.settle_seconds
    best, counters = Outcome("unsent", reason="no facilitator could be reached"), world.counters()
    for facilitator in world.facilitators:
        if world.clock() >= deadline or world.declares(facilitator.url) is False:
            continue
        state = limits.usable(counters, facilitator.url, now=world.clock())
        if not state:
            continue
        outcome = facilitator.settle(payload, wanted, seconds=max(1.0, deadline - world.clock()))
        if outcome.kind in ("settled", "refused"):
            limits.worked(counters, facilitator.url, state)
            return outcome if best.kind == "unsent" or outcome.kind == "settled" else best
        limits.failed(counters, facilitator.url, outcome.reason, now=world.clock())
        if outcome.kind == "unknown":
            best = outcome
    return best


def _refused(payment, outcome):
    """Whether this was a clear no. Only the first try can be one: a later one may speak of what the first did."""
    return outcome is not None and payment["status"] == "claimed" and outcome.kind in ("refused", "unsent")


def _look(world, authorization, payment, *, hint, patient):
    """Ask the chain whether the money is there; several times over some seconds when it may be on its way."""
    # By the chain's clock, not by ours alone: a worker may have stood still for long before it made the claim.
    since, waited = min(payment["claimed_at"], payment["valid_before"] - protocols.MAX_AHEAD) - LOOK_BACK, 0.0
    for pause in LOOK_AFTER if patient else LOOK_AFTER[:1]:
        if waited + pause > world.settings.chain_patience:
            break
        if pause:
            world.sleep(pause)
        waited += pause
        units, transaction = world.ledger.payment(authorization, since=since, hint=hint)
        if transaction and units >= authorization.value:
            return transaction
    return None


def _dead(world, authorization):
    """Whether this authorization can never fund its deal: expired unused, or used up without its money here.

    Other money at the deposit may hide that it was cancelled; then the lack of its transaction counts in the end.
    """
    head = world.ledger.head(depth=world.settings.confirmations)
    used = world.ledger.used([(authorization.payer, authorization.nonce)], at=head.number)[0]
    if used:
        short = world.ledger.balance(authorization.to, at=head.number) < authorization.value
        return short or head.time > authorization.valid_before + UNPROVEN
    return head.time > authorization.valid_before + MARGIN


def fund(db, world, payment, transaction):
    """Commit that the money is there. Returns the payment's row."""
    now = world.now()

    def commit(db):
        if not deals.move(db, payment["deal_id"], "fund", now=now, actor="chain", treasury=world.treasury):
            return db.execute("SELECT * FROM payments WHERE id = :id", {"id": payment["id"]}).fetchone()
        return db.execute(
            "UPDATE payments SET status = 'settled', settled_at = :now, transaction_hash = :hash, lease_until = 0,"
            " reason = NULL WHERE id = :id RETURNING *",
            {"id": payment["id"], "now": now, "hash": transaction},
        ).fetchone()

    return database.together(db, commit)


def receipt(db, world, payment):
    """Return (headers, body) of the 200 that a settled payment gets, byte for byte the same whenever it is sent again.

    It is not stored but composed anew: all it says was committed when the money was, and signatures are deterministic.
    """
    body = chain.compact([deals.record_when_funded(db, payment, world.frame)])
    return answer_headers(world, payment, protocol=payment["protocol"], now=payment["settled_at"]), body


def answer_headers(world, payment, *, protocol, now):
    receipt = {
        "version": 1,
        "network": f"eip155:{world.terminal.token.chain_id}",
        "resourceUrl": payment["resource_url"],
        "payer": chain.checksum(payment["payer"]),
        "issuedAt": now,
        "transaction": payment["transaction_hash"],
    }
    signed = {
        "format": "eip712",
        "payload": receipt,
        "signature": chain.sign(world.receipt_key, chain.receipt_digest(receipt)),
    }
    headers = protocols.success_headers(
        world.terminal, protocol, transaction=payment["transaction_hash"], payer=payment["payer"],
        challenge_id=payment["challenge_id"], settled_at=payment["settled_at"], receipt=signed,
    )  # fmt: skip
    return {**headers, "X-Svc-Results-Requested": "1", "X-Svc-Results-Delivered": "1"}


def _lapse(db, world, payment, reason):
    """Commit that this attempt is over. Should its money land after all, the sweep finds and returns it.

    A worker that has slept through its lease decides nothing: another one may have sent the authorization since.
    """
    now = world.now()
    with database.transaction(db):
        row = db.execute("SELECT * FROM payments WHERE id = :id", {"id": payment["id"]}).fetchone()
        if row["lease_until"] != payment["lease_until"]:
            return row
        look_at = max(now, payment["valid_before"]) + MARGIN
        moved = deals.move(
            db, payment["deal_id"], "lapse", now=now, actor="clock", treasury=world.treasury, look_at=look_at
        )
        if moved:
            db.execute(
                "UPDATE payments SET status = 'refused', lease_until = 0, reason = :reason WHERE id = :id",
                {"id": payment["id"], "reason": reason},
            )
        return db.execute("SELECT * FROM payments WHERE id = :id", {"id": payment["id"]}).fetchone()


def _unknown(db, world, payment, *, hint, reason):
    """Commit what was learned while the outcome stays open, and when to look again."""
    now = world.now()
    with database.transaction(db):
        db.execute(
            "UPDATE payments SET status = 'unknown', lease_until = 0, claimed_hash = coalesce(:hint, claimed_hash),"
            " reason = :reason WHERE id = :id AND lease_until = :lease",
            {"id": payment["id"], "hint": hint, "reason": reason, "lease": payment["lease_until"]},
        )
        db.execute(
            "UPDATE deals SET look_at = :at WHERE id = :id AND state = 'pending'",
            {"id": payment["deal_id"], "at": now + min(300, LOOK_EVERY + (now - payment["claimed_at"]) // 8)},
        )
        return db.execute("SELECT * FROM payments WHERE id = :id", {"id": payment["id"]}).fetchone()


def restore(db, world, deal_id):
    """Submit a funded deal's payment again if a reorganisation has taken it off the chain.

    Returns True once it is as deep as configured, False while it is not yet, None when it is lost for good:
    unused although it has expired.
    """
    payment = db.execute(
        "SELECT p.*, d.deposit_address FROM payments p JOIN deals d ON d.id = p.deal_id"
        " WHERE p.deal_id = :id AND p.status = 'settled'",
        {"id": deal_id},
    ).fetchone()
    if payment is None:  # lapsed: nothing was ever there to keep
        return True
    authorization = authorization_of(payment, payment["deposit_address"])
    pair = [(authorization.payer, authorization.nonce)]
    head = world.ledger.head(depth=world.settings.confirmations)
    if world.ledger.used(pair, at=head.number)[0]:
        return True
    if head.time > authorization.valid_before + MARGIN:
        lost = "the chain has lost this payment, and it has expired"
        db.execute("UPDATE payments SET reason = :reason WHERE id = :id", {"reason": lost, "id": payment["id"]})
        return None
    if not world.ledger.used(pair)[0]:
        submit(world, authorization, payment["signature"], payment["resource_url"])
    return False


def resolve(db, world, deal_id, *, send):
    """Look at a pending deal again; for the sweep (``send``: submit again) and for reads. Returns True if it moved."""
    now = world.now()
    row = db.execute(
        "SELECT p.id, d.deposit_address FROM payments p JOIN deals d ON d.id = p.deal_id AND d.attempt = p.attempt"
        " WHERE d.id = :id AND d.state = 'pending'",
        {"id": deal_id},
    ).fetchone()
    held = row and take_lease(db, world, row["id"], now=now)
    if not held:
        return False
    alive = send and held["valid_before"] > now
    return settle(db, world, held, row["deposit_address"], send=alive)["status"] in ("settled", "refused")


def look_due(db, deal_id, *, now):
    """Reserve the next look at a pending deal's deposit: at most one every few seconds, whoever asks."""
    seen = db.execute(
        "UPDATE deals SET look_at = :next WHERE id = :id AND state = 'pending' AND look_at <= :now",
        {"id": deal_id, "now": now, "next": now + LOOK_EVERY},
    )
    return seen.rowcount == 1
