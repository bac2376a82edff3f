"""All of the feed's routes, and how any of them is answered over HTTP.

The web framework stays outside: it calls :func:`respond` and sends the :class:`Reply`.
"""

import hashlib
import re
from typing import NamedTuple

import feed
import feedevents
import feedexports
import feedpages
import feedviews
from db import snapshot
from deals import Refusal
from feedviews import Bytes, Data, as_json, quoted, stamp

DISCLAIMER = (
    "Only the declarations at GET /supported are monitored. Payments, /verify, /settle and uninterrupted availability are not verified."
)


class View(NamedTuple):
    """A route: the function that answers, its query parameters, and the template if it is a page."""

    answer: object
    parameters: tuple[str, ...] = ()
    template: str | None = None


class Reply(NamedTuple):
    """An HTTP answer. ``template`` and ``context`` stand for the body of a page, ``policy`` is what it may load, if anything."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    template: str | None = None
    context: dict | None = None
    policy: str = ""


# -- Answering ------------------------------------------------------------------------------------------------

CACHED = {"Cache-Control": "no-cache"}
PAGE = {**CACHED, "Content-Type": "text/html; charset=utf-8"}
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def respond(db, view, query, args, *, if_none_match=""):
    """Answer one request. ``args`` maps each query parameter to the list of its values."""
    try:
        values = _single(args, view.parameters)
        with snapshot(db):
            found = view.answer(db, query._replace(values={**values, **query.values}))
    except Refusal as refusal:
        if view.template:
            return Reply(refusal.status, PAGE, template="refused.html", context={"refusal": refusal}, policy=PAGE_POLICY)
        return _refused(db, query, refusal)
    if isinstance(found, Data):
        return _enveloped(db, query, found, if_none_match)
    if isinstance(found, Bytes):
        tag = f'"{hashlib.sha256(found.content).hexdigest()[:32]}"'
        headers = {**CACHED, "ETag": tag, **dict(found.headers)}
        if _matches(if_none_match, tag.__eq__):
            return Reply(304, headers)
        return Reply(200, {**headers, "Content-Type": found.media_type}, found.content, policy=found.policy)
    return Reply(200, PAGE, template=view.template, context=found, policy=PAGE_POLICY)


def _enveloped(db, query, found, if_none_match):
    """Wrap data, or answer 304.

    ``as_of`` makes every body different, so a tag is the digest of the facts and the time. A tag whose facts still hold
    names a representation that may be kept, whenever it was made; that is what a 304 says.
    """
    data = as_json(found.data)
    facts = hashlib.sha256(data if found.facts is None else as_json(found.facts)).hexdigest()[:32]
    headers = dict(CACHED)
    if found.next:
        headers["Link"] = f'<{query.path}?cursor={found.next}>; rel="next"'
    as_of = _as_of(db, query)
    tag = f'"{facts}.{as_of:x}"'
    if kept := _matches(if_none_match, lambda given: given.startswith(f'"{facts}.')):
        return Reply(304, {**headers, "ETag": tag if kept == "*" else kept})
    body = b"".join((as_json(_envelope(as_of))[:-1], b',"data":', data, b"}"))  # copied once: data can be megabytes
    return Reply(200, {**headers, "ETag": tag, "Content-Type": "application/json"}, body)


def _refused(db, query, refusal):
    docs = f"{query.base_url}/docs/errors/{refusal.code}"
    body = {"error": refusal.code, "message": refusal.message, "docs": docs, **_envelope(_as_of(db, query))}
    return Reply(refusal.status, {**CACHED, "Content-Type": "application/json"}, as_json(body))


def _envelope(as_of):
    return {"data_mode": "live", "fabricated": False, "as_of": stamp(as_of), "disclaimer": DISCLAIMER}


def _as_of(db, query):
    """Return the time of the response, which is never before a time it may tell."""
    return max(query.now_ns, feed.horizon(db) - 1)


def _matches(header, accepts):
    """Return the first entity tag of If-None-Match that is accepted (weak comparison), ``*``, or None."""
    if header.strip() == "*":
        return "*"
    return next((tag for tag in re.findall(r'"[^"]*"', header) if accepts(tag)), None)


def _single(args, allowed):
    for name, values in args.items():
        if name not in allowed:
            known = f"It takes {', '.join(allowed)}." if allowed else "It takes none."
            raise Refusal("invalid_request", f"{quoted(name)} is no query parameter of this view. {known}")
        if len(values) != 1:
            raise Refusal("invalid_request", f"{name} was given more than once.")
    return {name: values[0] for name, values in args.items()}


_PAGED = ("change", "since", "until", "limit", "cursor")

ROUTES = {
    "/v1/feed/summary": View(feedviews.summary),
    "/v1/feed/facilitators": View(feedviews.facilitators),
    "/v1/feed/facilitators/<id>": View(feedviews.facilitator),
    "/v1/feed/facilitators/<id>/events": View(feedevents.events, _PAGED),
    "/v1/feed/facilitators/<id>/changes.atom": View(feedexports.atom),
    "/v1/feed/facilitators/<id>/changes.json": View(feedexports.json_feed),
    "/v1/feed/facilitators/<id>/badge.svg": View(feedexports.badge),
    "/v1/feed/events": View(feedevents.events, ("facilitator", *_PAGED)),
    "/v1/feed/changes.atom": View(feedexports.atom),
    "/v1/feed/changes.json": View(feedexports.json_feed),
    "/v1/feed/standards": View(feedviews.standards),
    "/v1/feed/capabilities": View(feedviews.capabilities, ("scheme", "network", "version", "extension")),
    "/v1/feed/checks/<check_id>/raw": View(feedviews.raw),
    "/metrics": View(feedexports.metrics),
    "/feed": View(feedpages.overview, template="feed.html"),
    "/feed/<id>": View(feedpages.one, template="facilitator.html"),
}
