"""What is going to disappear, and when: one table that drives the headers and the policy page."""

import dataclasses
import datetime

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
    """Return the headers that announce an operation's end (RFC 9745, RFC 8594); empty for all others."""
    for entry in DEPRECATIONS if table is None else table:
        if (entry.method, entry.path) == (method, path):
            since = datetime.datetime.combine(entry.since, datetime.time(), datetime.UTC)
            return {
                "Deprecation": f"@{int(since.timestamp())}",
                "Sunset": f"{entry.sunset:%a, %d %b %Y} 23:59:59 GMT",
                "Link": f'<{base_url}/deprecation-policy>; rel="deprecation"; type="text/html"',
            }
    return {}


def rows(table=None):
    """Return the table as the policy page shows it."""
    return [
        {**dataclasses.asdict(entry), "since": entry.since.isoformat(), "sunset": entry.sunset.isoformat()}
        for entry in (DEPRECATIONS if table is None else table)
    ]
