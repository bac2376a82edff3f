"""The feed for people: what the two pages show. The templates escape; here it is made sure that what escapes is also seen."""

import statistics
import unicodedata
from datetime import UTC, datetime

import feedviews
from feed import DAY
from feedviews import capabilities_of, check_shape, everyone, find, latest_changes, latest_check, stamp
from targets import SECOND

DAYS = 90
HOUR = 3600 * SECOND
PLOTTED = 7 * 24  # hours
NAMED = 5  # networks or schemes of one row before "and more"
PLOT = {"left": 56, "right": 712, "top": 12, "bottom": 172}  # pixels of the axes in a picture of 720 by 200


def overview(db, query):
    """Context of /feed."""
    return {
        "summary": feedviews.summary_figures(db),
        "rows": [_row(db, target, query.now_ns) for target in everyone(db)],
        "changes": [_change(found) for found in latest_changes(db, None, checks=15)],
        "as_of": _minute(query.now_ns),
        "scope": feedviews.SUMMARY_SCOPE,
    }


def one(db, query):
    """Context of /feed/{id}."""
    target = find(db, query.values["id"])
    rows = capabilities_of(db, target)
    for row in rows:
        row |= {"value": _visible(row["facet"]["value"]), "since": _minute_of(row["first_seen"]), "confirmed": _minute_of(row["last_confirmed"])}
    return {
        **_row(db, target, query.now_ns),
        "capabilities": rows,
        "plot": _plot(db, target, query.now_ns),
        "changes": [_change(found) for found in latest_changes(db, target, checks=25)],
        "as_of": _minute(query.now_ns),
        "base_url": query.base_url,
        "scope": feedviews.DECLARED,
    }


def _row(db, target, now_ns):
    check = check_shape(target, latest_check(db, target))
    present = db.execute(
        "SELECT scheme, network, name FROM feed_capabilities JOIN feed_facets USING (facet)"
        " WHERE target = :target AND removed_at IS NULL ORDER BY network, scheme, name",
        {"target": target["target"]},
    ).fetchall()
    times = [ms for _, ms in _times(db, target, now_ns - DAY)]
    return {
        "id": target["id"],
        "name": target["name"],
        "endpoint": target["base_url"],
        "check": check,
        "checked": _minute_of(check["checked_at"]),
        "median_ms": int(statistics.median(times)) if times else None,
        "networks": _named(row["network"] for row in present),
        "schemes": _named(row["scheme"] for row in present),
        "extensions": _named(row["name"] for row in present),
        "facets": len(present),
        "strip": _strip(db, target, now_ns),
    }


def _named(values):
    found = list(dict.fromkeys(_visible(value) for value in values if value is not None))
    return {"shown": found[:NAMED], "more": max(0, len(found) - NAMED)}


def _visible(text):
    """Write out the characters that would only rearrange or hide their neighbours, such as U+202E."""
    return "".join(f"\u27e8U+{ord(c):04X}\u27e9" if unicodedata.category(c) in ("Cf", "Cn", "Co", "Zl", "Zp") else c for c in text)


def _change(found):
    listed = [{"change": change.replace("_", " "), "class": change, "value": _visible(facet["value"])} for change, facet in found["changes"]]
    return {
        "at": _minute(found["at"]),
        "check_id": found["at"],
        "id": found["target"]["id"],
        "name": found["target"]["name"],
        "watched": bool(found["target"]["enabled"]),
        "shown": listed[:8],
        "more": max(0, len(listed) - 8),
    }


def _strip(db, target, now_ns):
    """Return one cell per day, oldest first: its class and what to say of it."""
    today = now_ns // DAY
    rows = db.execute(
        "SELECT * FROM feed_days WHERE target = :target AND day > :first", {"target": target["target"], "first": today - DAYS}
    )
    days = {row["day"]: row for row in rows}
    return [_cell(day, days.get(day)) for day in range(today - DAYS + 1, today + 1)]


def _cell(day, row):
    date = datetime.fromtimestamp(day * 86_400, UTC).strftime("%-d %B %Y")
    if row is None:
        return {"class": "none", "title": f"{date}: not checked"}
    kind = "good" if row["valid"] == row["checks"] else "bad" if row["valid"] == 0 else "some"
    return {"class": kind, "title": f"{date}: {row['valid']} of {row['checks']} checks valid"}


def _times(db, target, since):
    return db.execute(
        "SELECT at, ms FROM feed_checks WHERE target = :target AND at >= :since", {"target": target["target"], "since": since}
    ).fetchall()


def _plot(db, target, now_ns):
    """Return the picture of a week of response times: a line through the median of each hour, broken where there is none."""
    first = now_ns // HOUR - PLOTTED + 1
    hours = {}
    for at, ms in _times(db, target, first * HOUR):
        hours.setdefault(at // HOUR - first, []).append(ms)
    if not hours:
        return None
    medians = {hour: statistics.median(found) for hour, found in hours.items()}
    top = _ceiling(max(medians.values()))
    points = {
        hour: (
            round(PLOT["left"] + (PLOT["right"] - PLOT["left"]) * hour / (PLOTTED - 1), 1),
            round(PLOT["bottom"] - (PLOT["bottom"] - PLOT["top"]) * ms / top, 1),
        )
        for hour, ms in sorted(medians.items())
    }
    path = " ".join(f"{'L' if hour - 1 in points else 'M'}{x} {y}" for hour, (x, y) in points.items())
    lonely = [point for hour, point in points.items() if hour - 1 not in points and hour + 1 not in points]
    days = [
        {"x": round(PLOT["left"] + (PLOT["right"] - PLOT["left"]) * hour / (PLOTTED - 1), 1), "label": _day((first + hour) * HOUR)}
        for hour in range(PLOTTED)
        if (first + hour) % 24 == 0
    ]
    levels = [{"y": PLOT["bottom"] - (PLOT["bottom"] - PLOT["top"]) * part / 2, "label": f"{top * part // 2} ms"} for part in range(3)]
    return {"path": path, "dots": lonely, "days": days, "levels": levels, **PLOT}


def _ceiling(value):
    """Return the first of 10, 20, 50, 100, … that is not below ``value``."""
    size = 10
    while True:
        for step in (size, 2 * size, 5 * size):
            if value <= step:
                return step
        size *= 10


def _day(ns):
    return datetime.fromtimestamp(ns // SECOND, UTC).strftime("%-d %b")


def _minute(ns):
    return f"{stamp(ns)[:16].replace('T', ' ')} UTC"


def _minute_of(text):
    return f"{text[:16].replace('T', ' ')} UTC" if text else None
