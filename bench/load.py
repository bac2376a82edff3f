"""A load generator that costs little itself: ready bytes over a few keep-alive connections, one thread.

Which of a server's workers gets a connection is chance, and one that gets them all halves the throughput. So clients come
and go: a connection serves as many requests as an agent may make in a row, and chance evens out within a run.
"""

import selectors
import socket
import time


def request(method, path, body=b"", headers=()):
    """Return the bytes of one request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers)]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


IN_A_ROW = 10  # requests over one connection


def run(port, requests, *, connections=8, expect=200, seconds=60):
    """Send every request once, each connection its next one after an answer; returns requests per second.

    Raises AssertionError on an answer of another status, TimeoutError when it takes longer than ``seconds``.
    """
    selector, waiting, answers = selectors.DefaultSelector(), iter(requests), 0
    wanted, started = b"HTTP/1.1 %d " % expect, time.perf_counter()
    for number in range(connections):
        _send(_connect(selector, port, number), waiting)  # they do not all leave at the same time
    while answers < len(requests):
        if time.perf_counter() - started > seconds:
            raise TimeoutError(f"{answers} of {len(requests)} requests were answered in {seconds} s")
        for key, _ in selector.select(1):
            data = key.fileobj.recv(65536)
            client = key.data
            assert data, f"the server closed the connection after {bytes(client.answer[:200])}"
            client.answer.extend(data)
            if not _complete(client.answer):
                continue
            assert client.answer.startswith(wanted), bytes(client.answer[:1000])
            client.answer.clear()
            client.served += 1
            answers += 1
            if client.served >= IN_A_ROW:
                selector.unregister(key.fileobj).fileobj.close()
                key = _connect(selector, port)
            _send(key, waiting)
    elapsed = time.perf_counter() - started
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    return len(requests) / elapsed


class _Client:
    def __init__(self, served):
        self.answer, self.served = bytearray(), served


def _connect(selector, port, number=0):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return selector.register(sock, selectors.EVENT_READ, _Client(number % IN_A_ROW))


def fetch(port, data):
    """Send one request; returns the whole answer."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(data)
        answer = bytearray()
        while not _complete(answer):
            chunk = sock.recv(65536)
            assert chunk, bytes(answer)
            answer += chunk
    return bytes(answer)


def _send(key, waiting):
    data = next(waiting, None)
    if data is not None:
        key.fileobj.sendall(data)


def _complete(answer):
    """Whether an answer is all there: by its length, or by the last chunk."""
    head = answer.find(b"\r\n\r\n")
    if head < 0:
        return False
    start = answer.find(b"Content-Length: ", 0, head) + 16
    if start < 16:
        return answer.endswith(b"\r\n0\r\n\r\n")
    return len(answer) >= head + 4 + int(answer[start : answer.find(b"\r\n", start)])
