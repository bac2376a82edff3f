"""The two payment protocols on the wire: quotes out, payments in. Pure functions; nothing is stored or asked.

x402 v2 (HTTP transport, scheme ``exact`` on EVM) and MPP (HTTP "Payment" authentication, method ``evm``,
intent ``charge``). Both end in one EIP-3009 authorization, so :class:`Payment` is the same for either.
"""

import base64
import binascii
import calendar
import dataclasses
import functools
import hashlib
import hmac
import json
import re
import time
from typing import NamedTuple

import chain
from deals import Refusal, timestamp

QUOTE_SECONDS = 300  # how long a quote may be signed: x402 maxTimeoutSeconds and the MPP challenge's expiry
HEADER_CAP = 16384
MIN_AHEAD, MAX_AHEAD = 6, 900  # seconds that validBefore must, and may, lie ahead
IDENTIFIER = re.compile(r"[a-zA-Z0-9_-]{16,128}")
IDENTIFIER_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "required": {"type": "boolean"},
        "id": {"type": "string", "minLength": 16, "maxLength": 128, "pattern": "^[a-zA-Z0-9_-]+$"},
    },
    "required": ["required"],
}
DEAL_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"mode": {"type": "string"}, "id": {"type": ["string", "null"]}},
    "required": ["mode"],
}


class Mismatch(Exception):
    """The payment can be read but does not pay this offer; the sentence says which part differs."""


class Offer(NamedTuple):
    """What one request may be paid with. ``deal_id`` is None for a quote that starts no deal."""

    deal_id: str | None
    pay_to: str
    price_units: int
    url: str  # exactly as the client called it: clients refuse to pay for another
    body: bytes
    terms: str | None = None
    error: str = "Payment required"
    invalid: bool = False


@dataclasses.dataclass(frozen=True)
class Terminal:
    """The fixed facts of a service that quotes and reads payments; ``secrets`` newest first."""

    token: chain.Token
    master_key: bytes
    mode: str
    description: str
    secrets: tuple
    extensions: dict = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def fixed_extensions(self):
        """How every quote ends: the schema of its deal, and the extensions that are always the same, as JSON."""
        identifier = {"info": {"required": False}, "schema": IDENTIFIER_SCHEMA}
        others = chain.compact({"payment-identifier": identifier, **self.extensions})
        return b',"schema":%b},%b}' % (chain.compact(DEAL_SCHEMA), others[1:])


@dataclasses.dataclass(frozen=True)
class Payment:
    """One signed EIP-3009 authorization, whichever protocol carried it."""

    protocol: str  # "x402" or "mpp"
    authorization: chain.Authorization
    signature: str
    identifier: str | None = None  # x402's payment-identifier extension
    challenge: dict | None = None  # MPP: the echoed challenge
    claims: tuple = ()  # x402: (what, stated, ours) of everything the client echoed


# -- Quotes -------------------------------------------------------------------------------------------------


def requirements(terminal, pay_to, units):
    """Return x402 PaymentRequirements for ``units`` to ``pay_to``."""
    return {
        "scheme": "exact",
        "network": f"eip155:{terminal.token.chain_id}",
        "amount": str(units),
        "asset": chain.checksum(terminal.token.address),
        "payTo": chain.checksum(pay_to),
        "maxTimeoutSeconds": QUOTE_SECONDS,
        "extra": {"name": terminal.token.name, "version": terminal.token.version},
    }


def quote(terminal, offer, *, now):
    """Return (headers, body) of the 402: both challenges, the body identical to the x402 header."""
    deal = {
        "mode": terminal.mode,
        "id": offer.deal_id,
        "masterKey": terminal.master_key.hex(),
        "depositAddress": chain.checksum(offer.pay_to) if offer.deal_id else None,
        "terms": offer.terms,
    }
    required = {
        "x402Version": 2,
        "error": offer.error,
        "resource": {"url": offer.url, "description": terminal.description, "mimeType": "application/json"},
        "accepts": [requirements(terminal, offer.pay_to, offer.price_units)],
        "extensions": {"deal": {"info": deal}},
    }
    # The rest of the extensions is long and never changes: its text goes in before the last three braces.
    body = chain.compact(required)[:-3] + terminal.fixed_extensions
    headers = {
        "PAYMENT-REQUIRED": base64.b64encode(body).decode(),
        "WWW-Authenticate": challenge(terminal, offer, now=now),
        "Cache-Control": "no-store",
    }
    if offer.invalid:
        headers["X-Svc-Invalid-Request"] = "1"
    return headers, body


def challenge(terminal, offer, *, now):
    """Return the MPP challenge as a ``WWW-Authenticate`` value; stateless, bound by an HMAC over every field."""
    fields = {
        "realm": _realm(offer.url),
        "method": "evm",
        "intent": "charge",
        "request": _request(terminal, offer),
        "expires": timestamp(now + QUOTE_SECONDS),
        "digest": _digest(offer.body) if offer.body else "",
        "opaque": _b64url(f'{{"deal":"{offer.deal_id}"}}'.encode()) if offer.deal_id else "",
    }
    fields = {"id": _challenge_id(terminal.secrets[0], fields), **fields}
    return "Payment " + ", ".join(f'{name}="{value}"' for name, value in fields.items() if value)


def _request(terminal, offer):
    """Return the MPP charge request, base64url of canonical JSON: members in the order of their names, no spaces."""
    token = terminal.token
    return _b64url(
        f'{{"amount":"{offer.price_units}","currency":"{chain.checksum(token.address)}","methodDetails":{{"chainId":'
        f'{token.chain_id},"credentialTypes":["authorization"],"decimals":6}},"recipient":"{chain.checksum(offer.pay_to)}"}}'.encode()
    )


def _challenge_id(secret, fields):
    slots = ("realm", "method", "intent", "request", "expires", "digest", "opaque")
    message = "|".join([fields.get(slot) or "" for slot in slots])
    return _b64url(hmac.digest(secret, message.encode(), "sha256"))


@functools.lru_cache(maxsize=256)
def _realm(url):
    return re.sub(r"^https?://|[:/].*$", "", re.sub(r"^(https?://)[^/]*@", r"\1", url)) or "localhost"


def _digest(body):
    return "sha-256=:" + base64.b64encode(hashlib.sha256(body).digest()).decode() + ":"


def _b64url(data):
    return binascii.b2a_base64(data, newline=False).rstrip(b"=").replace(b"+", b"-").replace(b"/", b"_").decode()


# -- Payments -----------------------------------------------------------------------------------------------


def read(signatures, authorizations):
    """Read the one payment in a request's headers, or None when there is none.

    ``signatures`` are all values of PAYMENT-SIGNATURE, ``authorizations`` all values of Authorization.
    Refuses with invalid_payment what cannot be read, and more than one payment at once.
    """
    credentials = [value for value in authorizations if re.match(r"payment(\s|$)", value.strip(), re.IGNORECASE)]
    if len(signatures) + len(credentials) > 1:
        raise Refusal("invalid_payment", "Send one payment: either PAYMENT-SIGNATURE or Authorization: Payment, once.")
    if not signatures and not credentials:
        return None
    value = (signatures or credentials)[0].strip()
    if len(value) > HEADER_CAP:
        raise Refusal("invalid_payment", f"The payment header is longer than {HEADER_CAP} bytes.")
    try:
        return _read_x402(_decode(value)) if signatures else _read_mpp(_decode(value[len("payment") :].strip()))
    except ValueError as error:
        raise Refusal("invalid_payment", f"The payment header cannot be read: {error}.") from None


def _decode(text):
    """Decode base64 (either alphabet, padded or not) of a strict JSON object."""
    digits = text.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        data = digits and binascii.a2b_base64(digits + "=" * (-len(digits) % 4), strict_mode=True)
    except ValueError:
        data = b""
    if not data or len(text) - len(digits) > 2:
        raise ValueError("it is not base64")
    value = chain.read_json(data)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _read_x402(value):
    version, accepted, payload = value.get("x402Version"), value.get("accepted"), value.get("payload")
    if type(version) is not int:
        raise ValueError("x402Version is not an integer")
    if version != 2:
        raise Mismatch(f"This service speaks x402 version 2; the payment is version {version}.")
    if not isinstance(accepted, dict) or not isinstance(payload, dict):
        raise ValueError("accepted and payload must be objects")
    if "permit2Authorization" in payload:
        raise Mismatch("Only EIP-3009 authorizations are accepted, not Permit2.")
    claims = tuple((name, accepted.get(name)) for name in ("scheme", "network", "amount", "asset", "payTo"))
    if not all(isinstance(stated, str) for _, stated in claims):
        raise ValueError("accepted must have scheme, network, amount, asset and payTo as strings")
    return Payment(
        protocol="x402",
        authorization=read_authorization(payload.get("authorization")),
        signature=read_signature(payload.get("signature")),
        identifier=_identifier(value.get("extensions")),
        claims=claims,
    )


def _identifier(extensions):
    """Return the id of x402's payment-identifier extension, when the client sent one."""
    extension = extensions.get("payment-identifier") if isinstance(extensions, dict) else None
    info = extension.get("info") if isinstance(extension, dict) else None
    identifier = info.get("id") if isinstance(info, dict) else None
    if identifier is None:
        return None
    if not isinstance(identifier, str) or not IDENTIFIER.fullmatch(identifier):
        raise ValueError("the payment-identifier must be 16 to 128 letters, digits, hyphens and underscores")
    return identifier


def _read_mpp(value):
    echoed, payload = value.get("challenge"), value.get("payload")
    if not isinstance(echoed, dict) or not isinstance(payload, dict):
        raise ValueError("challenge and payload must be objects")
    needed = ("id", "realm", "method", "intent", "request")
    optional = ("expires", "digest", "opaque")
    if not all(isinstance(echoed.get(name), str) for name in needed):
        raise ValueError("the challenge must have id, realm, method, intent and request as strings")
    if not all(isinstance(echoed.get(name, ""), str) for name in optional):
        raise ValueError("expires, digest and opaque of the challenge must be strings")
    if payload.get("type") != "authorization":
        raise Mismatch("Only credentials of type authorization are accepted.")
    authorization = read_authorization(payload)
    source = value.get("source")
    if source is not None and not isinstance(source, str):
        raise ValueError("source must be a string")
    if source is not None and source.lower().rpartition(":")[2] != authorization.payer:
        raise Mismatch("The credential's source is not the account that the authorization is from.")
    return Payment(
        protocol="mpp",
        authorization=authorization,
        signature=read_signature(payload.get("signature")),
        challenge={name: echoed.get(name, "") for name in needed + optional},
    )


_DECIMAL, _ADDRESS, _NONCE, _SIGNATURE = (
    re.compile(pattern).fullmatch
    for pattern in (r"[0-9]{1,78}", r"0x[0-9a-fA-F]{40}", r"0x[0-9a-fA-F]{64}", r"0x[0-9a-fA-F]{128,12000}")
)


def read_authorization(fields):
    """Read an authorization as both protocols write it. Raises ValueError naming the field."""
    if not isinstance(fields, dict):
        raise ValueError("the authorization must be an object")

    def text(name, pattern):
        value = fields.get(name)
        if not isinstance(value, str) or not pattern(value):
            raise ValueError(f"{name} of the authorization is missing or malformed")
        return value.lower()

    def number(name):
        value = int(text(name, _DECIMAL))
        if value >= 1 << 256:
            raise ValueError(f"{name} of the authorization is too large")
        return value

    return chain.Authorization(
        payer=text("from", _ADDRESS),
        to=text("to", _ADDRESS),
        value=number("value"),
        valid_after=number("validAfter"),
        valid_before=number("validBefore"),
        nonce=text("nonce", _NONCE),
    )


def read_signature(value):
    """Read a signature of any length as lower-case hex, its bytes untouched. Raises ValueError."""
    if not isinstance(value, str) or not _SIGNATURE(value) or len(value) % 2:
        raise ValueError("the signature is missing or is not hex")
    return value.lower()


# -- Does it pay the offer? ---------------------------------------------------------------------------------


def match_terms(terminal, offer, payment):
    """Check what never changes about a payment: whom it pays, how much, in what. Raises :class:`Mismatch`."""
    authorization = payment.authorization
    if authorization.to != offer.pay_to:
        raise Mismatch(
            f"The authorization pays {chain.checksum(authorization.to)}; the deal with exactly these terms is paid"
            f" to {chain.checksum(offer.pay_to)}."
        )
    if authorization.value != offer.price_units:
        raise Mismatch(f"The authorization is for {authorization.value} units; the price is {offer.price_units}.")
    ours = requirements(terminal, offer.pay_to, offer.price_units)
    for name, stated in payment.claims:
        same = stated.lower() == ours[name].lower() if name in ("asset", "payTo") else stated == ours[name]
        if not same:
            raise Mismatch(f"The accepted {name} is not {ours[name]}.")


def match_moment(terminal, offer, payment, *, now):
    """Check what must hold when a payment is first used: its window, and for MPP its challenge."""
    authorization = payment.authorization
    if authorization.valid_after >= now:
        raise Mismatch("The authorization is not valid yet (validAfter must be in the past).")
    if authorization.valid_before < now + MIN_AHEAD:
        raise Mismatch(f"The authorization expires too soon: validBefore must be at least {MIN_AHEAD} s ahead.")
    if authorization.valid_before > now + MAX_AHEAD:
        raise Mismatch(f"The authorization is valid for too long: validBefore must be at most {MAX_AHEAD} s ahead.")
    if payment.protocol == "mpp":
        _match_challenge(terminal, offer, payment, now=now)


def _match_challenge(terminal, offer, payment, *, now):
    echoed = payment.challenge
    if not any(hmac.compare_digest(_challenge_id(s, echoed).encode(), echoed["id"].encode()) for s in terminal.secrets):
        raise Mismatch("The challenge was not issued by this service, or a field of it was changed.")
    expires = expiry(echoed["expires"])
    if now >= expires:
        raise Mismatch("The challenge has expired; sign the fresh one.")
    if payment.authorization.valid_before > expires:
        raise Mismatch("validBefore must not be later than the challenge's expiry.")
    if echoed["realm"] != _realm(offer.url) or (echoed["method"], echoed["intent"]) != ("evm", "charge"):
        raise Mismatch("The challenge is for another service, method or intent.")
    if echoed["request"] != _request(terminal, offer):
        raise Mismatch("The challenge quotes other terms than this request's.")
    if echoed["digest"] != _digest(offer.body):
        raise Mismatch("The challenge was issued for another request body.")
    if payment.authorization.nonce not in challenge_nonces(echoed["id"], echoed["realm"]):
        raise Mismatch("The authorization's nonce is not derived from the challenge.")


def challenge_nonces(challenge_id, realm):
    """Return the two nonces that bind a payment to a challenge: the draft's and mppx's, and pympp's."""
    text = json.dumps([challenge_id, realm], separators=(",", ":"), ensure_ascii=False)
    return {"0x" + chain.keccak(data.encode()).hex() for data in (challenge_id + realm, text)}


def expiry(text):
    """Read a challenge's expiry as Unix seconds. We wrote it ourselves: the HMAC has been checked before."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


# -- Answers ------------------------------------------------------------------------------------------------


def success_headers(terminal, protocol, *, transaction, payer, challenge_id, settled_at, receipt):
    """Return the headers of a paid 200: PAYMENT-RESPONSE for x402, Payment-Receipt for MPP.

    ``receipt`` is the signed x402 ``offer-receipt`` artifact.
    """
    if protocol == "x402":
        settled = {
            "success": True,
            "transaction": transaction,
            "network": f"eip155:{terminal.token.chain_id}",
            "payer": chain.checksum(payer),
            "extensions": {"offer-receipt": {"info": {"receipt": receipt}}},
        }
        return {"PAYMENT-RESPONSE": base64.b64encode(chain.compact(settled)).decode()}
    receipt = {
        "status": "success",
        "method": "evm",
        "timestamp": timestamp(settled_at),
        "reference": transaction,
        "challengeId": challenge_id,
        "chainId": terminal.token.chain_id,
    }
    return {"Payment-Receipt": _b64url(chain.canonical(receipt)), "Cache-Control": "private"}


def failure_headers(terminal, *, payer, reason):
    """Return the PAYMENT-RESPONSE header that tells an x402 client why its payment was not settled."""
    failed = {
        "success": False,
        "errorReason": reason,
        "transaction": "",
        "network": f"eip155:{terminal.token.chain_id}",
        "payer": chain.checksum(payer),
    }
    return {"PAYMENT-RESPONSE": base64.b64encode(chain.compact(failed)).decode()}
