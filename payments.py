"""The paid call: quote, check, verify, claim, then settlement.py. Every answer of the paid endpoint is made here."""

import dataclasses
import logging
from typing import NamedTuple

import chain
import db as database
import deals
import limits
import protocols
import settlement
import spec
from db import sqlite3
from deals import Refusal
from facilitators import MENDABLE

NONCE_TAKEN = "The authorization's nonce belongs to the payment of another deal; sign with a fresh nonce."
log = logging.getLogger(__name__)


class Call(NamedTuple):
    """One request to create a deal, free of HTTP machinery. ``refusal`` says why ``terms`` is None."""

    url: str
    body: bytes
    terms: deals.Terms | None
    refusal: Refusal | None
    signatures: tuple = ()
    authorizations: tuple = ()
    idempotency_key: str | None = None
    client: str = ""


class Answer(NamedTuple):
    status: int
    headers: dict
    body: bytes


def check_terms(world, body):
    """Turn a body that fits the published schema into Terms; refuses what a schema cannot say."""
    settings, seller = world.settings, body["seller_address"]
    if not chain.is_address(seller):
        raise Refusal("invalid_request", "seller_address mixes cases but fails its EIP-55 checksum: check for a typo.")
    terms = deals.terms(body)
    if not settings.min_amount_units <= terms.amount_units <= settings.max_amount_units:
        low, high = deals.usd(settings.min_amount_units), deals.usd(settings.max_amount_units)
        raise Refusal("invalid_request", f"amount_usd must be from {low} to {high}.")
    deposit = chain.deposit_address(world.terminal.master_key, terms.canonical)
    if terms.seller_address in (chain.ZERO_ADDRESS, world.terminal.token.address, world.treasury, deposit):
        raise Refusal("invalid_request", "seller_address must be the seller's own wallet.")
    return terms


def look(db, deal_id):
    """Return what a call depends on, in one question: (the deal's row or None, what is switched off or None).

    Of the row only the columns that count here: all forty take twice as long.
    """
    row = db.execute(
        "SELECT id, state, attempt, terms, buyer_address, deposit_address, price_units,"
        " (SELECT key FROM meta WHERE key IN ('off:deal', 'off:base') LIMIT 1) AS off"
        " FROM (SELECT 1) LEFT JOIN deals ON id = :id",
        {"id": deal_id},
    ).fetchone()
    return (row if row["id"] else None), row["off"]


def check_switches(off):
    """Refuse with unavailable while the operator has switched the endpoint or the network off."""
    if off:
        what = {"off:deal": "This endpoint", "off:base": "The payment network"}[off]
        raise Refusal("unavailable", f"{what} is switched off; nothing was charged.", headers={"Retry-After": "300"})


def create(db, world, call):
    """Answer one call of the paid endpoint. Returns an :class:`Answer`; raises :class:`Refusal`."""
    deal, off = look(db, call.terms and call.terms.deal_id(world.terminal.master_key))
    offer = offer_for(world, call, deal)
    try:
        payment = protocols.read(call.signatures, call.authorizations)
        if payment is None:
            check_switches(off)
            return quote(world, unpaid(offer, call, deal))
        if call.refusal:
            raise call.refusal
        own = find_payment(db, payment.authorization)
        offer, deal = _earlier(db, own, offer, deal)
        if call.terms is None:
            raise protocols.Mismatch("A GET starts no deal: send the payment with the POST that has the deal's terms.")
        protocols.match_terms(world.terminal, offer, payment)
        payment = _check_signature(world, call, payment)
        return _pay(db, world, call, offer, payment, deal, own, off)
    except protocols.Mismatch as mismatch:
        if call.refusal:
            raise call.refusal from None
        check_switches(off)
        return quote(world, offer._replace(error=str(mismatch), invalid=_open(deal)))
    except Refusal as refusal:
        if refusal.code == "invalid_payment":
            headers, _ = protocols.quote(world.terminal, unpaid(offer, call, deal), now=world.now())
            refusal.headers.update(headers)
        raise


def read_body(world, body, content_type):
    """Read a request body as Terms; returns (terms, None), or (None, the refusal that says what is wrong)."""
    try:
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise Refusal("unsupported_media_type", "Send the body as application/json.")
        try:
            value = chain.read_json(body)
        except ValueError as error:
            raise Refusal("invalid_request", f"The body cannot be read: {error}.") from None
        return check_terms(world, spec.check("DealRequest", value)), None
    except Refusal as refusal:
        return None, refusal


# -- Quotes -------------------------------------------------------------------------------------------------


def offer_for(world, call, deal=None):
    """Return what this call may be paid with; for a body that starts no deal, the treasury and the minimum price."""
    settings, terminal = world.settings, world.terminal
    if call.terms is None:
        units = settings.price_units(settings.min_amount_units)
        return protocols.Offer(None, world.treasury, units, call.url, call.body)
    return protocols.Offer(
        deal_id=call.terms.deal_id(terminal.master_key),
        pay_to=chain.deposit_address(terminal.master_key, call.terms.canonical),
        price_units=deal["price_units"] if _open(deal) else settings.price_units(call.terms.amount_units),
        url=call.url,
        body=call.body,
        terms=call.terms.canonical.decode(),
    )


def unpaid(offer, call, deal):
    """Say in an unpaid call's quote when it must not be signed: an invalid body, or a deal that exists."""
    if call.refusal:
        return offer._replace(invalid=True, error=f"{call.refusal.code}: {call.refusal.message}")
    if _open(deal):
        error = (
            f"deal_exists: the deal {deal['id']} already has exactly these terms and is {deal['state']}."
            " Do not sign this quote; use a fresh secret for another deal."
        )
        return offer._replace(invalid=True, error=error)
    return offer


def quote(world, offer, *, headers=None):
    """Return the 402 for an offer."""
    found, body = protocols.quote(world.terminal, offer, now=world.now())
    return Answer(402, {**found, **(headers or {})}, body)


def _earlier(db, own, offer, deal):
    """Return the offer that a stored payment was signed for, and its deal, if that began under an earlier master key.

    Without this, a retry after the operator changed wallets would be told to pay again.
    """
    first = look(db, own["deal_id"])[0] if own and own["deal_id"] != offer.deal_id else None
    if first is None or first["terms"] != offer.terms:
        return offer, deal
    found = {"deal_id": first["id"], "pay_to": first["deposit_address"], "price_units": first["price_units"]}
    return offer._replace(**found), first


def _open(deal):
    return deal is not None and deal["state"] != "lapsed"


def _check_signature(world, call, payment):
    """Check that the payer itself signed the authorization, as its own key or as a contract wallet.

    Returns the payment with the signature as the token takes it: v 27 or 28, a contract's own bytes untouched.
    """
    authorization = payment.authorization
    if authorization.payer in (call.terms.seller_address, authorization.to):
        raise protocols.Mismatch("The seller cannot pay for its own deal: pay from the buyer's wallet.")
    digest = authorization.digest(world.terminal.token)
    tidy = chain.tidy_signature(payment.signature)
    if chain.signer(digest, tidy) == authorization.payer:
        return payment if tidy == payment.signature else dataclasses.replace(payment, signature=tidy)
    try:
        with _slot(world, call):
            if world.ledger.signed_by_contract(authorization.payer, digest, payment.signature):
                return payment
    except chain.ChainUnknown as error:
        raise Refusal(
            "unavailable", "The chain cannot be asked about this wallet's signature now; nothing was charged.",
            headers={"Retry-After": "5"},
        ) from error  # fmt: skip
    raise protocols.Mismatch("The signature is not the payer's for exactly this authorization.")


# -- Paying -------------------------------------------------------------------------------------------------


def _pay(db, world, call, offer, payment, deal, own, off):
    """Answer a call with a payment that fits the terms: from what is stored, or by settling it.

    ``deal`` and ``own``: the rows of this deal and of this very payment as they were just now, or None; ``off``: what
    is switched off. What has changed since is found out where it counts, in the one statement that takes a lease or
    makes a claim.
    """
    now = world.now()
    answer = _known(db, world, offer, payment, call, deal, own, now=now)
    if answer:
        return answer
    check_switches(off)
    with _slot(world, call):
        protocols.match_moment(world.terminal, offer, payment, now=now)
        landed = _verify(world, offer, payment, now=now)
        with world.working():
            claimed = _claim(db, world, offer, payment, call, deal, now=world.now())
            if claimed:
                return _settled(db, world, offer, claimed, send=not landed)
        # Another request was faster: its claim decides.
        deal, own = look(db, offer.deal_id)[0], find_payment(db, payment.authorization)
        return _known(db, world, offer, payment, call, deal, own, now=world.now()) or _in_progress()


def _slot(world, call):
    """Occupy one place among the paid calls in flight; refuses with rate_limited."""
    settings = world.settings
    return limits.slot(
        world.counters(), call.client, now=world.clock(), most=settings.max_in_flight,
        most_per_client=settings.max_in_flight_per_client,
    )  # fmt: skip


def _known(db, world, offer, payment, call, deal, own, *, now):
    """Answer from what earlier calls stored; None when this payment is to be settled (decisions 2 and 7)."""
    _check_keys(db, offer, payment, call)
    if own and own["deal_id"] != offer.deal_id:
        raise protocols.Mismatch(NONCE_TAKEN)
    if deal is None:
        return None
    if own is None or own["status"] == "refused":
        if deal["state"] == "lapsed" and _may_retry(db, world, deal, payment):
            return None
        return _other_payment(db, world, deal, payment, now=now)
    if own["status"] == "settled":
        return _stored(db, world, own, now=now)
    try:
        held = settlement.take_lease(db, world, own["id"], now=now)
    except sqlite3.OperationalError:  # its money may have moved long ago: "nothing was charged" could be a lie
        log.exception("the payment of %s cannot be taken up again now; it stays pending", deal["id"])
        return pending_answer(deal["id"])
    if held is None:
        return _in_progress()
    return _settled(db, world, offer, held, send=True)


def _settled(db, world, offer, claimed, *, send):
    """Settle a claimed payment and answer. From here on a failure of ours means "unknown", never "not charged"."""
    try:
        payment = settlement.settle(db, world, claimed, offer.pay_to, send=send)
    except Exception:  # a full disk, a bug: the money may have moved, so the claim stays for the sweep to resolve
        log.exception("settling the payment of %s stopped half-way; it stays pending", offer.deal_id)
        return pending_answer(offer.deal_id)
    return _outcome(db, world, offer, payment)


def _check_keys(db, offer, payment, call):
    """Refuse a key that this payer has used for other terms."""
    for key, status in _keys(call, payment):
        row = db.execute(
            "SELECT body_hash FROM idempotency_keys WHERE payer = :payer AND key = :key",
            {"payer": payment.authorization.payer, "key": key},
        ).fetchone()
        if row and row["body_hash"] != _terms_hash(call):
            raise Refusal(
                "idempotency_conflict", "This key was used before with another request body; nothing was charged.",
                status=status,
            )  # fmt: skip


def _keys(call, payment):
    """Yield the idempotency keys of a call with the status that a conflict answers."""
    if call.idempotency_key:
        yield "key:" + call.idempotency_key, 422
    if payment.identifier:
        yield "id:" + payment.identifier, 409


def _terms_hash(call):
    return chain.sha256(call.terms.canonical).hex()


def find_payment(db, authorization):
    """Return the payment row of one authorization, or None."""
    return db.execute(
        "SELECT * FROM payments WHERE payer = :payer AND nonce = :nonce",
        {"payer": authorization.payer, "nonce": authorization.nonce},
    ).fetchone()


def _may_retry(db, world, deal, payment):
    """Whether a new attempt may start on a lapsed deal: at once for the same payer; for another one only when the
    chain shows every earlier authorization dead and nothing left of one that landed late, so that the money of two
    payers never meets in one deposit."""
    if payment.authorization.payer == deal["buyer_address"]:
        return True
    row = db.execute("SELECT max(valid_before) AS last FROM payments WHERE deal_id = :id", {"id": deal["id"]}).fetchone()
    try:
        head = world.ledger.head(depth=world.settings.confirmations)
        dead = head.time > (row["last"] or 0) + settlement.MARGIN
        return dead and world.ledger.balance(deal["deposit_address"], at=head.number) < deals.SMALLEST_TRANSFER
    except chain.ChainUnknown as error:
        raise _chain_unknown() from error


def _other_payment(db, world, deal, payment, *, now):
    """Answer a payment that is not the one this deal was made with; it is never settled."""
    if payment.authorization.payer != deal["buyer_address"]:
        raise Refusal(
            "deal_exists", f"The deal {deal['id']} has exactly these terms and another buyer; nothing was charged.",
            deal_id=deal["id"],
        )  # fmt: skip
    if deal["state"] == "pending":
        return pending_answer(deal["id"])
    with database.transaction(db):
        deals.apply_due(db, deal["id"], now=now, treasury=world.treasury)
        deal = deals.find(db, deal["id"])
        body = chain.compact([deals.record(db, deal, world.frame)])
        row = db.execute(
            "SELECT * FROM payments WHERE deal_id = :id AND status = 'settled'", {"id": deal["id"]}
        ).fetchone()
    return Answer(200, settlement.answer_headers(world, dict(row), protocol=payment.protocol, now=now), body)


def _stored(db, world, own, *, now):
    expires = own["settled_at"] + world.settings.answer_hours * 3600
    if now >= expires:
        raise Refusal(
            "expired", "The stored answer to this payment has expired; the deal is still there. Do not pay again.",
            deal_id=own["deal_id"],
        )  # fmt: skip
    try:
        return Answer(200, *settlement.receipt(db, world, own))
    except Exception:  # the money is there: "nothing was charged" would be a lie
        log.exception("the receipt for %s cannot be written now", own["deal_id"])
        return pending_answer(own["deal_id"])


def _in_progress():
    raise Refusal(
        "payment_in_progress", "This payment is being worked on: wait, then retry with the same payment.",
        headers={"Retry-After": "2"},
    )  # fmt: skip


def pending_answer(deal_id):
    """Return the 202: the outcome is not known yet, and a second payment would be a mistake."""
    path = f"/v1/deals/{deal_id}"
    body = {
        "id": deal_id,
        "state": "pending",
        "message": "The outcome of this payment is not known yet. Do not pay again: poll the deal, or retry with the"
        " same payment.",
        "poll": path,
    }
    return Answer(202, {"Location": path, "Retry-After": str(settlement.LOOK_EVERY)}, chain.compact(body))


# -- Verify and claim ---------------------------------------------------------------------------------------


def _verify(world, offer, payment, *, now):
    """Ask a facilitator about the payment. Returns True when its money is already at the deposit.

    A clear no is a :class:`protocols.Mismatch`, unless the chain shows that somebody submitted this very
    authorization before us. No facilitator to be had: refuses with unavailable. Nothing is written.
    """
    payload, wanted = settlement.envelope(world, payment.authorization, payment.signature, offer.url)
    counters = world.counters()
    for facilitator in world.facilitators:
        state = world.declares(facilitator.url) is not False and limits.usable(counters, facilitator.url, now=now)
        if not state:
            continue
        verdict = facilitator.verify(payload, wanted, seconds=world.settings.settle_seconds / 2)
        if verdict.valid is None:
            limits.failed(counters, facilitator.url, verdict.reason, now=world.clock())
            continue
        limits.worked(counters, facilitator.url, state)
        if verdict.valid:
            return False
        if _paid(world, payment.authorization, since=now - settlement.LOOK_BACK):
            return True
        raise protocols.Mismatch(f"The payment would not settle: {verdict.reason}.")
    raise Refusal(
        "unavailable", "No payment facilitator can be reached now; nothing was charged. Retry with the same payment.",
        headers={"Retry-After": "10"},
    )  # fmt: skip


def _paid(world, authorization, *, since):
    try:
        units, transaction = world.ledger.payment(authorization, since=since)
    except chain.ChainUnknown as error:
        raise _chain_unknown() from error
    return units >= authorization.value and transaction is not None


def _chain_unknown():
    return Refusal(
        "unavailable", "The chain cannot be asked now; nothing was charged. Retry with the same payment.",
        headers={"Retry-After": "10"},
    )  # fmt: skip


def _claim(db, world, offer, payment, call, before, *, now):
    """Commit that this payment is about to be settled for this deal. Returns its row, or None if it must not be.

    ``before``: the deal's row as :func:`_known` judged it; an attempt made since is another payer's business.
    """
    authorization, settings = payment.authorization, world.settings

    def claim(db):
        attempt = deals.open_attempt(
            db, call.terms, deal_id=offer.deal_id, deposit=offer.pay_to, master_key=world.terminal.master_key,
            price_units=offer.price_units, buyer=authorization.payer, decide_hours=settings.decide_hours, now=now,
            takes_over=before["attempt"] if before else None,
        )  # fmt: skip
        if attempt is None:
            return None
        row = db.execute(
            "INSERT INTO payments (deal_id, attempt, payer, nonce, protocol, status, value_units, valid_after,"
            " valid_before, signature, resource_url, challenge_id, claimed_at, lease_until)"
            " VALUES (:deal, :attempt, :payer, :nonce, :protocol, 'claimed', :value, :valid_after, :valid_before,"
            " :signature, :url, :challenge, :now, :lease)"
            # The same authorization may be tried again after an attempt that was refused before it could land.
            " ON CONFLICT (payer, nonce) DO UPDATE SET status = 'claimed', attempt = :attempt, claimed_at = :now,"
            " lease_until = :lease WHERE status = 'refused' AND deal_id = :deal RETURNING *",
            {
                "deal": offer.deal_id, "attempt": attempt, "payer": authorization.payer, "nonce": authorization.nonce,
                "protocol": payment.protocol, "value": authorization.value, "valid_after": authorization.valid_after,
                "valid_before": authorization.valid_before, "signature": payment.signature, "url": offer.url,
                "challenge": payment.challenge and payment.challenge["id"], "now": now,
                "lease": now + int(settings.settle_seconds) + settlement.LEASE_SLACK,
            },
        ).fetchone()  # fmt: skip
        if row is None:  # the same nonce is being claimed for another deal at this moment
            raise protocols.Mismatch(NONCE_TAKEN)
        for key, _ in _keys(call, payment):
            db.execute(
                "INSERT INTO idempotency_keys (payer, key, body_hash, deal_id) VALUES (:payer, :key, :hash, :deal)"
                " ON CONFLICT DO NOTHING",
                {"payer": authorization.payer, "key": key, "hash": _terms_hash(call), "deal": offer.deal_id},
            )
        return row

    return database.together(db, claim)


def _outcome(db, world, offer, payment):
    """Turn what became of a payment into the answer of the paid call."""
    if payment["status"] == "settled":
        return _stored(db, world, payment, now=world.now())
    if payment["status"] != "refused":
        return pending_answer(payment["deal_id"])
    reason = payment["reason"] or "the authorization can no longer be used"
    failure = protocols.failure_headers(world.terminal, payer=payment["payer"], reason=reason)
    if MENDABLE.search(reason):
        error = f"The payment was not settled and nothing was charged: {reason}."
        return quote(world, offer._replace(error=error), headers=failure)
    raise Refusal(
        "settlement_failed", f"The payment could not be settled and nothing was charged: {reason}.", headers=failure
    )


