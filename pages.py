"""The free surface over HTTP: documents, discovery, questions, feedback and MCP. Bound by app.create_app."""

import functools

from flask import Response, request
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

import ask
import chain
import deprecations
import discovery
import documents
import feedback
import keys
import limits
import operations
import spec
import tools
from answers import Headers, add_headers, base_url, body_bytes, client, connection, json_body, respond
from db import sqlite3
from deals import Refusal
from express import Express

# What may run in a page of ours: nothing; its one style sheet stands in it.
PAGE_POLICY = "default-src 'none'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; style-src "
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
EXPOSED = ", ".join(
    (
        "PAYMENT-REQUIRED", "PAYMENT-RESPONSE", "WWW-Authenticate", "Payment-Receipt", "X-Svc-Invalid-Request",
        "X-Svc-Results-Requested", "X-Svc-Results-Delivered", "X-Svc-Refund", "ETag", "Location", "Retry-After", "Link",
        "RateLimit-Limit", "RateLimit-Policy", "RateLimit-Remaining", "RateLimit-Reset", "Deprecation", "Sunset",
        "Content-Disposition", "Repr-Digest",
    )
)  # fmt: skip
DAY = "public, max-age=86400"


class Surface:
    """What the free surface is made of, built once at start."""

    def __init__(self, world):
        deprecations.check()
        self.world = world
        self.tools = tools.catalogue(world.settings)

    def warm(self):
        """Build everything now, so that no request pays for it; tests that read no page never do."""
        return self.library, self.passages

    @functools.cached_property
    def frame(self):
        signer = keys.receipt_address(self.world.receipt_key)
        facts = documents.figures(
            self.world.settings, master_key=self.world.terminal.master_key, treasury=self.world.treasury,
            receipt_signer=signer, tools=[{"name": tool["name"], "summary": tool["title"]} for tool in self.tools],
            mcp_versions=tools.VERSIONS,
        )  # fmt: skip
        return facts, documents.frame(facts)

    @functools.cached_property
    def pages(self):
        return documents.build(*self.frame)

    @functools.cached_property
    def library(self):
        return documents.Library(self.pages, self.frame[1])

    @functools.cached_property
    def passages(self):
        return ask.index(self.pages)

    @functools.cached_property
    def page_policy(self):
        return PAGE_POLICY + documents.style_hash()

    @functools.lru_cache(maxsize=64)  # noqa: B019 (as long-lived as the process)
    def openapi(self, base):
        """Return the served OpenAPI document under one address."""
        document = deprecations.mark(spec.served(base, self.world.settings))
        return documents.stamped(chain.compact(document), "application/json")

    def caller(self, db, base, who):
        """Return what MCP tools work with, for one client that calls the service by the address ``base``."""
        return tools.Caller(db, self.world, base, who, self.library, self.passages, self.tools)

    def page(self, path):
        """Answer with a document in the form that the client likes best."""
        page = self.library.pages.get(path)
        if page is None:
            raise Refusal("not_found", "There is no such page; /docs has the list.")
        environ = request.environ
        kind = preferred(environ.get("HTTP_ACCEPT", ""), page.kinds)
        found = self.library.document(path, kind, base_url(self.world))
        if len(page.bodies) > 1:
            add_headers(environ, ("Vary", "Accept"))
        return self.send(environ, found, DAY if kind == documents.SVG else "no-cache")

    def send(self, environ, found, cache="no-cache"):
        """Answer with a Document, or with 304 when the client already has it."""
        if found.media_type == documents.HTML:
            environ["deals.policy"] = self.page_policy
        add_headers(environ, ("ETag", found.etag), ("Cache-Control", cache))
        if "HTTP_IF_NONE_MATCH" in environ and request.if_none_match.contains_weak(found.etag.strip('"')):
            return Response(status=304)
        return Response(found.body, content_type=found.media_type)


@functools.lru_cache(maxsize=1024)
def preferred(accept, kinds):
    """Return which of the media types offered an Accept header likes best; the first one when it has no wish."""
    names = [kind.partition(";")[0] for kind in kinds]
    best = parse_accept_header(accept, MIMEAccept).best_match(names, default=names[0])
    return kinds[names.index(best)]


def limited(world, answer, shelf=None):
    """Answer one request to a free document, if this client has a slot left in its window.

    With a shelf, the answer is kept there for everybody who asks the same way.
    """
    admitted, left, reset = limits.free(world.settings.database, client(), now=world.clock())
    if not admitted:
        raise limits.too_many(reset)
    response = answer()
    if shelf is not None:
        shelf.keep(request.environ, response)
    add_headers(request.environ, *limits.free_headers(left, reset))
    return response


class Shelf:
    """Serve a document again that was served before, to a request that asks the same way, without waking Flask.

    Only what is the same for everybody is here; who asks is counted first, as ever. Flask answers the rest:
    first requests, HEAD, conditional requests, refusals.
    """

    MOST = 512

    def __init__(self, application, world):
        self.application, self.world = application, world
        self.ready = {}

    def __call__(self, environ, start_response):
        found = self.ready.get(_manner(environ))
        if found is None or environ["REQUEST_METHOD"] != "GET" or "HTTP_IF_NONE_MATCH" in environ:
            return self.application(environ, start_response)
        try:
            settings, address = self.world.settings, environ.get("REMOTE_ADDR", "")
            admitted, left, reset = limits.free(settings.database, address, now=self.world.clock())
        except sqlite3.Error:
            admitted = False
        if not admitted:
            return self.application(environ, start_response)
        body, headers, environ["deals.policy"] = found
        start_response("200 OK", [*headers, *limits.free_headers(left, reset)])
        return [body]

    def keep(self, environ, response):
        """Put the answer that Flask has just made on the shelf."""
        going = deprecations.headers("GET", environ["PATH_INFO"], "")
        if response.status_code == 200 and environ["REQUEST_METHOD"] == "GET" and not going and len(_manner(environ)[1]) < 200:
            if len(self.ready) >= self.MOST:  # a sandbox may be called by any name; begin anew now and then
                self.ready.clear()
            headers = [*response.headers, *environ["deals.headers"]]
            self.ready[_manner(environ)] = response.get_data(), headers, environ.get("deals.policy", DATA_POLICY)


def _manner(environ):
    """Return everything in a request that a document depends on."""
    asked = environ.get("HTTP_ACCEPT", ""), environ.get("HTTP_HOST"), environ["wsgi.url_scheme"]
    return environ["PATH_INFO"], *asked


def register(app, world, *, warm=False):
    """Bind the routes of the free surface and the headers that every answer carries."""
    surface = Surface(world)
    if warm:
        surface.warm()
    shelf = Shelf(app.wsgi_app, world)
    _add_documents(app, world, surface, shelf)
    _add_discovery(app, world, surface)

    @app.post("/feedback")
    def send_feedback():
        return respond(feedback.send(connection(world), world, json_body(), client=client()), 201)

    @app.post("/mcp")
    def mcp():
        if request.mimetype != "application/json":
            raise Refusal("unsupported_media_type", "Send the message as application/json.")
        headers = {name.lower(): value for name, value in request.headers.items() if name.lower().startswith("mcp-")}
        caller = surface.caller(connection(world), base_url(world), client())
        status, body = tools.answer(caller, body_bytes(), headers)
        return Response(status=status) if body is None else respond(body, status, {"Cache-Control": "no-store"})

    if deprecations.DEPRECATIONS:

        @app.after_request
        def announce(response):
            response.headers.extend(deprecations.headers(request.method, request.path, base_url(world)))
            return response

    headers = [("X-Content-Type-Options", "nosniff")]
    if world.settings.base_url.startswith("https:"):
        headers.append(("Strict-Transport-Security", "max-age=31536000"))
    # Pages of any origin may read and pay: there are no cookies that this could expose.
    shared = [("Access-Control-Allow-Origin", "*"), ("Access-Control-Expose-Headers", EXPOSED)]
    rest = Headers(shelf, [*headers, ("Referrer-Policy", "no-referrer"), *shared], DATA_POLICY)
    app.wsgi_app = Express(rest, world, headers=[("Content-Type", "application/json"), *headers], for_pages=shared)


def _add_documents(app, world, surface, shelf):
    for path in ("/llms.txt", "/agents.md", "/pricing.md", "/docs"):
        app.add_url_rule(path, path, lambda path=path: limited(world, lambda: surface.page(path), shelf))
    for path in ("/deprecation-policy", "/robots.txt", "/favicon.svg", "/favicon.ico"):
        app.add_url_rule(path, path, lambda path=path: surface.page(path))

    @app.get("/")
    def landing():
        add_headers(request.environ, ("Link", discovery.homepage_links(base_url(world))))
        return surface.page("/")

    @app.get("/docs/<name>")
    def docs(name):
        return limited(world, lambda: surface.page(f"/docs/{name}"), shelf)

    @app.get("/docs/errors/<code>")
    def error_page(code):
        return limited(world, lambda: surface.page(f"/docs/errors/{code}"), shelf)

    @app.get("/openapi.json")
    def openapi():
        return limited(world, lambda: surface.send(request.environ, surface.openapi(base_url(world))), shelf)

    @app.get("/ask")
    def questions():
        def answer():
            found = ask.ask(surface.passages, request.args.get("q", ""), base_url(world))
            wanted = preferred(request.environ.get("HTTP_ACCEPT", ""), ("application/json", "text/markdown", "text/html"))
            if wanted == "text/markdown":
                page = documents.stamped(ask.as_markdown(found).encode(), documents.MARKDOWN)
            elif wanted == "text/html":
                page = surface.library.compose("Answers", ask.as_markdown(found), base_url(world))
            else:
                page = documents.stamped(chain.compact(found), "application/json")
            return surface.send(request.environ, page)

        return limited(world, answer)

    @app.get("/health")
    def health():
        def answer():
            fit, facts = operations.health(connection(world), world)
            return respond(facts, 200 if fit else 503, {"Cache-Control": "no-store"})

        return limited(world, answer)


def _add_discovery(app, world, surface):
    settings = world.settings

    @app.get("/endpoints")
    def endpoints():
        items = discovery.entries(base_url(world))
        return respond(discovery.page(items, request.args.get("limit"), request.args.get("cursor")))

    @app.get("/v1")
    def index():
        return respond(discovery.index(base_url(world), settings.mode))

    @app.get("/.well-known/x402")
    def well_known_x402():
        return respond(discovery.x402(base_url(world)))

    @app.get("/.well-known/api-catalog")
    def api_catalog():
        response = respond(discovery.api_catalog(base_url(world)))
        response.headers["Content-Type"] = 'application/linkset+json; profile="https://www.rfc-editor.org/info/rfc9727"'
        return response

    @app.get("/.well-known/mcp/server-card.json")
    def mcp_card():
        return respond(discovery.mcp_card(base_url(world), settings, surface.tools, tools.VERSIONS))
