"""Money out: sign each leg once, send it until the chain shows it, give surplus back. Run by the sweep alone.

A leg is a check that anyone may cash: its bytes never change once signed, its nonce can be used once, and
the same bytes are sent again on any doubt.
"""

import collections
import sys
import traceback

import chain
import db as database
import deals
import settlement

LONGEST_PAUSE = 900
WAIT_FOR_DEPTH = 3  # seconds until a transfer that has landed is looked at again for its confirmations


def sweep(db, world, wallets, *, limit=100, seconds=50, progress=lambda total, done: None):
    """Do a bounded amount of everything that is due; returns a Counter. Safe to run twice at the same time.

    ``wallets`` maps public master keys to their secrets. Each item is claimed by pushing its next turn ahead
    first, so one that fails, even by an error in this code, never blocks the rest. Nothing new is begun after
    ``seconds``, so that cron's next run does not meet this one.
    """
    counts = Counts()
    counts.deadline = world.clock() + seconds
    work = [(_pending, row["id"]) for row in _waiting(db, world, limit)]
    work += [(_timer, deal_id) for deal_id in deals.due(db, now=world.now(), limit=limit)]
    for number, (job, deal_id) in enumerate(work):
        progress(len(work), number)
        _guarded(counts, job, db, world, deal_id)
    _guarded(counts, _legs, db, world, wallets, limit)
    for row in _deposits(db, world, limit):
        _guarded(counts, _surplus if row["due_at"] is None else _still_there, db, world, row)
    database.set_meta(db, "last_sweep_at", world.now())
    return counts


class Counts(collections.Counter):
    """What one sweep did, by kind, and until when it may begin something."""

    deadline = float("inf")


def _guarded(counts, job, db, world, *args):
    """Run one item of the sweep. An unreadable chain costs this item its turn; a bug is told and counted."""
    if world.clock() >= counts.deadline:
        counts["left"] += 1
        return
    try:
        job(db, world, *args, counts)
    except chain.ChainUnknown as error:
        counts["chain_unknown"] += 1
        print(f"sweep: the chain could not be read: {error}", file=sys.stderr)
    except Exception:
        counts["errors"] += 1
        traceback.print_exc()


# -- Pending deals and timers -------------------------------------------------------------------------------


def _waiting(db, world, limit):
    """Return pending deals whose next look is due; a claim that never came back is among them."""
    return db.execute(
        "SELECT id FROM deals WHERE look_at <= :now AND state = 'pending' ORDER BY look_at LIMIT :limit",
        {"now": world.now(), "limit": limit},
    ).fetchall()


def _pending(db, world, deal_id, counts):
    if settlement.look_due(db, deal_id, now=world.now()) and settlement.resolve(db, world, deal_id, send=True):
        counts["resolved"] += 1


def _timer(db, world, deal_id, counts):
    with database.transaction(db):
        if deals.apply_due(db, deal_id, now=world.now(), treasury=world.treasury):
            counts["timers"] += 1


# -- Legs ---------------------------------------------------------------------------------------------------


def _legs(db, world, wallets, limit, counts):
    """Sign and send the legs that are due, after one look at the chain for all of them."""
    rows = db.execute(
        "SELECT t.*, d.master_key, d.terms, d.deposit_address FROM transfers t JOIN deals d ON d.id = t.deal_id"
        " WHERE t.next_at <= :now ORDER BY t.next_at LIMIT :limit",
        {"now": world.now(), "limit": limit},
    ).fetchall()
    if not rows:
        return
    head = world.ledger.head(depth=world.settings.confirmations)
    pairs = [(row["deposit_address"], row["nonce"]) for row in rows]
    deep = world.ledger.used(pairs, at=head.number)
    landed = world.ledger.used(pairs) if world.settings.confirmations else deep
    for row, is_deep, has_landed in zip(rows, deep, landed):
        _guarded(counts, _leg, db, world, wallets, row, is_deep, has_landed)


def _leg(db, world, wallets, row, is_deep, has_landed, counts):
    """Take one leg one step further. What the chain shows comes before anything that is sent."""
    waits = row["leg"] == "fee" and _parties_open(db, row["deal_id"])  # before the turn: who pays them now wakes the next
    if not _take_turn(db, world, row) or waits:
        return
    if row["status"] == "due":
        row = _sign(db, world, wallets, row, counts)
        if row is None or row["leg"] == "guarantee":
            return
    if is_deep:
        _confirm(db, world, row, counts)
    elif has_landed:
        _later(db, world, row, WAIT_FOR_DEPTH)
    else:
        _send(db, world, row, counts)


def _take_turn(db, world, row):
    """Claim this leg's turn by pushing its next one ahead; False when another sweep was faster."""
    pause = min(LONGEST_PAUSE, 5 * 2 ** min(row["attempts"], 10))
    taken = db.execute(
        "UPDATE transfers SET attempts = attempts + 1, next_at = :next"
        " WHERE deal_id = :deal AND leg = :leg AND next_at = :seen AND attempts = :attempts",
        {"next": world.now() + pause, "deal": row["deal_id"], "leg": row["leg"], "seen": row["next_at"],
         "attempts": row["attempts"]},
    )  # fmt: skip
    return taken.rowcount == 1


def _parties_open(db, deal_id):
    """Whether the parties' own legs are still on their way: the fee comes after them."""
    return db.execute(
        "SELECT 1 FROM transfers WHERE deal_id = :deal AND leg IN ('seller', 'buyer') AND status <> 'confirmed'",
        {"deal": deal_id},
    ).fetchone()


def _sign(db, world, wallets, row, counts):
    """Sign a leg and store the bytes before anyone can see them sent; returns the leg's row, None if we cannot."""
    secret = wallets.get(bytes.fromhex(row["master_key"]))
    if secret is None:
        reason = f"no wallet for master key {row['master_key']}: add its keystore to DEALS_WALLET"
        _note(db, row, reason)
        counts["unsigned"] += 1
        return None
    signature = chain.sign(
        chain.deposit_key(secret, row["terms"].encode()), authorization_of(row).digest(world.terminal.token)
    )
    offered = row["leg"] == "guarantee"
    db.execute(
        "UPDATE transfers SET signature = :signature, status = :status, reason = NULL,"
        " next_at = CASE WHEN :offered THEN NULL ELSE next_at END"
        " WHERE deal_id = :deal AND leg = :leg AND signature IS NULL",
        {"signature": signature, "status": "offered" if offered else "signed", "offered": offered,
         "deal": row["deal_id"], "leg": row["leg"]},
    )  # fmt: skip
    counts["guarantees" if offered else "signed"] += 1
    return {**dict(row), "signature": signature, "status": "signed"}


def authorization_of(row):
    """Build the authorization of a leg (a row joined with its deal's deposit address)."""
    return chain.Authorization(
        payer=row["deposit_address"], to=row["payee"], value=row["value_units"], valid_after=row["valid_after"],
        valid_before=row["valid_before"], nonce=row["nonce"],
    )  # fmt: skip


def _send(db, world, row, counts):
    """Commit that the leg is being sent, submit it, and look what came of it."""
    db.execute(
        "UPDATE transfers SET status = 'sent' WHERE deal_id = :deal AND leg = :leg AND status <> 'confirmed'",
        {"deal": row["deal_id"], "leg": row["leg"]},
    )
    counts["sent"] += 1
    authorization = authorization_of(row)
    url = f"{world.settings.base_url or 'http://localhost'}/v1/deals/{row['deal_id']}"
    outcome = settlement.submit(world, authorization, row["signature"], url)
    if world.ledger.used([(authorization.payer, authorization.nonce)])[0]:
        row = {**dict(row), "transaction_hash": outcome.transaction}
        if world.settings.confirmations:
            _later(db, world, row, WAIT_FOR_DEPTH)
        else:
            _confirm(db, world, row, counts)
        return
    refusal = world.ledger.refusal(authorization, row["signature"])
    if refusal:
        settlement.restore(db, world, row["deal_id"])  # if the deposit itself has gone, have it paid again
        _block(db, row, refusal)
        counts["blocked"] += 1
    else:
        _note(db, row, outcome.reason or "sent; not on the chain yet")


def _later(db, world, row, seconds):
    db.execute(
        "UPDATE transfers SET next_at = :next, transaction_hash = coalesce(:hash, transaction_hash)"
        " WHERE deal_id = :deal AND leg = :leg AND status <> 'confirmed'",
        {"next": world.now() + seconds, "hash": row["transaction_hash"], "deal": row["deal_id"], "leg": row["leg"]},
    )


def _block(db, row, reason):
    """Show the operator that the token itself refuses this leg. The liability stays; it is never redirected."""
    db.execute(
        "UPDATE transfers SET status = 'blocked', reason = :reason"
        " WHERE deal_id = :deal AND leg = :leg AND status <> 'confirmed'",
        {"reason": reason, "deal": row["deal_id"], "leg": row["leg"]},
    )


def _note(db, row, reason):
    db.execute(
        "UPDATE transfers SET reason = :reason WHERE deal_id = :deal AND leg = :leg AND status <> 'confirmed'",
        {"reason": reason, "deal": row["deal_id"], "leg": row["leg"]},
    )


def _confirm(db, world, row, counts):
    """Commit that the chain shows this leg paid, and wake what waits for it: the fee, then the surplus look."""
    transaction = world.ledger.transaction_of(
        authorization_of(row), since=row["created_at"] - settlement.LOOK_BACK, hint=row["transaction_hash"]
    )
    now = world.now()
    with database.transaction(db):
        done = db.execute(
            "UPDATE transfers SET status = 'confirmed', confirmed_at = :now, next_at = NULL, reason = NULL,"
            " transaction_hash = coalesce(:hash, transaction_hash)"
            " WHERE deal_id = :deal AND leg = :leg AND status <> 'confirmed'",
            {"now": now, "hash": transaction, "deal": row["deal_id"], "leg": row["leg"]},
        ).rowcount
        if done and not _parties_open(db, row["deal_id"]):
            db.execute(
                "UPDATE transfers SET next_at = :now WHERE deal_id = :deal AND leg = 'fee' AND status = 'due'",
                {"now": now, "deal": row["deal_id"]},
            )
        if done:
            db.execute("UPDATE deals SET look_at = :now WHERE id = :deal", {"now": now, "deal": row["deal_id"]})
            counts["confirmed"] += 1


# -- Deposits -----------------------------------------------------------------------------------------------


def _deposits(db, world, limit):
    """Return deals whose deposit is to be looked at: soon after funding, and again when all is paid or lapsed."""
    return db.execute(
        "SELECT * FROM deals WHERE look_at <= :now AND state <> 'pending' ORDER BY look_at LIMIT :limit",
        {"now": world.now(), "limit": limit},
    ).fetchall()


def _still_there(db, world, deal, counts):
    """Make sure that a funded deal's money has stayed on the chain, while its payment could be submitted again."""
    there = settlement.restore(db, world, deal["id"])
    counts["lost"] += there is None
    _look_again(db, deal, world.now() + settlement.LOOK_EVERY if there is False else None)


def _surplus(db, world, deal, counts):
    """Owe the payer what is left at the deposit after the deal: it sent too much, or too late."""
    if _open_legs(db, deal["id"]):
        _look_again(db, deal, None)  # the last leg's confirmation sets the next look
        return
    head = world.ledger.head(depth=world.settings.confirmations)
    units = world.ledger.balance(deal["deposit_address"], at=head.number)
    if not _all_gone(db, world, deal, head):  # a node behind the one that confirmed them would count their money again
        _look_again(db, deal, world.now() + WAIT_FOR_DEPTH)
        return
    with database.transaction(db):
        again = _last_arrival(db, deal, head, world.now())
        if _open_legs(db, deal["id"]) or not _look_again(db, deal, again) or units < deals.SMALLEST_TRANSFER:
            return
        number = db.execute(
            "SELECT count(*) AS n FROM transfers WHERE deal_id = :id AND leg GLOB 'surplus-*'", {"id": deal["id"]}
        ).fetchone()["n"]
        deals.add_leg(db, deal["id"], f"surplus-{number + 1}", deal["buyer_address"], units, now=world.now())
        counts["surplus"] += 1


def _all_gone(db, world, deal, head):
    """Whether the block that the balance is read at already has every leg that has been confirmed."""
    legs = db.execute(
        "SELECT nonce FROM transfers WHERE deal_id = :id AND status = 'confirmed'", {"id": deal["id"]}
    ).fetchall()
    return all(world.ledger.used([(deal["deposit_address"], leg["nonce"]) for leg in legs], at=head.number))


def _open_legs(db, deal_id):
    return db.execute(
        "SELECT 1 FROM transfers WHERE deal_id = :id AND next_at IS NOT NULL AND leg <> 'guarantee'", {"id": deal_id}
    ).fetchone()


def _last_arrival(db, deal, head, now):
    """Return when to look once more: while an authorization to this deposit can still land; else None."""
    last = db.execute(
        "SELECT max(valid_before) AS t FROM payments WHERE deal_id = :id AND status <> 'settled'", {"id": deal["id"]}
    ).fetchone()["t"]
    return max(now, last) + settlement.MARGIN if last and head.time <= last + settlement.MARGIN else None


def _look_again(db, deal, at):
    """Set the next look, unless something has changed the deal's schedule or state in the meantime."""
    changed = db.execute(
        "UPDATE deals SET look_at = :at WHERE id = :id AND look_at IS :seen AND state = :state",
        {"at": at, "id": deal["id"], "seen": deal["look_at"], "state": deal["state"]},
    )
    return changed.rowcount == 1
