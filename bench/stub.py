"""A facilitator and a Base node in one small process that always say yes, and agree with each other.

``POST /verify``, ``POST /settle`` and ``GET /supported`` are the facilitator; ``POST /rpc`` is the node, which knows
exactly what was settled. Run: ``python bench/stub.py PORT``.
"""

import asyncio
import hashlib
import json
import sys
import time

import chain

USDC = "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913"
KIND = {"x402Version": 2, "scheme": "exact", "network": "eip155:8453"}
balances, used, receipts = {}, {}, {}


def supported(_):
    return {"kinds": [KIND], "extensions": [], "signers": {}}


def verify(body):
    return {"isValid": True, "payer": body["paymentPayload"]["payload"]["authorization"]["from"]}


def settle(body):
    """Move the money on paper and hand out a hash that the node will know."""
    paid = body["paymentPayload"]["payload"]["authorization"]
    payer, to, value = paid["from"].lower(), paid["to"].lower(), int(paid["value"])
    transaction = "0x" + hashlib.sha256((payer + paid["nonce"]).encode()).hexdigest()
    if transaction not in receipts:
        balances[to] = balances.get(to, 0) + value
        used[payer, paid["nonce"]] = transaction
        topics = [chain.AUTHORIZATION_USED, word(payer), paid["nonce"]]
        moved = [chain.TRANSFER, word(payer), word(to)]
        receipts[transaction] = {
            "status": "0x1",
            "transactionHash": transaction,
            "logs": [
                {"address": USDC, "topics": topics, "data": "0x", "transactionHash": transaction},
                {"address": USDC, "topics": moved, "data": word(hex(value)), "transactionHash": transaction},
            ],
        }
    return {"success": True, "transaction": transaction, "network": "eip155:8453", "payer": paid["from"]}


def word(text):
    return "0x" + text[2:].rjust(64, "0")


def node(body):
    if isinstance(body, list):
        return [node(call) for call in body]
    return {"jsonrpc": "2.0", "id": body["id"], "result": METHODS[body["method"]](*body["params"])}


def block(number, _):
    now = int(time.time())
    number = now // 2 if number == "latest" else int(number, 16)
    return {"number": hex(number), "timestamp": hex(number * 2)}


def call(request, _):
    """Answer balanceOf(address) and authorizationState(address, bytes32)."""
    data = request["data"]
    address = "0x" + data[34:74]
    if data.startswith("0x70a08231"):
        return word(hex(balances.get(address, 0)))
    return word(hex((address, "0x" + data[74:138]) in used))


def logs(where):
    _, payer, nonce = where["topics"]
    transaction = used.get(("0x" + payer[-40:], nonce))
    return receipts[transaction]["logs"][:1] if transaction else []


METHODS = {
    "eth_getBlockByNumber": block,
    "eth_call": call,
    "eth_getTransactionReceipt": receipts.get,
    "eth_getLogs": logs,
    "eth_getCode": lambda address, at: "0x",
}
ROUTES = {b"/supported": supported, b"/verify": verify, b"/settle": settle, b"/rpc": node}


class Connection(asyncio.Protocol):
    """Just enough HTTP/1.1 for keep-alive clients that send a Content-Length."""

    def connection_made(self, transport):
        self.transport, self.buffer = transport, b""

    def data_received(self, data):
        self.buffer += data
        while True:
            head, end, rest = self.buffer.partition(b"\r\n\r\n")
            if not end:
                return
            _, found, length = head.lower().partition(b"content-length:")
            length = int(length.split(b"\r\n", 1)[0]) if found else 0
            if len(rest) < length:
                return
            body, self.buffer = rest[:length], rest[length:]
            path = head.split(b" ", 2)[1]
            answer = json.dumps(ROUTES[path](json.loads(body) if body else None)).encode()
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer)
            )


async def main(port):
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
