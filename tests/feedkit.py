"""What the feed's tests share: declarations, polls without a network, strangers on real sockets, a client that checks answers."""

import functools
import json
import re
import socket
import ssl
import threading

import feed
import fetch
import jsonschema
import pytest
import spec
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


class Client:
    """GETs over HTTP and holds every answer against the published document: status, headers, media type, shape."""

    def __init__(self, client):
        self.client = client

    def get(self, path, **more):
        response = self.client.get(path, **more)
        check(path.partition("?")[0], response)
        return response

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
    return Client(client)


def check(path, response):
    document = spec.document()
    operation = document["paths"][_template(path)]["get"]
    described = operation["responses"][str(response.status_code)]
    for name in described.get("headers", {}):
        assert name in response.headers or name == "Link", f"{path}: the header {name} is missing"
    if response.status_code == 304:
        assert response.data == b""
        return
    [media_type] = described["content"] if response.mimetype in described["content"] else [f"not {response.mimetype}"]
    schema = described["content"][media_type].get("schema", {})
    if "json" in media_type:
        validator(json.dumps(schema)).validate(json.loads(response.data))


@functools.cache
def validator(schema):
    whole = {**json.loads(schema), "components": spec.document()["components"]}
    return jsonschema.Draft202012Validator(whole, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def _template(path):
    if path in spec.document()["paths"]:
        return path
    templates = [template for template in spec.document()["paths"] if "{" in template]
    return next(template for template in templates if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path))


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
