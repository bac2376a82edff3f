"""One GET from a stranger: bounded, pinned, verified, whatever the stranger does."""

import datetime
import gzip
import ipaddress
import socket
import ssl
import time
import zlib

import fetch
import pytest
from feedkit import Stranger, says

QUICK = fetch.Limits(body_bytes=4096, head_bytes=4096, connect_s=0.5, total_s=0.6)


def ask(stranger, path="/supported", **more):
    return fetch.get(stranger.url + path, loopback=True, **{"limits": QUICK} | more)


def refuse(answer, reason, status=None):
    assert (answer.reason, answer.status, answer.body) == (reason, status, None)
    assert answer.note
    assert answer.ms >= 0


# -- What works -----------------------------------------------------------------------------------------------


def test_a_whole_answer_comes_back_with_its_exact_bytes_and_its_time():
    with Stranger(says(b'{"kinds": []}\n', headers=["ETag: \"a\""])) as stranger:
        answer = ask(stranger)
    assert (answer.reason, answer.status, answer.body) == ("ok", 200, b'{"kinds": []}\n')
    assert answer.headers["etag"] == '"a"'
    assert 0 <= answer.ms < 600


def test_the_request_names_us_asks_for_no_coding_and_carries_our_headers():
    with Stranger(says(b"{}")) as stranger:
        ask(stranger, headers={"user-agent": "feed/1", "authorization": "Bearer k"})
    [request] = stranger.requests
    lines = request.split("\r\n")
    assert lines[0] == "GET /supported HTTP/1.1"
    assert f"Host: 127.0.0.1:{stranger.port}" in lines
    assert {"Accept-Encoding: identity", "user-agent: feed/1", "authorization: Bearer k"} <= set(lines)


def test_a_chunked_answer_is_put_together():
    def chunked(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    with Stranger(chunked) as stranger:
        assert ask(stranger).body == b"abcde"


@pytest.mark.parametrize("status", ["401 Unauthorized", "404 Not Found", "429 Too Many Requests", "500 Oops"])
def test_an_answer_of_any_status_is_an_answer(status):
    with Stranger(says(b"no", status, headers=["Retry-After: 7"])) as stranger:
        answer = ask(stranger)
    assert (answer.reason, answer.status, answer.body) == ("ok", int(status[:3]), b"no")
    assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize("coding, pack", [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)])
def test_a_coding_that_was_not_asked_for_is_undone(coding, pack):
    with Stranger(says(pack(b'{"kinds":[]}'), headers=[f"Content-Encoding: {coding}"])) as stranger:
        assert ask(stranger).body == b'{"kinds":[]}'


def test_environment_proxies_are_ignored(monkeypatch):
    with Stranger(says(b"proxy")) as proxy, Stranger(says(b"straight")) as stranger:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        assert ask(stranger).body == b"straight"
        assert proxy.requests == []


# -- What a stranger may try ----------------------------------------------------------------------------------


def drip(connection, data, times=40):
    for _ in range(times):
        connection.sendall(data)
        time.sleep(0.05)


@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"],
    ids=["of the head", "of the body", "of chunks"],
)
def test_a_slow_drip_ends_at_the_deadline(head):
    def slow(connection):
        connection.sendall(head)
        drip(connection, b"1\r\nx\r\n" if b"chunked" in head else b"H")

    started = time.monotonic()
    with Stranger(slow) as stranger:
        answer = ask(stranger)
    assert time.monotonic() - started < 1.2
    refuse(answer, "timeout", 200 if head else None)


def test_silence_ends_at_the_deadline():
    with Stranger(lambda connection: time.sleep(1)) as stranger:
        answer = ask(stranger)
    refuse(answer, "timeout")
    assert 550 <= answer.ms < 1200


def test_a_look_up_that_hangs_ends_at_the_deadline():
    answer = fetch.get("https://slow.example", limits=QUICK, resolve=lambda *_, **__: time.sleep(1))
    refuse(answer, "timeout")


def test_an_endless_body_ends_at_the_cap():
    def endless(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b"x" * 1024)

    with Stranger(endless) as stranger:
        refuse(ask(stranger), "too_large", 200)


def test_an_announced_length_over_the_cap_is_not_even_read():
    with Stranger(says(b"", headers=["X: y"])) as stranger:
        stranger.behave = lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4097\r\n\r\n")
        refuse(ask(stranger), "too_large", 200)


def test_an_answer_of_exactly_the_cap_is_fine():
    with Stranger(says(b"x" * 4096)) as stranger:
        assert len(ask(stranger).body) == 4096


def test_endless_headers_end_at_the_cap():
    def endless(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        for number in range(1000):
            connection.sendall(b"X-%d: %s\r\n" % (number, b"y" * 100))

    with Stranger(endless) as stranger:
        assert ask(stranger).reason in ("too_large", "malformed")


def test_endless_interim_answers_end_at_the_cap():
    def endless(connection):
        for _ in range(1000):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with Stranger(endless) as stranger:
        refuse(ask(stranger), "too_large")


def test_a_gzip_bomb_is_too_large_and_never_unpacked():
    bomb = gzip.compress(b"\0" * 1_000_000)
    assert len(bomb) < 4096
    with Stranger(says(bomb, headers=["Content-Encoding: gzip"])) as stranger:
        refuse(ask(stranger), "too_large", 200)


@pytest.mark.parametrize(
    "coding, content",
    [("gzip", b"not gzip"), ("gzip", gzip.compress(b"{}")[:-4]), ("gzip", gzip.compress(b"{}") * 2), ("br", b"x"), ("gzip, gzip", b"x")],
    ids=["no gzip at all", "cut short", "two in one", "another coding", "coded twice"],
)
def test_a_coding_that_cannot_be_undone_is_malformed(coding, content):
    with Stranger(says(content, headers=[f"Content-Encoding: {coding}"])) as stranger:
        refuse(ask(stranger), "malformed", 200)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_loopback_is_not_followed(status):
    with Stranger(says(b"secret")) as inner:
        with Stranger(says(b"", f"{status} Elsewhere", headers=[f"Location: {inner.url}/supported"])) as stranger:
            answer = ask(stranger)
        assert (answer.reason, answer.status) == ("ok", status)
        assert answer.headers["location"] == f"{inner.url}/supported"
        assert inner.requests == []


@pytest.mark.parametrize(
    "sent, status",
    [
        (b"\0\1\2 garbage\r\n\r\n", None),
        (b"SSH-2.0-OpenSSH_9.2\r\n", None),
        (b"HTTP/1.1 abc\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", 200),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n", 200),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n", 200),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc", 200),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 101 + b"\r\n", None),
    ],
    ids=["bytes", "another protocol", "no status", "cut short", "no chunk size", "negative chunk size", "cut chunk", "101 headers"],
)
def test_garbage_is_malformed(sent, status):
    with Stranger(lambda connection: connection.sendall(sent)) as stranger:
        refuse(ask(stranger), "malformed", status)


def test_hanging_up_without_a_word_is_refused():
    with Stranger(lambda connection: None) as stranger:
        refuse(ask(stranger), "refused")


def test_a_closed_port_is_refused():
    with Stranger(says(b"")) as stranger:
        url = stranger.url
    refuse(fetch.get(url, loopback=True, limits=QUICK), "refused")


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
def test_a_name_that_cannot_be_resolved_is_a_dns_failure(error):
    def resolve(*_, **__):
        raise error

    refuse(fetch.get("https://nowhere.example", limits=QUICK, resolve=resolve), "dns")


# -- Where we connect to --------------------------------------------------------------------------------------


def resolving(*addresses):
    """Return a look-up that gives these addresses, and counts."""

    def resolve(host, port, type):
        resolve.calls += 1
        return [
            (socket.AF_INET6 if ":" in address else socket.AF_INET, type, 0, "", (address, port)) for address in addresses
        ]  # fmt: skip

    resolve.calls = 0
    return resolve


@pytest.mark.parametrize(
    "address",
    """10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 127.0.0.1 0.0.0.0 100.64.0.1 192.0.2.1 198.18.0.1 224.0.0.1 239.1.1.1
    240.0.0.1 255.255.255.255 192.88.99.1 ::1 :: fe80::1 fe80::1%eth0 fc00::1 fec0::1 ff02::1 2001:db8::1 ::ffff:10.0.0.1
    ::ffff:8.8.8.8 ::127.0.0.1 64:ff9b::7f00:1 64:ff9b:1::1 2002:7f00:1:: 2001:0:1::1""".split(),
)
def test_an_address_that_is_not_public_is_never_connected_to(address, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    refuse(fetch.get("https://inner.example", limits=QUICK, resolve=resolving(address)), "refused")


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111"])
def test_a_public_address_is_connected_to_as_it_was_checked(address, monkeypatch):
    connected = []

    def connect(self, address):
        connected.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    resolve = resolving("10.0.0.1", address)
    refuse(fetch.get("https://public.example", limits=QUICK, resolve=resolve), "refused")
    assert connected == [address]
    assert resolve.calls == 1  # a second look-up could say something else


def test_loopback_needs_the_operators_word():
    with Stranger(says(b"{}")) as stranger:
        answer = fetch.get(stranger.url.replace("http:", "https:"), limits=QUICK)
    refuse(answer, "refused")
    assert stranger.requests == []


def test_plain_http_goes_to_loopback_alone(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    refuse(fetch.get("http://public.example", loopback=True, limits=QUICK, resolve=resolving("8.8.8.8")), "refused")


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example", "ftp://a.example", "https://", "https://user@a.example", "https://u:p@a.example", "https://@a.example",
        "https://a.example?x=1", "https://a.example/?", "https://a.example#f", "https://a.example#", "https://a.example:0",
        "https://a.example:99999", "https://a .example", "https://a.example\r\nX: y", "https://ä.example", "https://a.example\\@b",
        "//a.example", "https://a.example/" + "x" * 500,
    ],
)  # fmt: skip
def test_a_url_that_could_mean_something_else_is_not_accepted(url):
    with pytest.raises(ValueError, match="[Uu]RL|[Pp]ort"):
        fetch.check_url(url)


@pytest.mark.parametrize(
    "name, value",
    [("Host", "x"), ("content-length", "3"), ("Accept-Encoding", "br"), ("a b", "x"), ("", "x"), ("X", "a\r\nY: b"), ("X", "ä"), ("X", " a")],
)
def test_a_header_that_could_smuggle_is_not_accepted(name, value):
    with pytest.raises(ValueError, match="header"):
        fetch.check_header(name, value)


# -- TLS ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    trustme = pytest.importorskip("trustme")
    return trustme.CA()


def serving(authority, *names, **more):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    authority.issue_cert(*names, **more).configure_cert(context)
    return context


def trusting(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def by_name(stranger):
    return stranger.url.replace("127.0.0.1", "stranger.example"), resolving("127.0.0.1")


def test_a_right_certificate_is_accepted_and_the_name_is_sent(authority):
    context, asked = serving(authority, "stranger.example"), []
    context.sni_callback = lambda _, name, __: asked.append(name)
    with Stranger(says(b"{}"), tls=context) as stranger:
        url, resolve = by_name(stranger)
        answer = fetch.get(url, loopback=True, limits=QUICK, tls=trusting(authority), resolve=resolve)
    assert (answer.reason, answer.body) == ("ok", b"{}")
    assert asked == ["stranger.example"]


def test_a_certificate_for_another_name_is_refused(authority):
    with Stranger(says(b"{}"), tls=serving(authority, "other.example")) as stranger:
        url, resolve = by_name(stranger)
        refuse(fetch.get(url, loopback=True, limits=QUICK, tls=trusting(authority), resolve=resolve), "tls")
    assert stranger.requests == []


def test_a_certificate_of_nobody_known_is_refused(authority):
    with Stranger(says(b"{}"), tls=serving(authority, "stranger.example")) as stranger:
        url, resolve = by_name(stranger)
        refuse(fetch.get(url, loopback=True, limits=QUICK, resolve=resolve), "tls")


def test_an_expired_certificate_is_refused(authority):
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    with Stranger(says(b"{}"), tls=serving(authority, "stranger.example", not_after=past)) as stranger:
        url, resolve = by_name(stranger)
        refuse(fetch.get(url, loopback=True, limits=QUICK, tls=trusting(authority), resolve=resolve), "tls")


def test_plain_http_on_a_tls_port_is_a_tls_failure(authority):
    with Stranger(says(b"{}")) as stranger:
        answer = fetch.get(stranger.url.replace("http:", "https:"), loopback=True, limits=QUICK, tls=trusting(authority))
    assert answer.reason in ("tls", "refused", "timeout")


def test_a_handshake_that_never_ends_ends_at_the_deadline(authority):
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        answer = fetch.get(f"https://127.0.0.1:{listener.getsockname()[1]}", loopback=True, limits=QUICK)
    finally:
        listener.close()
    refuse(answer, "timeout")


def test_the_real_limits_are_those_of_the_manners():
    assert fetch.Limits() == (1_048_576, 65_536, 5.0, 15.0)
    assert ipaddress.ip_network("64:ff9b::/96") in fetch._NOT_PUBLIC
