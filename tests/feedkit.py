"""What the feed's tests share: a stopped clock, strangers that misbehave on real sockets, and a client that checks each answer."""

import json
import pathlib
import socket
import ssl
import threading
import types

import app as http
import db as database
import feed
import fetch
import flask
import pytest
import targets

SECOND = 1_000_000_000
NOON = 1_793_534_400 * SECOND  # 2026-11-01T12:00:00Z


class Clock:
    """A clock that stands still until told otherwise; nanoseconds when called."""

    def __init__(self, now=NOON):
        self.now = now

    def __call__(self):
        return self.now

    def forward(self, seconds):
        self.now += int(seconds * SECOND)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "deals.db")


@pytest.fixture
def db(path):
    connection = database.connect(path)
    database.init(connection, mode="sandbox")
    yield connection
    connection.close()


def kind(network="eip155:8453", scheme="exact", version=2, **more):
    return {"x402Version": version, "scheme": scheme, "network": network, **more}


def body(*kinds, **more):
    return json.dumps({"kinds": list(kinds), **more}).encode()


def answer(content=b"", status=200, *, reason="ok", headers=None, ms=120):
    return fetch.Answer(reason, status, headers or {}, content, ms)


def watch(db, id="payai", **more):
    targets.add(db, id, base_url=f"https://{id}.example", enabled=True, **more)


def poll(db, clock, said, id="payai", after=900):
    """Let ``after`` seconds pass and poll one target, which says ``said`` (bytes of a body, or an answer)."""
    clock.forward(after)
    found = said if isinstance(said, fetch.Answer) else answer(said)
    [check] = feed.poll(db, clock=clock, only=id, force=True, get=lambda url, **_: found)
    return check


# -- HTTP -----------------------------------------------------------------------------------------------------


@pytest.fixture
def client(db, path, clock):
    """The feed over HTTP, in an application that has nothing else; every answer is held against the document."""
    application = flask.Flask("deals", root_path=str(pathlib.Path(http.__file__).parent))
    settings = types.SimpleNamespace(database=path, base_url="https://deals.example", mode="sandbox", service_name="Deals")
    http._add_errors(application)
    http._add_feed(application, types.SimpleNamespace(settings=settings, clock=lambda: clock.now / SECOND))
    application.after_request(http._cors)
    application.testing = True
    return application.test_client()


# -- Strangers ------------------------------------------------------------------------------------------------


class Stranger:
    """A server on loopback that reads one request and then does as ``behave(connection)`` says, for each connection."""

    def __init__(self, behave, tls=None):
        self.behave, self.tls, self.requests = behave, tls, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.over = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.over.set()
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
            self.requests.append(request.decode())
            self.behave(connection)
        except (OSError, ssl.SSLError):
            pass  # the other side hung up, as it should on a stranger like this
        finally:
            connection.close()


def says(content, status="200 OK", headers=()):
    """Return a behaviour that gives one ordinary answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers, "", ""]
    return lambda connection: connection.sendall("\r\n".join(lines).encode() + content)
