"""The feed's JSON views: what is known, in the published shapes. Pure functions of the database and a query.

A view takes ``db`` and a :class:`Query` and returns :class:`Data` or :class:`Bytes`; feedroutes.py makes an HTTP answer of it.
"""

import base64
import json
import re
import statistics
import time
import zlib
from datetime import UTC, datetime
from typing import NamedTuple

import declaration
import feed
import targets
from deals import Refusal
from targets import SECOND

DECLARED = "Declaration only: what GET /supported said. Nothing behind it was tried."
SUMMARY_SCOPE = (
    "Counts the latest check of each watched facilitator: one GET of its declaration. It says nothing about payments,"
    " /verify, /settle or the time between checks."
)
SCOPES = {
    "kind": "Version, scheme and network as declared, to the letter. Any extra is retained in the raw evidence.",
    "extension": "The name as declared. Its behaviour is not tested.",
}

_PLACE = "\ud800"  # where a text goes: no string of a request, a body or the database can be this

_SPECS = "https://github.com/x402-foundation/x402/blob/main/specs"
STANDARDS = [
    {"id": id, "name": name, "category": category, "reference": f"{_SPECS}/{path}", "note": note}
    for id, name, category, path, note in (
        ("v1", "x402 version 1", "protocol", "x402-specification-v1.md", "Kinds name networks by short names such as base."),
        ("v2", "x402 version 2", "protocol", "x402-specification-v2.md", "Kinds name networks by chain identifiers such as eip155:8453."),
        ("bazaar", "Bazaar", "extension", "extensions/bazaar.md", "Discovery of paid resources."),
        ("builder-code", "Builder code", "extension", "extensions/builder_code.md", "Attribution of a payment to an application."),
        ("eip2612GasSponsoring", "EIP-2612 gas sponsoring", "extension", "extensions/eip2612_gas_sponsoring.md",
         "Token approval by a signed permit, without gas of the payer."),
        ("erc20ApprovalGasSponsoring", "ERC-20 approval gas sponsoring", "extension", "extensions/erc20_gas_sponsoring.md",
         "Token approval by a transaction whose gas the facilitator pays."),
        ("payment-identifier", "Payment identifier", "extension", "extensions/payment_identifier.md", "Idempotency chosen by the payer."),
    )
]  # fmt: skip


class Query(NamedTuple):
    """What was asked: path values and query values by name, the moment, and where the service can be reached."""

    values: dict[str, str]
    path: str
    now_ns: int
    base_url: str


class Data(NamedTuple):
    """The view's data; ``facts`` is what the ETag covers if parts of the data only tell the time of asking."""

    data: object
    facts: object = None
    next: str | None = None


class Verbatim(bytes):
    """JSON text that stands in an answer as it is."""


class Bytes(NamedTuple):
    content: bytes
    media_type: str
    headers: tuple[tuple[str, str], ...] = ()
    policy: str = ""  # Content-Security-Policy, if not the strict one of all data


# -- Parts of the shapes --------------------------------------------------------------------------------------


def evidence(target, at, note=DECLARED, raw=None):
    return {
        "check_id": str(at),
        "source": f"{target['base_url']}/supported",
        "source_type": "http_get",
        "raw": raw,
        "note": note,
        "fabricated": False,
        "captured_at": stamp(at),
    }


def facet_shape(row):
    facet = declaration.Facet(*(row[name] for name in declaration.Facet._fields))
    return {"id": row["id"], "category": facet.category, "value": facet.value, "scope": SCOPES[facet.category]}


def body_of(db, body):
    """Return the declaration in a stored body as JSON text (None once thinned) and the note that goes with it."""
    row = db.execute("SELECT sha256, content FROM feed_bodies WHERE body = :body", {"body": body}).fetchone()
    digest = f"SHA-256 of the body: {row['sha256'].hex()}."
    if row["content"] is None:
        return None, f"{digest} The body itself showed no change and is no longer kept."
    return Verbatim(declaration.written(zlib.decompress(row["content"]))), digest


def latest_check(db, target):
    """Return the row of the target's latest check of any outcome, or None."""
    return db.execute(
        "SELECT checks.*, reason, http_status, facet_set, complete, note FROM"
        " (SELECT at, target, ms, outcome, body FROM feed_checks WHERE at = :at"
        "  UNION ALL SELECT at, target, ms, outcome, body FROM feed_failures WHERE at = :at) AS checks JOIN feed_outcomes USING (outcome)",
        {"at": target["last_check"]},
    ).fetchone()


def status_of(target, check):
    """Return status and reason of a target with this latest check."""
    if target["base_url"] is None or (check and check["reason"] == "unconfigured"):
        return "pending", "unconfigured"
    if check is None:
        return "pending", "unchecked"
    return ("operational" if check["facet_set"] is not None else "unavailable"), check["reason"]


def check_shape(target, check):
    status, reason = status_of(target, check)
    return {
        "status": status,
        "reason": reason,
        "response_ms": check["ms"] if check else None,
        "reachable": bool(check and check["http_status"]),
        "http_status": check["http_status"] if check else None,
        "evidence": evidence(target, check["at"], f"{DECLARED} {check['note']}".strip()) if check else None,
        "checked_at": stamp(check["at"]) if check else None,
    }


def facilitator_shape(db, target):
    valid = db.execute("SELECT * FROM feed_checks WHERE at = :at", {"at": target["last_valid"]}).fetchone()
    supported, supported_evidence = None, None
    if valid:
        raw, digest = body_of(db, valid["body"])
        supported = declaration.shown(declaration.reload(raw))
        supported_evidence = evidence(target, valid["at"], f"{DECLARED} The last successful raw response. {digest}", raw)
    return {
        "id": target["id"],
        "name": target["name"],
        "endpoint": target["base_url"],
        "data_mode": "live",
        "fabricated": False,
        "check": check_shape(target, latest_check(db, target)),
        "supported": supported,
        "supported_evidence": supported_evidence,
        "capabilities": capabilities_of(db, target),
    }


def capabilities_of(db, target):
    """Return the capability records of one target, kinds first, in the order of their sets."""
    confirmed = feed.places(db, target)
    rows = db.execute(
        "SELECT * FROM feed_capabilities JOIN feed_facets USING (facet) WHERE target = :target"
        " ORDER BY category DESC, version, scheme, network, name",
        {"target": target["target"]},
    )
    return [capability_shape(db, target, row, confirmed) for row in rows]


def capability_shape(db, target, row, confirmed):
    """``confirmed`` maps the facets of the latest valid check to their events."""
    last_confirmed = row["last_confirmed"] or confirmed[row["facet"]]
    if row["removed_at"] is not None:
        shown = evidence(target, row["removed_by"], f"{DECLARED} The second complete answer in a row without it.")
    else:
        shown = evidence(target, target["last_valid"] if row["last_confirmed"] is None else _check_of(db, target, last_confirmed))
    return {
        "facet": facet_shape(row),
        "basis": "declared",
        "state": "present" if row["removed_at"] is None else "removed",
        "first_seen": stamp(row["first_seen"]),
        "last_confirmed": stamp(last_confirmed),
        "removed_at": stamp(row["removed_at"]),
        "evidence": shown,
    }


def _check_of(db, target, event):
    return db.execute(
        "SELECT max(at) AS at FROM feed_checks WHERE target = :target AND at <= :event", {"target": target["target"], "event": event}
    ).fetchone()["at"]


def find(db, id):
    """Return the watched target, or refuse."""
    if target := targets.watched(db, id):
        return target
    raise Refusal("not_found", f"No facilitator {quoted(id)} is watched here. /v1/feed/facilitators lists those that are.")


def everyone(db):
    """Return the watched targets, by id."""
    return db.execute("SELECT * FROM feed_targets WHERE enabled = 1 ORDER BY id").fetchall()


def stamp(ns):
    """Write a time as RFC 3339 in UTC with nine fractional digits; None stays None."""
    if ns is None:
        return None
    seconds, nanos = divmod(ns, SECOND)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanos:09d}Z"


def latest_changes(db, target, *, checks):
    """Return the latest ``checks`` checks that changed something, newest first, of one target or (None) of all watched."""
    if target:
        rows = db.execute("SELECT * FROM feed_changes WHERE target = :target ORDER BY id DESC", {"target": target["target"]})
    else:
        rows = db.execute("SELECT feed_changes.* FROM feed_changes CROSS JOIN feed_targets USING (target) WHERE enabled = 1"
                          " ORDER BY feed_changes.id DESC")  # fmt: skip
    found = {}
    for row in rows:
        if row["at"] not in found and len(found) == checks:
            break
        found.setdefault(row["at"], []).append(row)
    whose = targets_of(db, [rows[0] for rows in found.values()])
    facets = facets_of(db, {row["facet"] for rows in found.values() for row in rows})
    return [
        {"at": at, "target": whose[rows[0]["target"]], "changes": [(row["change"], facets[row["facet"]]) for row in reversed(rows)]}
        for at, rows in found.items()
    ]


def targets_of(db, rows):
    """Return target number -> target, for the rows' targets."""
    numbers = json.dumps(sorted({row["target"] for row in rows}))
    found = db.execute("SELECT * FROM feed_targets WHERE target IN (SELECT value FROM json_each(:numbers))", {"numbers": numbers})
    return {row["target"]: row for row in found}


def facets_of(db, numbers):
    """Return facet number -> facet, as shown."""
    found = db.execute(
        "SELECT * FROM feed_facets WHERE facet IN (SELECT value FROM json_each(:numbers))", {"numbers": json.dumps(sorted(numbers))}
    )
    return {row["facet"]: facet_shape(row) for row in found}


# -- The views ------------------------------------------------------------------------------------------------


def summary(db, query):
    return Data(summary_figures(db))


def summary_figures(db):
    seen = [(target, latest_check(db, target)) for target in everyone(db)]
    statuses = [status_of(target, check)[0] for target, check in seen]
    times = [check["ms"] for _, check in seen if check and check["facet_set"] is not None]
    return {
        "total": len(seen),
        "operational": statuses.count("operational"),
        "unavailable": statuses.count("unavailable"),
        "pending": statuses.count("pending"),
        "reachable": sum(1 for _, check in seen if check and check["http_status"]),
        "median_response_ms": int(statistics.median(times)) if times else None,
        "scope": SUMMARY_SCOPE,
    }


def facilitators(db, query):
    return Data([facilitator_shape(db, target) for target in everyone(db)])


def facilitator(db, query):
    return Data(facilitator_shape(db, find(db, query.values["id"])))


def standards(db, query):
    return Data(STANDARDS)


def capabilities(db, query):
    """Who declares it: every present capability that has all the asked-for parts, of every watched facilitator."""
    asked = {name: query.values.get(name) for name in ("scheme", "network", "version", "extension")}
    if not any(asked.values()):
        raise Refusal("invalid_request", "Give at least one of scheme, network, version and extension.")
    if asked["extension"] and (asked["scheme"] or asked["network"] or asked["version"]):
        raise Refusal("invalid_request", "extension cannot be combined with scheme, network or version: a facet is one or the other.")
    version = whole(query.values, "version", 1, declaration.VERSION)
    for name, value in asked.items():
        if value is not None and not 1 <= len(value) <= declaration.NAME:
            raise Refusal("invalid_request", f"{name} must be 1 to {declaration.NAME} characters.")
    rows = db.execute(
        "SELECT *, feed_targets.id AS facilitator, feed_facets.id AS id FROM feed_facets JOIN feed_capabilities USING (facet)"
        " JOIN feed_targets USING (target) WHERE enabled = 1 AND removed_at IS NULL"
        " AND (:scheme IS NULL OR scheme = :scheme) AND (:network IS NULL OR network = :network)"
        " AND (:version IS NULL OR version = :version)"
        " AND feed_facets.name IS :extension AND (:extension IS NOT NULL OR category = 'kind')"
        " ORDER BY facilitator, category DESC, version, scheme, network, feed_facets.name",
        {**asked, "version": version},
    ).fetchall()
    watched = {target["id"]: target for target in everyone(db)}
    confirmed = {id: feed.places(db, watched[id]) for id in {row["facilitator"] for row in rows}}
    return Data(
        [
            {
                "facilitator": row["facilitator"],
                "endpoint": watched[row["facilitator"]]["base_url"],
                **capability_shape(db, watched[row["facilitator"]], row, confirmed[row["facilitator"]]),
            }
            for row in rows
        ]
    )


def raw(db, query):
    """The exact bytes of one check's answer, as a file that no browser renders."""
    id = query.values["check_id"]
    row = None
    if re.fullmatch(r"[1-9][0-9]{0,18}", id) and int(id) < 1 << 63:
        row = db.execute(
            "SELECT sha256, content, body FROM (SELECT at, body FROM feed_checks WHERE at = :at"
            " UNION ALL SELECT at, body FROM feed_failures WHERE at = :at) LEFT JOIN feed_bodies USING (body)",
            {"at": int(id)},
        ).fetchone()
    if row is None:
        raise Refusal("not_found", f"There is no check {quoted(id)}.")
    if row["body"] is None:
        raise Refusal("not_found", f"Check {id} received no body.")
    if row["content"] is None:
        raise Refusal("expired", f"The body of check {id} showed no change and is no longer kept. Its SHA-256 was {row['sha256'].hex()}.")
    headers = (
        ("Content-Disposition", f'attachment; filename="supported-{id}.json"'),
        ("Repr-Digest", f"sha-256=:{base64.b64encode(row['sha256']).decode()}:"),
        ("Cache-Control", "public, max-age=3600"),
    )
    return Bytes(zlib.decompress(row["content"]), "application/octet-stream", headers, "sandbox; default-src 'none'")


def quoted(text):
    return json.dumps(text[:60])


def as_json(value):
    """Write a value as JSON, with every :class:`Verbatim` in it put in unread."""
    texts = []

    def place(found):
        if not isinstance(found, Verbatim):
            raise TypeError(f"{type(found).__name__} is no JSON")
        texts.append(found)
        return _PLACE

    outside = json.dumps(value, separators=(",", ":"), allow_nan=False, default=place).encode()
    parts = outside.split(json.dumps(_PLACE).encode())
    return b"".join(part for pair in zip(parts, [*texts, b""], strict=True) for part in pair)


# -- Query values ---------------------------------------------------------------------------------------------

_RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,9}))?(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)


def whole(values, name, low, high):
    """Return a whole number from the query, or None if it is absent."""
    if name not in values:
        return None
    text = values[name]
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise Refusal("invalid_request", f"{name} must be a whole number from {low} to {high}.")
    return int(text)


def moment(values, name):
    """Return a time from the query in nanoseconds, or None if it is absent."""
    if name not in values:
        return None
    match = _RFC3339.fullmatch(values[name])
    try:
        if not match or (match[8] and (int(match[9]) > 23 or int(match[10]) > 59)):
            raise ValueError(name)
        seconds = int(datetime(*(int(match[part]) for part in range(1, 7)), tzinfo=UTC).timestamp())
    except ValueError:
        hint = " (write + as %2B in a URL)" if " " in values[name] else ""
        raise Refusal("invalid_request", f"{name} must be an RFC 3339 time such as 2026-11-01T00:00:00Z{hint}.") from None
    shift = (int(match[9]) * 3600 + int(match[10]) * 60) * (1 if match[8] == "+" else -1) if match[8] else 0
    ns = (seconds - shift) * SECOND + int((match[7] or "0").ljust(9, "0"))
    if not 0 <= ns < 1 << 63:
        raise Refusal("invalid_request", f"{name} must lie between 1970 and 2262.")
    return ns
