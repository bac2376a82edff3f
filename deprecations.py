"""What is going to disappear, and when: one table that drives the headers and the policy page."""

import dataclasses
import datetime
import re

NOTICE_DAYS = 90


@dataclasses.dataclass(frozen=True)
class Deprecation:
    """One operation on its way out; ``path`` as in the OpenAPI document."""

    method: str
    path: str
    since: datetime.date  # announced, and deprecated from this day on
    sunset: datetime.date  # answers until the end of this day
    instead: str


DEPRECATIONS: tuple[Deprecation, ...] = ()


class TooSoon(ValueError):
    """A sunset with less notice than the policy promises; the service does not start with one."""


def check(table=None):
    """Raise :class:`TooSoon` unless every deprecation in the table gives the promised notice."""
    for entry in DEPRECATIONS if table is None else table:
        days = (entry.sunset - entry.since).days
        if days < NOTICE_DAYS:
            raise TooSoon(f"{entry.method} {entry.path}: {days} days' notice; the policy promises {NOTICE_DAYS}.")


def headers(method, path, base_url, table=None):
    """Return the headers that announce the end of the operation at a request's path (RFC 9745, RFC 8594)."""
    for entry in DEPRECATIONS if table is None else table:
        if entry.method == method and re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(entry.path)), path):
            since = datetime.datetime.combine(entry.since, datetime.time(), datetime.UTC)
            return {
                "Deprecation": f"@{int(since.timestamp())}",
                "Sunset": f"{entry.sunset:%a, %d %b %Y} 23:59:59 GMT",
                "Link": f'<{base_url}/deprecation-policy>; rel="deprecation"; type="text/html"',
            }
    return {}


def mark(document, table=None):
    """Mark the operations of a served OpenAPI document that are on their way out."""
    for entry in DEPRECATIONS if table is None else table:
        document["paths"][entry.path][entry.method.lower()]["deprecated"] = True
    return document


def rows(table=None):
    """Return the table as the policy page shows it."""
    return [
        {**dataclasses.asdict(entry), "since": entry.since.isoformat(), "sunset": entry.sunset.isoformat()}
        for entry in (DEPRECATIONS if table is None else table)
    ]
