"""A complete world without money: a dollar on SQLite with real EIP-3009 signatures, and its facilitator.

The token lives at an address where no chain has a contract, so a signature for it is worthless anywhere
else. :class:`Ledger` and :class:`Facilitator` have the methods of the real ones.
"""

import chain
import db as database
import deals
import protocols
from facilitators import Outcome, Verdict

FAUCET_UNITS = 1_000_000_000


class Refused(Exception):
    """The token does not take the authorization; the reason is a facilitator's usual word for it."""


# -- The dollar ---------------------------------------------------------------------------------------------


def balance(db, address):
    row = db.execute("SELECT units FROM sandbox_balances WHERE address = :a", {"a": address}).fetchone()
    return row["units"] if row else 0


def mint(db, address, units):
    """Make dollars out of nothing: the faucet."""
    db.execute(
        "INSERT INTO sandbox_balances (address, units) VALUES (:a, :units)"
        " ON CONFLICT (address) DO UPDATE SET units = units + :units",
        {"a": address, "units": units},
    )


def holding(db, address):
    """Return what an address holds, as published."""
    return {"address": chain.checksum(address.lower()), "balance_usd": deals.usd(balance(db, address.lower()))}


def faucet(db, body):
    """Give an address what it asks for, up to a thousand dollars at a time; returns what it holds then."""
    units = deals.units(body.get("amount_usd", "1000"))
    if not 0 < units <= FAUCET_UNITS:
        raise deals.Refusal("invalid_request", f"amount_usd must be above 0 and at most {deals.usd(FAUCET_UNITS)}.")
    with database.transaction(db):
        mint(db, body["address"].lower(), units)
    return holding(db, body["address"])


def check(db, token, authorization, signature, *, now):
    """Refuse what the real token would refuse, in its order: window, nonce, signature, balance."""
    if not authorization.valid_after < now:
        raise Refused("invalid_exact_evm_payload_authorization_valid_after")
    if not now < authorization.valid_before:
        raise Refused("invalid_exact_evm_payload_authorization_valid_before")
    if _find(db, authorization.payer, authorization.nonce):
        raise Refused("invalid_exact_evm_nonce_already_used")
    if chain.signer(authorization.digest(token), signature) != authorization.payer:
        raise Refused("invalid_exact_evm_payload_signature")
    if balance(db, authorization.payer) < authorization.value:
        raise Refused("insufficient_funds")


def transfer(db, token, authorization, signature, *, now):
    """Take an authorization and move its money; returns the hash of the transaction."""
    with database.transaction(db):
        check(db, token, authorization, signature, now=now)
        db.execute(
            "UPDATE sandbox_balances SET units = units - :units WHERE address = :payer",
            {"payer": authorization.payer, "units": authorization.value},
        )
        mint(db, authorization.to, authorization.value)
        return _record(db, authorization.payer, authorization.nonce, authorization.to, authorization.value)


def cancel(db, authorizer, nonce):
    """Use up a nonce without moving money, as the token's cancelAuthorization does."""
    with database.transaction(db):
        return _record(db, authorizer, nonce, None, None)


def _record(db, authorizer, nonce, payee, units):
    block = int(database.meta(db, "sandbox_block", "0")) + 1
    database.set_meta(db, "sandbox_block", block)
    transaction = "0x" + chain.keccak(f"{authorizer}{nonce}{block}".encode()).hex()
    db.execute(
        "INSERT INTO sandbox_authorizations (authorizer, nonce, payee, units, transaction_hash, block)"
        " VALUES (:authorizer, :nonce, :payee, :units, :hash, :block)",
        {"authorizer": authorizer, "nonce": nonce, "payee": payee, "units": units, "hash": transaction, "block": block},
    )
    return transaction


def _find(db, authorizer, nonce):
    return db.execute(
        "SELECT * FROM sandbox_authorizations WHERE authorizer = :authorizer AND nonce = :nonce",
        {"authorizer": authorizer, "nonce": nonce},
    ).fetchone()


def skip(db, deal_id, seconds):
    """Move one deal ``seconds`` into the past, as if it had all happened earlier: a clock to test timers with."""
    with database.transaction(db):
        values = {"id": deal_id, "s": seconds}
        db.execute(
            "UPDATE deals SET version = version + 1, created_at = created_at - :s, funded_at = funded_at - :s,"
            " accepted_at = accepted_at - :s, delivered_at = delivered_at - :s, disputed_at = disputed_at - :s,"
            " ended_at = ended_at - :s, deliver_by = deliver_by - :s, review_ends_at = review_ends_at - :s,"
            " decide_by = decide_by - :s, due_at = due_at - :s WHERE id = :id",
            values,
        )
        db.execute("UPDATE deal_events SET at = at - :s WHERE deal_id = :id", values)
        db.execute("UPDATE payments SET settled_at = settled_at - :s WHERE deal_id = :id", values)


# -- The chain and the facilitator ----------------------------------------------------------------------------


class Ledger:
    """Read the sandbox's dollar with the methods of :class:`chain.Ledger`."""

    def __init__(self, connect, token, clock):
        self.connect, self.token, self.clock = connect, token, clock

    def head(self, *, depth=0):
        return chain.Head(int(database.meta(self.connect(), "sandbox_block", "0")), int(self.clock()))

    def balance(self, address, *, at=None):
        return balance(self.connect(), address)

    def balances(self, addresses, *, at=None):
        return [self.balance(address) for address in addresses]

    def used(self, pairs, *, at=None):
        return [_find(self.connect(), authorizer, nonce) is not None for authorizer, nonce in pairs]

    def payment(self, authorization, *, since, hint=None):
        return self.balance(authorization.to), self.transaction_of(authorization, since=since)

    def transaction_of(self, authorization, *, since, hint=None):
        row = _find(self.connect(), authorization.payer, authorization.nonce)
        ours = row and (row["payee"], row["units"]) == (authorization.to, authorization.value)
        return row["transaction_hash"] if ours else None

    def refusal(self, authorization, signature):
        try:
            check(self.connect(), self.token, authorization, signature, now=int(self.clock()))
        except Refused as error:
            return str(error)
        return None

    def signed_by_contract(self, account, digest, signature):
        return False  # the sandbox has no contracts


class Facilitator:
    """An x402 facilitator for the sandbox's dollar; the service calls it in process, others over HTTP."""

    def __init__(self, connect, token, clock, url=""):
        self.connect, self.token, self.clock, self.url = connect, token, clock, url

    def supported(self):
        network = f"eip155:{self.token.chain_id}"
        kind = {"x402Version": 2, "scheme": "exact", "network": network}
        return {"kinds": [kind], "extensions": [], "signers": {"eip155:*": []}}

    def verify(self, payload, requirements, *, seconds):
        try:
            authorization, signature = self._read(payload, requirements)
            check(self.connect(), self.token, authorization, signature, now=int(self.clock()))
        except Refused as error:
            return Verdict(False, str(error))
        return Verdict(True)

    def settle(self, payload, requirements, *, seconds):
        try:
            authorization, signature = self._read(payload, requirements)
            transaction = transfer(self.connect(), self.token, authorization, signature, now=int(self.clock()))
        except Refused as error:
            return Outcome("unknown" if "nonce" in str(error) else "refused", reason=str(error))
        return Outcome("settled", transaction)

    def _read(self, payload, requirements):
        """Read a facilitator request of anyone; raises :class:`Refused` for what does not belong together."""
        inner = payload.get("payload") if isinstance(payload, dict) else None
        if not isinstance(inner, dict) or not isinstance(requirements, dict):
            raise Refused("invalid_payload")
        try:
            authorization = protocols.read_authorization(inner.get("authorization"))
            signature = chain.tidy_signature(protocols.read_signature(inner.get("signature")))
        except ValueError:
            raise Refused("invalid_payload") from None
        stated = [str(requirements.get(name, "")).lower() for name in ("scheme", "network", "asset", "payTo", "amount")]
        ours = ["exact", f"eip155:{self.token.chain_id}", self.token.address]
        if stated[:3] != ours:
            raise Refused("unsupported_scheme_network_or_asset")
        if stated[3] != authorization.to:
            raise Refused("invalid_exact_evm_payload_recipient_mismatch")
        if stated[4] != str(authorization.value):
            raise Refused("invalid_exact_evm_payload_authorization_value_mismatch")
        return authorization, signature

    def answer(self, verb, body):
        """Answer one HTTP request to /sandbox/verify or /sandbox/settle in the facilitator's own shapes."""
        payload = body.get("paymentPayload") if isinstance(body, dict) else None
        requirements = body.get("paymentRequirements") if isinstance(body, dict) else None
        payer = _payer(payload)
        if verb == "verify":
            verdict = self.verify(payload, requirements, seconds=0)
            reason = {} if verdict.valid else {"invalidReason": verdict.reason}
            return {"isValid": verdict.valid, "payer": payer, **reason}
        outcome = self.settle(payload, requirements, seconds=0)
        reason = {} if outcome.kind == "settled" else {"errorReason": outcome.reason}
        network = f"eip155:{self.token.chain_id}"
        transaction = outcome.transaction or ""
        return {"success": outcome.kind == "settled", "payer": payer, "transaction": transaction,
                "network": network, **reason}  # fmt: skip


def _payer(payload):
    """Return the payer a payload names, for the answer, or an empty string."""
    try:
        return chain.checksum(protocols.read_authorization(payload["payload"]["authorization"]).payer)
    except (ValueError, KeyError, TypeError):
        return ""
