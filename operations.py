"""What the operator sees and decides: health, disputes, switches, the books against the chain, stray money."""

import os

import chain
import db as database
import deals
import limits
from db import sqlite3
from deals import Refusal

SWEEP_OVERDUE = 900  # seconds without a sweep, while something waits for one, that are an incident
STUCK = 3600  # seconds after which a transfer that should have landed is an incident
DISK_LEFT = 50 << 20  # bytes free on the disk below which nothing can be recorded for much longer
SWITCHES = ("deal", "base")


# -- Health -------------------------------------------------------------------------------------------------


def health(db, world):
    """Return (is the service fit to take and move money, the facts)."""
    now, problems = world.now(), []
    waiting = db.execute(
        "SELECT (SELECT count(*) FROM deals WHERE due_at <= :late) + (SELECT count(*) FROM deals WHERE look_at <= :late)"
        " + (SELECT count(*) FROM transfers WHERE next_at <= :late AND status <> 'blocked') AS n",
        {"late": now - SWEEP_OVERDUE},
    ).fetchone()["n"]
    if waiting:
        problems.append("the sweep is overdue")
    legs = db.execute(
        "SELECT count(*) AS open, coalesce(sum(status = 'blocked'), 0) AS blocked, coalesce(sum(value_units), 0) AS units,"
        " coalesce(sum((status = 'sent' OR status = 'due' AND reason IS NOT NULL) AND created_at <= :old), 0) AS stuck"
        " FROM transfers WHERE next_at IS NOT NULL AND leg <> 'guarantee'",
        {"old": now - STUCK},
    ).fetchone()
    if legs["stuck"]:
        problems.append("transfers could not be signed or have been on their way for over an hour")
    if db.execute("SELECT 1 FROM payments WHERE status = 'settled' AND reason IS NOT NULL LIMIT 1").fetchone():
        problems.append("the chain has lost a deposit")
    held = db.execute(
        "SELECT count(*) AS n, coalesce(sum(price_units), 0) AS units FROM deals WHERE due_at IS NOT NULL"
    ).fetchone()
    peers = _facilitators(world, now)
    if all(peer["state"] == "resting" for peer in peers):
        problems.append("no payment facilitator works")
    problems += _storage(db, world)
    return not problems, {
        "status": "ok" if not problems else "failing",
        "problems": problems,
        "mode": world.settings.mode,
        "database": {"schema": database.VERSION, "journal_mode": database.journal_mode(db)},
        "last_sweep_at": deals.timestamp(_number(database.meta(db, "last_sweep_at"))),
        "open_deals": {"count": held["n"], "amount_usd": deals.usd(held["units"])},
        "open_transfers": {
            "count": legs["open"],
            "amount_usd": deals.usd(legs["units"]),
            "blocked": legs["blocked"],
            "stuck": legs["stuck"],
        },
        "facilitators": peers,
        "switched_off": [name for name in SWITCHES if database.meta(db, f"off:{name}")],
    }


def _facilitators(world, now):
    failing = {row["url"]: row for row in limits.circuits(world.counters())}
    found = []
    for facilitator in world.facilitators:
        row = failing.get(facilitator.url)
        state = "ok" if row is None else "resting" if row["open_until"] > now else "failing"
        if world.declares(facilitator.url) is False:
            state = "skipped"  # its latest complete declaration no longer has our kind
        found.append({"url": facilitator.url, "state": state})
    return found


def _storage(db, world):
    """Return what keeps the database from recording money."""
    problems = []
    try:
        with database.transaction(db):
            pass
    except sqlite3.Error as error:
        problems.append(f"the database cannot be written: {error}")
    disk = os.statvfs(os.path.dirname(os.path.abspath(world.settings.database)))
    if disk.f_bavail * disk.f_frsize < DISK_LEFT:
        problems.append("the disk is almost full")
    return problems


def _number(text):
    return None if text is None else int(text)


def switch(db, name, *, on):
    """Switch the endpoint (``deal``) or the network (``base``) on or off for new payments; reads go on."""
    if name not in SWITCHES:
        raise Refusal("invalid_request", f"The switches are {', '.join(SWITCHES)}.")
    database.set_meta(db, f"off:{name}", None if on else "1")


# -- Disputes -----------------------------------------------------------------------------------------------


def resolve_dispute(db, world, deal_id, outcome, *, note, seller_units=None, act=True):
    """Decide a disputed deal: ``release``, ``refund`` or ``split``. Returns the deal's row.

    Without ``act`` it only refuses what it would refuse.
    """
    deal = deals.get(db, deal_id)
    if outcome == "split" and not 0 <= (seller_units or 0) <= deal["amount_units"]:
        raise Refusal("invalid_request", f"The seller's part must be from 0 to {deals.usd(deal['amount_units'])}.")
    values = {"decision": note, **({"seller_units": seller_units} if outcome == "split" else {})}
    now = world.now()
    with database.transaction(db):
        deals.apply_due(db, deal_id, now=now, treasury=world.treasury)
        deal, decided = deals.find(db, deal_id), None
        if act:
            decided = deals.move(
                db, deal_id, f"resolve_{outcome}", now=now, actor="operator", treasury=world.treasury, content=note,
                **values,
            )  # fmt: skip
    if not decided and (act or deal["state"] != "disputed"):
        raise Refusal("invalid_state", f"The deal is {deal['state']}; only a disputed deal can be resolved.")
    return decided or deal


# -- Stray money --------------------------------------------------------------------------------------------


def recover(db, world, terms, payee, *, act):
    """Find money at the deposit of terms that no running deal accounts for; with ``act``, owe it to ``payee``.

    Returns (deposit address, units there). Terms that never became a deal are entered as a lapsed one, so that
    the sweep returns their money like any surplus. What reached a deal long after its end goes to its buyer.
    """
    master_key = world.terminal.master_key
    deal_id, deposit = terms.deal_id(master_key), chain.deposit_address(master_key, terms.canonical)
    _check_recoverable(db, deal_id, payee)
    units = world.ledger.balance(deposit)
    if act and units >= deals.SMALLEST_TRANSFER:
        now, price = world.now(), world.settings.price_units(terms.amount_units)
        with database.transaction(db):
            if not _check_recoverable(db, deal_id, payee):
                deals.open_attempt(
                    db, terms, deal_id=deal_id, deposit=deposit, master_key=master_key, price_units=price, buyer=payee,
                    decide_hours=world.settings.decide_hours, now=now,
                )  # fmt: skip
                deals.move(db, deal_id, "lapse", now=now, actor="clock", treasury=world.treasury, look_at=now)
            db.execute("UPDATE deals SET look_at = :now WHERE id = :id", {"now": now, "id": deal_id})
    return deposit, units


def _check_recoverable(db, deal_id, payee):
    """Refuse while the sweep looks after the deal's money, or to pay anyone but its buyer. Returns its row or None."""
    deal = deals.find(db, deal_id)
    if deal is None:
        return None
    state, owed = deal["state"], "SELECT 1 FROM transfers WHERE deal_id = :id AND next_at IS NOT NULL"
    ended = state == "lapsed" or state in deals.ENDED
    if not ended or deal["look_at"] is not None or db.execute(owed, {"id": deal_id}).fetchone():
        raise Refusal("deal_exists", f"These terms are the deal {deal_id} ({state}): the sweep looks after it.")
    if payee != deal["buyer_address"]:
        buyer = chain.checksum(deal["buyer_address"])
        raise Refusal("deal_exists", f"These terms are the deal {deal_id} ({state}): its money goes back to {buyer} only.")
    return deal


# -- Books --------------------------------------------------------------------------------------------------


def audit(db, world, *, progress=lambda total, done: None):
    """Compare every deal's books with the chain; returns a list of differences, each one a dict.

    What a deposit should hold: the price once funded, plus surplus that was found, minus every leg the chain
    has taken. Less than a cent more is no difference: anybody can send it, and nothing sends it back.
    """
    rows = db.execute("SELECT id, state, deposit_address, price_units, funded_at FROM deals ORDER BY id").fetchall()
    differences = []
    for start in range(0, len(rows), 100):
        progress(len(rows), start)
        batch = rows[start : start + 100]
        head = world.ledger.head(depth=world.settings.confirmations)
        held = world.ledger.balances([row["deposit_address"] for row in batch], at=head.number)
        for deal, units in zip(batch, held):
            differences += _audit_deal(db, world, deal, units, head)
    return differences


def _audit_deal(db, world, deal, units, head):
    legs = db.execute(
        "SELECT * FROM transfers WHERE deal_id = :id AND signature IS NOT NULL", {"id": deal["id"]}
    ).fetchall()
    taken = world.ledger.used([(deal["deposit_address"], leg["nonce"]) for leg in legs], at=head.number)
    expected = deal["price_units"] if deal["funded_at"] else 0
    found = []
    for leg, used in zip(legs, taken):
        expected += leg["value_units"] * leg["leg"].startswith("surplus-")
        expected -= leg["value_units"] * used
        if used != (leg["status"] == "confirmed") and leg["leg"] != "guarantee":
            word = "the chain has it, the books do not yet" if used else "confirmed in the books, not on the chain"
            found.append({"deal": deal["id"], "leg": leg["leg"], "difference": word})
    if not 0 <= units - expected < deals.SMALLEST_TRANSFER:
        words = f"the deposit holds {units} units, the books say {expected}"
        found.append({"deal": deal["id"], "leg": None, "difference": words})
    return found
