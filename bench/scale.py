"""Show that reading a deal and sweeping cost the same with a million deals as with a thousand. Run: ``make bench``.

Two live databases are filled by SQL with the same mix: most deals ended, one in twenty open, and the deals that fall
due during the measurement. Measured in turns: reads over HTTP, from gunicorn with two workers, of deals that are polled
and of deals that have changed; and in one process, composing a record, a sweep that finds nothing to do, and a sweep
that applies twenty timers. Nothing is signed or sent: the chain is away.
"""

import contextlib
import dataclasses
import io
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

import load
import run

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import actions  # noqa: E402
import chain  # noqa: E402
import db as database  # noqa: E402
import keys  # noqa: E402
import settings as configuration  # noqa: E402
import transfers  # noqa: E402
import world as worlds  # noqa: E402

SIZES = (1_000, int(os.environ.get("BENCH_DEALS", 1_000_000)))
ROUNDS, READS, SWEEPS, DUE = 9, 500, 10, 20
STATES = {"released": 80, "refunded": 12, "split": 3, "funded": 2, "accepted": 2, "delivered": 1}  # per cent


def main():
    folder = ROOT / "bench" / ".work"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scale-", dir=folder) as found, contextlib.ExitStack() as stack:
        places = {size: _filled(f"{found}/{size}.db", size) for size in SIZES}
        ports = {size: stack.enter_context(_served(f"{found}/{size}.db")) for size in SIZES}
        rows = {size: [] for size in SIZES}
        for number in range(ROUNDS + 1):
            for size, (db, world) in places.items():
                over_http = _polled(ports[size], size), _changed(ports[size], db, size)
                figures = *over_http, _read(db, world, size), _idle(db, world), _sweep(db, world, size + 1 + number * DUE)
                if number:  # the first round warms up
                    rows[size].append(figures)
    medians = {size: [statistics.median(column) for column in zip(*found)] for size, found in rows.items()}
    line = "{:<32}{:>14}{:>18}   {}".format
    print(line("milliseconds, median of rounds", *(f"{size:,} deals" for size in SIZES), "ratio"))
    measured = "one read over HTTP", "of a deal that has changed", "its record, composed", "a sweep with nothing due", f"a sweep with {DUE} due"
    for what, small, large in zip(measured, *medians.values()):
        print(line(what, f"{small * 1e3:.3f}", f"{large * 1e3:.3f}", f"{large / small:.2f}"))


def _filled(path, size):
    """Return (connection, world) of a new live database with ``size`` deals."""
    settings = configuration.Settings(mode="live", database=path, base_url="http://127.0.0.1", wallets=(f"{path}.wallet",))
    db = database.connect(path)
    database.init(db, mode="live")
    master_key = keys.create_wallet(settings.wallets[0], "bench", sandbox=True)
    keys.create_secrets(settings.secrets_path)
    database.set_meta(db, "master_key", master_key.hex())
    started, now = time.perf_counter(), int(time.time())
    with contextlib.closing(database.connect(path, durable=False)) as filler, database.transaction(filler):
        filler.execute("PRAGMA cache_size = -400000")
        for script in FILL:
            filler.execute(script, {"size": size, "all": size + (ROUNDS + 1) * DUE, "now": now, "key": master_key.hex()})
    print(f"{size:,} deals filled in {time.perf_counter() - started:.0f} s: {os.path.getsize(path) >> 20} MiB")
    return db, dataclasses.replace(worlds.build(settings, db), ledger=_Unasked())


@contextlib.contextmanager
def _served(path):
    """Serve a database with gunicorn as it is deployed; yields the port."""
    (port,) = run._free_ports(1)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DEALS_", "GUNICORN_"))},
        "DEALS_MODE": "live", "DEALS_DATABASE": path, "DEALS_BASE_URL": f"http://127.0.0.1:{port}",
        "DEALS_RPC_URL": "http://127.0.0.1:9",
    }  # fmt: skip
    command = [sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{port}", "app:create_app()"]
    with run._process(command, environ, f"{path}.log"):
        run._wait(port)
        yield port


class _Unasked:
    """A chain that knows nothing: legs that fall due wait, as they would while the node is away."""

    def __getattr__(self, name):
        def unknown(*args, **options):
            raise chain.ChainUnknown("not part of this measurement")

        return unknown


def _id(number):
    """Return the made-up id of a deal: FILL spells the number with the same letters."""
    return "deal_" + f"{number:026d}".translate(DIGITS)


DIGITS = str.maketrans("0123456789", "abcdefghij")
SPELL = "lower(printf('%026d', i))"
for digit, letter in zip("0123456789", "abcdefghij"):
    SPELL = f"replace({SPELL}, '{digit}', '{letter}')"
# A hash of the row number stands for everything that is random in life: ids of neighbours lie apart in the indexes.
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :all)"
SHARE = "(i * 7919 % 100)"
STATE, bound = "CASE WHEN i > :size THEN 'funded'", 0
for name, share in STATES.items():
    bound += share
    STATE += f" WHEN {SHARE} < {bound} THEN '{name}'"
STATE += " END"
ADDRESS = "'0x' || printf('%040x', (i * 2654435761 % 4294967296) * {})".format
FILL = (
    f"""{NUMBERS}, d AS (SELECT i, {STATE} AS state, :now - 86400 - i % 864000 AS at FROM n)
    INSERT INTO deals (id, state, master_key, terms, deposit_address, amount_units, price_units, seller_address,
      buyer_address, secret_hash, instant, deadline_hours, review_hours, decide_hours, created_at, funded_at,
      accepted_at, delivered_at, ended_at, deliver_by, review_ends_at, due_at, seller_units)
    SELECT 'deal_' || {SPELL}, state, :key, '{{}}', {ADDRESS(1048573)} , 20000000, 20292000, {ADDRESS(524287)},
      {ADDRESS(131071)}, printf('%064x', i), 0, 24, 24, 168, at, at,
      CASE WHEN state <> 'funded' THEN at END,
      CASE WHEN state IN ('released', 'delivered') THEN at END,
      CASE WHEN state IN ('released', 'refunded', 'split') THEN at END,
      :now + 86400 + i % 86400,
      CASE WHEN state IN ('released', 'delivered') THEN :now + 86400 + i % 86400 END,
      CASE WHEN state IN ('funded', 'accepted', 'delivered') THEN :now + 86400 + i % 86400 END,
      CASE state WHEN 'released' THEN 20000000 WHEN 'refunded' THEN 0 WHEN 'split' THEN 10000000 END
    FROM d""",
    """INSERT INTO payments (deal_id, attempt, payer, nonce, protocol, status, value_units, valid_after, valid_before,
      signature, resource_url, claimed_at, lease_until, settled_at, transaction_hash)
    SELECT id, 1, buyer_address, '0x' || secret_hash, 'x402', 'settled', price_units, 0, created_at + 300,
      '0x' || secret_hash || secret_hash || '1b', 'http://127.0.0.1/x402/deal', created_at, 0, created_at,
      '0x' || secret_hash FROM deals""",
    """INSERT INTO transfers (deal_id, leg, payee, value_units, valid_before, nonce, signature, status, transaction_hash,
      created_at, confirmed_at)
    SELECT id, 'guarantee', buyer_address, price_units, created_at + 315360000, '0xff' || substr(secret_hash, 3),
      '0x' || secret_hash || secret_hash || '1b', 'offered', NULL, created_at, NULL FROM deals
    UNION ALL
    SELECT id, CASE state WHEN 'refunded' THEN 'buyer' ELSE 'seller' END, seller_address, 20000000, created_at + 315360000,
      '0xee' || substr(secret_hash, 3), '0x' || secret_hash || secret_hash || '1b', 'confirmed', '0x' || secret_hash,
      created_at, created_at FROM deals WHERE seller_units IS NOT NULL""",
    """INSERT INTO deal_events (deal_id, number, at, event, actor, state)
    SELECT id, 1, created_at, 'pay', 'buyer', 'pending' FROM deals
    UNION ALL SELECT id, 2, created_at, 'fund', 'chain', 'funded' FROM deals""",
)  # fmt: skip


def _polled(port, size):
    """Return the seconds of one read over HTTP of a thousand deals that are read again and again."""
    ids = [_id(number) for number in range(1, size + 1, size // 1000)]
    return 1 / load.run(port, [load.request("GET", f"/v1/deals/{random.choice(ids)}") for _ in range(4000)])


def _changed(port, db, size):
    """Return the seconds of one read over HTTP of a thousand random deals that have changed since anybody read them."""
    ids = [_id(number) for number in random.sample(range(1, size + 1), 1000)]
    with database.transaction(db):
        db.executemany("UPDATE deals SET version = version + 1 WHERE id = ?", [(deal_id,) for deal_id in ids])
    return 1 / load.run(port, [load.request("GET", f"/v1/deals/{deal_id}") for deal_id in ids])


def _read(db, world, size):
    """Return the seconds of one read of a random deal, its record composed anew."""
    ids = [_id(random.randint(1, size)) for _ in range(READS)]
    world.records.clear()
    started = time.perf_counter()
    for deal_id in ids:
        actions.read(db, world, deal_id)
        world.records.clear()
    return (time.perf_counter() - started) / READS


def _idle(db, world):
    """Return the seconds of one sweep that finds nothing to do."""
    started = time.perf_counter()
    for _ in range(SWEEPS):
        assert not +transfers.sweep(db, world, {})
    return (time.perf_counter() - started) / SWEEPS


def _sweep(db, world, first):
    """Return the seconds of one sweep that finds deals due, and put away the transfers that it owes."""
    with database.transaction(db):
        for number in range(first, first + DUE):
            values = {"id": _id(number), "now": int(time.time())}
            db.execute("UPDATE deals SET due_at = :now, deliver_by = :now WHERE id = :id", values)
    started = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):  # it says that the chain is away
        counts = transfers.sweep(db, world, {})
    elapsed = time.perf_counter() - started
    assert counts["timers"] == DUE and not counts["errors"], counts
    with database.transaction(db):
        db.execute("UPDATE transfers SET status = 'confirmed', signature = '0x', next_at = NULL WHERE next_at IS NOT NULL")
        db.execute("UPDATE deals SET look_at = NULL WHERE look_at IS NOT NULL")
    return elapsed


if __name__ == "__main__":
    main()
