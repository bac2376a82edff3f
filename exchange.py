"""One bounded JSON exchange with a server that may be slow, huge or hostile (facilitators, RPC nodes)."""

import base64
import dataclasses
import functools
import http.client
import io
import json
import re
import select
import ssl
import threading
import time
import urllib.parse
import zlib

import certifi

CONNECT_SECONDS = 5.0
CAP = 1 << 20  # bytes of an answer that are read at most
IDLE = 10  # connections that one thread keeps for its next questions
DEEPEST = 100
_STRUCTURE = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


class Unreachable(Exception):
    """The request certainly never reached the other side, so nothing can have come of it."""


class NoAnswer(Exception):
    """The request may have been received and acted upon, but no complete answer came back."""


_here = threading.local()


def post_json(url, body, *, seconds, headers=None, again=False):
    """POST ``body`` as JSON and return (status, parsed JSON or None) within ``seconds`` in all.

    Redirects are not followed, proxies of the environment are ignored, certificates are checked, and no
    more than 1 MiB is read. ``again``: a pure question, so a connection that the other side had closed in the
    meantime is worth one more try. Raises Unreachable or NoAnswer.
    """
    data = json.dumps(body, separators=(",", ":")).encode()
    _here.deadline = time.monotonic() + seconds
    try:
        return _post(url, data, headers or {})
    except NoAnswer as error:
        cut = isinstance(error.__cause__, (ConnectionError, http.client.BadStatusLine))
        if not again or not cut or _left() < seconds / 2:
            raise
        return _post(url, data, headers or {})


def _post(url, data, headers):
    parts = _split(url)
    connection = _connected(parts)
    try:
        connection.sock.settimeout(_left())
        connection.request("POST", parts.target, data, {**parts.headers, **headers})
        response = connection.getresponse()
        answer = response.status, _json(_read(response))
    except (OSError, ValueError, http.client.HTTPException, zlib.error) as error:
        connection.close()
        raise NoAnswer(str(error) or type(error).__name__) from error
    except BaseException:
        connection.close()
        raise
    if not response.will_close:
        _here.open[parts.origin] = connection
        if len(_here.open) > IDLE:
            _here.open.pop(next(iter(_here.open))).close()
    return answer


def _left():
    """Return the seconds until the deadline of this thread's exchange; a moment when it has passed."""
    return max(0.001, _here.deadline - time.monotonic())


def _connected(parts):
    """Take this thread's idle connection to a server, or make one. Raises Unreachable: nothing has been sent yet."""
    if not hasattr(_here, "open"):
        _here.open = {}
    connection = _here.open.pop(parts.origin, None)
    if connection is not None:
        idle = select.poll()
        idle.register(connection.sock.fileno(), select.POLLIN)
        if not idle.poll(0):
            return connection
        connection.close()  # the other side has closed it, or talks out of turn
    kind = _HTTPS if parts.origin[0] == "https" else _HTTP
    try:
        connection = kind(*parts.origin[1:], timeout=min(CONNECT_SECONDS, _left()))
        connection.connect()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreachable(str(error)) from error
    return connection


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What of a URL goes where: ``origin`` is (scheme, host, port)."""

    origin: tuple
    target: str
    headers: dict


@functools.lru_cache(maxsize=64)
def _split(url):
    try:
        found = urllib.parse.urlsplit(url)
        origin = found.scheme, found.hostname, found.port
    except ValueError as error:
        raise Unreachable(str(error)) from error
    if found.scheme not in ("http", "https") or not found.hostname:
        raise Unreachable(f"{url} is not an address of the web")
    headers = {
        "Content-Type": "application/json",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "User-Agent": "deal-holding-service/1.1",
    }
    if found.username:
        login = f"{urllib.parse.unquote(found.username)}:{urllib.parse.unquote(found.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    target = (found.path or "/") + (f"?{found.query}" if found.query else "")
    return _Parts(origin, urllib.parse.quote(target, safe="/?=&%:;,+@!$'()*~-._"), headers)


def _read(response):
    """Read a body to its end, unpacked if it comes packed although we did not ask for that."""
    body = response.read(CAP + 1)
    if response.length:
        raise http.client.IncompleteRead(body, response.length) if len(body) <= CAP else _too_large()
    if response.getheader("Content-Encoding", "identity").lower() in ("gzip", "deflate"):
        body = zlib.decompressobj(wbits=47).decompress(body, CAP + 1)
    if len(body) > CAP:
        raise _too_large()
    return body


def _too_large():
    return NoAnswer(f"the answer is larger than {CAP} bytes")


def _json(body):
    """Parse an answer whatever its status was; anything but an object or a list is no answer at all."""
    try:
        text = body.decode()
        value = None if too_deep(text) else json.loads(text)
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


class _DeadlineSocket:
    """A socket that reads with the time that is left instead of a fresh time-out per read."""

    def __init__(self, sock):
        self._sock = sock

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def makefile(self, mode, *args, **kwargs):
        return io.BufferedReader(_DeadlineReader(self._sock))


class _DeadlineReader(io.RawIOBase):
    def __init__(self, sock):
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)  # keeps the descriptor open as http.client expects

    def readable(self):
        return True

    def readinto(self, buffer):
        left = _here.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline of the exchange has passed")
        self._sock.settimeout(left)
        return self._file.readinto(buffer)

    def close(self):
        self._file.close()
        super().close()


class _HTTP(http.client.HTTPConnection):
    def connect(self):
        super().connect()
        self.sock = _DeadlineSocket(self.sock)


class _HTTPS(http.client.HTTPSConnection):
    def __init__(self, *args, **options):
        super().__init__(*args, context=_tls(), **options)

    def connect(self):
        super().connect()
        self.sock = _DeadlineSocket(self.sock)


@functools.cache
def _tls():
    return ssl.create_default_context(cafile=certifi.where())
