"""The facilitator feed: polling declarations, and recording what each answer changes.

Times are nanoseconds since the Unix epoch; how checks, events and times are numbered stands in schema.sql.
"""

import concurrent.futures
import hashlib
import functools
import json
import os
import zlib
from typing import NamedTuple

import declaration
import fetch
import targets
from db import transaction
from targets import SECOND

AT_ONCE = 4
AGENT = "facilitator-feed/1.0"
KNOWN = 5000  # different facets of one target, ever: a target that invents new ones without end must not fill the disk
LARGE = 64 << 10  # compressed bytes; bodies above it are kept only while they are the latest, or when they show a change
KEPT_DAYS = 30
DAY = 86_400 * SECOND


class Check(NamedTuple):
    """One poll of one target, as recorded."""

    target: str
    at: int
    reason: str
    http_status: int | None
    ms: int
    facets: int
    changes: int
    note: str


class _Verdict(NamedTuple):
    reason: str
    http_status: int | None
    body: bytes | None
    declaration: declaration.Declaration | None
    notes: tuple[str, ...]


# -- Polling --------------------------------------------------------------------------------------------------


def poll(db, *, clock, only=None, force=False, contact="", environ=os.environ, report=None, get=fetch.get):
    """Poll every target whose turn it is, at most four at once and one a host, and return the recorded checks.

    ``force`` polls before the turn, but never against a Retry-After. Several polls may run at the same time: each target is
    leased to one. ``clock`` gives nanoseconds; ``report(check, left)`` is called after each.
    """
    waiting = targets.due(db, now_ns=clock(), only=only, force=force)
    running, checks = {}, []
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        while waiting or running:
            for number in waiting[:]:
                if len(running) == AT_ONCE:
                    break
                if target := targets.claim(db, number, now_ns=clock(), force=force):
                    waiting.remove(number)
                    running[pool.submit(_request(db, target, contact, environ, get))] = target
            if not running:
                break  # another poll has taken what is left
            for done in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED).done:
                check = record(db, running.pop(done), done.result(), now_ns=clock())
                if check:
                    checks.append(check)
                if report:
                    report(check, len(waiting) + len(running))
    return checks


def _request(db, target, contact, environ, get):
    """Return the call that asks this target; it touches no database, so any thread may make it."""
    headers = {"user-agent": f"{AGENT} (+{contact})" if contact else AGENT, "accept": "application/json"}
    try:
        headers |= {name.lower(): text for name, text in targets.headers(target, environ).items()}
    except targets.Unset as unset:
        note = str(unset)
        return lambda: fetch.Answer("unconfigured", None, {}, None, 0, note)
    if target["etag"] and _latest_body(db, target) is not None:
        headers["if-none-match"] = target["etag"]
    return functools.partial(get, f"{target['base_url']}/supported", headers=headers, loopback=bool(target["loopback"]))


def _latest_body(db, target):
    """Return the bytes of the target's latest valid answer, or None."""
    row = db.execute(
        "SELECT content FROM feed_bodies WHERE body = (SELECT body FROM feed_checks WHERE at = :at)", {"at": target["last_valid"]}
    ).fetchone()
    return zlib.decompress(row["content"]) if row and row["content"] is not None else None


def _judge(db, target, answer):
    """Say what an answer means. Reads only."""
    status, body, notes = answer.status, answer.body, tuple(filter(None, [answer.note]))
    if answer.reason != "ok":
        return _Verdict(answer.reason, status, body, None, notes)
    if status == 304 and target["etag"]:
        body, notes = _latest_body(db, target), ("Not modified since the declaration before.",)
    elif status == 401:
        return _Verdict("auth_required", status, body, None, ("The facilitator answers only with a key.",))
    elif 300 <= status < 400 and status != 304:
        where = "".join(c for c in answer.headers.get("location", "")[:200] if c.isascii() and c.isprintable())
        return _Verdict("redirect", status, body, None, (f"A redirect to {where or 'nowhere'}, not followed.",))
    elif status != 200:
        return _Verdict(f"http_{status}", status, body, None, ())
    try:
        declared = declaration.parse(body or b"")
        if _invents(db, target, declared):
            raise declaration.Malformed(f"The facilitator has declared more than {KNOWN} different things.", "too_large")
    except declaration.Malformed as malformed:
        return _Verdict(malformed.reason, status, body, None, (str(malformed),))
    return _Verdict("ok", status, body, declared, notes + declared.notes)


def _invents(db, target, declared):
    known = db.execute(
        "SELECT count(*) FROM feed_capabilities WHERE target = :target", {"target": target["target"]}
    ).fetchone()[0]
    if known + len(declared.facets) <= KNOWN:
        return False
    seen = {
        row["id"]
        for row in db.execute(
            "SELECT id FROM feed_capabilities JOIN feed_facets USING (facet) WHERE target = :target", {"target": target["target"]}
        )
    }
    return len(seen.union(facet.id for facet in declared.facets)) > KNOWN


# -- Recording ------------------------------------------------------------------------------------------------


def record(db, target, answer, *, now_ns):
    """Record the answer of a claimed target; None if its lease was lost meanwhile, for then another poll records."""
    verdict = _judge(db, target, answer)
    with transaction(db):
        retry_after = None if verdict.declaration else answer.headers.get("retry-after")
        if not targets.release(db, target, now_ns=now_ns, retry_after=retry_after):
            return None
        at = max(now_ns, horizon(db))
        changes = 0
        if verdict.declaration:
            changes = _record_valid(db, target, answer, verdict, at)
        else:
            _record_failure(db, target, answer, verdict, at)
        _count_day(db, target, verdict, at)
    facets = len(verdict.declaration.facets) if verdict.declaration else 0
    return Check(target["id"], at, verdict.reason, verdict.http_status, answer.ms, facets, changes, " ".join(verdict.notes))


def horizon(db):
    """Return the first moment after every check and event so far. Nothing is ever recorded before it, whatever the clock does."""
    row = db.execute(
        "SELECT max(coalesce((SELECT max(at) FROM feed_failures), 0),"
        " coalesce((SELECT at + size + changes FROM feed_checks JOIN feed_outcomes USING (outcome)"
        "  JOIN feed_sets USING (facet_set) ORDER BY at DESC LIMIT 1), 0))"
    ).fetchone()
    return row[0] + 1


def _record_valid(db, target, answer, verdict, at):
    """Store a valid declaration and return how many changes it shows."""
    facet_set, facets = _store_set(db, verdict.declaration.facets)
    changes = _compare(db, target, at, facets, verdict.declaration.complete)
    body = _store_body(db, verdict.body, at, keep=bool(changes))
    db.execute(
        "INSERT INTO feed_checks (at, target, ms, outcome, body, changes) VALUES (:at, :target, :ms, :outcome, :body, :changes)",
        {
            "at": at,
            "target": target["target"],
            "ms": answer.ms,
            "outcome": _store_outcome(db, verdict, facet_set),
            "body": body,
            "changes": len(changes),
        },
    )
    for id, facet, change in changes:
        db.execute(
            "INSERT INTO feed_changes (id, at, target, facet, change) VALUES (:id, :at, :target, :facet, :change)",
            {"id": id, "at": at, "target": target["target"], "facet": facet, "change": change},
        )
    db.execute(
        "UPDATE feed_targets SET last_check = :at, last_valid = :at, changes = changes + :changes, etag = :etag,"
        " last_complete = CASE WHEN :complete THEN :at ELSE last_complete END WHERE target = :target",
        {
            "at": at,
            "target": target["target"],
            "changes": len(changes),
            "complete": int(verdict.declaration.complete),
            "etag": target["etag"] if answer.status == 304 else _usable_etag(answer.headers.get("etag", "")),
        },
    )
    _drop_large(db, target["last_valid"])
    return len(changes)


def _record_failure(db, target, answer, verdict, at):
    body = None if verdict.body is None else _store_body(db, verdict.body, at, keep=False, largest=LARGE)
    db.execute(
        "INSERT INTO feed_failures (at, target, ms, outcome, body) VALUES (:at, :target, :ms, :outcome, :body)",
        {
            "at": at,
            "target": target["target"],
            "ms": None if verdict.reason == "unconfigured" else answer.ms,
            "outcome": _store_outcome(db, verdict, None),
            "body": body,
        },
    )
    db.execute("UPDATE feed_targets SET last_check = :at WHERE target = :target", {"at": at, "target": target["target"]})


def _compare(db, target, at, facets, complete):
    """Bring the target's capabilities up to date and return the changes as (event id, facet, change).

    Rows are written only for what changed. A facet is removed by two complete checks in a row without it; anything else
    between the two (a failure, a partial answer) breaks the row, and the count starts again.
    """
    place = {facet: at + 1 + position for position, facet in enumerate(facets)}
    before = places(db, target)
    known = {
        row["facet"]: row
        for row in db.execute("SELECT * FROM feed_capabilities WHERE target = :target", {"target": target["target"]})
    }
    changes = []
    for facet, id in place.items():
        row = known.get(facet)
        if row is None or row["removed_at"] is not None:
            changes.append((id, facet, "returned" if row else "first_seen"))
        if row is None or row["last_confirmed"] is not None:
            db.execute(
                "INSERT INTO feed_capabilities (target, facet, first_seen) VALUES (:target, :facet, :id) ON CONFLICT DO UPDATE"
                " SET last_confirmed = NULL, missing_at = NULL, removed_at = NULL, removed_by = NULL",
                {"target": target["target"], "facet": facet, "id": id},
            )
    for facet, row in known.items():
        if facet in place or row["removed_at"] is not None or not (complete or row["last_confirmed"] is None):
            continue
        gone = complete and row["missing_at"] is not None and row["missing_at"] == target["last_check"]
        db.execute(
            "UPDATE feed_capabilities SET last_confirmed = coalesce(last_confirmed, :before),"
            " missing_at = CASE WHEN :complete THEN :at ELSE missing_at END,"
            " removed_at = CASE WHEN :gone THEN missing_at END, removed_by = CASE WHEN :gone THEN :at END"
            " WHERE target = :target AND facet = :facet",
            {
                "target": target["target"],
                "facet": facet,
                "before": before.get(facet),
                "complete": int(complete),
                "gone": int(gone),
                "at": at,
            },
        )
        if gone:
            changes.append((at + 1 + len(facets) + sum(change == "removed" for _, _, change in changes), facet, "removed"))
    if any(change == "removed" for _, _, change in changes):
        _keep_body_of(db, target["last_check"])
    return changes


def places(db, target):
    """Return facet -> id of its event in the target's latest valid check."""
    row = db.execute(
        "SELECT at, facets FROM feed_checks JOIN feed_outcomes USING (outcome) JOIN feed_sets USING (facet_set) WHERE at = :at",
        {"at": target["last_valid"]},
    ).fetchone()
    return {facet: row["at"] + 1 + place for place, facet in enumerate(json.loads(row["facets"]))} if row else {}


def _store_set(db, facets):
    """Return the number of this set and the numbers of its facets; a set seen before costs one look-up."""
    ids = [facet.id for facet in facets]
    sha256 = hashlib.sha256("\n".join(ids).encode()).digest()
    known = db.execute("SELECT facet_set, facets FROM feed_sets WHERE sha256 = :sha256", {"sha256": sha256}).fetchone()
    if known:
        return known["facet_set"], json.loads(known["facets"])
    numbers = [
        db.execute(
            "INSERT INTO feed_facets (id, category, version, scheme, network, name)"
            " VALUES (:id, :category, :version, :scheme, :network, :name)"
            " ON CONFLICT (id) DO UPDATE SET id = excluded.id RETURNING facet",
            {"id": id, **facet._asdict()},
        ).fetchone()["facet"]
        for id, facet in zip(ids, facets, strict=True)
    ]
    stored = db.execute(
        "INSERT INTO feed_sets (sha256, size, facets) VALUES (:sha256, :size, :facets) RETURNING facet_set",
        {"sha256": sha256, "size": len(numbers), "facets": json.dumps(numbers, separators=(",", ":"))},
    ).fetchone()
    return stored["facet_set"], numbers


def _store_outcome(db, verdict, facet_set):
    values = {
        "reason": verdict.reason,
        "http_status": verdict.http_status,
        "facet_set": facet_set,
        "complete": int(bool(verdict.declaration and verdict.declaration.complete)),
        "note": " ".join(verdict.notes),
    }
    known = db.execute(
        "SELECT outcome FROM feed_outcomes WHERE reason = :reason AND coalesce(http_status, 0) = coalesce(:http_status, 0)"
        " AND coalesce(facet_set, 0) = coalesce(:facet_set, 0) AND complete = :complete AND note = :note",
        values,
    ).fetchone()
    if known:
        return known["outcome"]
    return db.execute(
        "INSERT INTO feed_outcomes (reason, http_status, facet_set, complete, note)"
        " VALUES (:reason, :http_status, :facet_set, :complete, :note) RETURNING outcome",
        values,
    ).fetchone()["outcome"]


def _store_body(db, body, at, *, keep, largest=None):
    """Store the bytes once, whoever sent them and however often; return their number."""
    sha256 = hashlib.sha256(body).digest()
    known = db.execute(
        "UPDATE feed_bodies SET last_at = :at, kept = max(kept, :keep) WHERE sha256 = :sha256 RETURNING body, content IS NULL AS thin",
        {"at": at, "keep": int(keep), "sha256": sha256},
    ).fetchone()
    if known and not known["thin"]:
        return known["body"]
    content = zlib.compress(body, 9)
    if largest is not None and len(content) > largest:
        content = None
    return db.execute(
        "INSERT INTO feed_bodies (sha256, size, content, kept, last_at) VALUES (:sha256, :size, :content, :keep, :at)"
        " ON CONFLICT (sha256) DO UPDATE SET content = excluded.content RETURNING body",
        {"sha256": sha256, "size": len(body), "content": content, "keep": int(keep), "at": at},
    ).fetchone()["body"]


def _usable_etag(text):
    return text if 2 <= len(text) <= 256 and text.isascii() and text.isprintable() and text.endswith('"') else None


def _count_day(db, target, verdict, at):
    db.execute(
        "INSERT INTO feed_days (target, day, checks, valid, reachable) VALUES (:target, :day, 1, :valid, :reachable)"
        " ON CONFLICT DO UPDATE SET checks = checks + 1, valid = valid + excluded.valid, reachable = reachable + excluded.reachable",
        {
            "target": target["target"],
            "day": at // DAY,
            "valid": int(verdict.declaration is not None),
            "reachable": int(verdict.http_status is not None),
        },
    )


# -- Retention ------------------------------------------------------------------------------------------------


def prune(db, *, now_ns, days=KEPT_DAYS):
    """Thin the bodies that show no change and were last received ``days`` ago; return how many. Hashes and events stay."""
    thinned = 0
    while True:
        with transaction(db):
            count = db.execute(
                "UPDATE feed_bodies SET content = NULL WHERE body IN (SELECT body FROM feed_bodies"
                "  WHERE kept = 0 AND content IS NOT NULL AND last_at < :before AND body NOT IN"
                "   (SELECT body FROM feed_checks JOIN feed_targets ON at = last_valid) LIMIT 500)",
                {"before": now_ns - days * DAY},
            ).rowcount
        thinned += count
        if count == 0:
            return thinned


def _keep_body_of(db, at):
    db.execute("UPDATE feed_bodies SET kept = 1 WHERE body = (SELECT body FROM feed_checks WHERE at = :at)", {"at": at})


def _drop_large(db, at):
    """Thin the body of check ``at`` now if it is large, shows no change and is nobody's latest."""
    db.execute(
        "UPDATE feed_bodies SET content = NULL WHERE body = (SELECT body FROM feed_checks WHERE at = :at)"
        " AND kept = 0 AND length(content) > :large"
        " AND body NOT IN (SELECT body FROM feed_checks JOIN feed_targets ON at = last_valid)",
        {"at": at, "large": LARGE},
    )


# -- For the service itself -----------------------------------------------------------------------------------


def declares(db, base_url, *, scheme="exact", networks=("eip155:8453", "base")):
    """Say whether the latest complete check of the watched facilitator at ``base_url`` declares this; None: not known."""
    row = db.execute(
        "SELECT last_complete FROM feed_targets WHERE base_url = :url AND enabled = 1 AND last_complete IS NOT NULL",
        {"url": base_url.strip().rstrip("/")},
    ).fetchone()
    if row is None:
        return None
    found = db.execute(
        "SELECT 1 FROM feed_checks JOIN feed_outcomes USING (outcome) JOIN feed_sets USING (facet_set), json_each(feed_sets.facets)"
        " JOIN feed_facets ON feed_facets.facet = json_each.value"
        " WHERE at = :at AND scheme = :scheme AND network IN (SELECT value FROM json_each(:networks)) LIMIT 1",
        {"at": row["last_complete"], "scheme": scheme, "networks": json.dumps(networks)},
    ).fetchone()
    return found is not None
