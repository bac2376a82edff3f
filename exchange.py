"""One bounded JSON exchange with a server that may be slow, huge or hostile (facilitators, RPC nodes)."""

import base64
import dataclasses
import functools
import re
import select
import socket
import ssl
import threading
import time
import urllib.parse
import zlib

import certifi
import httptools
import orjson

CONNECT_SECONDS = 5.0
CAP = 1 << 20  # bytes of an answer that are read at most
HEADERS = 1 << 16  # and of its headers
IDLE = 10  # connections that one thread keeps for its next questions
DEEPEST = 100
_STRUCTURE = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


class Unreachable(Exception):
    """The request certainly never reached the other side, so nothing can have come of it."""


class NoAnswer(Exception):
    """The request may have been received and acted upon, but no complete answer came back."""


_here = threading.local()


def post_json(url, body, *, seconds, authorization="", again=False):
    """POST ``body`` as JSON and return (status, parsed JSON or None) within ``seconds`` in all.

    Redirects are not followed, proxies of the environment are ignored, certificates are checked, and no
    more than 1 MiB is read. ``again``: a pure question, so a connection that the other side had closed in the
    meantime is worth one more try. Raises Unreachable or NoAnswer.
    """
    route = _route(url, authorization)
    data = orjson.dumps(body)
    deadline = time.monotonic() + seconds
    try:
        return _post(route, data, deadline)
    except NoAnswer as error:
        if not again or not isinstance(error.__cause__, ConnectionError) or _left(deadline) < seconds / 2:
            raise
        return _post(route, data, deadline)


def _post(route, data, deadline):
    sock = _connected(route, deadline)
    try:
        sock.settimeout(_left(deadline))
        sock.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (route.head, len(data), data))
        answer = _Answer()
        while not answer.whole:
            sock.settimeout(_left(deadline))
            answer.take(sock.recv(65536))
        found = answer.parser.get_status_code(), _json(answer.unpacked())
    except (OSError, ValueError, httptools.HttpParserError, zlib.error) as error:
        sock.close()
        raise NoAnswer(str(error) or type(error).__name__) from error
    except BaseException:
        sock.close()
        raise
    if not answer.reusable:
        sock.close()
        return found
    _here.open[route.origin] = sock
    if len(_here.open) > IDLE:
        _here.open.pop(next(iter(_here.open))).close()
    return found


def _left(deadline):
    """Return the seconds until the deadline; a moment when it has passed."""
    return max(0.001, deadline - time.monotonic())


def _connected(route, deadline):
    """Take this thread's idle connection to a server, or make one. Raises Unreachable: nothing has been sent yet."""
    if not hasattr(_here, "open"):
        _here.open = {}
    sock = _here.open.pop(route.origin, None)
    if sock is not None:
        idle = select.poll()
        idle.register(sock.fileno(), select.POLLIN)
        if not idle.poll(0):
            return sock
        sock.close()  # the other side has closed it, or talks out of turn
    scheme, host, port = route.origin
    try:
        sock = socket.create_connection((host, port), timeout=min(CONNECT_SECONDS, _left(deadline)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _tls().wrap_socket(sock, server_hostname=host) if scheme == "https" else sock
    except (OSError, ValueError) as error:
        raise Unreachable(str(error)) from error


@dataclasses.dataclass(frozen=True)
class _Route:
    """What of a URL goes where: ``origin`` is (scheme, host, port), ``head`` what every request begins with."""

    origin: tuple
    head: bytes


@functools.lru_cache(maxsize=64)
def _route(url, authorization):
    try:
        found = urllib.parse.urlsplit(url)
        origin = found.scheme, found.hostname, found.port or {"http": 80, "https": 443}.get(found.scheme)
        host = found.netloc.rpartition("@")[2].encode("idna").decode()
    except ValueError as error:
        raise Unreachable(str(error)) from error
    if not origin[1] or not origin[2]:
        raise Unreachable(f"{url} is not an address of the web")
    if found.username:
        login = f"{urllib.parse.unquote(found.username)}:{urllib.parse.unquote(found.password or '')}"
        authorization = authorization or "Basic " + base64.b64encode(login.encode()).decode()
    if not authorization.isprintable():
        raise Unreachable("the facilitator's token has characters that no header can have")
    target = (found.path or "/") + (f"?{found.query}" if found.query else "")
    lines = [
        f"POST {urllib.parse.quote(target, safe='/?=&%:;,+@!$()*~-._' + chr(39))} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Accept: */*",
        "Accept-Encoding: identity",
        "User-Agent: deal-holding-service/1.1",
        *([f"Authorization: {authorization}"] if authorization else []),
    ]
    return _Route(origin, "".join(f"{line}\r\n" for line in lines).encode())


@functools.cache
def _tls():
    return ssl.create_default_context(cafile=certifi.where())


class _Answer:
    """An HTTP answer as it comes in; httptools' parser calls the ``on_`` methods."""

    def __init__(self):
        self.parser = httptools.HttpResponseParser(self)
        self.body, self.encoding, self.received = bytearray(), b"", 0
        self.begun = self.framed = self.whole = self.reusable = False

    def take(self, data):
        """Add what was received; nothing means that the other side has closed."""
        self.received += len(data)
        if self.received > CAP + HEADERS:
            raise ValueError(f"the answer is larger than {CAP} bytes")
        if data:
            self.parser.feed_data(data)
        elif not self.received:
            raise ConnectionResetError("the connection was closed without an answer")
        elif self.framed or not self.begun:
            raise ValueError("the answer was cut short")
        else:  # its end is the connection's
            self.whole = True

    def on_header(self, name, value):
        name = name.lower()
        self.framed = self.framed or name in (b"content-length", b"transfer-encoding")
        if name == b"content-encoding":
            self.encoding = value.lower()

    def on_headers_complete(self):
        self.begun = True

    def on_body(self, data):
        self.body += data

    def on_message_complete(self):
        self.whole = self.parser.get_status_code() >= 200
        self.reusable = self.whole and self.parser.should_keep_alive()

    def unpacked(self):
        """Return the body, unpacked if it comes packed although we did not ask for that."""
        body = bytes(self.body)
        if self.encoding in (b"gzip", b"deflate"):
            body = zlib.decompressobj(wbits=47).decompress(body, CAP + 1)
        if len(body) > CAP:
            raise ValueError(f"the answer is larger than {CAP} bytes")
        return body


def _json(body):
    """Parse an answer whatever its status was; anything but an object or a list is no answer at all."""
    try:
        text = body.decode()
        value = None if too_deep(text) else orjson.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, (dict, list)) else None


def too_deep(text):
    """Whether JSON text nests deeper than anything we speak.

    Not left to RecursionError: a library that we use raises the interpreter's limit far beyond what its stack bears,
    so that hostile nesting would end the process.
    """
    if text.count("[") + text.count("{") <= DEEPEST:
        return False
    depth, inside = 0, False
    for found in _STRUCTURE.finditer(text):
        mark = found[0]
        if mark == '"':
            inside = not inside
        elif not inside and mark in "[{":
            depth += 1
            if depth > DEEPEST:
                return True
        elif not inside and mark in "]}":
            depth -= 1
    return False
