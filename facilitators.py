"""The client of x402 facilitators: verify and settle, with "unknown" as a third outcome of its own."""

import dataclasses
import re

import exchange

# Words of a refusal after which the very same authorization cannot land, so the attempt is over.
FINAL = re.compile(
    r"insufficient|invalid_signature|payload_signature|recipient_mismatch|value_mismatch|unsupported|missing_eip712"
    r"|network_mismatch|undeployed|not_allowed|not_deployed|blacklist|blocked_address|self_send",
    re.IGNORECASE,
)
MENDABLE = re.compile(r"insufficient", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a facilitator said to /verify: ``valid`` is True, False, or None when it gave no usable answer."""

    valid: bool | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of /settle: ``settled`` (it says so), ``refused`` (finally), ``unsent``, or ``unknown``."""

    kind: str
    transaction: str | None = None
    reason: str = ""


class Facilitator:
    """One facilitator over HTTP. A body is read at any status: some report refusals as 4xx or 5xx."""

    def __init__(self, url, *, token=""):
        self.url = url
        self._authorization = f"Bearer {token}" if token else ""

    def verify(self, payload, requirements, *, seconds):
        """Ask whether ``payload`` would settle; nothing moves."""
        try:
            status, answer = self._post("verify", payload, requirements, seconds, again=True)
        except (exchange.Unreachable, exchange.NoAnswer) as error:
            return Verdict(None, f"no answer: {error}")
        if not isinstance(answer, dict) or not isinstance(answer.get("isValid"), bool):
            return Verdict(None, f"HTTP {status} without a verdict")
        return Verdict(answer["isValid"], _reason(answer, "invalidReason", status))

    def settle(self, payload, requirements, *, seconds):
        """Have ``payload`` submitted to the chain."""
        try:
            status, answer = self._post("settle", payload, requirements, seconds)
        except exchange.Unreachable as error:
            return Outcome("unsent", reason=f"unreachable: {error}")
        except exchange.NoAnswer as error:
            return Outcome("unknown", reason=f"no answer: {error}")
        return read_outcome(status, answer)

    def _post(self, verb, payload, requirements, seconds, *, again=False):
        body = {"x402Version": 2, "paymentPayload": payload, "paymentRequirements": requirements}
        url = f"{self.url}/{verb}"
        return exchange.post_json(url, body, seconds=seconds, authorization=self._authorization, again=again)


def read_outcome(status, answer):
    """Read an answer of /settle. Only a plain "no" for a reason that is final counts as refused."""
    if not isinstance(answer, dict) or not isinstance(answer.get("success"), bool):
        return Outcome("unknown", reason=f"HTTP {status} without an outcome")
    transaction = answer.get("transaction")
    transaction = transaction.lower() if isinstance(transaction, str) and transaction else None
    if answer["success"]:
        return Outcome("settled", transaction)
    reason = _reason(answer, "errorReason", status)
    return Outcome("refused" if FINAL.search(reason) and not transaction else "unknown", transaction, reason)


def _reason(answer, field, status):
    """Return the facilitator's reason as one short printable line: it is shown to clients and operators."""
    reason = answer.get(field)
    text = reason if isinstance(reason, str) and reason else f"HTTP {status}"
    return re.sub(r"[^\x20-\x7e]+", " ", text)[:200]
