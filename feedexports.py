"""The feed for other programs: Atom, JSON Feed, a badge and Prometheus figures."""

import re
import xml.etree.ElementTree as ET
from xml.sax.saxutils import escape

import feedviews
from feedviews import Bytes, as_json, everyone, find, latest_changes, latest_check, stamp, status_of
from targets import SECOND

ATOM = "http://www.w3.org/2005/Atom"
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production Char
WORDS = {"first_seen": "first seen", "removed": "removed", "returned": "returned"}
COLOURS = {"operational": "#1a7f4b", "unavailable": "#b3372f", "pending": "#6b7280"}


def atom(db, query):
    """Changes as an Atom feed, one entry per check that changed something."""
    target, title = _subject(db, query)
    items = list(_items(db, query, target))
    ET.register_namespace("", ATOM)
    root = ET.Element(f"{{{ATOM}}}feed")
    _add(root, "id", _id(query, target["id"] if target else "all"))
    _add(root, "title", title)
    _add(root, "updated", items[0]["date_published"] if items else stamp(0))
    _add(root, "link", rel="self", href=query.base_url + query.path)
    _add(root, "link", rel="alternate", href=_page(query, target and target["id"]), type="text/html")
    _add(_add(root, "author"), "name", "Facilitator feed")
    for item in items:
        entry = _add(root, "entry")
        _add(entry, "id", item["id"])
        _add(entry, "title", item["title"])
        _add(entry, "updated", item["date_published"])
        _add(entry, "link", rel="alternate", href=item["url"], type="text/html")
        _add(entry, "link", rel="related", href=item["external_url"], title="raw evidence")
        _add(entry, "content", item["content_text"], type="text")
    return Bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True), "application/atom+xml; charset=utf-8")


def json_feed(db, query):
    """Changes as JSON Feed 1.1, with the same items."""
    target, title = _subject(db, query)
    value = {
        "version": "https://jsonfeed.org/version/1.1",
        "title": title,
        "home_page_url": _page(query, target and target["id"]),
        "feed_url": query.base_url + query.path,
        "description": feedviews.DECLARED,
        "items": list(_items(db, query, target)),
    }
    return Bytes(as_json(value), "application/feed+json")


def _subject(db, query):
    target = find(db, query.values["id"]) if "id" in query.values else None
    return target, f"Declarations of {target['name']}: changes" if target else "Facilitator declarations: changes"


def _items(db, query, target):
    for found in latest_changes(db, target, checks=50):
        whose, changes = found["target"], found["changes"]
        kinds = [change for change, _ in changes]
        counted = [f"{kinds.count(change)} {word}" for change, word in WORDS.items() if change in kinds]
        yield {
            "id": _id(query, str(found["at"])),
            "url": _page(query, whose["id"]),
            "external_url": f"{query.base_url}/v1/feed/checks/{found['at']}/raw",
            "title": f"{whose['name']}: {', '.join(counted)}",
            "content_text": "\n".join(f"{WORDS[change]}: {facet['value']}" for change, facet in changes),
            "date_published": stamp(found["at"]),
            "tags": sorted(set(kinds)),
        }


def _id(query, what):
    """Return a tag URI (RFC 4151); the year is that of this scheme, not of the entry."""
    host = re.sub(r"^https?://|:[0-9]+$", "", query.base_url)
    return f"tag:{host},2026:facilitator-feed/{what}"


def _page(query, id):
    return f"{query.base_url}/feed/{id}" if id else f"{query.base_url}/feed"


def _add(parent, name, text=None, **attributes):
    element = ET.SubElement(parent, f"{{{ATOM}}}{name}", attributes)
    element.text = None if text is None else NOT_XML.sub("\ufffd", text)
    return element


def badge(db, query):
    """The status of one facilitator as a small picture."""
    target = find(db, query.values["id"])
    status, _ = status_of(target, latest_check(db, target))
    left, right = 12 + 7 * len(target["name"]), 12 + 7 * len(status)
    name, wide = escape(NOT_XML.sub("\ufffd", target["name"])), left + right
    picture = f"""<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="20" role="img" aria-label="{name.replace('"', "&quot;")}: {status}">
<title>{name}: {status}</title>
<rect width="{left}" height="20" fill="#374151"/><rect x="{left}" width="{right}" height="20" fill="{COLOURS[status]}"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{left / 2}" y="14" textLength="{left - 12}">{name}</text><text x="{left + right / 2}" y="14" textLength="{right - 12}">{status}</text>
</g></svg>"""
    return Bytes(picture.encode(), "image/svg+xml")


FIGURES = (
    ("up", "gauge", "1 if the latest check got a valid declaration."),
    ("response_seconds", "gauge", "From before the look-up to the last byte, of the latest valid check."),
    ("last_check_timestamp_seconds", "gauge", "Time of the latest check."),
    ("last_success_timestamp_seconds", "gauge", "Time of the latest valid declaration."),
    ("facets", "gauge", "Kinds and extensions present."),
    ("changes_total", "counter", "Facets first seen, removed and returned so far."),
)


def metrics(db, query):
    """Prometheus text format 0.0.4."""
    samples = [(target["id"], _figures(db, target)) for target in everyone(db)]
    lines = []
    for name, kind, text in FIGURES:
        lines += [f"# HELP facilitator_{name} {text}", f"# TYPE facilitator_{name} {kind}"]
        lines += [f'facilitator_{name}{{facilitator="{id}"}} {found[name]}' for id, found in samples if found[name] is not None]
    return Bytes(("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4; charset=utf-8")


def _figures(db, target):
    check = latest_check(db, target)
    status, _ = status_of(target, check)
    valid = db.execute("SELECT ms FROM feed_checks WHERE at = :at", {"at": target["last_valid"]}).fetchone()
    present = db.execute(
        "SELECT count(*) FROM feed_capabilities WHERE target = :target AND removed_at IS NULL", {"target": target["target"]}
    ).fetchone()[0]
    return {
        "up": None if status == "pending" else int(status == "operational"),
        "response_seconds": valid and valid["ms"] / 1000,
        "last_check_timestamp_seconds": check and check["at"] // SECOND,
        "last_success_timestamp_seconds": target["last_valid"] and target["last_valid"] // SECOND,
        "facets": present,
        "changes_total": target["changes"],
    }
