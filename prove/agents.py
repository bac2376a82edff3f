"""Buyers, sellers, rivals and strangers as small programs: each yields requests and pauses, and loses answers.

``yield Ask(...)`` gives the Answer, or None when it was lost; ``yield seconds`` waits.
"""

import calendar
import dataclasses
import functools
import json
import time

import deals as service_deals

from . import parties

PATIENCE = 14  # requests after which a client gives up on one payment


@dataclasses.dataclass
class Ask:
    """One HTTP request of a client."""

    method: str
    path: str
    deal: parties.Deal
    by: str
    body: dict | None = None
    headers: dict = dataclasses.field(default_factory=dict)
    payment: parties.Payment | None = None
    proved: bool | None = None  # for actions: whether the proof is good


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict
    raw: bytes

    @functools.cached_property
    def json(self):
        return json.loads(self.raw)


# -- Paying -------------------------------------------------------------------------------------------------------


def buyer(sim, deal, payer):
    """Quote, sign and pay until it is clear what became of it, as well-meaning and broken clients do."""
    rng, tries, payment = deal.rng, 0, None
    while tries < PATIENCE:
        tries += 1
        if payment is None:
            payment = yield from _sign(sim, deal, payer)
            if payment is None:
                yield rng.uniform(1, 60)
                continue
            yield from _mischief(sim, deal, payment)
        answer = yield _paid(deal, payment)
        if answer is None:  # lost: the service may have died, or only the answer may have
            if rng.random() < 0.08:
                return
            if sim.happens("double_sign", deal=deal.id):
                payment = None
            yield rng.choice((0.0, 1.0, 5.0, 40.0, 400.0))
            continue
        if answer.status == 200:
            yield from _afterwards(sim, deal, payment)
            return
        if answer.status == 202:
            settled = yield from _poll(sim, deal, payer)
            if settled:
                return
            if sim.happens("double_sign", deal=deal.id):
                payment = None
        elif answer.status in (402, 502):
            if rng.random() < 0.4:
                return
            sim.mend(payer)
            payment = None
        elif answer.status == 409 and answer.json["error"] == "deal_exists":
            return
        elif answer.status in (400, 410, 422):
            return
        yield rng.choice((0.5, 3.0, 20.0, 90.0))


def rival(sim, deal):
    """Pay for terms that are somebody else's."""
    sim.hit("rival", deal.id)
    yield from buyer(sim, deal, deal.rival)


def _paid(deal, payment):
    return _asked(deal, payment, payment.path, deal.body, payment.headers)


def _asked(deal, payment, path, body, headers):
    return Ask("POST", path, deal, payment.payer.name, body, headers, payment=payment)


def _sign(sim, deal, payer):
    """Ask for the quote and sign it; None when there is no quote to sign."""
    rng = deal.rng
    if deal.quoted and deal.master != sim.master:  # it began under an earlier key: a new quote would be another deal's
        return None
    deal.quoted = True
    path = rng.choice(("/x402/deal", "/mpp/deal"))
    quote = yield Ask("POST", path, deal, payer.name, deal.body)
    if quote is None or quote.status != 402 or deal.master != sim.master:
        return None
    if "X-Svc-Invalid-Request" in quote.headers and not sim.happens("double_sign", deal=deal.id):
        return None  # the deal exists: do not sign
    changes = {}
    if rng.random() < 0.06:
        changes["valid_before"] = int(sim.clock()) + rng.choice((5, 6, 7, 900, 901))
    payment = parties.pay(
        deal, payer, sim.token, quote, path, now=sim.clock(), protocol=rng.choice(("x402", "mpp")), **changes
    )
    if rng.random() < 0.3:
        payment.headers["Idempotency-Key"] = rng.choice((f"key {payer.name}", f"{deal.index}-{len(deal.payments)}"))
    deal.payments.append(payment)
    sim.laws.signed(deal, payment)
    return payment


def _mischief(sim, deal, payment):
    """What can happen to a signed authorization before, and while, the service works on it."""
    rng, a = deal.rng, payment.authorization
    if sim.happens("front_run", deal=deal.id):
        sim.submit("authorization", a, payment.signature, by="a stranger", delay=rng.choice((0, 0, 1, 3, 30, 250)))
        if rng.random() < 0.5:
            yield rng.choice((rng.uniform(0, 6), 130))
    if sim.happens("cancelled", deal=deal.id):
        sim.submit("cancel", a.payer, a.nonce, by=payment.payer.name, delay=rng.choice((0, 1, 3, 30)))
    if sim.happens("drained", deal=deal.id):
        units = sim.chain.balance(a.payer)
        sim.submit("transfer", a.payer, sim.purse, units, by=payment.payer.name, delay=rng.choice((0, 1, 2, 4)))
        if rng.random() < 0.7:
            sim.agent(_refill(sim, payment.payer), at=rng.choice((5, 60, 200)))
    if sim.happens("moved_payment", deal=deal.id):
        yield from _moved(sim, deal, payment)


def _refill(sim, payer):
    sim.mend(payer)
    return
    yield


def _moved(sim, deal, payment):
    """Attach the payment to another body or path, or reuse its key: nothing may be charged for it."""
    if deal.rng.random() < 0.5:
        other = {**deal.body, "ref": "something else"}
        yield Ask("POST", payment.path, deal, "a thief", other, payment.headers)
    else:
        path = "/mpp/deal" if payment.path == "/x402/deal" else "/x402/deal"
        yield _asked(deal, payment, path, deal.body, payment.headers)


def _poll(sim, deal, payer):
    """Read the deal until it is no longer pending; True once it is funded or beyond."""
    for pause in (1, 5, 10, 60, 400):
        answer = yield Ask("GET", f"/v1/deals/{deal.id}", deal, payer.name)
        if answer and answer.status == 200 and answer.json["state"] != "pending":
            return answer.json["state"] != "lapsed"
        yield pause * deal.rng.uniform(0.5, 1.5)
    return False


def _afterwards(sim, deal, payment):
    """Repeat a paid call later: the same payment, a fresh one, the same key with another body."""
    rng = deal.rng
    if rng.random() < 0.3:
        yield rng.choice((1, 100, 80_000, 90_000))
        yield _paid(deal, payment)
    if sim.happens("double_sign", deal=deal.id):
        again = yield from _sign(sim, deal, payment.payer)
        if again:
            yield _paid(deal, again)


def stray(sim, deal):
    """Send money to a deposit as nobody asked: dust, a second price, by the buyer itself, early or late."""
    yield deal.rng.choice((0, 10, 100, 300, 1000, 50_000, 700_000))
    units, deal.quoted = deal.rng.choice((1, 9_999, 10_000, deal.price)), True
    sim.hit("stray_money", deal.id)
    sim.submit("transfer", deal.buyer.address, deal.deposit, units, by=deal.buyer.name, delay=0.0)


# -- Dealing ------------------------------------------------------------------------------------------------------

MOODS = {  # what a party likes to do, and how much
    "seller": ((None, 2), ("accept", 8), ("deliver", 10), ("refund", 1), ("split", 2), ("statement", 3)),
    "buyer": ((None, 3), ("confirm", 2), ("cancel", 0.5), ("dispute", 7), ("split", 2)),
}
QUARRELS = {  # the same in the seeds whose people quarrel
    "seller": ((None, 8), ("accept", 40), ("deliver", 40), ("refund", 0.2), ("split", 0.8), ("statement", 5)),
    "buyer": ((None, 8), ("confirm", 0.2), ("cancel", 0.1), ("dispute", 40), ("split", 0.8)),
}


def party(sim, deal, role):
    """Look at the deal and act, at once, late, or in the very second of the deadline; sometimes never."""
    rng = deal.rng
    who = deal.seller if role == "seller" else deal.buyer
    if rng.random() < 0.12:
        return
    yield rng.uniform(3, 200)
    for _ in range(20 if sim.quarrels else 12):
        answer = yield Ask("GET", f"/v1/deals/{deal.id}", deal, who.name)
        if answer is None or answer.status != 200 or answer.json["state"] in ("pending", "lapsed"):
            if answer is not None and answer.status == 200 and sim.happens("wrong_proof", deal=deal.id):
                yield _wrong(sim, deal, role, "accept" if role == "seller" else "cancel", {})
            yield rng.choice((5, 60, 1000))
            continue
        record = answer.json
        if record["state"] in service_deals.ENDED:
            if sim.happens("cashed", deal=deal.id):
                yield from _cash(sim, deal, record, who)
            return
        if record["refund_guarantee"] and sim.happens("cashed", deal=deal.id):  # long before its time: it must fail
            sim.submit("authorization", *sim.read_check(record["refund_guarantee"]), by=who.name, delay=0.0)
        action = _choose(rng, record, role, (QUARRELS if sim.quarrels else MOODS)[role])
        if action is None:
            yield rng.choice((60, 300, 600, 1000, 3000) if sim.quarrels else (60, 300, 1000, 3000, 40_000))
            continue
        yield from _when(sim, rng, record)
        ask = _action(sim, deal, who, role, action, record["offers"])
        answer = yield ask
        if answer is None or rng.random() < 0.1:
            yield rng.choice((0, 2, 30))
            yield ask  # safe to repeat


def _choose(rng, record, role, moods):
    """Pick what this party would like to do now; now and then something the state does not allow."""
    if rng.random() < 0.05:
        return rng.choice(moods[1:])[0]
    allowed = {None} | {entry["action"] for entry in record["actions"] if entry["by"] == role}
    moods = [(action, weight) for action, weight in moods if action in allowed]
    return rng.choices([action for action, _ in moods], [weight for _, weight in moods])[0]


def _when(sim, rng, record):
    """Wait for the moment of acting: soon, somewhere before the deadline, or right around it."""
    due = service_due(record) - sim.skew
    left = due - sim.time
    draw = rng.random()
    if draw < (0.85 if sim.quarrels else 0.65) or left <= 0:
        yield rng.uniform(0.1, min(60, max(left, 0.2)))
    elif rng.random() < 0.3:
        yield left * rng.random()
    else:
        yield max(0.0, left + rng.choice((-1, -1, 0, 0, 0, 0.5, 1)))


def service_due(record):
    """Read when the clock moves the deal, from its public record."""
    return calendar.timegm(time.strptime(record["next"]["at"], "%Y-%m-%dT%H:%M:%SZ"))


FIELDS = {
    "deliver": lambda rng: {"url": "https://results.test/1", "note": "done"} if rng.random() < 0.7 else {},
    "dispute": lambda rng: {"reason": "It is not what was agreed."},
    "statement": lambda rng: {"statement": "It is."},
}


def _action(sim, deal, who, role, action, offers):
    """Build the request of an action with its proof; sometimes a wrong, borrowed or replayed one."""
    rng = deal.rng
    fields = FIELDS.get(action, lambda rng: {})(rng)
    if action == "split":
        offered = offers["buyer" if role == "seller" else "seller"]
        fields = {"seller_usd": rng.choice(("0", service_deals.usd(deal.terms.amount_units), "0.25"))}
        if offered and rng.random() < 0.5:
            fields = {"seller_usd": offered}
    path = f"/v1/deals/{deal.id}/{action}"
    if sim.happens("wrong_proof", deal=deal.id):
        return _wrong(sim, deal, role, action, fields)
    if role == "buyer" and rng.random() < 0.7:
        body = {**fields, "secret": deal.secret}
    else:
        payer = sim.laws.funder(deal) if role == "buyer" else who
        body = (payer or who).prove(deal.id, action, fields, sim.settings.service_name)
    return Ask("POST", path, deal, who.name, body, proved=True)


def _wrong(sim, deal, role, action, fields):
    """Build the request of somebody who must not get through."""
    body = _wrongly_proved(sim, deal, role, action, fields)
    return Ask("POST", f"/v1/deals/{deal.id}/{action}", deal, "a stranger", body, proved=False)


def _wrongly_proved(sim, deal, role, action, fields):
    rng, service = deal.rng, sim.settings.service_name
    owner = deal.seller if role == "seller" else (sim.laws.funder(deal) or deal.buyer)
    other = deal.buyer if role == "seller" else deal.seller
    kind = rng.randrange(6)
    if kind == 0:
        return {**fields, "secret": deal.secret + "?"}
    if kind == 1:  # a good signature of another deal
        other_id = "deal_" + "a" * 26
        return {**fields, "signature": owner.prove(other_id, action, fields, service)["signature"]}
    if kind == 2:  # of another action
        verb = "refund" if action != "refund" else "accept"
        return {**fields, "signature": owner.prove(deal.id, verb, fields, service)["signature"]}
    if kind == 3:  # of another service
        return owner.prove(deal.id, action, fields, "Another Service")
    if kind == 4 and not (action == "split"):  # the counterparty's key, in the owner's name
        if other.contract:
            other = sim.stranger
        return {**fields, **other.prove(deal.id, action, fields, service, account=owner.address)}
    changed = {**fields, "signature": sim.stranger.prove(deal.id, action, fields, service)["signature"]}
    return changed


def _cash(sim, deal, record, who):
    """Submit the published payouts to the chain oneself, as the documents invite anyone to."""
    for transfer in record["transfers"]:
        if transfer["authorization"]:
            authorization, signature = sim.read_check(transfer["authorization"])
            sim.submit("authorization", authorization, signature, by=who.name, delay=deal.rng.choice((0, 2, 60)))
            yield deal.rng.uniform(0, 2)
