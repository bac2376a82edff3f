"""Notes to the operators: taken over HTTP and MCP, read on the command line."""

import secrets

import limits
import spec
from deals import Refusal

THANKS = "Thank you: the operators will read it."


def send(db, world, body, *, client):
    """Keep one note; returns the receipt. Refuses with invalid_request or, after ten in an hour, rate_limited."""
    spec.check("FeedbackRequest", body)
    key = f"feedback {limits.client_key(client)}"
    admitted, _, wait = limits.visit(
        limits.log(world.settings.database, key), key, now=world.clock(), most=limits.NOTES_MOST,
        seconds=limits.NOTES_SECONDS,
    )  # fmt: skip
    if not admitted:
        raise Refusal(
            "rate_limited", f"Ten notes an hour are enough; try again in {wait} s.", headers={"Retry-After": str(wait)}
        )
    note = f"feedback_{secrets.token_hex(8)}"
    db.execute(
        "INSERT INTO feedback (id, at, message, contact, deal_id) VALUES (:id, :now, :message, :contact, :deal)",
        {
            "id": note, "now": world.now(), "message": body["message"], "contact": body.get("contact"),
            "deal": body.get("deal_id"),
        },
    )  # fmt: skip
    return {"id": note, "message": THANKS}


def notes(db, *, everything=False, limit=100):
    """Return the notes that wait to be read, oldest first; with ``everything`` also those that are done."""
    return db.execute(
        "SELECT * FROM feedback WHERE done_at IS NULL OR :everything ORDER BY at, id LIMIT :limit",
        {"everything": everything, "limit": limit},
    ).fetchall()


def done(db, note, *, now):
    """Mark a note as dealt with. Refuses with not_found."""
    changed = db.execute(
        "UPDATE feedback SET done_at = coalesce(done_at, :now) WHERE id = :id", {"id": note, "now": now}
    )
    if not changed.rowcount:
        raise Refusal("not_found", f"There is no note {note}.")
