"""A model of the chain: the token with its checks in order, a pool, blocks, reorganisations, halts; and its RPC nodes."""

import bisect
import dataclasses

import chain
import exchange

BLOCK_SECONDS = 2
FIRST = 5_000  # the block of the simulation's first moment


class Reverted(Exception):
    """The token refuses; the reason is its own."""


@dataclasses.dataclass
class Transaction:
    """Something on its way into a block: ``run(chain, block)`` does it or raises :class:`Reverted`."""

    hash: str
    kind: str  # "authorization", "cancel" or "transfer"
    args: tuple
    by: str
    at: float  # not before this moment
    block: int | None = None
    ok: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Use:
    """What used up a nonce: a transfer to ``payee``, or nothing if it was cancelled."""

    block: int
    payee: str | None
    units: int
    hash: str


class Chain:
    """One token. Amounts are base units; a block every two seconds, its time fixed by its number, as on Base."""

    def __init__(self, token, now):
        self.token, self.base = token, int(now) - FIRST * BLOCK_SECONDS
        self.number = FIRST
        self.now = now
        self.balances = {}  # address -> [(block, units)], ascending
        self.uses = {}  # (authorizer, nonce) -> Use
        self.receipts = {}  # hash -> Transaction
        self.pool, self.landed = [], []
        self.halted_until = 0.0
        self.paused, self.blacklist, self.wallets = False, {}, {}
        self.signers = {}
        self.counter = 0
        self.told = lambda transaction: None

    def time_of(self, number):
        return self.base + number * BLOCK_SECONDS

    # -- Reading ----------------------------------------------------------------------------------------------

    def balance(self, address, at=None):
        history = self.balances.get(address)
        if not history:
            return 0
        if at is None or history[-1][0] <= at:
            return history[-1][1]
        found = bisect.bisect_right(history, (at, 1 << 70)) - 1
        return history[found][1] if found >= 0 else 0

    def use(self, authorizer, nonce, at=None):
        found = self.uses.get((authorizer, nonce))
        return found if found and (at is None or found.block <= at) else None

    def signed(self, account, digest, signature):
        """Whether ``account`` (a key, or a contract wallet's owner) signed; remembered, since curves are slow."""
        key = account, digest, signature
        if key not in self.signers:
            owner = self.wallets.get(account)
            proof = "0x" + signature[-130:] if owner and len(signature) > 132 else signature
            self.signers[key] = chain.signer(digest, proof) == (owner or account)
        return self.signers[key]

    # -- The token ----------------------------------------------------------------------------------------------

    def check(self, authorization, signature, *, time):
        """Refuse what the real token refuses, in its order."""
        a = authorization
        if self.paused:
            raise Reverted("Pausable: paused")
        if a.payer in self.blacklist or a.to in self.blacklist:
            raise Reverted("Blacklistable: account is blacklisted")
        if not time > a.valid_after:
            raise Reverted("FiatTokenV2: authorization is not yet valid")
        if not time < a.valid_before:
            raise Reverted("FiatTokenV2: authorization is expired")
        if (a.payer, a.nonce) in self.uses:
            raise Reverted("FiatTokenV2: authorization is used or canceled")
        if not self.signed(a.payer, a.digest(self.token), signature):
            raise Reverted("FiatTokenV2: invalid signature")
        if self.balance(a.payer) < a.value:
            raise Reverted("ERC20: transfer amount exceeds balance")

    def _set(self, address, units, block):
        self.balances.setdefault(address, []).append((block, units))

    def mint(self, address, units):
        self._set(address, self.balance(address) + units, self.number)

    def _execute(self, transaction, block):
        if transaction.kind == "authorization":
            authorization, signature = transaction.args
            self.check(authorization, signature, time=self.time_of(block))
            payer, to, units, nonce = authorization.payer, authorization.to, authorization.value, authorization.nonce
        elif transaction.kind == "cancel":
            payer, nonce = transaction.args
            if (payer, nonce) in self.uses:
                raise Reverted("FiatTokenV2: authorization is used or canceled")
            self.uses[payer, nonce] = Use(block, None, 0, transaction.hash)
            return
        else:
            payer, to, units = transaction.args
            nonce = None
            if self.paused or payer in self.blacklist or to in self.blacklist or self.balance(payer) < units:
                raise Reverted("ERC20: transfer refused")
        self._set(payer, self.balance(payer) - units, block)
        self._set(to, self.balance(to) + units, block)
        if nonce:
            self.uses[payer, nonce] = Use(block, to, units, transaction.hash)

    # -- Blocks -------------------------------------------------------------------------------------------------

    def submit(self, kind, *args, by, delay=0.0):
        """Put a transaction into the pool; returns it. It lands, or fails, when a block takes it."""
        self.counter += 1
        name = "0x" + chain.sha256(f"{self.base}/{self.counter}".encode()).hex()
        transaction = Transaction(name, kind, args, by, self.now + delay)
        self.pool.append(transaction)
        return transaction

    def advance(self, now):
        """Make the blocks up to ``now``, or none while the chain stands still."""
        self.now = now
        if now < self.halted_until:
            return
        last = int(now - self.base) // BLOCK_SECONDS
        if self.pool:
            self.pool.sort(key=lambda transaction: transaction.at)
            for transaction in [t for t in self.pool if t.at <= now]:
                block = max(self.number + 1, int(transaction.at - self.base) // BLOCK_SECONDS)
                if block > last:
                    break
                self.number = block
                self.pool.remove(transaction)
                self._include(transaction, block)
        self.number = max(self.number, last)

    def _include(self, transaction, block):
        transaction.block, transaction.ok, transaction.reason = block, True, ""
        try:
            self._execute(transaction, block)
        except Reverted as error:
            transaction.ok, transaction.reason = False, str(error)
        self.receipts[transaction.hash] = transaction
        self.landed.append(transaction)
        self.told(transaction)

    def reorganise(self, depth, rng):
        """Replace the last ``depth`` blocks: what they held goes back to the pool, in another order."""
        first = self.number - depth + 1
        undone = []
        while self.landed and self.landed[-1].block >= first:
            transaction = self.landed.pop()
            del self.receipts[transaction.hash]
            undone.append(transaction)
        for history in self.balances.values():
            while history and history[-1][0] >= first:
                history.pop()
        self.uses = {key: use for key, use in self.uses.items() if use.block < first}
        rng.shuffle(undone)
        for number, transaction in enumerate(undone):
            transaction.at = self.time_of(first) + rng.random() * BLOCK_SECONDS * depth * 0.5 + number * 1e-6
            self.pool.append(transaction)
        self.number = first - 1
        self.advance(self.now)
        return undone


# -- RPC --------------------------------------------------------------------------------------------------------


class Node(chain.Ledger):
    """The service's own JSON-RPC reader; behind it stand this model's nodes, which fail, lag and disagree."""

    def __init__(self, sim, model):
        super().__init__("simulated", model.token)
        self.sim, self.model = sim, model

    def _post(self, body):
        sim, model = self.sim, self.model
        sim.foreign("an RPC node")
        deal = sim.current.deal
        if sim.happens("rpc_fails", deal=deal):
            if sim.rng.random() < 0.5:
                sim.pause(self.seconds)
            raise chain.ChainUnknown("simulated: the node does not answer")
        model.advance(sim.time)
        top = model.number - (sim.rng.choice((1, 2, 6, 40)) if sim.happens("rpc_lags", deal=deal) else 0)
        if isinstance(body, list):
            return [self._answer(call, top) for call in body]
        return self._answer(body, top)

    def _answer(self, call, top):
        try:
            return {"id": call["id"], "result": getattr(self, call["method"])(top, *call["params"])}
        except Reverted as error:
            return {"id": call["id"], "error": {"code": 3, "message": f"execution reverted: {error}"}}
        except LookupError:
            return {"id": call["id"], "error": {"code": -32000, "message": "header not found"}}

    def eth_getBlockByNumber(self, top, tag, _full):
        number = top if tag == "latest" else int(tag, 16)
        if number > top:
            return None
        return {"number": hex(number), "timestamp": hex(self.model.time_of(number))}

    def eth_call(self, top, call, tag):
        at = top if tag == "latest" else int(tag, 16)
        if at > top:
            raise LookupError
        data, model = call["data"], self.model
        selector, words = data[2:10], [data[10 + i : 74 + i] for i in range(0, len(data) - 10, 64)]
        address = lambda word: "0x" + word[24:]
        if selector == "70a08231":
            return "0x" + model.balance(address(words[0]), at).to_bytes(32, "big").hex()
        if selector == "e94a0102":
            return "0x" + f"{int(model.use(address(words[0]), '0x' + words[1], at) is not None):064x}"
        if selector == chain.ERC1271_MAGIC.hex():
            length = int(words[2], 16) * 2
            good = model.signed(call["to"], bytes.fromhex(words[0]), "0x" + "".join(words[3:])[:length])
            return "0x" + (chain.ERC1271_MAGIC.hex() if good else "ffffffff").ljust(64, "0")
        numbers = [int(word, 16) for word in words[2:5]]
        authorization = chain.Authorization(address(words[0]), address(words[1]), *numbers, "0x" + words[5])
        if len(words) == 9:
            signature = "0x" + words[7] + words[8] + words[6][-2:]
        else:
            signature = "0x" + "".join(words[8:])[: int(words[7], 16) * 2]
        model.check(authorization, signature, time=model.time_of(model.number + 1))
        return "0x"

    def eth_getCode(self, top, account, _tag):
        return "0x60" if account in self.model.wallets else "0x"

    def eth_getTransactionReceipt(self, top, name):
        transaction = self.model.receipts.get(name)
        if transaction is None or transaction.block > top:
            return None
        if not transaction.ok or transaction.kind != "authorization":
            return {"status": "0x1" if transaction.ok else "0x0", "logs": []}
        authorization, _ = transaction.args
        payer, to = _topic(authorization.payer), _topic(authorization.to)
        token = chain.checksum(self.model.token.address)
        value = "0x" + authorization.value.to_bytes(32, "big").hex()
        logs = [
            {"address": token, "topics": [chain.AUTHORIZATION_USED, payer, authorization.nonce], "data": "0x"},
            {"address": token, "topics": [chain.TRANSFER, payer, to], "data": value},
        ]
        return {"status": "0x1", "logs": logs}

    def eth_getLogs(self, top, where):
        first, last = int(where["fromBlock"], 16), int(where["toBlock"], 16)
        if last - first >= 2_000:
            raise Reverted("block range is too wide")
        _, payer, nonce = where["topics"]
        use = self.model.uses.get(("0x" + payer[26:], nonce))
        if use is None or use.payee is None or not first <= use.block <= min(last, top):
            return []
        return [{"transactionHash": use.hash}]


def _topic(address):
    return "0x" + address[2:].rjust(64, "0")


def silence(sim, seconds):
    """Model a peer that accepted the request and never finished answering."""
    sim.pause(seconds)
    return exchange.NoAnswer("simulated: no complete answer")
