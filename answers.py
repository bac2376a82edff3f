"""Between Flask and the rest: where a request came in, what it brought, and the shapes that answers take."""

import functools
import re

from flask import Response, request

import chain
import db as database
import payments
from deals import Refusal


BODY_CAP = 65536


def connection(world):
    """Return this thread's database connection."""
    return database.here(world.settings.database)


def base_url(world, environ=None):
    """Return the service's public address: configured, or in the sandbox the one the client called."""
    if world.settings.base_url:
        return world.settings.base_url
    environ = environ or request.environ
    called = _called(environ["wsgi.url_scheme"], environ.get("HTTP_HOST") or environ["SERVER_NAME"])
    if called is None:
        raise Refusal("invalid_request", "The Host header is not a host name.")
    return called


@functools.lru_cache(maxsize=256)
def _called(scheme, host):
    if not re.fullmatch(r"([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?", host):
        return None
    default = {"http": ":80", "https": ":443"}[scheme]
    return f"{scheme}://{host.removesuffix(default)}"


def client():
    """Return the address of the client: the peer, or what the configured number of proxies say."""
    return request.remote_addr or ""


class Ready(Response):
    """A response whose headers are final: its length is known and no URL in them needs mending."""

    def get_wsgi_headers(self, environ):
        return self.headers


def respond(value, status=200, headers=None):
    """Return a JSON response from a value or from ready bytes."""
    body = value if isinstance(value, bytes) else chain.compact(value)
    return Ready(body, status, headers, content_type="application/json")


def conditional(body, etag, content_type="application/json", cache="no-cache"):
    """Return a response with a strong ETag, or 304 when the client already has it."""
    headers = {"ETag": etag, "Cache-Control": cache}
    if "HTTP_IF_NONE_MATCH" in request.environ and request.if_none_match.contains_weak(etag.strip('"')):
        return Response(status=304, headers=headers)
    return Ready(body, 200, headers, content_type=content_type)


def too_large():
    return Refusal("body_too_large", f"The body is over {BODY_CAP} bytes; nothing was charged.")


def body_bytes():
    """Return the request's body; refuses with body_too_large without reading on, also when it has no length."""
    data = request.get_data(cache=False)
    if len(data) > BODY_CAP:
        raise too_large()
    return data


def paid_call(world, environ, body):
    """Take from a request to the paid endpoint what it needs, and nothing of Flask."""
    terms, refusal = None, None
    if environ["REQUEST_METHOD"] == "POST":
        terms, refusal = payments.read_body(world, body, environ.get("CONTENT_TYPE", ""))
    key = environ.get("HTTP_IDEMPOTENCY_KEY")
    if key is not None and not 0 < len(key) <= 128:
        terms, refusal = None, Refusal("invalid_request", "Idempotency-Key must have 1 to 128 characters.")
    return payments.Call(
        url=base_url(world, environ) + environ["PATH_INFO"],
        body=body,
        terms=terms,
        refusal=refusal,
        signatures=_values(environ, "HTTP_PAYMENT_SIGNATURE"),
        authorizations=_values(environ, "HTTP_AUTHORIZATION"),
        idempotency_key=key,
        client=environ.get("REMOTE_ADDR", ""),
    )


def _values(environ, name):
    """Return all values of a header; WSGI servers join those of equal names into one."""
    return (environ[name],) if name in environ else ()


def json_body():
    """Return the JSON object of a request body; an empty body is an empty object."""
    data = body_bytes()
    if not data:
        return {}
    if request.mimetype != "application/json":
        raise Refusal("unsupported_media_type", "Send the body as application/json.")
    try:
        return chain.read_json(data)
    except ValueError as error:
        raise Refusal("invalid_request", f"The body cannot be read: {error}.") from None


def add_headers(environ, *pairs):
    """Add headers to the answer of the request with this environment, past Flask, where that costs least."""
    environ.setdefault("deals.headers", []).extend(pairs)


class Headers:
    """Finish every answer: what :func:`add_headers` was told, what is always there, and the content policy;
    a header that is there already stays."""

    def __init__(self, application, always, policy):
        self.application, self.always, self.policy = application, always, policy

    def __call__(self, environ, start_response):
        def start(status, headers, *more):
            there = {name for name, _ in headers}
            policy = ("Content-Security-Policy", environ.get("deals.policy", self.policy))
            rest = [pair for pair in (*self.always, policy) if pair[0] not in there]
            return start_response(status, [*headers, *environ.get("deals.headers", ()), *rest], *more)

        return self.application(environ, start)
