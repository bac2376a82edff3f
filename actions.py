"""What the parties do with a deal: prove who they are, then move it. The same code serves HTTP and MCP."""

import hmac

import chain
import db as database
import deals
import limits
import settlement
import spec
from deals import Refusal

ACTORS = {
    "accept": ("seller",),
    "deliver": ("seller",),
    "refund": ("seller",),
    "statement": ("seller",),
    "confirm": ("buyer",),
    "cancel": ("buyer",),
    "dispute": ("buyer",),
    "split": ("seller", "buyer"),
}
SCHEMAS = {action: f"{action.capitalize()}Action" for action in ACTORS}


def act(db, world, deal_id, action, body, *, client):
    """Carry out one action of a party; returns the deal's row afterwards.

    Safe to repeat: what already took effect with the same content is answered like the first time.
    Refuses with not_found, invalid_request, proof_required, invalid_signature, invalid_secret, rate_limited,
    invalid_state or unavailable.
    """
    deal = deals.get(db, deal_id)
    spec.check(SCHEMAS[action], body)
    fields = {name: value for name, value in body.items() if name not in ("secret", "signature")}
    values = _values(deal, action, fields)
    actor = _prove(world, deal, action, fields, body, client=client)
    content = chain.canonical(fields).decode()
    now = world.now()
    with database.transaction(db):
        deals.apply_due(db, deal_id, now=now, treasury=world.treasury)
        proved, deal = deal, deals.find(db, deal_id)
        done = deal["attempt"] == proved["attempt"] and (  # the next attempt may have another buyer
            _repeated(db, deal_id, action, actor, content)
            or _carry_out(db, world, deal_id, action, actor, values, content, now=now)
        )
        deal = deals.find(db, deal_id)
    if not done:
        raise _wrong_state(deal, action)
    return deal


def read(db, world, deal_id):
    """Return (JSON bytes, strong ETag) of a deal's record as it stands this moment, whenever cron last ran."""
    deal = deals.glance(db, deal_id)
    now = world.now()
    if deal["due_at"] is not None and deal["due_at"] <= now:
        with database.transaction(db):
            deals.apply_due(db, deal_id, now=now, treasury=world.treasury)
        deal = deals.glance(db, deal_id)
    elif deal["state"] == "pending" and settlement.look_due(db, deal_id, now=now):
        settlement.resolve(db, world, deal_id, send=False)
        deal = deals.glance(db, deal_id)
    return rendered(db, world, deal)


def rendered(db, world, deal):
    """Return (JSON bytes, ETag) of a deal's row, or of a newer one; composed once per version and worker."""
    found = world.records.get((deal["id"], deal["version"]))
    if found is None:
        with database.snapshot(db):  # its row, history and transfers are of one moment
            deal = deals.find(db, deal["id"])
            record = deals.record(db, deal, world.frame)
        if len(world.records) >= 4096:
            world.records.clear()
        body = chain.compact(record)
        found = world.records[deal["id"], deal["version"]] = body, f'"{chain.sha256(body).hex()[:32]}"'
    return found


def _values(deal, action, fields):
    """Return what the move writes, from the fields the party sent."""
    if action == "deliver":
        return {name: fields.get(name) for name in ("url", "sha256", "note")}
    if action == "split":
        units = deals.units(fields["seller_usd"])
        if units > deal["amount_units"]:
            most = deals.usd(deal["amount_units"])
            raise Refusal("invalid_request", f"seller_usd must not be above the deal's amount of {most}.")
        return {"units": units}
    return dict(fields)


def _repeated(db, deal_id, action, actor, content):
    """Whether this very action is already part of the deal's history; for offers, whether it still stands."""
    row = db.execute(
        "SELECT content FROM deal_events WHERE deal_id = :id AND event IN (:action, :offer) AND actor = :actor"
        " ORDER BY number DESC LIMIT 1",
        {"id": deal_id, "action": action, "offer": "offer" if action == "split" else action, "actor": actor},
    ).fetchone()
    return row is not None and row["content"] == content


def _carry_out(db, world, deal_id, action, actor, values, content, *, now):
    """Make the move; returns a truthy value if the state allowed it."""
    if action == "statement":
        return _statement(db, deal_id, values["statement"], content, now=now)
    if action == "split":
        return _offer(db, world, deal_id, actor, values["units"], content, now=now)
    return deals.move(
        db, deal_id, action, now=now, actor=actor, treasury=world.treasury, content=content, **values
    )


def _statement(db, deal_id, statement, content, *, now):
    row = db.execute(
        "UPDATE deals SET dispute_statement = :statement WHERE id = :id AND state = 'disputed'"
        " AND dispute_statement IS NULL RETURNING state",
        {"id": deal_id, "statement": statement},
    ).fetchone()
    if row:
        deals.record_event(
            db, deal_id, "statement", now=now, actor="seller", state=row["state"], content=content
        )
    return row


def _offer(db, world, deal_id, actor, units, content, *, now):
    """Set one party's standing offer; when both name the same figure, the deal is split."""
    row = db.execute(
        "UPDATE deals SET seller_offer_units = CASE :actor WHEN 'seller' THEN :units ELSE seller_offer_units END,"
        " buyer_offer_units = CASE :actor WHEN 'buyer' THEN :units ELSE buyer_offer_units END"
        " WHERE id = :id AND state IN ('accepted', 'delivered', 'disputed') RETURNING *",
        {"id": deal_id, "actor": actor, "units": units},
    ).fetchone()
    if row is None:
        return None
    deals.record_event(db, deal_id, "offer", now=now, actor=actor, state=row["state"], content=content)
    if row["seller_offer_units"] == row["buyer_offer_units"]:
        return deals.move(db, deal_id, "split", now=now, actor=actor, treasury=world.treasury, content=content)
    return row


def _wrong_state(deal, action):
    possible = sorted({entry["action"] for entry in deals.actions(deal)})
    now_possible = f"possible now: {', '.join(possible)}" if possible else "nothing more can be done"
    return Refusal(
        "invalid_state", f"The deal is {deal['state']}, which does not allow {action}; {now_possible}.",
        state=deal["state"], actions=deals.actions(deal),
    )  # fmt: skip


# -- Proofs -------------------------------------------------------------------------------------------------


def signing_text(world, deal, action, fields, account):
    """Return the text whose EIP-191 signature proves a party: bound to service, deal, action, account, content."""
    details = "0x" + chain.sha256(chain.canonical(fields)).hex() if fields else "-"
    return (
        f"{world.settings.service_name}\ndeal: {deal['id']}\naction: {action}\n"
        f"account: {chain.checksum(account)}\ndetails: {details}"
    )


def _prove(world, deal, action, fields, body, *, client):
    """Return which party sent this. The same refusal for every wrong value, and only so many tries a minute."""
    actors = ACTORS[action]
    accounts = {actor: deal["seller_address" if actor == "seller" else "buyer_address"] for actor in actors}
    if "secret" not in body and "signature" not in body:
        raise _proof_required(world, deal, action, fields, accounts)
    counters = world.counters()
    limits.check_proofs(counters, deal["id"], client, now=world.clock())
    if "secret" in body:
        digest = chain.sha256(body["secret"].encode()).hex()
        if hmac.compare_digest(digest, deal["secret_hash"]):
            return "buyer"
        limits.wrong_proof(counters, deal["id"], client, now=world.clock())
        raise Refusal("invalid_secret", "The secret is not the one whose SHA-256 is this deal's secret_hash.")
    for actor, account in accounts.items():
        text = signing_text(world, deal, action, fields, account)
        if _signed(world, account, chain.personal_digest(text), body["signature"]):
            return actor
    limits.wrong_proof(counters, deal["id"], client, now=world.clock())
    raise Refusal(
        "invalid_signature", "The signature does not prove the party. Sign exactly the text in sign, as personal_sign.",
        **_sign_facts(world, deal, action, fields, accounts),
    )  # fmt: skip


def _signed(world, account, digest, signature):
    """Whether ``account`` signed ``digest``: as its own key, or as a contract wallet (ERC-1271)."""
    if chain.signer(digest, chain.tidy_signature(signature)) == account:
        return True
    try:
        return world.ledger.signed_by_contract(account, digest, signature)
    except chain.ChainUnknown as error:
        raise Refusal(
            "unavailable", "The chain cannot be asked about this signature now; try again.",
            headers={"Retry-After": "5"},
        ) from error  # fmt: skip


def _proof_required(world, deal, action, fields, accounts):
    if "buyer" in accounts:
        how = "Send secret, or signature: the paying address's personal_sign of the text in sign"
    else:
        how = "Send signature: the seller_address's personal_sign of the text in sign"
    if len(accounts) == 2:
        how = "Send secret as the buyer, or signature: your personal_sign of your text in sign"
    return Refusal("proof_required", how + ".", **_sign_facts(world, deal, action, fields, accounts))


def _sign_facts(world, deal, action, fields, accounts):
    texts = {actor: signing_text(world, deal, action, fields, account) for actor, account in accounts.items()}
    return {"sign": next(iter(texts.values())), **({"sign_as": texts} if len(texts) > 1 else {})}
