"""Hashes, keys, signatures and one small JSON-RPC reader. No SQL, no Flask: bytes in, bytes out.

Addresses are lower-case ``0x`` hex everywhere inside the service; :func:`checksum` is for what others read.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import re

import coincurve
import orjson

import exchange

try:
    from sha3 import keccak_256  # in C, a third of the time; ready builds are not for everywhere

    def keccak(data):
        """Return the Keccak-256 hash of bytes, 32 bytes."""
        return keccak_256(data).digest()

except ImportError:
    from eth_hash.auto import keccak

CURVE_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
ZERO_ADDRESS = "0x" + "00" * 20

TRANSFER_TYPE = keccak(
    b"TransferWithAuthorization(address from,address to,uint256 value,"
    b"uint256 validAfter,uint256 validBefore,bytes32 nonce)"
)
DOMAIN_TYPE = keccak(b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)")
AUTHORIZATION_USED = "0x" + keccak(b"AuthorizationUsed(address,bytes32)").hex()
TRANSFER = "0x" + keccak(b"Transfer(address,address,uint256)").hex()
ERC1271_MAGIC = keccak(b"isValidSignature(bytes32,bytes)")[:4]
_ADDRESS, _HASH = re.compile(r"0x[0-9a-fA-F]{40}").fullmatch, re.compile(r"0x[0-9a-fA-F]{64}").fullmatch
# Words of a node for a call that the contract itself failed; any other error, such as a rate limit, says nothing.
CALL_FAILED = re.compile(r"revert|out ?of ?gas|gas required|opcode|jump|stack (under|over)flow|evm error", re.IGNORECASE)


def sha256(data):
    return hashlib.sha256(data).digest()


# -- JSON ---------------------------------------------------------------------------------------------------


_ascii = json.JSONEncoder(separators=(",", ":")).encode


def compact(value):
    """Serialise JSON to ASCII bytes without spaces: some clients read the base64 in a header byte by byte."""
    data = orjson.dumps(value)
    return data if data.isascii() else _ascii(value).encode()


def canonical(value):
    """Serialise JSON per RFC 8785; only for values without floats and with ASCII keys, which is all we sign."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def read_json(data):
    """Parse untrusted bytes as strict JSON. Raises ValueError with a sentence for anything doubtful.

    Doubtful: not UTF-8, duplicate keys, NaN or Infinity, lone surrogates, integers past 64 bits, deep nesting.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if exchange.too_deep(text):
        raise ValueError("it is nested too deeply")
    try:
        value = _strict(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it contains a lone surrogate") from None
    except json.JSONDecodeError:
        raise ValueError("it is not JSON") from None
    return value


def _no_duplicates(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _no_constant(name):
    raise ValueError(f"{name} is not JSON")


def _small_int(digits):
    if len(digits) > 19 or abs(int(digits)) >= 1 << 63:
        raise ValueError("a number is too large")
    return int(digits)


_strict = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_int=_small_int
).decode


# -- Addresses and keys -------------------------------------------------------------------------------------


_CASE = str.maketrans("0123456789abcdef", "\x00" * 8 + " " * 8)  # to bit 32 where EIP-55 wants upper case
_BITS_64 = int.from_bytes(b"@" * 40, "big")


@functools.lru_cache(maxsize=4096)
def checksum(address):
    """Return the EIP-55 mixed-case form of a lower-case address."""
    digits = address[2:].encode()
    shadow = keccak(digits)[:20].hex().translate(_CASE).encode()
    # All forty digits at once: a letter is upper-case without bit 32, and the digits 0 to 9 have no bit 64.
    letters = int.from_bytes(digits, "big") & _BITS_64
    upper = int.from_bytes(shadow, "big") & (letters >> 1)
    return "0x" + (int.from_bytes(digits, "big") ^ upper).to_bytes(40, "big").decode()


def is_address(text):
    """Whether ``text`` is an address: one case throughout, or a mixed case that passes its EIP-55 checksum."""
    if not _ADDRESS(text):
        return False
    digits = text[2:]
    return digits in (digits.lower(), digits.upper()) or checksum(text.lower()) == text


def address_of(public_key):
    """Return the Ethereum address of a secp256k1 public key (33 or 65 bytes)."""
    if len(public_key) != 65:
        public_key = coincurve.PublicKey(public_key).format(compressed=False)
    return "0x" + keccak(public_key[1:])[12:].hex()


def tweak(master_key, terms):
    """Return the 32-byte scalar by which the deposit key of ``terms`` differs from the master key.

    ``master_key`` is M, compressed (33 bytes); ``terms`` the canonical terms. The pay-to-contract
    construction: anyone can recompute the address, nobody can reach it without the master key.
    """
    return sha256(b"deposit" + master_key + sha256(terms))


@functools.lru_cache(maxsize=1024)  # one paid call asks for it several times
def deposit_address(master_key, terms):
    """Return the address that holds the money of the deal with these canonical ``terms``."""
    shift = coincurve.PublicKey.from_secret(tweak(master_key, terms))
    return address_of(coincurve.PublicKey.combine_keys([_point(master_key), shift]).format(compressed=False))


@functools.lru_cache(maxsize=16)
def _point(public_key):
    return coincurve.PublicKey(public_key)


def deposit_key(master_secret, terms):
    """Return the 32-byte private key of :func:`deposit_address`. Only operator commands hold ``master_secret``."""
    master_key = coincurve.PublicKey.from_secret(master_secret).format()
    scalar = (int.from_bytes(master_secret, "big") + int.from_bytes(tweak(master_key, terms), "big")) % CURVE_ORDER
    return scalar.to_bytes(32, "big")


# -- Signatures ---------------------------------------------------------------------------------------------


def sign(secret, digest):
    """Sign a 32-byte digest; returns ``0x`` r s v with v 27 or 28 and a low s, as the token demands."""
    signature = _private_key(secret).sign_recoverable(digest, hasher=None)
    return "0x" + (signature[:64] + bytes([27 + signature[64]])).hex()


@functools.lru_cache(maxsize=1)  # making one costs more than signing; the web process signs with one, its receipts
def _private_key(secret):
    return coincurve.PrivateKey(secret)


def tidy_signature(signature):
    """Return ``0x`` hex with v 0/1 written as 27/28; other lengths (contract wallets) pass unchanged."""
    raw = bytes.fromhex(signature[2:])
    if len(raw) == 65 and raw[64] in (0, 1):
        raw = raw[:64] + bytes([raw[64] + 27])
    return "0x" + raw.hex()


def signer(digest, signature):
    """Return the address that signed ``digest``, or None. High-s twins are refused, as by the token (EIP-2)."""
    raw = bytes.fromhex(signature[2:])
    if len(raw) != 65 or raw[64] not in (27, 28) or int.from_bytes(raw[32:64], "big") > CURVE_ORDER // 2:
        return None
    try:
        key = coincurve.PublicKey.from_signature_and_message(raw[:64] + bytes([raw[64] - 27]), digest, hasher=None)
    except Exception:  # coincurve raises bare Exception for a point that is not on the curve
        return None
    return address_of(key.format(compressed=False))


def personal_digest(text):
    """Return the EIP-191 ``personal_sign`` digest of ``text``."""
    data = text.encode()
    return keccak(b"\x19Ethereum Signed Message:\n%d" % len(data) + data)


def _word(value):
    """ABI-encode one uint256, or one address given as hex."""
    if isinstance(value, str):
        value = int(value, 16)
    return value.to_bytes(32, "big")


@dataclasses.dataclass(frozen=True)
class Token:
    """An EIP-3009 token: where it is, and the EIP-712 domain under which it reads signatures."""

    address: str
    name: str
    version: str
    chain_id: int

    @functools.cached_property
    def domain_separator(self):
        return keccak(
            DOMAIN_TYPE
            + keccak(self.name.encode())
            + keccak(self.version.encode())
            + _word(self.chain_id)
            + _word(self.address)
        )


@dataclasses.dataclass(frozen=True)
class Authorization:
    """An EIP-3009 ``transferWithAuthorization``: integers for amounts and Unix seconds, ``0x`` hex for the rest."""

    payer: str
    to: str
    value: int
    valid_after: int
    valid_before: int
    nonce: str

    def digest(self, token):
        """Return the EIP-712 digest that the token checks the signature against."""
        body = TRANSFER_TYPE + _word(self.payer) + _word(self.to) + _word(self.value)
        body += _word(self.valid_after) + _word(self.valid_before) + _word(self.nonce)
        return keccak(b"\x19\x01" + token.domain_separator + keccak(body))

    def wire(self):
        """Return the form both protocols use on the wire: every number a decimal string."""
        return {
            "from": checksum(self.payer),
            "to": checksum(self.to),
            "value": str(self.value),
            "validAfter": str(self.valid_after),
            "validBefore": str(self.valid_before),
            "nonce": self.nonce,
        }

    def call(self, signature):
        """Return the calldata that submits this authorization to the token."""
        raw = bytes.fromhex(signature[2:])
        head = b"".join(map(_word, (self.payer, self.to, self.value, self.valid_after, self.valid_before, self.nonce)))
        kinds = b"address,address,uint256,uint256,uint256,bytes32"
        if len(raw) == 65:
            selector = keccak(b"transferWithAuthorization(" + kinds + b",uint8,bytes32,bytes32)")[:4]
            return "0x" + (selector + head + _word(raw[64]) + raw[:64]).hex()
        selector = keccak(b"transferWithAuthorization(" + kinds + b",bytes)")[:4]
        return "0x" + (selector + head + _word(7 * 32) + _dynamic(raw)).hex()


def _dynamic(data):
    return _word(len(data)) + data + bytes(-len(data) % 32)


RECEIPT_DOMAIN = keccak(
    keccak(b"EIP712Domain(string name,string version,uint256 chainId)")
    + keccak(b"x402 receipt")
    + keccak(b"1")
    + _word(1)
)
RECEIPT_TYPE = keccak(
    b"Receipt(uint256 version,string network,string resourceUrl,string payer,uint256 issuedAt,string transaction)"
)


@functools.lru_cache(maxsize=256)
def _text_hash(text):
    """Hash a string as EIP-712 does; most receipts share network, address of the service and payer."""
    return keccak(text.encode())


def receipt_digest(receipt):
    """Return the EIP-712 digest of an x402 ``offer-receipt`` receipt (domain fixed by that specification)."""
    body = RECEIPT_TYPE + _word(receipt["version"])
    body += b"".join([_text_hash(receipt[name]) for name in ("network", "resourceUrl", "payer")])
    body += _word(receipt["issuedAt"]) + keccak(receipt["transaction"].encode())
    return keccak(b"\x19\x01" + RECEIPT_DOMAIN + keccak(body))


# -- The chain ----------------------------------------------------------------------------------------------


class ChainUnknown(Exception):
    """The chain could not be read. Says nothing about what is on it."""


@contextlib.contextmanager
def _well_formed():
    """Take an answer of another shape than the node's interface has for no answer."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ChainUnknown("the node's answer does not have the shape it should") from error


@dataclasses.dataclass(frozen=True)
class Head:
    """A block: its number and its time in Unix seconds."""

    number: int
    time: int


LOG_RANGE = 2_000  # blocks that one eth_getLogs may span at any public node
LOG_PAGES = 50  # and how many such calls one search is worth: more than two days of blocks
DAY_BLOCKS = 43_200


class Ledger:
    """Read one token on one chain over JSON-RPC. Every method may raise :class:`ChainUnknown`."""

    def __init__(self, url, token, *, seconds=8.0):
        self.url, self.token, self.seconds = url, token, seconds

    @_well_formed()
    def head(self, *, depth=0):
        """Return the newest block, or the one ``depth`` blocks below it."""
        (block,) = self._ask(("eth_getBlockByNumber", ["latest", False]))
        if depth:
            number = max(0, _int(block["number"]) - depth)
            (block,) = self._ask(("eth_getBlockByNumber", [hex(number), False]))
        if not block:
            raise ChainUnknown("the node does not have that block yet")
        return Head(_int(block["number"]), _int(block["timestamp"]))

    def balance(self, address, *, at=None):
        """Return the token units at ``address``, at block ``at`` or the latest."""
        (answer,) = self._ask(self._call("70a08231" + _word(address).hex(), at))
        return _int(answer)

    def balances(self, addresses, *, at=None):
        """Return the units at each address, in one round trip per hundred."""
        found = []
        for start in range(0, len(addresses), 100):
            calls = (self._call("70a08231" + _word(a).hex(), at) for a in addresses[start : start + 100])
            found += [_int(answer) for answer in self._ask(*calls)]
        return found

    def used(self, pairs, *, at=None):
        """Return for each (authorizer, nonce) whether the token takes it no more (used *or* cancelled)."""
        found = []
        for start in range(0, len(pairs), 100):
            calls = (self._call("e94a0102" + _word(a).hex() + n[2:], at) for a, n in pairs[start : start + 100])
            found += [_int(answer) == 1 for answer in self._ask(*calls)]
        return found

    def payment(self, authorization, *, since, hint=None):
        """Return (units at the payee, hash of the transaction that used this very authorization, or None).

        A cancelled authorization, or one whose money went elsewhere, has no such transaction. ``since`` is
        the earliest time (Unix seconds) it can have landed; ``hint`` a hash somebody claims it has.
        """
        if hint:
            units, transaction = self._by_hint(authorization, hint)
            if transaction:
                return units, transaction
        else:
            units = self.balance(authorization.to)
        return units, self._search(authorization, since) if units >= authorization.value else None

    def transaction_of(self, authorization, *, since, hint=None):
        """Return the hash of the transaction that used ``authorization`` and moved its money, or None."""
        return hint and self._by_hint(authorization, hint)[1] or self._search(authorization, since)

    @_well_formed()
    def _by_hint(self, authorization, hint):
        """Return (units at the payee, the hash if it really is this authorization's transaction, or None)."""
        balance = self._call("70a08231" + _word(authorization.to).hex(), None)
        if not _HASH(hint):
            return _int(self._ask(balance)[0]), None
        units, receipt = self._ask(balance, ("eth_getTransactionReceipt", [hint]))
        return _int(units), hint.lower() if self._proves(receipt, authorization) else None

    @_well_formed()
    def _search(self, authorization, since):
        """Find the transaction by the token's own log, in ranges that nodes accept and no more than a few of them."""
        head = self.head()
        blocks = lambda moment: head.number - (head.time - moment) // 2  # Base makes a block every two seconds
        first = max(0, blocks(since) - 100)
        last = min(head.number, max(blocks(authorization.valid_before) + 100, first + 1000))
        found = self._logs(authorization, first, last)
        if found or not self.used([(authorization.payer, authorization.nonce)])[0]:
            return found
        # It is used, and not where our clock puts it: the clock may have been a day off when it gave us ``since``.
        return self._logs(authorization, max(0, first - DAY_BLOCKS), min(head.number, last + DAY_BLOCKS))

    def _logs(self, authorization, first, last):
        """Look through the blocks from ``last`` back to ``first``, or as far back as LOG_PAGES reach."""
        topics = [AUTHORIZATION_USED, "0x" + _word(authorization.payer).hex(), authorization.nonce]
        for top in range(last, first - 1, -LOG_RANGE)[:LOG_PAGES]:
            where = {"fromBlock": hex(max(first, top - LOG_RANGE + 1)), "toBlock": hex(top),
                     "address": self.token.address, "topics": topics}  # fmt: skip
            (logs,) = self._ask(("eth_getLogs", [where]))
            for log in logs:
                (receipt,) = self._ask(("eth_getTransactionReceipt", [log["transactionHash"]]))
                if self._proves(receipt, authorization):
                    return log["transactionHash"].lower()
        return None

    def _proves(self, receipt, authorization):
        """Whether a receipt shows the token using the authorization and moving its value to its payee."""
        if not receipt or receipt.get("status") != "0x1":
            return False
        ours = [log for log in receipt.get("logs", []) if log["address"].lower() == self.token.address]
        payer, to = "0x" + _word(authorization.payer).hex(), "0x" + _word(authorization.to).hex()
        used = any(log["topics"] == [AUTHORIZATION_USED, payer, authorization.nonce] for log in ours)
        moved = any(log["topics"] == [TRANSFER, payer, to] and _int(log["data"]) == authorization.value for log in ours)
        return used and moved

    def refusal(self, authorization, signature):
        """Ask the token, without sending anything, why it would refuse ``authorization``; None if it would not."""
        call = {"to": self.token.address, "data": authorization.call(signature), "from": ZERO_ADDRESS[:-1] + "1"}
        body = {"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [call, "latest"]}
        answer = self._post(body)
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            message = str(answer["error"].get("message", ""))
            if "revert" in message.lower():
                return message[:200]
            raise ChainUnknown(message[:200])
        if not isinstance(answer, dict) or "result" not in answer:
            raise ChainUnknown("the node's answer is not JSON-RPC")
        return None

    @_well_formed()
    def signed_by_contract(self, account, digest, signature):
        """Whether ``account`` is a contract wallet that accepts ``signature`` for ``digest`` (ERC-1271)."""
        data = ERC1271_MAGIC + digest + _word(64) + _dynamic(bytes.fromhex(signature[2:]))
        (code,) = self._ask(("eth_getCode", [account, "latest"]))
        if len(code) <= 2:
            return False
        body = {"to": account, "data": "0x" + data.hex()}
        answer = self._post({"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": [body, "latest"]})
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            message = str(answer["error"].get("message", ""))
            if CALL_FAILED.search(message):
                return False
            raise ChainUnknown(message[:200])
        if not isinstance(answer, dict) or "result" not in answer:
            raise ChainUnknown("the node's answer is not JSON-RPC")
        return str(answer["result"])[:10] == "0x" + ERC1271_MAGIC.hex()

    def _call(self, data, at):
        return ("eth_call", [{"to": self.token.address, "data": "0x" + data}, "latest" if at is None else hex(at)])

    def _ask(self, *calls):
        """Send the calls in one batch and return their results in order."""
        batch = [
            {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            for number, (method, params) in enumerate(calls)
        ]
        answers = self._post(batch if len(batch) > 1 else batch[0])
        answers = answers if isinstance(answers, list) else [answers]
        results = {a.get("id"): a for a in answers if isinstance(a, dict)}
        for number in range(len(batch)):
            if "result" not in results.get(number, {}):
                raise ChainUnknown(str(results.get(number, {}).get("error", "the node gave no answer"))[:200])
        return [results[number]["result"] for number in range(len(batch))]

    def _post(self, body):
        try:
            _, answer = exchange.post_json(self.url, body, seconds=self.seconds, again=True)
        except (exchange.Unreachable, exchange.NoAnswer) as error:
            raise ChainUnknown(str(error)) from error
        return answer


def _int(text):
    """Read one quantity or one word of the node's answer."""
    try:
        return int(text, 16)
    except (TypeError, ValueError):
        raise ChainUnknown(f"the node answered {text!r} where a number belongs") from None
