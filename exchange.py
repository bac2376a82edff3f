"""One bounded JSON exchange with a server that may be slow, huge or hostile (facilitators, RPC nodes)."""

import io
import json
import re
import threading
import time

import requests
import urllib3
from requests.adapters import HTTPAdapter

CONNECT_SECONDS = 5.0
CAP = 1 << 20  # bytes of an answer that are read at most
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
    _here.deadline = time.monotonic() + seconds
    try:
        return _post(url, body, seconds, headers)
    except NoAnswer as error:
        left = _here.deadline - time.monotonic()
        if not again or left < seconds / 2 or not isinstance(error.__cause__, requests.exceptions.ConnectionError):
            raise
        return _post(url, body, left, headers)


def _post(url, body, seconds, headers):
    try:
        with _session().post(
            url,
            data=json.dumps(body, separators=(",", ":")).encode(),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})},
            timeout=(min(CONNECT_SECONDS, seconds), seconds),
            allow_redirects=False,
            stream=True,
        ) as response:
            return response.status_code, _json(_read(response))
    except (requests.exceptions.ConnectTimeout, requests.exceptions.InvalidURL) as error:
        raise Unreachable(str(error)) from error
    except requests.exceptions.ConnectionError as error:
        cause = error.args[0] if error.args else None
        if isinstance(getattr(cause, "reason", None), urllib3.exceptions.NewConnectionError):
            raise Unreachable(str(error)) from error
        raise NoAnswer(str(error)) from error
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise NoAnswer(str(error)) from error


def _read(response):
    body = bytearray()
    for chunk in response.iter_content(65536):
        body += chunk
        if len(body) > CAP:
            raise NoAnswer(f"the answer is larger than {CAP} bytes")
    return bytes(body)


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


def _session():
    """One session per thread: requests does not promise that sessions may be shared."""
    if not hasattr(_here, "session"):
        session = requests.Session()
        session.trust_env = False
        session.headers["User-Agent"] = "deal-holding-service/1.1"
        for scheme in ("http://", "https://"):
            session.mount(scheme, _DeadlineAdapter(max_retries=0))
        _here.session = session
    return _here.session


class _DeadlineAdapter(HTTPAdapter):
    """Use connections whose every single read ends at the exchange's deadline (a slow drip never outlives it)."""

    def init_poolmanager(self, *args, **kwargs):
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}


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


class _HTTPConnection(urllib3.connection.HTTPConnection):
    def connect(self):
        super().connect()
        self.sock = _DeadlineSocket(self.sock)


class _HTTPSConnection(urllib3.connection.HTTPSConnection):
    def connect(self):
        super().connect()
        self.sock = _DeadlineSocket(self.sock)


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection
