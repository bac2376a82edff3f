"""The operator's commands for the feed: whom to watch, polling, thinning."""

import contextlib
import json
import sys
import time

import click

import db as database
import feed
import feedviews
import settings as configuration
import targets
from console import table
from deals import Refusal

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@click.group()
def facilitators():
    """Choose which facilitators the feed watches."""


@facilitators.command("list")
@AS_JSON
def list_(as_json):
    """Show every target, watched or not."""
    with _database() as db:
        rows = [_row(db, target) for target in targets.every(db)]
    _print(rows, ("id", "name", "watched", "status", "last_check", "every", "url"), as_json)


@facilitators.command()
@click.argument("id")
@click.option("--url", help="Base URL, to which /supported is added. Without one the target is pending.")
@click.option("--name", help="Display name (default: the id).")
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'",
              help="Send this header to the target, for those that need a key. ${VARIABLE} in it is read from the environment of"
                   " the poll, so that the key itself is stored nowhere. May be given more than once.")  # fmt: skip
@click.option("--interval", type=click.IntRange(1, 1440), default=15, show_default=True, help="Minutes between polls.")
@click.option("--loopback", is_flag=True, help="The target is on this machine; allows loopback addresses and http://.")
@click.option("--enable/--no-enable", "enabled", default=True, show_default=True, help="Watch it at once.")
def add(id, url, name, headers, interval, loopback, enabled):
    """Add the target ID, give a pending one its URL, or bring a removed one back."""
    with _database() as db:
        targets.add(
            db,
            id,
            name=name,
            base_url=url,
            headers=dict(_header(text) for text in headers),
            interval_s=interval * 60,
            loopback=loopback,
            enabled=enabled,
        )
    click.echo(f"{id} is {'watched' if enabled else 'added, not watched'}{'' if url else ', pending: it has no URL yet'}.")


@facilitators.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def enable(ids):
    """Watch targets from the next poll on."""
    with _database() as db:
        for id in ids:
            targets.enable(db, id)
            click.echo(f"{id} is watched.")


@facilitators.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def disable(ids):
    """Stop watching targets; their history stays."""
    with _database() as db:
        for id in ids:
            targets.enable(db, id, False)
            click.echo(f"{id} is no longer watched.")


@facilitators.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def remove(ids):
    """Remove targets from the list. Events of the past are never taken back."""
    with _database() as db:
        for id in ids:
            targets.remove(db, id)
            click.echo(f"{id} is removed.")


@facilitators.command()
@AS_JSON
def catalogue(as_json):
    """Put back what is missing of the shipped catalogue (disabled), and show it."""
    with _database() as db:
        targets.seed_catalogue(db)
        known = {target["id"]: target for target in targets.every(db)}
    rows = [
        {"id": id, "name": name, "watched": bool(id in known and known[id]["enabled"]), "url": url} for id, name, url in targets.CATALOGUE
    ]
    _print(rows, ("id", "name", "watched", "url"), as_json)


@click.command()
@click.option("--now", "force", is_flag=True, help="Poll before the turn; a Retry-After is honoured all the same.")
@click.option("--only", metavar="ID", help="Poll this target alone.")
@AS_JSON
def poll(force, only, as_json):
    """Poll the facilitators whose turn it is (a cron job, say every minute)."""
    config = configuration.load()
    with _database() as db:
        if only and not targets.watched(db, only):
            raise Refusal("not_found", f"{only} is not watched.")
        contact = config.contact or config.base_url
        due = len(targets.due(db, now_ns=time.time_ns(), only=only, force=force))
        with _progress(due) as report:
            checks = feed.poll(db, clock=time.time_ns, only=only, force=force, contact=contact, report=report)
    if as_json:
        click.echo(json.dumps([check._asdict() | {"at": feedviews.stamp(check.at)} for check in checks]))
        return
    failed = [f"{check.target} {check.reason}" for check in checks if check.reason != "ok"]
    changed = [f"{check.target} {check.changes}" for check in checks if check.changes]
    click.echo(
        f"Polled {len(checks)}: {len(checks) - len(failed)} operational, {len(failed)} not{_listed(failed)};"
        f" {_counted(sum(check.changes for check in checks))}{_listed(changed)}."
    )


@click.command()
@click.option("--days", type=click.IntRange(1), default=feed.KEPT_DAYS, show_default=True,
              help="Keep bodies that show no change this long.")  # fmt: skip
@AS_JSON
def prune(days, as_json):
    """Thin old raw bodies that show no change; their hashes and every event stay."""
    with _database() as db:
        count = feed.prune(db, now_ns=time.time_ns(), days=days)
    click.echo(json.dumps({"thinned": count}) if as_json else f"Thinned {count} bodies.")


def _row(db, target):
    check = feedviews.latest_check(db, target)
    status, reason = feedviews.status_of(target, check)
    return {
        "id": target["id"],
        "name": target["name"],
        "watched": bool(target["enabled"]),
        "status": status if reason == "ok" else f"{status}: {reason}",
        "last_check": feedviews.stamp(check and check["at"]),
        "every": f"{target['interval_s'] // 60} min",
        "url": target["base_url"],
        "headers": sorted(json.loads(target["headers"])),  # names alone; values are nobody's business
    }


def _header(text):
    name, colon, value = text.partition(":")
    if not colon:
        raise Refusal("invalid_request", "A header is written NAME: VALUE.")
    return name.strip(), value.strip()


def _print(rows, columns, as_json):
    """Print rows as JSON, or as a table that a person can read and a terminal cannot be fooled by."""
    if as_json:
        click.echo(json.dumps(rows))
        return
    table([column.replace("_", " ") for column in columns], [[row[column] for column in columns] for row in rows])


def _counted(changes):
    return "1 change" if changes == 1 else f"{changes} changes"


def _listed(items):
    return f" ({', '.join(items)})" if items else ""


@contextlib.contextmanager
def _progress(length):
    """Give ``feed.poll`` a reporter: a progress bar if somebody is watching."""
    if not length or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=length, label="Polling", file=sys.stderr) as bar:
        yield lambda check, left: bar.update(1)


@contextlib.contextmanager
def _database():
    config = configuration.load()
    db = database.connect(config.database)
    try:
        database.check(db, mode=config.mode)
        yield db
    finally:
        db.close()
