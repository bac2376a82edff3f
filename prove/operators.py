"""The operator and the weather: sweeps, decisions, switches, backups; halts, reorganisations, deaths; and the calm."""

import dataclasses
import math
import os
import shutil

import chain
import db as database
import deals
import operations
import transfers
from deals import Refusal

from . import agents
from .engine import FAVOUR, Job

WEATHER = ("halt", "reorg", "pause", "blacklist", "power_cut", "clock_jump", "switch", "rotation", "new_wallet", "restore")
WEIGHTS = (4, 8, 2, 5, 3, 1, 1, 1, 0.6, 0.4)


def enter(sim):
    """Let the people of a seed appear, over a few minutes, and start the operator's jobs."""
    for deal in sim.deals:
        start = deal.rng.uniform(0, 240)
        clients = [agents.buyer(sim, deal, deal.buyer), agents.party(sim, deal, "seller"), agents.party(sim, deal, "buyer")]
        if sim.drawn("rival", times=2):
            sim.agent(agents.rival(sim, deal), at=start + deal.rng.choice((0, 0, 0.5, 5, 400, 1000)))
            sim.busy += 1
        if sim.happens("double_sign", deal=deal.id):  # a second process of the same buyer, at the same moment
            clients.append(agents.buyer(sim, deal, deal.buyer))
        if sim.drawn("stray_money"):
            clients.append(agents.stray(sim, deal))
        for client in clients:
            sim.agent(client, at=start)
            sim.busy += 1
    sim.agent(sweeper(sim), at=1)
    sim.agent(sweeper(sim), at=2)
    sim.agent(judge(sim), at=3)
    sim.agent(keeper(sim), at=60)


def due(sim):
    """Return when something is next to be swept, by the server's clock, or None."""
    return sim.laws.db.execute(
        "SELECT min(t) FROM (SELECT min(due_at) AS t FROM deals UNION ALL SELECT min(look_at) FROM deals"
        " UNION ALL SELECT min(next_at) FROM transfers)"
    ).fetchone()[0]


def sweeper(sim):
    """Sweep as cron does, more or less; sometimes two at once, sometimes nobody for hours."""
    rng = sim.rng
    while True:
        moment = due(sim)
        if moment is None:
            yield rng.uniform(5, 60)
        else:
            pause = math.exp(rng.uniform(math.log(0.5), math.log(200)))
            yield min(3600.0, max(0.0, moment - sim.clock())) + pause
        yield sim.quiet() * rng.uniform(0.05, 0.4)
        if sim.happens("no_sweep", times=0.3):
            yield rng.choice((600, 7200, 90_000))
        sweep = Job("the sweep", _sweeping(sim, rng.choice((100, 100, 2))))
        if sim.happens("two_sweeps"):
            sim.agent(_once(sweep))
        yield sweep


def _once(job):
    yield job


def _sweeping(sim, limit=100):
    return lambda db, world: transfers.sweep(db, world, sim.wallets, limit=limit)


def judge(sim):
    """Decide disputes, early, late or in the second of the deadline; decide some twice, and leave some to the clock."""
    rng, awaited = sim.rng, set()
    while True:
        yield rng.choice((30, 300, 600) if sim.quarrels else (30, 600, 7000)) + sim.quiet() * 0.2
        rows = sim.laws.db.execute("SELECT id, decide_by, amount_units FROM deals WHERE state = 'disputed'").fetchall()
        left = lambda row: row["id"] in awaited or sim.quarrels and chain.sha256(row["id"].encode())[0] % 5 < 2
        rows = [row for row in rows if not left(row)]
        if not rows or rng.random() < (0.1 if sim.quarrels else 0.5):
            continue
        row, wait = rng.choice(rows), 0.0
        if rng.random() < (0.1 if sim.quarrels else 0.6):
            wait = max(0.0, row["decide_by"] - sim.clock() + rng.choice((-1, 0, 1)))
            awaited.add(row["id"])
        outcome = rng.choice(("release", "refund", "split"))
        units = rng.choice((0, row["amount_units"], rng.randrange(row["amount_units"])))
        decision = Job(f"the operator decides: {outcome}", _decide(row["id"], outcome, units), deal=row["id"])
        sim.agent(_decision(decision), at=wait)
        sim.busy += 1


def _decision(job):
    yield job


def _decide(deal_id, outcome, units):
    def work(db, world):
        try:
            operations.resolve_dispute(db, world, deal_id, outcome, note="decided", seller_units=units)
        except Refusal as refusal:
            return refusal.code

    return work


def keeper(sim):
    """Make a backup now and then, and look after health and books while everything goes on."""
    while True:
        yield Job("a backup", lambda db, world: _backup(sim, db))
        yield Job("health", lambda db, world: operations.health(db, world))
        yield sim.rng.choice((100, 2000, 50_000)) + sim.quiet()


def _backup(sim, db):
    target = sim.path + ".backup"
    try:
        database.backup(db, target)
        sim.laws.backed_up()
    except Exception as error:
        if "locked" not in str(error):
            raise


# Those for whom a seed waits before its faults stop.
CLIENTS = {each.__code__ for each in (agents.buyer, agents.rival, agents.party, agents.stray, _decision)}


# -- Weather --------------------------------------------------------------------------------------------------------


def weather(sim):
    """After each step, let something happen to the world now and then."""
    if sim.rng.random() >= 0.004 * sim.heat:
        return
    kinds = {kind: weight for kind, weight in zip(WEATHER, WEIGHTS) if kind in sim.enabled}
    if sim.favourite in kinds:
        kinds[sim.favourite] += 2 * FAVOUR
    if kinds:
        kind = sim.rng.choices(list(kinds), kinds.values())[0]
        globals()[f"_{kind}"](sim)


def _halt(sim):
    sim.hit("halt")
    sim.chain.halted_until = sim.time + sim.rng.choice((5, 40, 400, 2000))


def _reorg(sim):
    if sim.time < sim.chain.halted_until:  # a chain that makes no blocks replaces none
        return
    sim.hit("reorg")
    sim.chain.reorganise(sim.rng.randrange(1, 5), sim.rng)


def _pause(sim):
    sim.hit("pause")
    sim.chain.paused = True
    sim.agent(_later(lambda: setattr(sim.chain, "paused", False)), at=sim.rng.choice((20, 300, 5000)))


def _blacklist(sim):
    deal = sim.rng.choice(sim.deals)
    party = sim.rng.choice((deal.seller, deal.buyer))
    sim.hit("blacklist", deal.id)
    sim.chain.blacklist[party.address] = True
    sim.agent(_later(lambda: sim.chain.blacklist.pop(party.address, None)), at=sim.rng.choice((60, 5000, 500_000)))


def _power_cut(sim):
    sim.hit("power_cut")
    sim.kill()
    for process in (*sim.web, sim.office):
        process.boot()


def _clock_jump(sim):
    sim.hit("clock_jump")
    sim.laws.clock_jumped = True
    sim.skew = sim.rng.choice((0.0, 86_400.0, -86_400.0, 3600.0, -3600.0, 30.0, -30.0))


def _switch(sim):
    sim.hit("switch")

    def flip():
        name = sim.rng.choice(operations.SWITCHES)
        yield Job(f"the operator switches {name} off", lambda db, world: operations.switch(db, name, on=False))
        yield sim.rng.choice((5, 60, 600))
        yield Job(f"the operator switches {name} on", lambda db, world: operations.switch(db, name, on=True))

    sim.agent(flip())


def _rotation(sim):
    sim.hit("rotation")
    sim.secrets.append(chain.sha256(f"challenge secret {len(sim.secrets)}".encode()))
    _restart(sim)


def _new_wallet(sim):
    """Put a new wallet before the others, as the operator does with ``init``: the sweep keeps them all."""
    if len(sim.wallets) > 2:
        return
    sim.hit("new_wallet")
    sim.begin_wallet()
    _restart(sim)


def _restart(sim):
    sim.kill()
    for process in (*sim.web, sim.office):
        process.boot()


def _restore(sim):
    """Stop everything and put the last backup in the database's place."""
    if not os.path.exists(sim.path + ".backup"):
        return
    sim.hit("restore")
    sim.kill()
    for worker in sim.workers:
        worker.drop()
    sim.laws.close()
    shutil.copyfile(sim.path + ".backup", sim.path)
    for process in (*sim.web, sim.office):
        process.boot()
    sim.laws.restored()


def _later(action):
    action()
    return
    yield


# -- The calm -------------------------------------------------------------------------------------------------------


def calm(sim):
    """Faults off: everything pending, due or owed must reach its end by the sweep and the clock alone."""
    sim.enabled = set()
    sim.agents.clear()
    sim.run(lambda: not sim.tasks)
    sim.agents.clear()
    sim.say("from here on nothing goes wrong any more")
    sim.chain.paused, sim.chain.halted_until, sim.skew = False, 0.0, 0.0
    sim.chain.blacklist.clear()
    for name in operations.SWITCHES:
        database.set_meta(sim.laws.db, f"off:{name}", None)
    pause = 4
    for turn in range(600):
        if turn % 50 == 49 and any(sim.laws.taken_away(deal.id) for deal in sim.deals):
            pause = 6 * 3600  # what a reorganisation took away is tried for ever: do not wait for each time
        _sweep(sim)
        if turn % 5 == 4:
            _recover(sim)
        moment = due(sim)
        waiting = [transaction.at for transaction in sim.chain.pool]
        if moment is None and not waiting and not sim.laws.stranded():
            return
        nearest = min([*waiting, *([moment - sim.skew] if moment is not None else [])], default=sim.time)
        sim.advance(max(sim.time + pause, nearest))
    open_ends = [tuple(row) for row in sim.laws.db.execute(
        "SELECT id, state, due_at, look_at FROM deals WHERE due_at IS NOT NULL OR look_at IS NOT NULL")]
    open_ends += [tuple(row) for row in sim.laws.db.execute(
        "SELECT deal_id, leg, status, reason FROM transfers WHERE next_at IS NOT NULL")]
    sim.laws.unfinished(open_ends)


def _sweep(sim):
    sim.command("the sweep", _sweeping(sim))


def _recover(sim):
    """Return what lies at the deposits of terms that never became a deal, as their payers ask the operator."""
    for deal, payee in sim.laws.stranded():
        def work(db, world):
            terminal = dataclasses.replace(world.terminal, master_key=deal.master)  # with the wallet it began under
            operations.recover(db, dataclasses.replace(world, terminal=terminal), deal.terms, payee, act=True)

        sim.command("the operator recovers stray money", work)
