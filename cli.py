"""The operator's commands: set up, serve, the cron jobs, and everything that needs a person or the master key."""

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import time

import click

import chain
import db as database
import deals
import feedback
import feedcli
import keys
import operations
import payments
import settings as configuration
import spec
import targets
import transfers
import world as worlds
from console import plain, progress, table
from db import sqlite3


class Group(click.Group):
    """Turn what the service refuses into one sentence and exit code 2 instead of a stack trace."""

    def invoke(self, context):
        try:
            return super().invoke(context)
        except (configuration.Wrong, database.NotReady, keys.Locked, chain.ChainUnknown) as error:
            raise _Stop(str(error)) from None
        except deals.Refusal as refusal:
            raise _Stop(f"{refusal.code}: {refusal.message}") from None


class _Stop(click.ClickException):
    exit_code = 2


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main():
    """Hold payments between agents: the operator's side. Configuration comes from DEALS_* variables."""


def _open():
    """Return (settings, db, world) of the configured service."""
    settings = configuration.load()
    db = database.here(settings.database)
    database.check(db, mode=settings.mode)
    return settings, db, worlds.build(settings, db)


def _print(value):
    click.echo(json.dumps(value, indent=2))


# -- Set up and serve ---------------------------------------------------------------------------------------


@main.command()
def init():
    """Prepare the database, the wallet and the service's own secrets. Safe to run again."""
    settings = configuration.load()
    _prepare(settings, settings.base_url)


def _prepare(settings, base_url):
    path = settings.wallets[0]
    if not settings.sandbox and not settings.passphrase:
        raise _Stop("Set DEALS_WALLET_PASSPHRASE or DEALS_WALLET_PASSPHRASE_FILE: it encrypts the wallet.")
    db = database.here(settings.database)
    database.init(db, mode=settings.mode)
    _check_wallets(db, settings)
    if not os.path.exists(path):
        keys.create_wallet(path, settings.passphrase or keys.SANDBOX_PASSPHRASE, sandbox=settings.sandbox)
        click.echo(f"Made the wallet {path}. Back it up: it is the only way to the money.")
    if not os.path.exists(settings.secrets_path):
        keys.create_secrets(settings.secrets_path)
    master_key = next(iter(keys.open_wallets(settings)))
    database.set_meta(db, "master_key", master_key.hex())
    targets.seed(db, mode=settings.mode, base_url=base_url)
    click.echo(f"Ready: {settings.mode} mode, database {settings.database}, master key {master_key.hex()}.")


def _check_wallets(db, settings):
    """Refuse to replace a wallet that is merely missing: the money of every deal so far hangs on it."""
    current = database.meta(db, "master_key")
    present = tuple(path for path in settings.wallets if os.path.exists(path))
    if current and bytes.fromhex(current) not in keys.open_wallets(dataclasses.replace(settings, wallets=present)):
        raise _Stop(
            f"The wallet of master key {current} is not here: restore its file. To start a new one beside it, set"
            " DEALS_WALLET to the new path, a comma, and the old path."
        )


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8402, show_default=True)
@click.option("--workers", default=2, show_default=True)
def serve(host, port, workers):
    """Serve with gunicorn; in the sandbox also prepare it and sweep every second."""
    settings = configuration.load()
    if settings.sandbox:
        _prepare(settings, settings.base_url or f"http://{host}:{port}")
        if os.fork() == 0:
            _sweep_beside(os.getppid())
    here = os.path.dirname(os.path.abspath(__file__))
    config = os.path.join(here, "gunicorn.conf.py")
    os.execv(
        sys.executable,
        [sys.executable, "-m", "gunicorn", "--config", config, "--pythonpath", here, "--bind", f"{host}:{port}",
         "--workers", str(workers), "app:create_app()"],
    )  # fmt: skip


def _sweep_beside(parent):
    """Sweep every second until the server that started us is gone."""
    settings, db, world = _open()
    wallets = keys.open_wallets(settings)
    while os.getppid() == parent:
        with _told():
            transfers.sweep(db, world, wallets)
        time.sleep(1)
    os._exit(0)


@contextlib.contextmanager
def _told():
    """Tell of a database that cannot be used right now, and go on with the next run."""
    try:
        yield
    except sqlite3.OperationalError as error:
        click.echo(f"sweep: {error}", err=True)


# -- Cron ---------------------------------------------------------------------------------------------------


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
@click.option("--limit", default=100, show_default=True, help="Most items of each kind in one run.")
@click.option("--watch", type=float, help="Go on, with this many seconds between runs.")
def sweep(as_json, limit, watch):
    """Resolve unknown payments, apply due timers, sign and send what is owed. Run it from cron every minute."""
    settings, db, world = _open()
    wallets = keys.open_wallets(settings)
    while True:
        counts = transfers.Counts(errors=1)
        with _told():
            counts = transfers.sweep(db, world, wallets, limit=limit, progress=progress("sweep"))
        if as_json:
            click.echo(json.dumps(counts))
        else:
            found = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()) if number)
            click.echo(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ} sweep: {found or 'nothing was due'}")
        if not watch:
            sys.exit(1 if counts["errors"] else 0)
        time.sleep(watch)


# -- The feed -----------------------------------------------------------------------------------------------

for command in (feedcli.facilitators, feedcli.poll, feedcli.prune):
    main.add_command(command)


# -- Deals and disputes -------------------------------------------------------------------------------------


@main.group(name="deals")
def deals_group():
    """Look at deals."""


@deals_group.command(name="list")
@click.option("--state", type=click.Choice(["open", *sorted({m.target for m in deals.MOVES.values()}), "pending"]), default="open")
@click.option("--limit", default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def list_deals(state, limit, as_json):
    """List deals, newest first."""
    _, db, world = _open()
    chosen = "due_at IS NOT NULL OR look_at IS NOT NULL AND state = 'pending'" if state == "open" else "state = :state"
    rows = db.execute(
        f"SELECT * FROM deals WHERE {chosen} ORDER BY created_at DESC LIMIT :limit", {"state": state, "limit": limit}
    ).fetchall()
    if as_json:
        return _print([deals.record(db, row, world.frame) for row in rows])
    table(
        ["deal", "state", "amount", "seller", "buyer", "clock moves at"],
        [
            (row["id"], row["state"], deals.usd(row["amount_units"]), chain.checksum(row["seller_address"]),
             chain.checksum(row["buyer_address"]), deals.timestamp(row["due_at"]))
            for row in rows
        ],
    )  # fmt: skip


@deals_group.command(name="show")
@click.argument("deal_id")
@click.option("--json", "as_json", is_flag=True)
def show_deal(deal_id, as_json):
    """Show one deal with its payment, transfers and history."""
    _, db, world = _open()
    record = deals.record(db, deals.get(db, deal_id), world.frame)
    if as_json:
        return _print(record)
    for name in ("id", "state", "amount_usd", "price_usd", "seller_address", "buyer_address", "deposit_address",
                 "ref", "deliver_by", "review_ends_at", "decide_by", "ended_at"):  # fmt: skip
        if record[name] is not None:
            click.echo(f"{name.replace('_', ' '):16} {plain(record[name])}")
    if record["dispute"]:
        for name, text in record["dispute"].items():
            click.echo(f"{name:16} {plain(text)}")
    click.echo()
    table(["at", "event", "by", "state"], [tuple(line.values()) for line in record["history"]])
    reasons = dict(db.execute("SELECT leg, reason FROM transfers WHERE deal_id = :id", {"id": deal_id}).fetchall())
    if record["transfers"]:
        click.echo()
        table(
            ["leg", "to", "amount", "status", "why"],
            [(t["leg"], t["to"], t["amount_usd"], t["status"], reasons[t["leg"]]) for t in record["transfers"]],
        )


@main.group()
def disputes():
    """Look at disputes and decide them."""


@disputes.command(name="list")
@click.option("--json", "as_json", is_flag=True)
def list_disputes(as_json):
    """List open disputes, the most urgent first."""
    _, db, world = _open()
    rows = db.execute("SELECT * FROM deals WHERE due_at IS NOT NULL AND state = 'disputed' ORDER BY decide_by").fetchall()
    if as_json:
        return _print([deals.record(db, row, world.frame) for row in rows])
    table(
        ["deal", "amount", "decide by", "reason"],
        [(r["id"], deals.usd(r["amount_units"]), deals.timestamp(r["decide_by"]), r["dispute_reason"][:60]) for r in rows],
    )


@disputes.command(name="show")
@click.argument("deal_id")
@click.pass_context
def show_dispute(context, deal_id):
    """Show what both parties say."""
    context.invoke(show_deal, deal_id=deal_id, as_json=False)


@disputes.command(name="resolve")
@click.argument("deal_id")
@click.argument("outcome", type=click.Choice(["release", "refund", "split"]))
@click.option("--note", required=True, help="Why; published on the deal.")
@click.option("--seller-usd", help="With split: what the seller gets; the buyer gets the rest.")
@click.option("--yes", is_flag=True, help="Really do it; without this the command only says what it would do.")
def resolve_dispute(deal_id, outcome, note, seller_usd, yes):
    """Decide a dispute. The money follows with the next sweep, and the decision is final."""
    _, db, world = _open()
    deal = deals.get(db, deal_id)
    if (outcome == "split") != (seller_usd is not None):
        raise click.UsageError("--seller-usd goes with split, and split needs it.")
    units = deal["amount_units"] * (outcome == "release") if seller_usd is None else _usd(seller_usd)
    operations.resolve_dispute(db, world, deal_id, outcome, note=note, seller_units=units, act=yes)
    parts = f"seller {deals.usd(units)}, buyer {deals.usd(deal['amount_units'] - units)}"
    if not yes:
        click.echo(f"Would decide {deal_id}: {outcome} ({parts}). Nothing was done; add --yes to act.")
        return
    click.echo(f"Decided {deal_id}: {outcome} ({parts}).")


def _usd(text):
    try:
        spec.check("SplitAction", {"seller_usd": text})
    except deals.Refusal:
        raise click.UsageError(f"{text!r} is not an amount such as 12.50.") from None
    return deals.units(text)


# -- Operating ----------------------------------------------------------------------------------------------


@main.command()
@click.argument("name", type=click.Choice(operations.SWITCHES))
@click.argument("position", type=click.Choice(["on", "off"]))
def switch(name, position):
    """Switch new payments on or off: the endpoint (deal) or the network (base). Everything else goes on."""
    _, db, _ = _open()
    operations.switch(db, name, on=position == "on")
    click.echo(f"{name} is {position}.")


@main.command()
@click.option("--json", "as_json", is_flag=True)
def audit(as_json):
    """Compare every deal's books with the chain; exit code 1 on any difference."""
    _, db, world = _open()
    found = operations.audit(db, world, progress=progress("audit"))
    if as_json:
        _print(found)
    elif found:
        table(["deal", "leg", "difference"], [tuple(line.values()) for line in found])
    else:
        number = db.execute("SELECT count(*) AS n FROM deals").fetchone()["n"]
        click.echo(f"All {number} deals agree with the chain.")
    sys.exit(1 if found else 0)


@main.command()
@click.argument("terms_file", type=click.File("rb"))
@click.option("--to", "payee", required=True, help="The address the money came from.")
@click.option("--yes", is_flag=True, help="Really return it.")
def recover(terms_file, payee, yes):
    """Return stray money at the deposit of a request body (JSON): of no deal, or of one long over."""
    _, db, world = _open()
    terms, refusal = payments.read_body(world, terms_file.read(), "application/json")
    if refusal:
        raise refusal
    if not chain.is_address(payee):
        raise click.UsageError("--to must be an address with a right checksum.")
    deposit, units = operations.recover(db, world, terms, payee.lower(), act=yes)
    click.echo(f"The deposit {chain.checksum(deposit)} holds {deals.usd(units)} USDC.")
    if units >= deals.SMALLEST_TRANSFER:
        click.echo("It goes back with the next sweep." if yes else "Nothing was done; add --yes to return it.")


@main.command()
@click.argument("path", type=click.Path(dir_okay=False))
def backup(path):
    """Copy the database, complete and consistent, while the service runs. Back up the wallet separately."""
    settings, db, _ = _open()
    if os.path.exists(path):
        raise _Stop(f"{path} exists already.")
    database.backup(db, path)
    click.echo(f"Copied {settings.database} to {path}.")


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@click.option("--yes", is_flag=True, help="Really replace the database.")
def restore(path, yes):
    """Put a backup in place of the database. Stop the service and the cron jobs first."""
    settings = configuration.load()
    if not yes:
        click.echo(f"This would replace all of {settings.database} by {path}; add --yes to do it.")
        return
    try:
        database.restore(database.connect(settings.database), path, mode=settings.mode)
    except sqlite3.DatabaseError as error:
        raise _Stop(f"Nothing was replaced: {error}") from error
    click.echo(f"Restored {settings.database} from {path}. Start again: the sweep asks the chain before it sends anything.")


@main.command(name="rotate-secret")
def rotate_secret():
    """Make a fresh MPP challenge secret; restart the service afterwards. Challenges already issued stay good."""
    keys.rotate_secret(configuration.load().secrets_path)
    click.echo("Rotated; restart the service.")


@main.command()
def mcp():
    """Serve the MCP tools over stdio: one JSON-RPC message a line, in and out."""
    import pages
    import tools

    settings, db, world = _open()
    surface = pages.Surface(world)
    caller = surface.caller(db, settings.base_url or "http://127.0.0.1:8402", "stdio")
    for line in sys.stdin.buffer:
        if line.strip():
            _, answer = tools.answer(caller, line)
            if answer is not None:
                sys.stdout.write(json.dumps(answer, separators=(",", ":")) + "\n")
                sys.stdout.flush()


# -- Feedback -----------------------------------------------------------------------------------------------


@main.group(name="feedback")
def notes():
    """What agents and people tell the operators."""


@notes.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Also the notes that are done.")
@click.option("--limit", default=100, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def list_notes(everything, limit, as_json):
    """List the notes that wait to be read, oldest first."""
    _, db, _ = _open()
    rows = feedback.notes(db, everything=everything, limit=limit)
    if as_json:
        _print([{**dict(row), "at": deals.timestamp(row["at"]), "done_at": deals.timestamp(row["done_at"])} for row in rows])
    else:
        lines = [(row["id"], deals.timestamp(row["at"]), row["contact"], row["deal_id"], row["message"]) for row in rows]
        table(["id", "at", "contact", "deal", "message"], lines)


@notes.command(name="done")
@click.argument("ids", nargs=-1, required=True)
def finish_notes(ids):
    """Mark notes as dealt with."""
    _, db, world = _open()
    for note in ids:
        feedback.done(db, note, now=world.now())
        click.echo(f"{note} is done.")


@main.command()
@click.option("--url", help="A running sandbox; without it the demo starts one of its own and stops it afterwards.")
def demo(url):
    """Watch two agents do three deals over HTTP in the sandbox."""
    import demo as story

    sys.exit(story.main(url))


if __name__ == "__main__":
    main()
