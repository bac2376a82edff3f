"""A facilitator and a Base node in one small process that always say yes, and agree with each other.

``POST /verify``, ``POST /settle`` and ``GET /supported`` are the facilitator; ``POST /rpc`` is the node, which knows
exactly what was settled. Run: ``python bench/stub.py PORT``.
"""

import hashlib
import re
import selectors
import socket
import sys
import time

import orjson

import chain

USDC = "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913"
KIND = {"x402Version": 2, "scheme": "exact", "network": "eip155:8453"}
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
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


def serve(port):
    """Answer keep-alive clients that send a Content-Length, at the least cost: others do this work on other machines."""
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", port))
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                sock = listener.accept()[0]
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(sock, selectors.EVENT_READ, bytearray())
            elif not answer(key.fileobj, key.data):
                selector.unregister(key.fileobj)
                key.fileobj.close()


def answer(sock, received):
    """Read what a client sends and answer its request once that is complete; returns False when the client has gone."""
    try:
        data = sock.recv(65536)
    except ConnectionResetError:
        data = b""
    received.extend(data)
    end = received.find(b"\r\n\r\n") + 4
    if end < 4:
        return data
    found = LENGTH.search(received, 0, end)
    size = end + (int(found[1]) if found else 0)
    if len(received) < size:
        return data
    path = bytes(received[:end].split(b" ", 2)[1])
    body = orjson.dumps(ROUTES[path](orjson.loads(received[end:size]) if found else None))
    received.clear()
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return data


if __name__ == "__main__":
    serve(int(sys.argv[1]))
