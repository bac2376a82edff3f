"""The HTTP surface: requests in, answers out. Everything it says is decided in the modules below it."""

import functools
import json
import logging
import sqlite3

from flask import Flask, Response, render_template, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge
from werkzeug.middleware.proxy_fix import ProxyFix

import actions
import chain
import db as database
import deals
import feedroutes
import feedviews
import operations
import payments
import sandbox
import settings as configuration
import spec
import targets
import world as worlds
from deals import Refusal

BODY_CAP = 65536
EXPOSED = ", ".join(
    (
        "PAYMENT-REQUIRED", "PAYMENT-RESPONSE", "WWW-Authenticate", "Payment-Receipt", "X-Svc-Invalid-Request",
        "X-Svc-Results-Requested", "X-Svc-Results-Delivered", "X-Svc-Refund", "ETag", "Location", "Retry-After", "Link",
        "RateLimit-Limit", "RateLimit-Policy", "RateLimit-Remaining", "RateLimit-Reset", "Deprecation", "Sunset",
        "Content-Disposition", "Repr-Digest",
    )
)  # fmt: skip
ALLOWED = "Content-Type, Authorization, PAYMENT-SIGNATURE, Idempotency-Key, If-None-Match"
log = logging.getLogger("deals")


def create_app(settings=None, world=None):
    """Build the WSGI application from the environment, or from a given world (tests, simulator)."""
    settings = settings or (world.settings if world else configuration.load())
    if world is None:
        db = database.connect(settings.database)
        database.check(db, mode=settings.mode)
        world = worlds.build(settings, db)
        db.close()  # every worker opens its own after the fork
    spec.compile_all("DealRequest", *actions.SCHEMAS.values())
    app = Flask("deals")
    app.config["MAX_CONTENT_LENGTH"] = BODY_CAP + 1  # one more, to notice where a chunked body was cut
    app.json.sort_keys = False
    app.world = world
    if settings.proxies:
        app.wsgi_app = ProxyFix(app.wsgi_app, x_for=settings.proxies, x_proto=0, x_host=0, x_prefix=0)
    _add_errors(app)
    _add_deals(app, world)
    _add_feed(app, world)
    if settings.sandbox:
        _add_sandbox(app, world)
    app.after_request(_cors)
    return app


def connection(world):
    """Return this thread's database connection."""
    return database.here(world.settings.database)


def base_url(world):
    """Return the service's public address: configured, or in the sandbox the one the client called."""
    return world.settings.base_url or request.host_url.rstrip("/")


def respond(value, status=200, headers=None):
    """Return a JSON response from a value or from ready bytes."""
    body = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    return Response(body, status, headers, content_type="application/json")


def _cors(response):
    """Let pages of any origin read and pay; there are no cookies that this could expose."""
    response.headers["Access-Control-Allow-Origin"] = "*"
    response.headers["Access-Control-Expose-Headers"] = EXPOSED
    if request.method == "OPTIONS":
        response.headers["Access-Control-Allow-Headers"] = ALLOWED
        response.headers["Access-Control-Allow-Methods"] = response.headers.get("Allow", "GET, POST, OPTIONS")
        response.headers["Access-Control-Max-Age"] = "86400"
    return response


# -- Errors -------------------------------------------------------------------------------------------------


def _add_errors(app):
    @app.errorhandler(Refusal)
    def refused(refusal):
        return respond(refusal.body(), refusal.status, refusal.headers)

    @app.errorhandler(HTTPException)
    def http_error(error):
        return refused(_as_refusal(error))

    @app.errorhandler(sqlite3.OperationalError)
    def storage_error(error):
        log.error("the database could not be used: %s", error)
        sentence = "The service cannot record anything now; nothing was charged. Try again."
        return refused(Refusal("unavailable", sentence, headers={"Retry-After": "5"}))

    @app.errorhandler(Exception)
    def bug(error):
        log.exception("%s %s failed", request.method, request.path)
        return refused(Refusal("internal_error", "The service failed on this request; no payment was settled."))


def _as_refusal(error):
    """Say in the service's own words what Flask refused."""
    if isinstance(error, NotFound):
        return Refusal("not_found", "There is nothing at this path; see /openapi.json for what there is.")
    if isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        return Refusal("method_not_allowed", f"This path takes {allowed}.", headers={"Allow": allowed})
    if isinstance(error, RequestEntityTooLarge):
        return _too_large()
    return Refusal("invalid_request", error.description or "The request is malformed.", status=error.code)


# -- Deals --------------------------------------------------------------------------------------------------


def _add_deals(app, world):
    @app.route("/x402/deal", methods=["GET", "POST"])
    @app.route("/mpp/deal", methods=["GET", "POST"], endpoint="mpp_deal")
    def deal():
        answer = payments.create(connection(world), world, _paid_call(world))
        return respond(answer.body, answer.status, answer.headers)

    @app.get("/v1/deals/<deal_id>")
    def read_deal(deal_id):
        body, etag = actions.read(connection(world), world, deal_id)
        return conditional(body, etag)

    @app.post("/v1/deals/<deal_id>/<action>")
    def act(deal_id, action):
        if action not in actions.ACTORS:
            raise NotFound
        row = actions.act(connection(world), world, deal_id, action, json_body(), client=request.remote_addr or "")
        body, etag = actions.rendered(connection(world), world, row)
        return respond(body, headers={"ETag": etag, "Cache-Control": "no-store"})

    @app.get("/health")
    def health():
        fit, facts = operations.health(connection(world), world)
        return respond(facts, 200 if fit else 503, {"Cache-Control": "no-store"})

    @app.get("/openapi.json")
    def openapi():
        return respond(spec.served(base_url(world)))


def conditional(body, etag, content_type="application/json", cache="no-cache"):
    """Return a response with a strong ETag, or 304 when the client already has it."""
    headers = {"ETag": etag, "Cache-Control": cache}
    if request.if_none_match.contains_weak(etag.strip('"')):
        return Response(status=304, headers=headers)
    return Response(body, 200, headers, content_type=content_type)


def _too_large():
    return Refusal("body_too_large", f"The body is over {BODY_CAP} bytes; nothing was charged.")


def body_bytes():
    """Return the request's body; refuses with body_too_large without reading on, also when it has no length."""
    data = request.get_data(cache=False)
    if len(data) > BODY_CAP:
        raise _too_large()
    return data


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


def _paid_call(world):
    """Take from the request what the paid endpoint needs, and nothing of Flask."""
    body = body_bytes() if request.method == "POST" else b""
    terms, refusal = None, None
    if request.method == "POST":
        terms, refusal = payments.read_body(world, body, request.content_type or "")
    key = request.headers.get("Idempotency-Key")
    if key is not None and not 0 < len(key) <= 128:
        terms, refusal = None, Refusal("invalid_request", "Idempotency-Key must have 1 to 128 characters.")
    return payments.Call(
        url=base_url(world) + request.path,
        body=body,
        terms=terms,
        refusal=refusal,
        signatures=tuple(request.headers.getlist("PAYMENT-SIGNATURE")),
        authorizations=tuple(request.headers.getlist("Authorization")),
        idempotency_key=key,
        client=request.remote_addr or "",
    )


# -- The feed -----------------------------------------------------------------------------------------------


def _add_feed(app, world):
    for path, view in feedroutes.ROUTES.items():
        app.add_url_rule(path, endpoint=path, view_func=functools.partial(_feed, world, view))


def _feed(world, view, **values):
    now_ns = int(world.clock() * targets.SECOND)
    query = feedviews.Query(values, request.path, now_ns, base_url(world))
    tags = request.headers.get("If-None-Match", "")
    reply = feedroutes.respond(connection(world), view, query, request.args.to_dict(flat=False), if_none_match=tags)
    body = reply.body
    if reply.template:
        body = render_template(reply.template, mode=world.settings.mode, service=world.settings.service_name, **reply.context)
    return Response(body, reply.status, reply.headers)


# -- Sandbox ------------------------------------------------------------------------------------------------


def _add_sandbox(app, world):
    facilitator = world.facilitators[0]

    @app.get("/sandbox/supported")
    def supported():
        return respond(facilitator.supported())

    @app.post("/sandbox/<any(verify, settle):verb>")
    def facilitate(verb):
        return respond(facilitator.answer(verb, json_body()))

    @app.post("/sandbox/faucet")
    def faucet():
        body = spec.check("FaucetRequest", json_body())
        db = connection(world)
        with database.transaction(db):
            sandbox.mint(db, body["address"].lower(), deals.units(body.get("amount_usd", "1000")))
        units = sandbox.balance(db, body["address"].lower())
        return respond({"address": chain.checksum(body["address"].lower()), "balance_usd": deals.usd(units)})

    @app.get("/sandbox/balances/<address>")
    def balance(address):
        if not chain.is_address(address):
            raise Refusal("invalid_request", "The address must be 0x and 40 hex digits with a right checksum.")
        units = sandbox.balance(connection(world), address.lower())
        return respond({"address": chain.checksum(address.lower()), "balance_usd": deals.usd(units)})

    @app.post("/sandbox/deals/<deal_id>/skip")
    def skip(deal_id):
        body = spec.check("SkipRequest", json_body())
        db = connection(world)
        deals.get(db, deal_id)
        sandbox.skip(db, deal_id, body["seconds"])
        return respond(actions.read(db, world, deal_id)[0])
