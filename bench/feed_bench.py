"""A year of the feed: its size, and how long its pages take, beside a plain table with one row per event.

    python bench/feed_bench.py                     30 targets every 5 minutes for a year, 60 facets each
    python bench/feed_bench.py --days 30           less of it

The polls that change something, and one a day of each target, go through the feed's own code; the unchanged ones in between
are written in bulk as that code would have written them, in the same order, so that the file grows the same way.
"""

import argparse
import gc
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import db as database
import feed
import feedevents
import feedroutes
import feedviews
import fetch
import targets

SECOND = targets.SECOND
START = 1_767_225_600 * SECOND  # 2026-01-01T00:00:00Z
CHANGE_EVERY = 10  # days between changes of one target


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=30)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--every", type=int, default=300, help="seconds between polls of one target")
    parser.add_argument("--facets", type=int, default=60)
    parser.add_argument("--plain-days", type=int, default=10, help="days of the plain table")
    parser.add_argument("--samples", type=int, default=300)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        ours = measure_feed(asked, f"{folder}/feed.db")
        plain = measure_plain(asked, f"{folder}/plain.db")
    report(asked, ours, plain)


# -- The feed -------------------------------------------------------------------------------------------------


def measure_feed(asked, path):
    db = database.connect(path, durable=False)
    database.init(db, mode="sandbox")
    for number in range(asked.targets):
        targets.add(db, f"t{number:02}", base_url=f"https://t{number:02}.example", enabled=True, interval_s=asked.every)
    filled, sizes = time.perf_counter(), {}
    for day in range(asked.days):
        fill_day(db, asked, day)
        if day + 1 in (1, asked.days // 10, asked.days):
            sizes[day + 1] = size_and_views(db, path, asked, day + 1)
    found = {"filled": time.perf_counter() - filled, "at": sizes, **sizes[asked.days]}
    found["pages"] = page_times(db, asked)
    db.close()
    db = database.connect(path)  # durable, as in service
    found["record"] = record_times(db, asked)
    db.close()
    return found


def declared(asked, number, day):
    """Return what a target declares on a day: one network gives way to another every ten days."""
    swapped = (day + number) // CHANGE_EVERY
    networks = [f"eip155:{1000 * (number % 3) + one}" for one in range(asked.facets - 2)]
    networks[swapped % len(networks)] = f"eip155:{900_000 + swapped}"
    kinds = [{"x402Version": 2, "scheme": "exact", "network": network} for network in networks]
    return json.dumps({"kinds": kinds, "extensions": ["bazaar", "payment-identifier"], "signers": {"eip155:*": ["0x" + "11" * 20]}}).encode()


def fill_day(db, asked, day):
    """Poll each target twice for real, then add the rest of the day as it would have been recorded."""
    chance, begin, rounds = random.Random(day), START + day * feed.DAY, 86_400 // asked.every
    for early in range(2):
        for number in range(asked.targets):
            poll_once(db, asked, number, day, begin + (early * asked.every + number) * SECOND)
    known = [tuple(row) for row in db.execute("SELECT target, outcome, body FROM feed_checks JOIN feed_targets USING (target) WHERE at = last_valid ORDER BY target")]
    rows = (
        (begin + (turn * asked.every + place) * SECOND + chance.randrange(SECOND), target, 40 + chance.randrange(900), outcome, body)
        for turn in range(2, rounds)
        for place, (target, outcome, body) in enumerate(known)
    )
    with database.transaction(db):
        db.executemany("INSERT INTO feed_checks (at, target, ms, outcome, body, changes) VALUES (?, ?, ?, ?, ?, 0)", rows)
        db.execute("UPDATE feed_days SET checks = checks + :more, valid = valid + :more, reachable = reachable + :more WHERE day = :day",
                   {"more": rounds - 2, "day": begin // feed.DAY})  # fmt: skip
        for target, _, _ in known:
            db.execute("UPDATE feed_targets SET last_check = at, last_valid = at, last_complete = at FROM"
                       " (SELECT max(at) AS at FROM feed_checks WHERE target = :target) WHERE target = :target", {"target": target})  # fmt: skip


def poll_once(db, asked, number, day, now_ns):
    target = targets.claim(db, number + 1, now_ns=now_ns, force=True)
    answer = fetch.Answer("ok", 200, {}, declared(asked, number, day), 120)
    return feed.record(db, target, answer, now_ns=now_ns)


def size_and_views(db, path, asked, days):
    checks = db.execute("SELECT count(*) FROM feed_checks").fetchone()[0]
    now_ns = START + days * feed.DAY
    return {
        "polls": checks,
        "events": db.execute("SELECT sum(1 + size) FROM feed_checks JOIN feed_outcomes USING (outcome) JOIN feed_sets USING (facet_set)").fetchone()[0],
        "bytes": os.path.getsize(path),
        "summary": timed(lambda: view(db, "/v1/feed/summary", now_ns), 20),
        "list": timed(lambda: view(db, "/v1/feed/facilitators", now_ns), 10),
    }


def view(db, path, now_ns, query="", **values):
    shown = feedroutes.ROUTES[path]
    asked = feedviews.Query(values, path, now_ns, "https://deals.example")
    reply = feedroutes.respond(db, shown, asked, urllib.parse.parse_qs(query))
    assert reply.status == 200, reply.body
    return reply


def page_times(db, asked):
    """Time whole answers (query, JSON, digest) of every filter: a page that starts anywhere, and the next one by its cursor."""
    chance, now_ns, found = random.Random(1), START + asked.days * feed.DAY, {}
    for of, facilitator in (("", {}), (" of one", {"facilitator": "t07"})):
        for change in (None, *feedevents.CHANGES):
            filters = facilitator | ({"change": change} if change else {})
            cursor = None

            def one():
                nonlocal cursor
                since = START + chance.randrange(max(1, asked.days - 1)) * feed.DAY + chance.randrange(feed.DAY)
                query = {"cursor": cursor} if cursor else {"since": feedviews.stamp(since), **filters}
                reply = view(db, "/v1/feed/events", now_ns, urllib.parse.urlencode(query))
                link = None if cursor else reply.headers.get("Link")
                cursor = link and link[link.index("cursor=") + 7 : link.index(">")]

            found[f"{change or 'all'}{of}"] = timed(one, asked.samples)
    return found


def record_times(db, asked):
    """Time polls that change nothing, on a durable connection, with their look-ups and all."""
    day, now_ns, times = asked.days - 1, START + asked.days * feed.DAY, []
    for number in range(min(30, asked.targets)):
        target = targets.claim(db, number + 1, now_ns=now_ns + number, force=True)
        answer = fetch.Answer("ok", 200, {}, declared(asked, number, day), 120)
        began = time.perf_counter()
        feed.record(db, target, answer, now_ns=now_ns + number)
        times.append(time.perf_counter() - began)
    return spread(times)


# -- The plain table ------------------------------------------------------------------------------------------


def measure_plain(asked, path):
    db = database.connect(path, durable=False)
    db.executescript(
        "CREATE TABLE events (id INTEGER PRIMARY KEY, at INTEGER NOT NULL, target INTEGER NOT NULL, facet INTEGER, change INTEGER NOT NULL,"
        " check_id INTEGER NOT NULL) STRICT; CREATE INDEX events_by_target ON events (target, id); CREATE INDEX events_by_time ON events (at)"
    )
    began, per_check, rounds = time.perf_counter(), 1 + asked.facets, asked.plain_days * 86_400 // asked.every

    def rows():
        id = check = 0
        for turn in range(rounds):
            for target in range(asked.targets):
                check, at = check + 1, START + (turn * asked.every + target) * SECOND
                for place in range(per_check):
                    id += 1
                    yield id, at + place, target, place or None, 0 if place == 0 else 2, check

    with database.transaction(db):
        db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", rows())
    count = rounds * asked.targets * per_check
    chance = random.Random(1)

    def page():
        since = START + chance.randrange(asked.plain_days * 86_400) * SECOND
        db.execute("SELECT * FROM events WHERE at >= ? ORDER BY at LIMIT 101", (since,)).fetchall()

    found = {"polls": rounds * asked.targets, "events": count, "bytes": os.path.getsize(path), "page": timed(page, asked.samples),
             "filled": time.perf_counter() - began}  # fmt: skip
    db.close()
    return found


# -- Telling --------------------------------------------------------------------------------------------------


def timed(call, times):
    call()
    gc.collect()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return spread(found)


def spread(times):
    ordered = sorted(times)
    return {"median": statistics.median(ordered), "p95": ordered[int(len(ordered) * 0.95)], "worst": ordered[-1]}


def ms(found):
    return f"{found['median'] * 1000:6.2f} ms   95 %: {found['p95'] * 1000:6.2f}   worst: {found['worst'] * 1000:6.2f}"


def report(asked, ours, plain):
    whole = 86_400 // asked.every * asked.days * asked.targets * (1 + asked.facets)
    each = plain["bytes"] / plain["events"]
    print(f"{asked.targets} targets, {asked.facets} facets each, a poll every {asked.every} s, {asked.days} days\n")
    print(f"{'':34}{'this feed':>18}{'one row an event':>20}")
    for name, a, b in (
        ("polls", f"{ours['polls']:,}", f"{plain['polls']:,}"),
        ("addressable events", f"{ours['events']:,}", f"{plain['events']:,}"),
        ("database", f"{ours['bytes'] / 1e6:,.1f} MB", f"{plain['bytes'] / 1e6:,.1f} MB"),
        ("bytes per poll", f"{ours['bytes'] / ours['polls']:,.1f}", f"{plain['bytes'] / plain['polls']:,.0f}"),
        ("database for the whole history", f"{ours['bytes'] / 1e6:,.1f} MB", f"{each * whole / 1e6:,.0f} MB (scaled)"),
        ("filled in", f"{ours['filled']:.0f} s", f"{plain['filled']:.0f} s"),
    ):
        print(f"{name:34}{a:>18}{b:>20}")
    print("\nA page of 100 events anywhere, as a whole answer (query, JSON, digest)")
    for name, found in ours["pages"].items():
        print(f"  {name:32}{ms(found)}")
    print(f"  {'plain table, the query alone':32}{ms(plain['page'])}")
    print("\nSummary and list, as the history grows")
    for days, found in ours["at"].items():
        print(f"  after {days:4} days: summary {ms(found['summary'])}")
        print(f"  {'':16}list    {ms(found['list'])}")
    print(f"\nRecording a poll that changes nothing, on the disk\n  {'':32}{ms(ours['record'])}")


if __name__ == "__main__":
    main()
