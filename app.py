"""The HTTP surface: requests in, answers out. Everything it says is decided in the modules below it."""

import functools
import logging

from flask import Flask, Response, render_template, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge
from werkzeug.middleware.proxy_fix import ProxyFix

import actions
import chain
import db as database
import deals
import feedroutes
import feedviews
import pages
import payments
import sandbox
import settings as configuration
import spec
import targets
import world as worlds
from answers import BODY_CAP, base_url, body_bytes, client, conditional, connection, json_body, paid_call, respond, too_large
from db import sqlite3
from deals import Refusal

ALLOWED = (
    "Content-Type, Authorization, PAYMENT-SIGNATURE, Idempotency-Key, If-None-Match, MCP-Protocol-Version, Mcp-Method, Mcp-Name"
)
log = logging.getLogger("deals")


def create_app(settings=None, world=None):
    """Build the WSGI application from the environment, or from a given world (tests, simulator)."""
    settings = settings or (world.settings if world else configuration.load())
    built = world is None
    if built:
        db = database.connect(settings.database)
        database.check(db, mode=settings.mode)
        world = worlds.build(settings, db)
        db.close()  # every worker opens its own after the fork
    spec.compile_all("DealRequest", "FeedbackRequest", *actions.SCHEMAS.values())
    app = Flask("deals", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_CAP + 1  # one more, to notice where a chunked body was cut
    app.json.sort_keys = False
    app.world = world
    _add_errors(app, world)
    _add_deals(app, world)
    _add_feed(app, world)
    pages.register(app, world, warm=built)
    if settings.sandbox:
        _add_sandbox(app, world)
    app.after_request(_preflight)
    if settings.proxies:
        app.wsgi_app = ProxyFix(app.wsgi_app, x_for=settings.proxies, x_proto=0, x_host=0, x_prefix=0)
    return app


def _preflight(response):
    """Say what a page of another origin may send."""
    if request.method == "OPTIONS":
        response.headers["Access-Control-Allow-Headers"] = ALLOWED
        response.headers["Access-Control-Allow-Methods"] = response.headers.get("Allow", "GET, POST, OPTIONS")
        response.headers["Access-Control-Max-Age"] = "86400"
    return response


# -- Errors -------------------------------------------------------------------------------------------------


def _add_errors(app, world):
    @app.before_request
    def raised_before():
        if "deals.error" in request.environ:  # by express.py
            raise request.environ["deals.error"]

    @app.errorhandler(Refusal)
    def refused(refusal):
        page = f"/docs/errors/{refusal.code}"
        try:
            page = base_url(world) + page
        except Refusal:
            pass  # a Host header that is none
        return respond({**refusal.body(), "docs": page}, refusal.status, refusal.headers)

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
        return too_large()
    return Refusal("invalid_request", error.description or "The request is malformed.", status=error.code)


# -- Deals --------------------------------------------------------------------------------------------------


def _add_deals(app, world):
    @app.route("/x402/deal", methods=["GET", "POST"])
    @app.route("/mpp/deal", methods=["GET", "POST"], endpoint="mpp_deal")
    def deal():
        body = body_bytes() if request.method == "POST" else b""
        answer = payments.create(connection(world), world, paid_call(world, request.environ, body))
        return respond(answer.body, answer.status, answer.headers)

    @app.get("/v1/deals/<deal_id>")
    def read_deal(deal_id):
        body, etag = actions.read(connection(world), world, deal_id)
        return conditional(body, etag)

    @app.post(f"/v1/deals/<deal_id>/<any({', '.join(actions.ACTORS)}):action>")
    def act(deal_id, action):
        row = actions.act(connection(world), world, deal_id, action, json_body(), client=client())
        body, etag = actions.rendered(connection(world), world, row)
        return respond(body, headers={"ETag": etag, "Cache-Control": "no-store"})


# -- The feed -----------------------------------------------------------------------------------------------


def _add_feed(app, world):
    for path, view in feedroutes.ROUTES.items():
        app.add_url_rule(path, path, functools.partial(_feed, world, view))


def _feed(world, view, **values):
    query = feedviews.Query(values, request.path, int(world.clock() * targets.SECOND), base_url(world))
    tags = request.headers.get("If-None-Match", "")
    reply = feedroutes.respond(connection(world), view, query, request.args.to_dict(flat=False), if_none_match=tags)
    if reply.policy:
        request.environ["deals.policy"] = reply.policy
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
        return respond(facilitator.answer(verb, spec.check("FacilitatorRequest", json_body())))

    @app.post("/sandbox/faucet")
    def faucet():
        return respond(sandbox.faucet(connection(world), spec.check("FaucetRequest", json_body())))

    @app.get("/sandbox/balances/<address>")
    def balance(address):
        if not chain.is_address(address):
            raise Refusal("invalid_request", "The address must be 0x and 40 hex digits with a right checksum.")
        return respond(sandbox.holding(connection(world), address))

    @app.post("/sandbox/deals/<deal_id>/skip")
    def skip(deal_id):
        body = spec.check("SkipRequest", json_body())
        db = connection(world)
        deals.get(db, deal_id)
        sandbox.skip(db, deal_id, body["seconds"])
        return respond(actions.read(db, world, deal_id)[0])
