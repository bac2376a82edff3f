"""Facilitators: the service's own client, and behind it models that are honest, broken or lying."""

import chain
import exchange
import facilitators
import protocols

from .chainmodel import Reverted, silence

WORDS = {  # what the token says -> what facilitators call it
    "Pausable: paused": "transaction_failed",
    "Blacklistable: account is blacklisted": "blacklisted_address",
    "FiatTokenV2: authorization is not yet valid": "invalid_exact_evm_payload_authorization_valid_after",
    "FiatTokenV2: authorization is expired": "invalid_exact_evm_payload_authorization_valid_before",
    "FiatTokenV2: authorization is used or canceled": "invalid_exact_evm_nonce_already_used",
    "FiatTokenV2: invalid signature": "invalid_exact_evm_payload_signature",
    "ERC20: transfer amount exceeds balance": "insufficient_funds",
}
CLEAR = ("insufficient_funds", "invalid_exact_evm_payload_signature", "blacklisted_address")  # nothing will come of it


class Peer(facilitators.Facilitator):
    """One facilitator. What it really does with an authorization, and what it says, are drawn apart."""

    def __init__(self, sim, url):
        super().__init__(url)
        self.sim = sim

    def _post(self, verb, payload, requirements, seconds, *, again=False):
        sim, inner = self.sim, payload["payload"]
        sim.foreign(f"/{verb}")
        authorization, task = protocols.read_authorization(inner["authorization"]), sim.current
        deal = task.deal = sim.deal_of(authorization) or task.deal
        if verb == "verify":
            return self._exchange(verb, authorization, inner["signature"], seconds, deal)
        sim.laws.settling(task, authorization, inner["signature"])
        try:
            return self._exchange(verb, authorization, inner["signature"], seconds, deal)
        finally:
            sim.laws.settled(task, authorization)

    def _exchange(self, verb, authorization, signature, seconds, deal):
        sim = self.sim
        if sim.happens("unreachable", deal=deal):
            raise exchange.Unreachable("simulated: connection refused")
        sim.pause(sim.rng.uniform(0.05, 0.8))
        sim.chain.advance(sim.time)
        if verb == "settle":
            sim.laws.taken(authorization)
        answer = self._verify if verb == "verify" else self._settle
        status, value = answer(authorization, signature, seconds, deal)
        sim.point("foreign")
        if verb == "settle" and isinstance(value, dict) and value.get("errorReason") in CLEAR and not value["transaction"]:
            sim.laws.clearly_refused(authorization)
        sim.say(f"{self.url} answers /{verb}: {status} {value}", deal)
        return status, value

    def _refusal(self, authorization, signature):
        try:
            self.sim.chain.check(authorization, signature, time=int(self.sim.time))
        except Reverted as error:
            return WORDS[str(error)]
        return None

    def _verify(self, authorization, signature, seconds, deal):
        sim = self.sim
        if sim.happens("verify_fails", deal=deal):
            kind = sim.rng.randrange(3)
            if kind == 0:
                raise silence(sim, seconds)
            return (500, {"error": "internal"}) if kind == 1 else (200, None)
        reason = self._refusal(authorization, signature)
        if sim.happens("verify_lies", deal=deal):
            reason = None if reason else "invalid_exact_evm_payload_signature"
        payer = chain.checksum(authorization.payer)
        if reason:
            return sim.rng.choice((200, 400, 412)), {"isValid": False, "invalidReason": reason, "payer": payer}
        return 200, {"isValid": True, "payer": payer}

    def _settle(self, authorization, signature, seconds, deal):
        sim = self.sim
        happens = lambda fault, **more: sim.happens(fault, deal=deal, **more)
        if happens("hoarded"):
            self._submit(authorization, signature, delay=sim.rng.choice((20, 200, 2000)))
            raise silence(sim, seconds)
        if happens("false_success"):
            return 200, self._said(True, self._hash(authorization, deal))
        if happens("false_refusal"):
            self._submit(authorization, signature, delay=sim.rng.choice((1, 30, 250)))
            return 200, self._said(False, "", "insufficient_funds")
        if happens("silent"):
            if sim.rng.random() < 0.7:
                self._submit(authorization, signature)
            raise silence(sim, sim.rng.choice((0.2, seconds)))
        reason = self._refusal(authorization, signature)
        if reason:
            return sim.rng.choice((200, 400)), self._said(False, "", reason)
        transaction = self._submit(authorization, signature)
        if happens("garbled"):
            return sim.rng.choice(((502, None), (200, []), (200, {"success": "yes"}), (500, {"error": "oops"})))
        if happens("says_pending"):
            return sim.rng.choice(((500, self._said(False, "", "settlement_pending")),
                                   (200, self._said(False, transaction.hash, "transaction_failed"))))  # fmt: skip
        sim.pause(sim.rng.uniform(1, 5))
        sim.chain.advance(sim.time)
        if transaction.block is None:
            return 200, self._said(False, "", "settlement_pending")
        name = self._hash(authorization, deal) if happens("wrong_hash") else transaction.hash
        if not transaction.ok:
            return 200, self._said(False, name, WORDS[transaction.reason])
        return 200, self._said(True, name)

    def _submit(self, authorization, signature, delay=0.0):
        sim = self.sim
        if sim.happens("slow_block", deal=sim.current.deal):
            delay += sim.rng.choice((8, 40, 400))
        return sim.chain.submit("authorization", authorization, signature, by=self.url, delay=delay)

    def _hash(self, authorization, deal):
        """Return a transaction hash that is not this authorization's: none, never mined, reverted, or another's."""
        sim = self.sim
        others = [t.hash for t in sim.chain.landed[-20:] if t.args[0] != authorization]
        return sim.rng.choice(["", "0x" + "ab" * 32, "not a hash", *others[-2:]])

    def _said(self, success, name, reason=None):
        answer = {"success": success, "transaction": name, "network": "eip155:8453"}
        return {**answer, "errorReason": reason} if reason else answer
