"""The promises, written by hand from the design and not from the code: checked after every step and at the end."""

import collections
import glob
import pathlib

import chain
import db as database
import operations
from db import sqlite3

from .agents import service_due
from .engine import Violation
from .events import check_event

SMALLEST = 10_000  # units under which nothing is sent back
LEASE = 25 + 20  # seconds one worker holds a payment
FREE = {400, 409, 410, 413, 422, 429, 500, 503}  # answers after which this call has moved no money


class Laws:
    """What must hold. It reads the database through a connection of its own, hence only what is committed."""

    def __init__(self, sim):
        self.sim = sim
        self.db = sim.connect()
        self.events, self.states = {}, {}  # deal id -> number of events seen, last state
        self.signed_rows, self.confirmed = {}, set()
        self.payments = {}  # (payer, nonce) -> (agent's deal, agent's Payment)
        self.proofs = {}  # (payer, nonce) -> hashes by which it ever landed with its money at its deposit
        self.receipts = {}  # (payer, nonce) -> the first 200: (receipt headers, body)
        self.funders = {}  # deal id -> payer whose payment ever funded it
        self.in_flight = {}  # (payer, nonce) -> [(task, lease)]
        self.turns = {}  # (deal id, leg) -> the last sweep that sent it, and when it began to
        self.doubts = collections.Counter()  # payment -> facilitators that took it and have not clearly refused
        self.clock_jumped = self.was_restored = False
        self.unattributed = 0

    def close(self):
        self.db.close()

    def broken(self, law, words, deal=None):
        raise Violation(law, words, deal)

    # -- What others tell ---------------------------------------------------------------------------------------

    def signed(self, deal, payment):
        self.payments[payment.key] = deal, payment

    def funder(self, deal):
        """Return the party whose address the deal names as its buyer, or None."""
        row = self.db.execute("SELECT buyer_address FROM deals WHERE id = ?", (deal.id,)).fetchone()
        people = {party.address: party for party in (deal.buyer, deal.rival)}
        return people.get(row["buyer_address"]) if row else None

    def landed(self, transaction):
        """The chain took a transaction: whatever leaves a deposit must have been committed before."""
        sim = self.sim
        deal = sim._deal_in(transaction.args)
        outcome = "" if transaction.ok else f" and fails: {transaction.reason}"
        sim.say(f"block {transaction.block} takes {transaction.by}'s {transaction.kind}{outcome}", deal)
        if transaction.kind != "authorization" or not transaction.ok:
            return
        authorization, _ = transaction.args
        self.proofs.setdefault((authorization.payer, authorization.nonce), set()).add(transaction.hash)
        if authorization.payer in sim.by_deposit and not self.was_restored:
            if self._leg(authorization) is None:
                self.broken("nothing leaves a deposit that was not committed", str(authorization), deal)

    def _leg(self, authorization):
        return self.db.execute(
            "SELECT * FROM transfers WHERE nonce = ? AND payee = ? AND value_units = ? AND signature IS NOT NULL",
            (authorization.nonce, authorization.to, authorization.value),
        ).fetchone()

    def taken(self, authorization):
        self.doubts[authorization.payer, authorization.nonce] += 1

    def clearly_refused(self, authorization):
        self.doubts[authorization.payer, authorization.nonce] -= 1

    def settling(self, task, authorization, signature):
        """A worker hands an authorization to a facilitator: it must have been committed, and be its turn."""
        key = authorization.payer, authorization.nonce
        if authorization.payer in self.sim.by_deposit:
            self._sending(task, authorization, signature)
            return
        task.settled.append(key)
        row = self.db.execute("SELECT * FROM payments WHERE payer = ? AND nonce = ?", key).fetchone()
        if row is None or row["signature"] != signature:
            self.broken("no settle that was not committed first", f"{task.label} settles {key}", task.deal)
        if row["status"] == "settled":  # a reorganisation took it away: the same bytes go out again, and need no lease
            return
        if not self.clock_jumped and not self.was_restored and not task.stalled:
            for other, lease in self.in_flight.get(key, ()):
                if other is not task and not other.stalled and row["lease_until"] < lease + LEASE - 1:
                    self.broken("one worker settles one payment", f"{other.label} and {task.label} at once", task.deal)
        self.in_flight.setdefault(key, []).append((task, row["lease_until"]))

    def settled(self, task, authorization):
        """The facilitator's answer is there, or lost, or the worker is dead: its settle is over."""
        key = authorization.payer, authorization.nonce
        self.in_flight[key] = [entry for entry in self.in_flight.get(key, ()) if entry[0] is not task]

    def _sending(self, task, authorization, signature):
        leg = self._leg(authorization)
        if leg is None or leg["signature"] != signature or leg["status"] not in ("sent", "blocked", "confirmed"):
            self.broken("no transfer that was not committed first", f"{task.label} sends {authorization}", task.deal)
        if leg["leg"] == "guarantee":
            self.broken("the guarantee is the buyer's to use", "the sweep sends it", leg["deal_id"])
        self._one_turn(task, leg)
        if leg["leg"] == "fee":
            for party in self.db.execute(
                "SELECT * FROM transfers WHERE deal_id = ? AND leg IN ('seller', 'buyer')", (leg["deal_id"],)
            ):
                if party["status"] != "confirmed":
                    self.broken("the parties are paid before the fee", f"{party['leg']} is {party['status']}", leg["deal_id"])

    def _one_turn(self, task, leg):
        """Two sweeps never take the same turn of a leg: a turn is three seconds long at least."""
        key, now = (leg["deal_id"], leg["leg"]), self.sim.time
        before, sent = self.turns.get(key, (None, 0.0)), task.sent
        if key in sent:  # the same turn at the next facilitator
            return
        sent.add(key)
        other, began = before
        if other is not None and other is not task and now - began < 2.5:
            if not (task.stalled or other.stalled or other.died or self.clock_jumped or self.was_restored):
                self.broken("two sweeps never take the same turn", f"{leg['leg']} sent twice at once", leg["deal_id"])
        self.turns[key] = task, now

    # -- After every step ---------------------------------------------------------------------------------------------

    def step(self):
        """Check every deal that has changed since the last step."""
        try:
            rows = self.db.execute("SELECT id, version, state, attempt FROM deals").fetchall()
        except sqlite3.OperationalError:  # a worker holds the lock in mid-commit; nothing new is committed
            self.sim.changed = True
            return
        for deal_id, *stand in rows:
            if self.states.get(deal_id) != stand:
                self._changed(self.db.execute("SELECT * FROM deals WHERE id = ?", (deal_id,)).fetchone())
                self.states[deal_id] = stand

    def _changed(self, deal):
        sim, seen = self.sim, self.events.get(deal["id"], 0)
        events = self.db.execute(
            "SELECT * FROM deal_events WHERE deal_id = ? ORDER BY number", (deal["id"],)
        ).fetchall()
        state = events[seen - 1]["state"] if seen else None
        for event in events[seen:]:
            sim.say(f"MOVE {event['event']} by {event['actor']}: now {event['state']}", deal["id"])
            check_event(self, deal, state, event)
            sim.moved(deal["id"], event["event"])
            state = event["state"]
        self.events[deal["id"]] = len(events)
        if state != deal["state"]:
            self.broken("every change of state is in the history", f"{state} became {deal['state']}", deal["id"])
        if state not in ("pending", "lapsed"):
            settled = self.db.execute(
                "SELECT count(*) FROM payments WHERE deal_id = ? AND status = 'settled'", (deal["id"],)
            ).fetchone()[0]
            if settled != 1:
                self.broken("one settled payment for one funded deal", f"there are {settled}", deal["id"])
        self._legs(deal)

    def _legs(self, deal):
        """The legs follow from the state and are fixed; confirmed means that the chain has them."""
        legs = {row["leg"]: row for row in self.db.execute("SELECT * FROM transfers WHERE deal_id = ?", (deal["id"],))}
        party_legs = {name: (row["payee"], row["value_units"]) for name, row in legs.items() if name in ("seller", "buyer", "fee")}
        wanted = {}
        if deal["state"] in ("released", "refunded", "split"):
            seller = deal["seller_units"]
            wanted = {
                "seller": (deal["seller_address"], seller),
                "buyer": (deal["buyer_address"], deal["amount_units"] - seller),
                "fee": (self.sim.treasury, deal["price_units"] - deal["amount_units"]),
            }
            wanted = {name: leg for name, leg in wanted.items() if leg[1]}
        if party_legs != wanted:
            self.broken("the legs are what the decision says", f"{deal['state']}: {party_legs}, not {wanted}", deal["id"])
        for name, row in legs.items():
            self._leg_row(deal, name, row)

    def _leg_row(self, deal, name, row):
        fixed = tuple(row[k] for k in ("payee", "value_units", "valid_after", "valid_before", "nonce", "signature"))
        key = deal["id"], name
        if key in self.signed_rows and self.signed_rows[key] != fixed:
            self.broken("a signed transfer never changes", f"{name}: {fixed}", deal["id"])
        if row["signature"]:
            self.signed_rows[key] = fixed
        if key in self.confirmed and row["status"] != "confirmed":
            self.broken("confirmed stays confirmed", name, deal["id"])
        if row["status"] == "confirmed" and key not in self.confirmed:
            self.confirmed.add(key)
            model = self.sim.chain
            use = model.use(deal["deposit_address"], row["nonce"])
            if not self.was_restored and (use is None or (use.payee, use.units) != (row["payee"], row["value_units"])):
                self.broken("confirmed means paid on the chain", f"{name}: the chain has {use}", deal["id"])
            if use and model.number - use.block < self.sim.settings.confirmations:
                self.broken("confirmed means deep enough", f"{name} at {model.number - use.block} blocks", deal["id"])
        if row["nonce"] != "0x" + chain.keccak(f"{deal['id']}|{name}".encode()).hex():
            self.broken("one leg, one nonce", f"{name}: {row['nonce']}", deal["id"])
        if name == "guarantee":
            hours = deal["deadline_hours"] + deal["review_hours"] + 168 + 168
            last = deal["funded_at"] + hours * 3600
            if (row["payee"], row["value_units"], row["valid_after"]) != (deal["buyer_address"], deal["price_units"], last):
                self.broken("the guarantee returns the whole price after the last decision", str(fixed), deal["id"])

    # -- Answers -----------------------------------------------------------------------------------------------------

    def answered(self, task, ask, answer):
        """Judge one answer by what the documents promise about it."""
        sim, status = self.sim, answer.status
        if ask.deal.secret.encode() in answer.raw:
            self.broken("no answer contains a secret", task.label, task.deal)
        if status == 500 and not task.disk_failed:
            self.broken("no request fails by our fault", f"{task.label}: {sim.log[-1:]}", task.deal)
        if b"cannot record anything" in answer.raw and not task.disk_failed:
            self.broken("the database works", f"{task.label}: {sim.log[-1:]}", task.deal)
        late = status == 410 and task.stalled and self.clock_jumped  # a day went by while it stood still, says the clock
        if status in FREE and task.settled and not late:
            self.broken("a refusal charges nothing", f"{status} after settling {task.settled}", task.deal)
        if ask.payment is not None and ask.body == ask.deal.body:
            ask.payment.answers.append(status)
            if status == 200:
                self._receipt(task, ask.payment, answer)
            if status == 402 and (task.settled or b"would not settle" in answer.raw):
                self._refused(task, ask.payment)
        elif ask.path.endswith("/deal"):
            self._quoted(task, ask, answer)
        elif ask.method == "GET":
            self._read(task, answer)
        else:
            self._acted(task, ask, answer)
        if status != 200 and ("Payment-Receipt" in answer.headers or (
                "PAYMENT-RESPONSE" in answer.headers and status not in (402, 502))):  # fmt: skip
            self.broken("a receipt only for a paid deal", f"{status} carries one", task.deal)

    def _receipt(self, task, payment, answer):
        """A paid 200: a funded deal, the chain's own hash, and the same bytes for the same payment for ever."""
        record = answer.json[0]
        row = self.db.execute("SELECT * FROM payments WHERE deal_id = ? AND status = 'settled'", (record["id"],)).fetchone()
        if row is None and not self.was_restored:
            self.broken("200 means funded", "no settled payment", task.deal)
        if row and (row["payer"], row["nonce"]) == payment.key:
            if record["payment"]["transaction"] not in self.proofs.get(payment.key, ()):
                self.broken("a receipt names the chain's own transaction", str(record["payment"]), task.deal)
            first = self.receipts.setdefault(payment.key, answer.raw)
            if first != answer.raw and not self.was_restored:
                self.broken("one payment, one answer", "another body for the same payment", task.deal)
        if record["payment"]["payer"].lower() != payment.authorization.payer:
            self.broken("200 only to the payer", record["payment"]["payer"], task.deal)
        self._timely(task, record)

    def _refused(self, task, payment):
        """A 402 makes a client pay again: never while the money of this very payment is in plain sight.

        What lands at a deal that has lapsed is given back by the sweep, and from then on may be asked for again.
        """
        use, model = self.sim.chain.use(*payment.key), self.sim.chain
        early = use and use.payee == payment.authorization.to and model.time_of(use.block) < task.began - 100
        early = early and use.block < model.number - 50 and model.balance(use.payee) >= use.units  # no node lags so far behind
        alive = payment.authorization.valid_before >= self.sim.clock() + 6
        if early and alive and not (self.clock_jumped or self.was_restored or task.stalled):
            self.broken("no 402 for a payment that has arrived", f"it landed in block {use.block}", task.deal)

    def _quoted(self, task, ask, answer):
        """A call without a payment of its own: a quote at the deal's price and address, and nothing taken."""
        if task.settled:
            self.broken("an unpaid or misdirected call settles nothing", task.label, task.deal)
        if answer.status != 402 or ask.headers:
            return
        wanted = answer.json["accepts"][0]
        if (wanted["payTo"].lower(), int(wanted["amount"])) != (ask.deal.deposit, ask.deal.price):
            self.broken("the quote is the deposit of its terms at the published price", str(wanted), task.deal)

    def _read(self, task, answer):
        if answer.status == 200:
            self._timely(task, answer.json)
            self._fresh(task, answer.json)

    def _timely(self, task, record):
        """No answer depends on when cron ran: what was due before the request began has been applied."""
        if record["state"] != "pending" and record["next"] and not self.clock_jumped and "answer_of" not in record:
            if service_due(record) <= int(task.began) and not self.receipts_old(record):
                self.broken("a due timer is applied on read", f"{record['state']} was due", record["id"])

    def receipts_old(self, record):
        """Whether this may be a stored receipt, which shows the deal as it was when it was funded."""
        return record["state"] == "funded" and record["refund_guarantee"] is None

    def _fresh(self, task, record):
        """A record shown is the record as it stood at some moment of the request."""
        row = self.db.execute("SELECT state FROM deals WHERE id = ?", (record["id"],)).fetchone()
        if row and row["state"] != record["state"]:
            last = self.db.execute("SELECT max(at) FROM deal_events WHERE deal_id = ?", (record["id"],)).fetchone()[0]
            if last < int(task.began) and not self.clock_jumped:
                self.broken("a record is never stale", f"shown {record['state']}, it is {row['state']}", record["id"])

    def _acted(self, task, ask, answer):
        if ask.proved is False and answer.status not in (400, 403, 404, 429, 503) and not task.disk_failed:
            self.broken("a wrong proof gains nothing", f"{ask.path} -> {answer.status}", task.deal)
        if ask.proved and answer.status == 429:
            self.broken("others' wrong proofs lock nobody out", task.label, task.deal)
        if ask.proved and "secret" in ask.body and answer.status == 403:
            self.broken("the right secret is accepted", task.label, task.deal)
        if answer.status == 200:
            self._timely(task, answer.json)

    def job_done(self, task):
        """A sweep or command has ended; a bug in it is counted by itself and told on stderr."""
        counts = task.result
        if hasattr(counts, "get") and counts.get("errors") and not task.disk_failed:
            self.broken("the sweep has no bugs", self.sim.noise.getvalue()[-1500:], task.deal)

    # -- Restored backups -------------------------------------------------------------------------------------------------

    def backed_up(self):
        self.sim.say("a backup is made")

    def restored(self):
        """Start again from what the backup knows: it may have forgotten, and must not pay twice."""
        self.db = self.sim.connect()
        self.was_restored = True
        self.states, self.events = {}, {}
        self.signed_rows, self.confirmed = {}, set()
        self.in_flight = {}
        for row in self.db.execute("SELECT deal_id, count(*) AS n FROM deal_events GROUP BY deal_id"):
            self.events[row["deal_id"]] = row["n"]

    # -- The end -----------------------------------------------------------------------------------------------------------

    def stranded(self):
        """Return (deal, payee) of money at the deposit of terms that are no deal, or one that is over."""
        found = []
        for deal in self.sim.deals:
            if self.sim.chain.balance(deal.deposit) >= SMALLEST:
                row = self.db.execute("SELECT * FROM deals WHERE id = ?", (deal.id,)).fetchone()
                owing = self.db.execute("SELECT 1 FROM transfers WHERE deal_id = ? AND next_at > 0", (deal.id,)).fetchone()
                if row is None or (row["due_at"] is None and row["look_at"] is None and not owing and self._uninvited(deal)):
                    found.append((deal, row["buyer_address"] if row else self._sender(deal) or deal.buyer.address))
        return found

    def _uninvited(self, deal):
        """Whether money came to this deposit of which the service cannot know: plain transfers, unclaimed payments."""
        known = {(r["payer"], r["nonce"]) for r in self.db.execute("SELECT payer, nonce FROM payments")}
        return any(
            t.ok and (t.args[1] == deal.deposit if t.kind == "transfer" else
                      t.args[0].to == deal.deposit and (t.args[0].payer, t.args[0].nonce) not in known)
            for t in self.sim.chain.landed if t.kind != "cancel"
        )  # fmt: skip

    def _sender(self, deal):
        for payment in deal.payments:
            use = self.sim.chain.use(*payment.key)
            if use and use.payee == deal.deposit:
                return payment.key[0]
        return None

    def unfinished(self, open_ends):
        """The calm has not brought everything to its end: only a deposit that a reorganisation took away may do that."""
        open_ends = [end for end in open_ends if not self.taken_away(end[0])]
        if open_ends and not self.was_restored:
            self.broken("everything reaches its end", str(open_ends[:4]), open_ends[0][0])

    def taken_away(self, deal_id):
        """Whether the payment that funded this deal is no longer on the chain, and can land no more: expired or cancelled."""
        row = self.db.execute("SELECT * FROM payments WHERE deal_id = ? AND status = 'settled'", (deal_id,)).fetchone()
        use = row and self.sim.chain.use(row["payer"], row["nonce"])
        return row is not None and (use is None or use.payee is None)

    def final(self):
        """Everything has come to its end: close the books to the unit."""
        self.states.clear()
        self.step()
        for deal in self.sim.deals:
            row = self.db.execute("SELECT * FROM deals WHERE id = ?", (deal.id,)).fetchone()
            self._close(deal, row)
        self._nothing_leaked()
        self._forbidden()
        self._audit()

    def _close(self, deal, row):
        sim, ended = self.sim, row is not None and row["state"] in ("released", "refunded", "split")
        flows_in, flows_out = self._flows(deal)
        left = sim.chain.balance(deal.deposit)
        if sum(flows_in.values()) != sum(flows_out.values()) + left:
            self.broken("what arrived = what left + what is there", f"{flows_in} {flows_out} {left}", deal.id)
        if self.was_restored or self.taken_away(deal.id):
            return
        if row is None or row["state"] == "lapsed":
            owed = 0
        elif ended:
            owed = row["price_units"]
        else:
            self.broken("everything reaches its end", row["state"], deal.id)
        if left >= SMALLEST:
            self.broken("nothing is left behind", f"{left} units at the deposit", deal.id)
        if ended:
            self._ended(deal, row, flows_out)
        self._returned(deal, row, owed, flows_out)

    def _flows(self, deal):
        """Return units by payer into, and by payee out of, the deposit, as the chain has them in the end."""
        into, out = {}, {}
        for transaction in self.sim.chain.landed:
            if not transaction.ok or transaction.kind == "cancel":
                continue
            a = transaction.args
            payer, to, units = (a[0].payer, a[0].to, a[0].value) if transaction.kind == "authorization" else a
            if to == deal.deposit:
                into[payer] = into.get(payer, 0) + units
            if payer == deal.deposit:
                out[to] = out.get(to, 0) + units
        return into, out

    def _ended(self, deal, row, out):
        legs = self.db.execute("SELECT * FROM transfers WHERE deal_id = ? AND leg <> 'guarantee'", (deal.id,)).fetchall()
        if any(leg["status"] != "confirmed" for leg in legs):
            self.broken("everything reaches its end", f"{[(l['leg'], l['status'], l['reason']) for l in legs]}", deal.id)
        if out.get(deal.seller.address, 0) != row["seller_units"]:
            self.broken("the seller gets what the decision says", f"{out} {row['seller_units']}", deal.id)
        if out.get(self.sim.treasury, 0) != deal.price - deal.terms.amount_units:
            self.broken("the treasury gets the fee and no more", str(out), deal.id)

    def _returned(self, deal, row, owed, out):
        """Every payer whose payment landed without being the price of a deal has it back."""
        claimed = {tuple(r) for r in self.db.execute("SELECT payer, nonce FROM payments WHERE deal_id = ?", (deal.id,))}
        paid, unclaimed = {}, {}
        for key in {payment.key: None for payment in deal.payments}:
            use = self.sim.chain.use(*key)
            if use and use.payee:
                kind = paid if key in claimed else unclaimed
                kind[key[0]] = kind.get(key[0], 0) + use.units
        funder = row["buyer_address"] if row is not None else None
        for payer in {**paid, **unclaimed}:
            refund = deal.terms.amount_units - row["seller_units"] if owed else 0
            due = paid.get(payer, 0) + (refund - owed if payer == funder else 0)
            got = out.get(payer, 0)
            if got < due - SMALLEST:
                self.broken("whoever paid in vain has its money back", f"{payer}: {got} of {due}", deal.id)
            # What a third party submitted although the service never took it on: it goes to the deal's buyer.
            self.unattributed += got < due + unclaimed.get(payer, 0) - SMALLEST

    def _forbidden(self):
        """What the database itself forbids, whatever the code does: tried, refused and rolled back."""
        copy = "INSERT INTO {0} SELECT * FROM (SELECT {1} FROM {0} LIMIT 1)"
        columns = lambda table: [row["name"] for row in self.db.execute(f"PRAGMA table_info({table})")]
        but = lambda table, **new: copy.format(table, ", ".join(new.get(name, name) for name in columns(table)))
        attempts = {
            "payments": (but("payments", id="NULL", attempt="99"), but("payments", id="NULL", nonce="'0x1'")),
            "transfers": (but("transfers", nonce="'0x1'"),
                          "UPDATE transfers SET value_units = value_units + 1 WHERE signature IS NOT NULL"),
            "deals": (but("deals", id="'deal_x'"),
                      "UPDATE deals SET state = 'funded', seller_units = NULL, due_at = 1 WHERE state = 'refunded'",
                      "UPDATE deals SET seller_units = amount_units WHERE state = 'refunded'",
                      "UPDATE deals SET seller_units = 0 WHERE state = 'released'"),
        }  # fmt: skip
        for table, statements in attempts.items():
            for statement in statements:
                self.db.execute("BEGIN")
                try:
                    if self.db.execute(statement).rowcount > 0:
                        self.broken("the database forbids it by itself", statement[:200])
                except sqlite3.IntegrityError:
                    pass
                finally:
                    self.db.execute("ROLLBACK")

    def _nothing_leaked(self):
        stored = b"".join(pathlib.Path(path).read_bytes() for path in glob.glob(f"{self.sim.path}*"))
        told = ("\n".join(self.sim.log) + self.sim.noise.getvalue()).encode()
        for where, data in (("the database", stored), ("the logs", told)):
            for deal in self.sim.deals:
                if deal.secret.encode() in data:
                    self.broken("no secret is ever stored or logged", where, deal.id)
                key = chain.deposit_key(self.sim.wallets[deal.master], deal.terms.canonical)
                if key in data or key.hex().encode() in data:
                    self.broken("no key is ever stored or logged", where, deal.id)
            for secret in self.sim.wallets.values():
                if secret in data or secret.hex().encode() in data:
                    self.broken("no key is ever stored or logged", where)

    def _audit(self):
        """The operator's own audit agrees: silent when all is well."""
        found = self.sim.command("the audit", operations.audit)
        gone = {deal.id for deal in self.sim.deals if self.taken_away(deal.id)}
        if gone - {line["deal"] for line in found}:
            self.broken("the audit tells what a reorganisation took", str(gone))
        wrong = [line for line in found if line["deal"] not in gone]
        if wrong and not self.was_restored:
            self.broken("the audit is clean", str(wrong[:3]), wrong[0]["deal"])
