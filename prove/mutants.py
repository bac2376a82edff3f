"""Take away one guard at a time, and show that the simulator notices.

Each mutant is a copy of the sources in which one text is replaced. It lives seeds until a promise breaks
(killed) or its time is up (it survived, which is a failure of the simulator, or a guard too many).
"""

import contextlib
import dataclasses
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent.parent
THIRD_PARTY = ("flask", "werkzeug.test", "jsonschema", "coincurve", "eth_hash.auto", "eth_account", "requests", "click")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``old`` in ``file`` becomes ``new``; ``faults`` are those that bring it out.

    ``also`` is a second (file, old, new): some guards stand twice, and then both have to go before anything shows.
    """

    name: str
    file: str
    old: str
    new: str
    faults: str = ""
    also: tuple = ()
    count: int = 6
    heat: float = 1.0


SWEEPS = "two_sweeps,rpc_lags,slow_block"
ALL = (
    # What the database forbids by itself
    Mutant("payment key not unique", "schema.sql", "  UNIQUE (payer, nonce),\n", "  UNIQUE (payer, nonce, id),\n", ""),
    Mutant("attempt not unique", "schema.sql", "  UNIQUE (deal_id, attempt)\n", "  CHECK (attempt > 0)\n", ""),
    Mutant("deposit address not unique", "schema.sql", "deposit_address   TEXT NOT NULL UNIQUE", "deposit_address   TEXT NOT NULL", ""),
    Mutant("leg not unique", "schema.sql", "  PRIMARY KEY (deal_id, leg),\n  CHECK ((status = 'due')", "  PRIMARY KEY (deal_id, leg, nonce),\n  CHECK ((status = 'due')", ""),
    Mutant("an ended deal may change", "schema.sql", "WHEN old.state IN ('released', 'refunded', 'split') AND new.state <> old.state", "WHEN 0", ""),
    Mutant("a signed transfer may change", "schema.sql", "  WHEN old.signature IS NOT NULL\n", "  WHEN 0\n", ""),
    Mutant("a refund may pay the seller", "schema.sql", "  CHECK (state <> 'refunded' OR seller_units = 0),\n", "", ""),
    Mutant("history does not raise the version", "schema.sql", "CREATE TRIGGER deal_event_seen AFTER INSERT ON deal_events", "CREATE TRIGGER deal_event_seen AFTER DELETE ON deal_events", ""),
    # Compare and set
    Mutant("moves from any state", "deals.py", '''where = f"state IN ({', '.join(map(repr, move.sources))})"''', 'where = "seller_units IS NULL"', "wrong_proof,lost_answer"),
    Mutant("a lease can be taken twice", "settlement.py", '" AND lease_until <= :now RETURNING *"', '" AND :now = :now RETURNING *"', "silent,lost_answer,says_pending,hoarded"),
    Mutant("a turn can be taken twice", "transfers.py", "AND next_at = :seen AND attempts = :attempts", "AND :seen + :attempts IS NOT NULL", SWEEPS),
    Mutant("a deal that has not lapsed is opened again", "deals.py", "WHERE state = 'lapsed' AND (buyer_address", "WHERE (buyer_address", "double_sign"),
    Mutant("another payer takes over a living attempt", "deals.py", "AND (buyer_address = :buyer OR attempt = :takes_over)", "AND :takes_over IS :takes_over", "rival,false_refusal,slow_block,no_sweep"),
    Mutant("another payer need not wait", "payments.py", "    if payment.authorization.payer == deal[\"buyer_address\"]:\n        return True\n    row", "    return True\n    row", "rival,false_refusal,slow_block"),
    Mutant("what was settled can become unknown", "settlement.py", "reason = :reason WHERE id = :id AND lease_until = :lease", "reason = :reason WHERE id = :id", "stall,silent,two_sweeps,rpc_fails,lost_answer,hoarded,slow_block", heat=4.0),
    Mutant("two looks owe one surplus twice", "transfers.py", "AND look_at IS :seen AND state = :state", "AND :seen IS :seen AND :state = :state", "two_sweeps,stray_money,hoarded,false_refusal,rpc_lags",
           also=("transfers.py", '        if _open_legs(db, deal["id"]) or not _look_again', "        if not _look_again")),
    Mutant("offers after the end", "actions.py", "WHERE id = :id AND state IN ('accepted', 'delivered', 'disputed') RETURNING *", "WHERE id = :id RETURNING *", "lost_answer"),
    # Deadlines
    Mutant("parties act after the deadline", "deals.py", 'where += f" AND :now < {move.before}"', 'where += ""', "no_sweep",
           also=("actions.py", "        deals.apply_due(db, deal_id, now=now, treasury=world.treasury)\n        proved", "        proved")),
    Mutant("parties act in the second of the deadline", "deals.py", '" AND :now < {move.before}"', '" AND :now <= {move.before}"', "no_sweep",
           also=("actions.py", "        deals.apply_due(db, deal_id, now=now, treasury=world.treasury)\n        proved", "        proved")),
    Mutant("the clock moves early", "deals.py", 'WHERE id = :id AND due_at <= :now"', 'WHERE id = :id AND due_at <= :now + 60"', "",
           also=("deals.py", 'where += f" AND :now >= {move.after}"', 'where += ""')),
    Mutant("the clock waits a second", "deals.py", 'WHERE id = :id AND due_at <= :now"', 'WHERE id = :id AND due_at < :now"', "no_sweep"),
    Mutant("timers only by the sweep", "actions.py", 'if deal["due_at"] is not None and deal["due_at"] <= now:', "if False:", "no_sweep"),
    Mutant("actions do not apply the timer", "actions.py", "        deals.apply_due(db, deal_id, now=now, treasury=world.treasury)\n        proved", "        proved", "no_sweep"),
    Mutant("the operator decides after the deadline", "operations.py", "        deals.apply_due(db, deal_id, now=now, treasury=world.treasury)\n        deal, decided", "        deal, decided", "no_sweep", count=12),
    # Commit, then go outside
    Mutant("settled before it is claimed", "payments.py", "            claimed = _claim(", "            settlement.submit(world, payment.authorization, payment.signature, offer.url)\n            claimed = _claim(", ""),
    Mutant("sent before it is committed", "transfers.py", "\"UPDATE transfers SET status = 'sent' WHERE deal_id", "\"UPDATE transfers SET attempts = attempts WHERE deal_id", ""),
    Mutant("sent before the bytes are stored", "transfers.py", 'AND leg = :leg AND signature IS NULL",', 'AND leg = :leg AND signature IS NULL AND 0",', ""),
    # The chain's word
    Mutant("a facilitator's word funds a deal", "settlement.py", "    if transaction:\n        return fund(db, world, payment, transaction)", "    if transaction or outcome and outcome.kind == 'settled':\n        return fund(db, world, payment, transaction or outcome.transaction or '0x')", "false_success,wrong_hash"),
    Mutant("any transaction proves a payment", "chain.py", "        return used and moved", "        return True", "wrong_hash,stray_money,slow_block,silent"),
    Mutant("a payout counts at once", "transfers.py", "    deep = world.ledger.used(pairs, at=head.number)", "    deep = world.ledger.used(pairs)", "two_sweeps"),
    Mutant("a lagging node's balance is surplus", "transfers.py", "    return all(world.ledger.used([(deal", "    return True or all(world.ledger.used([(deal", "rpc_lags,two_sweeps"),
    Mutant("verify's no is the last word", "payments.py", "        if _paid(world, payment.authorization, since=now - settlement.LOOK_BACK):", "        if False:", "front_run,lost_answer"),
    # Unknown is not failed
    Mutant("a second no counts", "settlement.py", 'payment["status"] == "claimed" and outcome.kind in', "outcome.kind in", "silent,hoarded,drained,slow_block"),
    Mutant("a no after silence counts", "settlement.py", 'return outcome if best.kind == "unsent" or outcome.kind == "settled" else best', "return outcome", "silent,hoarded,drained,false_refusal"),
    Mutant("every refusal is final", "facilitators.py", 'Outcome("refused" if FINAL.search(reason) and not transaction else "unknown"', 'Outcome("refused"', "says_pending,pause,slow_block"),
    Mutant("dead by our own clock", "settlement.py", "    return head.time > authorization.valid_before + MARGIN", "    return world.now() > authorization.valid_before - 250", "slow_block,silent,hoarded,halt"),
    # The fixed legs
    Mutant("the seller gets the price", "deals.py", '("seller", deal["seller_address"], seller)', '("seller", deal["seller_address"], seller and deal["price_units"])', ""),
    Mutant("a split gives the buyer everything", "deals.py", 'deal["amount_units"] - seller)', 'deal["amount_units"] * (seller < deal["amount_units"]))', ""),
    Mutant("a leg's nonce depends on the time", "deals.py", '"valid_before": now + LEG_LIFE, "nonce": leg_nonce(deal_id, leg)', '"valid_before": now + LEG_LIFE, "nonce": leg_nonce(deal_id, f"{leg}{now}")', ""),
    Mutant("the fee goes first", "transfers.py", '    waits = row["leg"] == "fee" and _parties_open(db, row["deal_id"])', "    waits = False", ""),
    Mutant("what is owed is surplus", "transfers.py", '    if _open_legs(db, deal["id"]):\n        _look_again(db, deal, None)', '    if False:\n        _look_again(db, deal, None)', "two_sweeps",
           also=("transfers.py", '        if _open_legs(db, deal["id"]) or not _look_again', "        if not _look_again")),
    Mutant("surplus to the seller", "transfers.py", 'f"surplus-{number + 1}", deal["buyer_address"]', 'f"surplus-{number + 1}", deal["seller_address"]', "false_refusal,hoarded,slow_block"),
    Mutant("nobody looks for late money", "settlement.py", 'look_at = max(now, payment["valid_before"]) + MARGIN', "look_at = None", "false_refusal,slow_block"),
    Mutant("the guarantee comes too early", "deals.py", '"after": now + hours * HOUR + GUARANTEE_GRACE', '"after": now + hours * HOUR', ""),
    # Proofs
    Mutant("any secret will do", "actions.py", 'if hmac.compare_digest(digest, deal["secret_hash"]):', "if digest:", "wrong_proof"),
    Mutant("a signature for any deal", "actions.py", "{world.settings.service_name}\\ndeal: {deal['id']}", "{world.settings.service_name}\\ndeal: deal_aaaaaaaaaaaaaaaaaaaaaaaaaa", "wrong_proof"),
    Mutant("a signature of anybody", "actions.py", "    if chain.signer(digest, chain.tidy_signature(signature)) == account:\n        return True", "    if chain.signer(digest, chain.tidy_signature(signature)):\n        return True", "wrong_proof"),
)  # fmt: skip


def build(mutant, folder):
    """Copy the sources and take the guard away. Raises LookupError when the guard's text is not there once."""
    for path in (*HERE.glob("*.py"), HERE / "schema.sql", HERE / "openapi.json"):
        shutil.copy(path, folder)
    for name in ("docs", "templates"):
        if (HERE / name).is_dir():
            (pathlib.Path(folder) / name).symlink_to(HERE / name)
    shutil.copytree(HERE / "prove", pathlib.Path(folder) / "prove", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in ((mutant.file, mutant.old, mutant.new), *([mutant.also] if mutant.also else [])):
        path = pathlib.Path(folder) / file
        text = path.read_text()
        if text.count(old) != 1:
            raise LookupError(f"{mutant.name}: its text is {text.count(old)} times in {file}")
        path.write_text(text.replace(old, new))


def live(mutant, seconds):
    """Run one mutant in this process, which is given up afterwards; returns what killed it, or None."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        build(mutant, folder)
        for name, module in list(sys.modules.items()):  # whatever was loaded of the original
            if str(getattr(module, "__file__", "")).startswith(str(HERE) + os.sep) and name != "__main__":
                if "site-packages" not in module.__file__:
                    del sys.modules[name]
        sys.path.insert(0, folder)
        os.chdir(folder)
        until, seed = time.monotonic() + seconds, 0
        cli = importlib.import_module("prove.cli")
        faults = [name for name in mutant.faults.split(",") if name]
        while time.monotonic() < until:
            found = cli.run_seed(seed, folder, count=mutant.count, faults=faults, heat=mutant.heat)["broken"]
            seed += 1
            if found:
                return f"{found['law']} (seed {seed - 1})"
        return None


def _child(mutant, seconds, pipe):
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            pipe.send((live(mutant, seconds), None))
        except BaseException as error:  # a mutant that cannot even be built, or breaks the harness, must be seen
            pipe.send((None, f"{type(error).__name__}: {error}"))


def hunt(mutants, *, seconds, processes):
    """Run mutants, a few at a time, each in a fresh process; yields (mutant, what killed it, error, seconds)."""
    for name in THIRD_PARTY:
        importlib.import_module(name)
    context, waiting, running = multiprocessing.get_context("fork"), list(mutants), {}
    while waiting or running:
        while waiting and len(running) < processes:
            mutant = waiting.pop(0)
            ours, theirs = context.Pipe()
            process = context.Process(target=_child, args=(mutant, seconds, theirs), daemon=True)
            process.start()
            running[ours] = mutant, process, time.monotonic()
        for pipe in multiprocessing.connection.wait(list(running)):
            mutant, process, began = running.pop(pipe)
            try:
                killed, error = pipe.recv()
            except EOFError:
                killed, error = None, "its process ended without a word"
            process.join()
            yield mutant, killed, error, time.monotonic() - began


def main(argv=None):
    """``python -m prove.mutants [NAME…]``: hunt all mutants, or those whose name contains a word; 1 if one survives."""
    words = sys.argv[1:] if argv is None else argv
    chosen = [m for m in ALL if not words or any(word in m.name for word in words)]
    survivors = 0
    for mutant, killed, error, seconds in hunt(chosen, seconds=30, processes=os.cpu_count()):
        survivors += killed is None
        print(f"{'killed' if killed else 'SURVIVED'}  {seconds:5.1f} s  {mutant.name}: {killed or error or 'nothing noticed'}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
