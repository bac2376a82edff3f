"""Pages of events, worked out of the checks they belong to."""

import base64
import hashlib
import json
from typing import NamedTuple

import declaration
import feed
import targets
from deals import Refusal
from feed import DAY
from feedviews import DECLARED, Data, as_json, body_of, evidence, facets_of, moment, quoted, stamp, targets_of, whole

PAGE = 100
CHECKS = 1500  # looked at for one page: who declares nothing confirms nothing, and may go on so for years
WINDOW = 7 * DAY
CHANGES = ("snapshot", "first_seen", "confirmed", "removed", "returned")


class Window(NamedTuple):
    """A query for events: whose, which, from when (inclusive) until when (exclusive), and after which id."""

    facilitator: str | None
    change: str | None
    since: int
    until: int
    after: int
    limit: int


def events(db, query):
    """One page of events, oldest first."""
    window = _window(db, query)
    target = None
    if window.facilitator is not None:
        target = targets.ever(db, window.facilitator)
        if target is None:
            raise Refusal("not_found", f"No facilitator {quoted(window.facilitator)} was ever watched here.")
    found, after = _page(db, window, target and target["target"])
    if len(found) > window.limit:
        found = found[: window.limit]
        after = int(found[-1]["id"])
    cursor = _write_cursor(query.path, window._replace(after=after)) if after else None
    data = {"events": found, "start": stamp(window.since), "end": stamp(window.until), "limit": window.limit}
    if cursor:
        data["next_cursor"] = cursor
    given = [query.values.get(name) for name in ("since", "until", "cursor")]
    facts = [[event["id"], event["evidence"]["raw"] is None] for event in found]  # an event never changes but for a body thinned
    return Data(data, [facts, window.limit, bool(cursor), given], cursor)


def _window(db, query):
    values = query.values
    facilitator, change = values.get("id", values.get("facilitator")), values.get("change")
    if change is not None and change not in CHANGES:
        raise Refusal("invalid_request", f"change must be one of {', '.join(CHANGES)}.")
    limit = whole(values, "limit", 1, PAGE)
    since, until = moment(values, "since"), moment(values, "until")
    if "cursor" in values:
        window = _read_cursor(query.path, values["cursor"])
        given = {"facilitator": facilitator, "change": change, "since": since, "until": until}
        for name, value in given.items():
            if value is not None and value != getattr(window, name):
                raise Refusal("invalid_request", f"cursor belongs to a query with another {name}.")
        return window._replace(limit=limit or window.limit)
    if until is None:
        until = max(_end(db, query), since or 0)
    if since is None:
        since = max(0, until - WINDOW)
    if since > until:
        raise Refusal("invalid_request", "since must not be later than until.")
    return Window(facilitator, change, since, until, 0, limit or PAGE)


def _end(db, query):
    """Return the end of a window that names none: the moment after the newest record, not the moment of asking.

    A poll under way may still record a time before now, but never one before this end; so who asks again from here on
    misses nothing and sees nothing twice.
    """
    newest = feed.horizon(db)
    return newest if newest > 1 else query.now_ns


def _page(db, window, target):
    """Return up to one event more than the limit, and the id up to which there are no others if the search stopped short."""
    low, high = max(window.since, window.after + 1), window.until
    if window.change in (None, "snapshot", "confirmed"):
        return _from_checks(db, window, target, low, high)
    rows = _changes(db, window, target, low, high)
    whose, facets = targets_of(db, rows), facets_of(db, {row["facet"] for row in rows})
    return [_event(whose[row["target"]], row["id"], row["change"], facets[row["facet"]], row["at"]) for row in rows], None


def _changes(db, window, target, low, high):
    values = {"change": window.change, "target": target, "low": low, "high": high, "limit": window.limit + 1}
    if target is None:
        return db.execute(
            "SELECT * FROM feed_changes WHERE change = :change AND id >= :low AND id < :high ORDER BY id LIMIT :limit", values
        ).fetchall()
    return db.execute(
        "SELECT * FROM feed_changes WHERE target = :target AND change = :change AND id >= :low AND id < :high"
        " ORDER BY id LIMIT :limit",
        values,
    ).fetchall()


def _from_checks(db, window, target, low, high):
    """Work the events out of the checks they belong to, from the check that contains ``low`` on."""
    found, sets, bodies, facets, whose = [], {}, {}, {}, {}
    for looked, check in enumerate(_checks(db, target, low, high)):
        if looked == CHECKS:
            return found, check["at"] - 1
        if window.change == "confirmed" and not check["size"]:
            continue
        if check["target"] not in whose:
            whose |= targets_of(db, [check])
        if check["facet_set"] not in sets:
            sets[check["facet_set"]] = json.loads(check["facets"])
        numbers = sets[check["facet_set"]]
        if low <= check["at"] < high and window.change != "confirmed":
            if check["body"] not in bodies:
                bodies[check["body"]] = body_of(db, check["body"])
            content, digest = bodies[check["body"]]
            note = f"{DECLARED} {digest} {check['note']}".strip()
            found.append(_event(whose[check["target"]], check["at"], "snapshot", None, check["at"], note, content))
        if window.change != "snapshot":
            listed = _listed(db, check, numbers)
            wanted = [
                (id, facet, change) for id, facet, change in listed if low <= id < high and window.change in (None, change)
            ][: window.limit + 1 - len(found)]  # fmt: skip
            facets |= facets_of(db, {facet for _, facet, _ in wanted} - facets.keys())
            found += [_event(whose[check["target"]], id, change, facets[facet], check["at"]) for id, facet, change in wanted]
        if len(found) > window.limit:
            break
    return found, None


def _checks(db, target, low, high):
    """Yield checks in order, from the last one that began at or before ``low``."""
    if target is None:
        first = db.execute("SELECT max(at) FROM feed_checks WHERE at <= :low", {"low": low}).fetchone()[0]
        return db.execute(
            "SELECT * FROM feed_checks JOIN feed_outcomes USING (outcome) JOIN feed_sets USING (facet_set)"
            " WHERE at >= :first AND at < :high ORDER BY at",
            {"first": first or low, "high": high},
        )
    first = db.execute(
        "SELECT max(at) FROM feed_checks WHERE target = :target AND at <= :low", {"target": target, "low": low}
    ).fetchone()[0]
    return db.execute(
        "SELECT * FROM feed_checks JOIN feed_outcomes USING (outcome) JOIN feed_sets USING (facet_set)"
        " WHERE target = :target AND at >= :first AND at < :high ORDER BY at",
        {"target": target, "first": first or low, "high": high},
    )


def _listed(db, check, numbers):
    """Return (id, facet, change) of the events of one check after its snapshot."""
    at, changed = check["at"], {}
    if check["changes"]:
        rows = db.execute("SELECT id, facet, change FROM feed_changes WHERE id > :at ORDER BY id LIMIT :count",
                          {"at": at, "count": check["changes"]})  # fmt: skip
        changed = {row["id"]: (row["id"], row["facet"], row["change"]) for row in rows}
    confirmed = {at + 1 + place: (at + 1 + place, facet, "confirmed") for place, facet in enumerate(numbers)}
    return sorted((confirmed | changed).values())


def _event(target, id, change, facet, at, note=DECLARED, content=None):
    if change == "removed":
        note = f"{DECLARED} The second complete answer in a row without it."
    return {
        "id": str(id),
        "at": stamp(id),
        "facilitator": target["id"],
        "facet": facet,
        "basis": "unknown" if change == "snapshot" else "declared",
        "change": change,
        "evidence": evidence(target, at, note, content),
        "data_mode": "live",
        "fabricated": False,
    }


def _write_cursor(path, window):
    """Pack a query and its place, under a check sum that finds tampering.

    The sum needs no key: whoever computes it anew has only written another query, which is checked like any other.
    """
    text = as_json([path, *window])
    return _unpadded(hashlib.sha256(text).digest()[:9] + text)


def _read_cursor(path, cursor):
    """Unpack what :func:`_write_cursor` packed for this path, or refuse."""
    try:
        packed = base64.urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
    except ValueError:  # binascii.Error and UnicodeEncodeError
        packed = b""
    text = packed[9:]
    if not text or hashlib.sha256(text).digest()[:9] != packed[:9] or _unpadded(packed) != cursor:
        raise Refusal("invalid_request", "cursor is damaged: it must be sent back exactly as it was given.")
    origin, window = _parts(text)
    if origin != path:
        raise Refusal("invalid_request", "cursor belongs to another query.")
    return window


def _parts(text):
    try:
        origin, *parts = declaration.load(text)
        window = Window(*parts)
        numbers = [window.since, window.until, window.after, window.limit]
        sound = all(type(number) is int and number >= 0 for number in numbers) and 1 <= window.limit <= PAGE
        if sound and window.change in (None, *CHANGES) and isinstance(window.facilitator, str | None):
            return origin, window
    except (declaration.Malformed, TypeError, ValueError):
        pass
    raise Refusal("invalid_request", "cursor is damaged: it must be sent back exactly as it was given.")


def _unpadded(packed):
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")
