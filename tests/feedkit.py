"""What the feed's tests share: declarations, polls without a network, strangers on real sockets, a client that checks answers."""

import json
import socket
import ssl
import threading

import feed
import fetch
import pytest
import targets

SECOND = 1_000_000_000


def kind(network="eip155:8453", scheme="exact", version=2, **more):
    return {"x402Version": version, "scheme": scheme, "network": network, **more}


def body(*kinds, **more):
    return json.dumps({"kinds": list(kinds), **more}).encode()


def answer(content=b"", status=200, *, reason="ok", headers=None, ms=120, note=""):
    return fetch.Answer(reason, status, headers or {}, content, ms, note)


def nanoseconds(clock):
    """The same clock, as the feed reads it."""
    return lambda: int(clock.now * SECOND)


def watch(db, id="payai", **more):
    targets.add(db, id, **{"base_url": f"https://{id}.example", "enabled": True} | more)


def poll(db, clock, said, id="payai", after=900):
    """Let ``after`` seconds pass and poll one target, which says ``said`` (bytes of a body, or an answer)."""
    clock.sleep(after)
    found = said if isinstance(said, fetch.Answer) else answer(said)
    [check] = feed.poll(db, clock=nanoseconds(clock), only=id, force=True, get=lambda url, **_: found)
    return check


# -- HTTP -----------------------------------------------------------------------------------------------------


class Reader:
    """Reads the feed over HTTP; the client holds every answer against the published document."""

    def __init__(self, client):
        self.get = client.get

    def data(self, path, **more):
        response = self.get(path, **more)
        assert response.status_code == 200, response.json
        return response.json["data"]

    def events(self, path="/v1/feed/events", **query):
        return self.data(path, query_string=query)["events"]

    def refusal(self, path, **more):
        response = self.get(path, **more)
        assert response.status_code >= 400
        return response.status_code, response.json["error"], response.json["message"]


@pytest.fixture
def reader(client):
    return Reader(client)


# -- Strangers ------------------------------------------------------------------------------------------------


class Stranger:
    """A server on loopback that reads one request and then does as ``behave(connection)`` says, for each connection."""

    def __init__(self, behave, tls=None):
        self.behave, self.tls, self.requests = behave, tls, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.listener.close()

    def _serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._meet, args=(connection,), daemon=True).start()

    def _meet(self, connection):
        try:
            if self.tls:
                connection = self.tls.wrap_socket(connection, server_side=True)
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(65536) or b"\r\n\r\n"
            self.requests.append(request.decode("latin-1"))
            self.behave(connection)
        except (OSError, ssl.SSLError):
            pass  # the other side hung up, as it should on a stranger like this
        finally:
            connection.close()


def says(content, status="200 OK", headers=()):
    """Return a behaviour that gives one ordinary answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers, "", ""]
    return lambda connection: connection.sendall("\r\n".join(lines).encode() + content)
