"""One bounded GET from a stranger.

Whatever the other side does, :func:`get` returns within its deadline, holds at most its limits in memory, talks only to an
address it has checked, and never raises for the stranger's doing.
"""

import http.client
import io
import ipaddress
import queue
import socket
import ssl
import threading
import time
import urllib.parse
import zlib
from typing import NamedTuple

import certifi

SENT_BY_US = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "te", "upgrade", "expect"})
ADDRESSES_TRIED = 4

# Ranges that ipaddress calls global, or that carry an IPv4 address inside, so that the check of the outer one says nothing.
_NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in (
        "192.88.99.0/24",  # 6to4 relays
        "::/96",  # IPv4-compatible
        "::ffff:0:0/96",  # IPv4-mapped
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # local NAT64
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fec0::/10",  # site-local
    )
]


class Limits(NamedTuple):
    body_bytes: int = 1 << 20  # on the wire and decoded
    head_bytes: int = 64 << 10
    connect_s: float = 5.0
    total_s: float = 15.0  # from before the look-up to the last byte


class Answer(NamedTuple):
    """What came back. ``reason`` is ``ok`` for a whole response of any status, else why there is none."""

    reason: str  # ok, timeout, tls, dns, refused, malformed, too_large
    status: int | None  # known as soon as a status line arrived, even if the rest did not
    headers: dict[str, str]  # lower-case names
    body: bytes | None
    ms: int
    note: str = ""


class _Failed(Exception):
    """The exchange ended early, for the given reason."""

    def __init__(self, reason, note):
        super().__init__(note)
        self.reason, self.note = reason, note


def get(url, *, headers=None, loopback=False, limits=Limits(), tls=None, resolve=socket.getaddrinfo):
    """GET ``url`` once and return an :class:`Answer`.

    ``headers`` were checked by :func:`check_header`, ``url`` by :func:`check_url`. ``loopback`` admits loopback addresses,
    and plain http to these alone. Redirects are not followed, cookies and environment proxies not known.
    """
    started = time.monotonic()
    wire = _Wire(started + limits.total_s, limits)
    seen = {"status": None, "headers": {}}
    body, reason, note = None, "ok", ""
    try:
        body = _exchange(wire, url, headers or {}, loopback, tls, resolve, seen)
    except _Failed as failed:
        reason, note = failed.reason, failed.note
    except TimeoutError:
        reason, note = "timeout", "No whole answer in time."
    except ssl.SSLCertVerificationError as error:
        reason, note = "tls", f"The certificate was not accepted: {error.verify_message}."
    except ssl.SSLError:
        reason, note = "tls", "The TLS connection failed."
    except OSError:  # http.client's RemoteDisconnected included
        reason, note = "refused", "The connection was refused or broken off."
    except http.client.HTTPException:
        reason, note = "malformed", "The answer is not whole, well-formed HTTP."
    finally:
        wire.close()
    ms = max(0, round((time.monotonic() - started) * 1000))
    return Answer(reason, seen["status"], seen["headers"], body, ms, note)


def check_url(url, *, loopback=False):
    """Return the parts of an acceptable absolute URL; ValueError with a sentence otherwise."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url or len(url) > 500:
        raise ValueError("The URL must be printable ASCII without blanks, at most 500 characters (write names in punycode).")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not (loopback and parts.scheme == "http"):
        raise ValueError("The URL must begin with https:// (http:// only for a loopback target).")
    if not parts.hostname or parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise ValueError("The URL needs a host and must not carry user information.")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError("The URL must not have a query or a fragment.")
    if parts.port == 0:
        raise ValueError("The port must be 1 to 65535.")
    return parts


def check_header(name, value):
    """Refuse, with a ValueError, a header that is not ours to send or could smuggle a second one."""
    token = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
    if not name or name.lower().strip(token) or name.lower() in SENT_BY_US:
        raise ValueError(f"The header name {name!r} cannot be used.")
    if not value.isascii() or not value.isprintable() or value != value.strip() or len(value) > 8000:
        raise ValueError(f"The value of the header {name} must be printable ASCII.")


def _exchange(wire, url, headers, loopback, tls, resolve, seen):
    parts = check_url(url, loopback=loopback)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = _addresses(parts.hostname, port, wire, resolve)
    allowed = [entry for entry in found if _allowed(entry[4][0], loopback=loopback, plain=parts.scheme == "http")]
    if not allowed:
        raise _Failed("refused", "The name leads to no address that may be polled.")
    wire.connect(allowed[:ADDRESSES_TRIED])
    if parts.scheme == "https":
        wire.secure(tls or _TLS, parts.hostname)
    wire.send(_request(parts, headers))
    response = http.client.HTTPResponse(wire, method="GET")
    response.begin()
    seen["status"] = response.status
    seen["headers"] = {name.lower(): value for name, value in response.getheaders()}
    return _decoded(_body(response, wire.limits), seen["headers"].get("content-encoding", ""), wire.limits)


def _request(parts, headers):
    lines = [f"GET {parts.path or '/'} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close", "Accept-Encoding: identity"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("ascii")


def _addresses(host, port, wire, resolve):
    """Look ``host`` up. The system's look-up knows no deadline, so it runs in a thread that may be left behind."""
    answers = queue.SimpleQueue()

    def look_up():
        try:
            answers.put(resolve(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):
            answers.put(None)

    threading.Thread(target=look_up, daemon=True).start()
    try:
        found = answers.get(timeout=wire.remaining())
    except queue.Empty:
        raise TimeoutError from None
    if not found:
        raise _Failed("dns", "The name could not be resolved.")
    return found


def _allowed(address, *, loopback, plain):
    """Say whether one resolved address may be connected to."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return loopback
    if plain or not ip.is_global or ip.is_multicast or ip.is_reserved:
        return False
    return not any(ip.version == network.version and ip in network for network in _NOT_PUBLIC)


def _body(response, limits):
    """Read to the end, and not a byte past the limit."""
    if (response.length or 0) > limits.body_bytes:
        raise _Failed("too_large", f"The answer announces more than {limits.body_bytes} bytes.")
    chunks, size = [], 0
    try:
        while chunk := response.read(65536):
            size += len(chunk)
            if size > limits.body_bytes:
                raise _Failed("too_large", f"The answer has more than {limits.body_bytes} bytes.")
            chunks.append(chunk)
    except ValueError:  # http.client takes a negative chunk size at its word
        raise _Failed("malformed", "The answer is not whole, well-formed HTTP.") from None
    if response.length:  # http.client reports a short body only to those who read it in one go
        raise _Failed("malformed", "The answer ended before its announced length.")
    return b"".join(chunks)


def _decoded(body, encoding, limits):
    """Undo a content coding that was not asked for, never past the limit."""
    coding = encoding.strip().lower()
    if coding in ("", "identity") or not body:
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise _Failed("malformed", "The answer came in a content coding that was not asked for.")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | (0 if coding == "deflate" else 16))
    try:
        plain = unpacker.decompress(body, limits.body_bytes + 1)
    except zlib.error:
        raise _Failed("malformed", "The compressed answer is damaged.") from None
    if len(plain) > limits.body_bytes:
        raise _Failed("too_large", f"The answer unpacks to more than {limits.body_bytes} bytes.")
    if not unpacker.eof or unpacker.unused_data:
        raise _Failed("malformed", "The compressed answer is damaged.")
    return plain


class _Wire(io.RawIOBase):
    """A socket that counts what it reads and lets every wait end at one deadline.

    It is also the ``sock`` that http.client reads its response from.
    """

    def __init__(self, deadline, limits):
        self.deadline, self.limits = deadline, limits
        self.sock, self.count = None, 0

    def remaining(self):
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def connect(self, found):
        """Connect to the first of the checked addresses that takes us."""
        for position, (family, kind, protocol, _, address) in enumerate(found, start=1):
            self.sock = socket.socket(family, kind, protocol)
            self.sock.settimeout(min(self.limits.connect_s, self.remaining()))
            try:
                return self.sock.connect(address)
            except OSError:
                self.sock.close()
                if position == len(found):
                    raise

    def secure(self, context, hostname):
        self.sock.settimeout(self.remaining())
        self.sock = context.wrap_socket(self.sock, server_hostname=hostname)

    def send(self, data):
        self.sock.settimeout(self.remaining())
        self.sock.sendall(data)

    def makefile(self, mode):
        return io.BufferedReader(self, 8192)

    def readable(self):
        return True

    def readinto(self, buffer):
        self.sock.settimeout(self.remaining())
        count = self.sock.recv_into(buffer)
        self.count += count
        if self.count > self.limits.body_bytes + self.limits.head_bytes:
            raise _Failed("too_large", f"The answer has more than {self.limits.body_bytes} bytes.")
        return count

    def close(self):
        if self.sock is not None:
            self.sock.close()
        super().close()


_TLS = ssl.create_default_context(cafile=certifi.where())
