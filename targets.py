"""Whom the feed watches: the catalogue, adding and enabling, and whose turn it is."""

import email.utils
import hashlib
import json
import re
import urllib.parse

import fetch
from db import transaction
from deals import Refusal

SECOND = 1_000_000_000
INTERVAL = 900  # seconds between polls of one target unless the operator says otherwise
LEASE = 60 * SECOND  # a poll under way; four times the longest request, so that only a dead one is taken over
LONGEST_HOLD = 86_400 * SECOND  # a Retry-After beyond a day is a mistake or a trick

# Seen in 2026; shipped disabled. The last two answer 401 without a key.
CATALOGUE = (
    ("x402-org", "x402.org", "https://www.x402.org/facilitator"),
    ("payai", "PayAI", "https://facilitator.payai.network"),
    ("dexter", "Dexter", "https://x402.dexter.cash"),
    ("ultravioleta", "Ultravioleta DAO", "https://facilitator.ultravioletadao.xyz"),
    ("openx402", "OpenX402", "https://facilitator.openx402.ai"),
    ("daydreams", "Daydreams", "https://facilitator.daydreams.systems"),
    ("xpay", "xpay", "https://facilitator.xpay.sh"),
    ("0xarchive", "0xArchive", "https://facilitator.0xarchive.io"),
    ("heurist", "Heurist", "https://facilitator.heurist.xyz"),
    ("mogami", "Mogami", "https://facilitator.mogami.tech"),
    ("meridian", "Meridian", "https://api.mrdn.finance/v1"),
    ("celo", "Celo", "https://api.x402.celo.org"),
    ("polygon", "Polygon", "https://x402.polygon.technology"),
    ("near", "NEAR", "https://x402.mikedotexe.com"),
    ("solvador", "Solvador", "https://api.solvador.com"),
    ("circle-gateway", "Circle Gateway", "https://gateway-api.circle.com/v1/x402"),
    ("aeon", "AEON", "https://facilitator.aeon.xyz"),
    ("primer", "Primer", "https://x402.primer.systems"),
    ("goplausible", "GoPlausible", "https://facilitator.goplausible.xyz"),
    ("t54-xrpl", "t54 XRPL", "https://xrpl-facilitator-mainnet.t54.ai"),
    ("coinbase-cdp", "Coinbase CDP", "https://api.cdp.coinbase.com/platform/v2/x402"),
    ("thirdweb", "thirdweb", "https://api.thirdweb.com/v1/payments/x402"),
)

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Unset(Exception):
    """A header of a target names an environment variable that is not set, or that no header can carry."""


def seed(db, *, mode, base_url=""):
    """Put the catalogue in, disabled; in the sandbox also the service's own facilitator, enabled. Repeating changes nothing."""
    seed_catalogue(db)
    if mode == "sandbox" and not _row(db, "sandbox"):
        own = (base_url or "http://127.0.0.1:8402").rstrip("/")
        add(db, "sandbox", name="Sandbox facilitator", base_url=f"{own}/sandbox", loopback=True, enabled=True)


def seed_catalogue(db):
    """Put in, disabled, what the database does not have of the catalogue, unless it was removed."""
    for id, name, url in CATALOGUE:
        if not _row(db, id):
            add(db, id, name=name, base_url=url)


def add(db, id, *, name=None, base_url=None, headers=None, interval_s=INTERVAL, loopback=False, enabled=False):
    """Add a target, or complete a pending one, or bring a removed one back. Raises :class:`Refusal`.

    A target without ``base_url`` is pending. ``headers`` (name to text) are sent to this target alone; ``${NAME}`` in one stands
    for an environment variable, so that no key needs to lie in the database.
    """
    if not _ID.fullmatch(id):
        raise Refusal("invalid_request", "An id is 1 to 64 characters: lower-case letters, digits and hyphens.")
    name = (id if name is None else name).strip()
    if not 1 <= len(name) <= 100 or not name.isprintable():
        raise Refusal("invalid_request", "A name is 1 to 100 printable characters.")
    if not 60 <= interval_s <= 86_400:
        raise Refusal("invalid_request", "The interval must be 1 to 1440 minutes.")
    url = clean_url(base_url, loopback=loopback) if base_url else None
    for header, value in (headers or {}).items():
        try:
            fetch.check_header(header, value)
        except ValueError as error:
            raise Refusal("invalid_request", str(error)) from None
    with transaction(db):
        old = _row(db, id)
        if old and not old["retired"] and old["base_url"]:
            raise Refusal("invalid_request", f"There is a target {id} already.")
        if old and old["base_url"] and old["base_url"] != url:
            raise Refusal("invalid_request", f"The history of {id} belongs to {old['base_url']}: choose another id.")
        db.execute(
            "INSERT INTO feed_targets (id, name, base_url, host, headers, interval_s, loopback, enabled)"
            " VALUES (:id, :name, :url, :host, :headers, :interval_s, :loopback, :enabled)"
            " ON CONFLICT (id) DO UPDATE SET name = excluded.name, base_url = excluded.base_url, host = excluded.host,"
            "  headers = excluded.headers, interval_s = excluded.interval_s, loopback = excluded.loopback,"
            "  enabled = excluded.enabled, retired = 0, due_at = 0",
            {
                "id": id,
                "name": name,
                "url": url,
                "host": urllib.parse.urlsplit(url).netloc.lower() if url else None,
                "headers": json.dumps(headers or {}),
                "interval_s": interval_s,
                "loopback": int(loopback),
                "enabled": int(enabled),
            },
        )


def enable(db, id, enabled=True):
    """Watch a target, or stop watching it; its history stays. Raises :class:`Refusal`."""
    changed = db.execute(
        "UPDATE feed_targets SET enabled = :enabled, due_at = 0 WHERE id = :id AND retired = 0", {"id": id, "enabled": int(enabled)}
    )
    if changed.rowcount == 0:
        raise Refusal("not_found", f"There is no target {id}.")


def remove(db, id):
    """Forget a target. One that was ever polled only leaves the lists: events are never taken back. Raises :class:`Refusal`."""
    with transaction(db):
        gone = db.execute("DELETE FROM feed_targets WHERE id = :id AND last_check IS NULL AND retired = 0", {"id": id}).rowcount
        if not gone:
            gone = db.execute(
                "UPDATE feed_targets SET retired = 1, enabled = 0, headers = '{}' WHERE id = :id AND retired = 0", {"id": id}
            ).rowcount
    if gone == 0:
        raise Refusal("not_found", f"There is no target {id}.")


def every(db):
    """Return all targets that were not removed, by id."""
    return db.execute("SELECT * FROM feed_targets WHERE retired = 0 ORDER BY id").fetchall()


def watched(db, id):
    """Return the target that is enabled under ``id``, or None."""
    return db.execute("SELECT * FROM feed_targets WHERE id = :id AND enabled = 1", {"id": id}).fetchone()


def ever(db, id):
    """Return the target of that id even if it is no longer watched, or None."""
    return _row(db, id)


def clean_url(text, *, loopback=False):
    """Return a base URL without blanks and slashes at its ends. Raises :class:`Refusal`."""
    url = text.strip().rstrip("/")
    try:
        parts = fetch.check_url(url, loopback=loopback)
    except ValueError as error:
        raise Refusal("invalid_request", str(error)) from None
    if parts.path.endswith("/supported"):
        raise Refusal("invalid_request", "Give the base URL, without /supported.")
    return url


def due(db, *, now_ns, only=None, force=False):
    """Return the numbers of the targets whose turn it is, the longest waiting first."""
    rows = db.execute(
        "SELECT target FROM feed_targets WHERE enabled = 1 AND base_url IS NOT NULL AND (:only IS NULL OR id = :only)"
        " AND (:force OR due_at <= :now) AND hold_until <= :now AND claimed_until <= :now ORDER BY due_at, target",
        {"now": now_ns, "only": only, "force": int(force)},
    )
    return [row["target"] for row in rows]


def claim(db, target, *, now_ns, force=False):
    """Take one target for polling and return it, or None: not due, taken by another poll, or its host is being asked."""
    return db.execute(
        "UPDATE feed_targets SET claimed_until = :until WHERE target = :target AND enabled = 1 AND claimed_until <= :now"
        " AND (:force OR due_at <= :now) AND hold_until <= :now AND NOT EXISTS"
        "  (SELECT 1 FROM feed_targets AS other WHERE other.host = feed_targets.host AND other.claimed_until > :now)"
        " RETURNING *",
        {"target": target, "now": now_ns, "until": now_ns + LEASE, "force": int(force)},
    ).fetchone()


def release(db, target, *, now_ns, retry_after=None):
    """Give a claimed target back and set its next turn. False: the lease was lost, so nothing may be recorded.

    Turns lie on a grid of the target's own interval, shifted by its id, so that targets do not come all at once.
    """
    interval = target["interval_s"] * SECOND
    shift = int.from_bytes(hashlib.sha256(target["id"].encode()).digest()[:6], "big") % interval
    done = db.execute(
        "UPDATE feed_targets SET claimed_until = 0, due_at = :due, hold_until = :hold"
        " WHERE target = :target AND claimed_until = :token",
        {
            "target": target["target"],
            "token": target["claimed_until"],
            "due": ((now_ns - shift) // interval + 1) * interval + shift,
            "hold": now_ns + _hold(retry_after, now_ns) if retry_after else 0,
        },
    )
    return done.rowcount == 1


def headers(target, environ):
    """Return the target's own headers with variables filled in. Raises :class:`Unset`."""

    def value(match):
        if match[1] not in environ:
            raise Unset(f"The environment variable {match[1]} is not set.")
        return environ[match[1]]

    filled = {name: _VARIABLE.sub(value, text) for name, text in json.loads(target["headers"]).items()}
    for name, text in filled.items():
        try:
            fetch.check_header(name, text)
        except ValueError as error:
            raise Unset(str(error)) from None
    return filled


def _hold(text, now_ns):
    """Return how long a Retry-After header asks to wait, in nanoseconds; 0 if it cannot be read."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return min(int(text) * SECOND, LONGEST_HOLD)
    try:
        moment = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return 0
    return max(0, min(int(moment) * SECOND - now_ns, LONGEST_HOLD))


def _row(db, id):
    return db.execute("SELECT * FROM feed_targets WHERE id = :id", {"id": id}).fetchone()
