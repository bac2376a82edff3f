"""The service as tools of the Model Context Protocol: JSON-RPC in, JSON-RPC out, whatever carries it.

Two revisions: 2026-07-28, where every request stands alone, and 2025-11-25, which begins with ``initialize``.
Nothing is remembered between calls. Every tool ends in the very functions that the routes call.
"""

import base64
import copy
import dataclasses
import json
import re

import actions
import ask
import chain
import deals
import discovery
import feedback
import feedroutes
import feedviews
import limits
import operations
import payments
import sandbox
import spec
import targets
from deals import Refusal

CURRENT, BEFORE = "2026-07-28", "2025-11-25"
VERSIONS = (CURRENT, BEFORE)
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
HEADER_MISMATCH, UNSUPPORTED_VERSION = -32020, -32022
PAYMENT_REQUIRED, PAYMENT_REFUSED = -32042, -32043  # MPP's MCP transport (draft)
STATUS = {PARSE_ERROR: 400, INVALID_REQUEST: 400, INVALID_PARAMS: 400, HEADER_MISMATCH: 400, UNSUPPORTED_VERSION: 400,
          METHOD_NOT_FOUND: 404}  # fmt: skip
META = "io.modelcontextprotocol/"
X402_PAYMENT, X402_RESPONSE = "x402/payment", "x402/payment-response"
MPP_CREDENTIAL, MPP_RECEIPT = "org.paymentauth/credential", "org.paymentauth/receipt"
DOCUMENTS = ("agents.md", "pricing.md", "llms.txt", "deprecation-policy", "openapi.json")
LIMITED = ("ask", "read_document", "health")  # they read the free documents
INSTRUCTIONS = (
    "Holds a payment between a buyer and a seller. create_deal costs money; every other tool is free. Act only on a deal"
    " whose state is funded or later. After a result with state pending, never pay again: call get_deal. confirm_deal,"
    " cancel_deal and refund_deal are final. Read the document agents.md before you pay."
)


class Fault(Exception):
    """A JSON-RPC error: the call itself is wrong, or must be paid by MPP."""

    def __init__(self, code, message, data=None):
        super().__init__(message)
        self.error = {"code": code, "message": message, **({"data": data} if data is not None else {})}


@dataclasses.dataclass(frozen=True)
class Caller:
    """What a tool works with: the world, and who asks under which address."""

    db: object
    world: object
    base_url: str
    client: str
    library: object  # documents.Library
    passages: object  # ask.index
    tools: tuple = ()


# -- The tools ----------------------------------------------------------------------------------------------


def catalogue(settings):
    """Return the tools as ``tools/list`` shows them, their schemas taken from the published document."""
    found = [
        _tool("create_deal", "Create a deal: hold a payment",
              f"COSTS MONEY: {_price(settings)}, paid by x402. Called without payment it charges nothing and"
              " returns an error result whose structuredContent is the x402 PaymentRequired object: check that payTo is the"
              " deposit of your own terms, sign it, and call again with the same arguments and the payment in"
              " _meta[\"x402/payment\"]. NEVER pay twice for the same arguments: if the result says state pending, or the"
              " answer was lost, call again with the SAME payment or call get_deal. Keep the secret: only its SHA-256 goes in"
              " here.", _deal_schema(), paid=True),
        _tool("create_deal_mpp", "Create a deal: hold a payment (MPP)",
              f"COSTS MONEY: {_price(settings)}. The same as create_deal, for clients that pay by MPP: unpaid it answers JSON-RPC error -32042"
              " with the challenge; call again with the credential in _meta[\"org.paymentauth/credential\"]. Either tool"
              " takes either payment. NEVER pay twice for the same arguments.", _deal_schema(), paid=True),
        _tool("get_deal", "Read a deal",
              "Free. The public record: state, timers, transfers, what can be done now (actions) and what the clock does"
              " next (next). Safe to repeat.", _object({"deal_id": _deal_id()}), reads=True),
    ]  # fmt: skip
    found += [_action_tool(action, *words) for action, words in _ACTIONS.items()]
    found += [
        _tool("list_endpoints", "List the paid endpoints", "Free. The paid HTTP endpoints and where to get a live quote.",
              _object({"limit": {"type": "integer", "minimum": 1, "maximum": 50}, "cursor": {"type": "string"}}, ()),
              reads=True),
        _tool("ask", "Search the documents", "Free. The best passages of the documentation for a few words, with links.",
              _object({"q": {"type": "string", "description": "A few words."}}), reads=True),
        _tool("read_document", "Read a document", "Free. One of the service's documents; agents.md is the complete guide.",
              _object({"name": {"type": "string", "enum": list(DOCUMENTS)}}), reads=True),
        _tool("health", "Is the service fit?", "Free. Whether money can be moved and recorded now.", _object({}), reads=True),
        _tool("feedback", "Send a note to the operators", "Free. Ten notes an hour.", _component("FeedbackRequest")),
    ]  # fmt: skip
    found += [_tool(name, *words, _query(path), reads=True) for name, (path, *words) in _FEED.items()]
    if settings.sandbox:
        found += [
            _tool("sandbox_faucet", "Get sandbox dollars", "Free, and worth nothing: dollars of this sandbox.",
                  _component("FaucetRequest")),
            _tool("sandbox_balance", "Read a sandbox balance", "Free. What an address holds in sandbox dollars.",
                  _object({"address": {"type": "string", "pattern": "^0x[0-9a-fA-F]{40}$"}}), reads=True),
            _tool("sandbox_skip", "Move a deal into the past", "Free. Lets a deal's timers run out, in the sandbox only.",
                  _with_id(_component("SkipRequest"))),
        ]  # fmt: skip
    return tuple(found)


def _price(settings):
    return f"amount_usd x {1 + settings.fee_percent / 100:.2f} + {deals.usd(settings.fee_units)} dollars"


_PROOF = (
    " Without a proof it changes nothing and returns proof_required with the exact text to sign in sign. Safe to repeat"
    " with the same content."
)
_ACTIONS = {
    "accept": ("Accept a deal (seller)", "The seller takes the deal, before deliver_by; the buyer can no longer cancel."),
    "deliver": ("Deliver (seller)", "The seller delivers, before deliver_by; url, sha256 and note become public and can"
                " not be changed afterwards. The review window starts."),
    "refund": ("Refund the buyer (seller)", "FINAL. The seller gives the money back."),
    "confirm": ("Confirm (buyer)", "FINAL. The seller is paid. Check the delivered work first."),
    "cancel": ("Cancel (buyer)", "FINAL. The buyer takes the money back; only while the seller has not accepted."),
    "dispute": ("Dispute the delivery (buyer)", "Before review_ends_at. reason becomes public; the operator decides."),
    "statement": ("Answer a dispute (seller)", "Once, and public."),
    "split": ("Offer a split (either party)", "FINAL when both parties' latest offers name the same seller_usd: the seller"
              " gets that, the buyer the rest. Until then it is an offer that a later one replaces."),
}  # fmt: skip


_WATCHED = "Free. Declarations only: what GET /supported said, when; nothing behind it was tried."
_FEED = {
    "facilitators": ("/v1/feed/facilitators", "List the watched facilitators, or read one",
                     f"{_WATCHED} All of them, or one by its id: latest check, declaration, capabilities."),
    "feed_summary": ("/v1/feed/summary", "Count the facilitators that answer", _WATCHED),
    "feed_events": ("/v1/feed/events", "Read what changed in declarations", f"{_WATCHED} Oldest first, in pages."),
    "feed_capabilities": ("/v1/feed/capabilities", "Who declares a scheme, network or extension", _WATCHED),
    "feed_standards": ("/v1/feed/standards", "List the standards that declarations name", _WATCHED),
}  # fmt: skip


def _query(path):
    """Return the query parameters of a published GET as a tool's arguments; a list's items have an id."""
    listed = spec.document()["paths"][path]["get"]["parameters"]
    found = {part["name"]: {**part["schema"], "description": part["description"]} for part in listed if part.get("in") == "query"}
    if path == "/v1/feed/facilitators":
        found["id"] = {"type": "string", "description": "A facilitator's id."}
    return _object(found, ())


def _tool(name, title, description, schema, *, reads=False, paid=False, final=False):
    hints = {"readOnlyHint": reads, "destructiveHint": final or paid, "idempotentHint": not paid, "openWorldHint": paid}
    return {"name": name, "title": title, "description": description, "inputSchema": schema, "annotations": hints}


def _action_tool(action, title, text):
    schema = _with_id(_component(actions.SCHEMAS[action]))
    return _tool(f"{action}_deal", title, f"Free. {text}{_PROOF}", schema, final="FINAL" in text)


def _component(name):
    schema = copy.deepcopy(spec.document()["components"]["schemas"][name])
    schema.pop("examples", None)
    return schema


def _deal_schema():
    schema = _component("DealRequest")
    schema["properties"]["idempotency_key"] = {
        "type": "string", "minLength": 1, "maxLength": 128,
        "description": "Optional key of your own; the same key with other terms is refused.",
    }  # fmt: skip
    return schema


def _deal_id():
    return {"type": "string", "pattern": "^deal_[a-z2-7]{26}$", "description": "The deal's id."}


def _with_id(schema):
    schema["properties"] = {"deal_id": _deal_id(), **schema["properties"]}
    schema["required"] = ["deal_id", *schema.get("required", ())]
    return schema


def _object(properties, required=None):
    required = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# -- JSON-RPC -----------------------------------------------------------------------------------------------


def answer(caller, data, headers=None):
    """Answer one message; returns (HTTP status, JSON-ready answer or None when there is none).

    ``headers`` are the HTTP headers by lower-case name; None over stdio, where there are none to compare.
    """
    number = None
    try:
        try:
            message = chain.read_json(data)
        except ValueError as error:
            raise Fault(PARSE_ERROR, f"The message cannot be read: {error}.") from None
        number = _check_message(message)
        if "id" not in message:
            return 202, None
        current = _revision(message, headers)
        result = _dispatch(caller, message["method"], message.get("params") or {}, current)
    except Fault as fault:
        return STATUS.get(fault.error["code"], 200), {"jsonrpc": "2.0", "id": number, "error": fault.error}
    if current:
        result = {"resultType": "complete", **result}
    return 200, {"jsonrpc": "2.0", "id": number, "result": result}


def _check_message(message):
    """Return the message's id; refuses what is no JSON-RPC request or notification."""
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0" or not isinstance(message.get("method"), str):
        raise Fault(INVALID_REQUEST, "Send one JSON-RPC 2.0 request or notification.")
    number = message.get("id")
    if "id" in message and (isinstance(number, bool) or not isinstance(number, (str, int))):
        raise Fault(INVALID_REQUEST, "id must be a string or an integer.")
    if not isinstance(message.get("params", {}), dict):
        raise Fault(INVALID_PARAMS, "params must be an object.")
    return number


def _revision(message, headers):
    """Return whether the request is of the current revision, where it must say so in itself; checks what it says."""
    meta = message.get("params", {}).get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    stated = meta.get(META + "protocolVersion")
    header = headers.get("mcp-protocol-version") if headers is not None else stated
    if stated is None and header in (None, BEFORE) and message["method"] != "server/discover":
        return False
    if stated is None or not isinstance(meta.get(META + "clientCapabilities"), dict):
        if header is not None and header not in VERSIONS:
            raise _unsupported(header)
        raise Fault(INVALID_PARAMS, f"_meta must have {META}protocolVersion and {META}clientCapabilities.")
    if headers is not None:
        _match_headers(message, stated, headers)
    if stated != CURRENT:
        raise _unsupported(stated)
    return True


def _unsupported(version):
    return Fault(
        UNSUPPORTED_VERSION, "Unsupported protocol version.", {"supported": list(VERSIONS), "requested": str(version)}
    )


def _match_headers(message, stated, headers):
    """Refuse a request whose routing headers say something else than its body."""
    wanted = {"mcp-protocol-version": stated, "mcp-method": message["method"]}
    if message["method"] == "tools/call":
        wanted["mcp-name"] = message["params"].get("name")
    for name, value in wanted.items():
        if headers.get(name) != value:
            raise Fault(HEADER_MISMATCH, f"The header {name} does not say what the body says.")


def _dispatch(caller, method, params, current):
    about = {
        "capabilities": {"tools": {}, "experimental": {"payment": {"methods": ["evm"], "intents": ["charge"]}}},
        "instructions": INSTRUCTIONS,
    }
    info = {
        "name": "deal-holding-service",
        "title": caller.world.settings.service_name,
        "version": spec.document()["info"]["version"],
    }
    cached = {"ttlMs": 3_600_000, "cacheScope": "public"} if current else {}
    if method == "tools/list":
        return {"tools": list(caller.tools), **cached}
    if method == "tools/call":
        return _call(caller, params)
    if method == "server/discover" and current:
        return {"supportedVersions": list(VERSIONS), **about, **cached, "_meta": {META + "serverInfo": info}}
    if method == "initialize" and not current:
        return {"protocolVersion": BEFORE, "serverInfo": info, **about}
    if method == "ping" and not current:
        return {}
    raise Fault(METHOD_NOT_FOUND, "There is no such method; this server has tools/list and tools/call.")


# -- Calls --------------------------------------------------------------------------------------------------


def _call(caller, params):
    """Carry out one tool call; a refusal of the service is a result with isError, as a model can read it."""
    name, arguments = params.get("name"), params.get("arguments", {})
    if not isinstance(name, str) or name not in {tool["name"] for tool in caller.tools}:
        raise Fault(INVALID_PARAMS, f"There is no tool {str(name)[:100]!r}.")
    if not isinstance(arguments, dict):
        raise Fault(INVALID_PARAMS, "arguments must be an object.")
    meta = params.get("_meta") if isinstance(params.get("_meta"), dict) else {}
    try:
        if name in ("create_deal", "create_deal_mpp"):
            return _create(caller, name, dict(arguments), meta)
        return _result(_free(caller, name, dict(arguments)))
    except Refusal as refusal:
        body = {**refusal.body(), "docs": f"{caller.base_url}/docs/errors/{refusal.code}"}
        if "Retry-After" in refusal.headers:
            body["retry_after_seconds"] = int(refusal.headers["Retry-After"])
        return _result(body, error=True)


def _result(value, *, error=False, meta=None):
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    result = {"content": [{"type": "text", "text": text}], "isError": error}
    if isinstance(value, dict):
        result["structuredContent"] = value
    return {**result, **({"_meta": meta} if meta else {})}


def _free(caller, name, arguments):
    """Carry out a tool that costs nothing; returns its value."""
    db, world = caller.db, caller.world
    if name == "feedback":
        return feedback.send(db, world, arguments, client=caller.client)
    if name == "sandbox_faucet":
        return sandbox.faucet(db, spec.check("FaucetRequest", arguments))
    _check_arguments(caller, name, arguments)
    if name in LIMITED:
        admitted, _, reset = limits.free(world.settings.database, caller.client, now=world.clock())
        if not admitted:
            raise limits.too_many(reset)
    if name == "ask":
        return ask.ask(caller.passages, arguments["q"], caller.base_url)
    if name == "list_endpoints":
        limit = arguments.get("limit")
        text = None if limit is None else str(limit)
        return discovery.page(discovery.entries(caller.base_url), text, arguments.get("cursor"))
    if name == "read_document":
        return document(caller, arguments["name"])
    if name == "health":
        return operations.health(db, world)[1]
    if name in _FEED:
        return _feed(caller, _FEED[name][0], arguments)
    if name == "sandbox_balance":
        return sandbox.holding(db, arguments["address"])
    deal_id = arguments.pop("deal_id")
    if name == "get_deal":
        body, _ = actions.read(db, world, deal_id)
    elif name == "sandbox_skip":
        deals.get(db, deal_id)
        sandbox.skip(db, deal_id, arguments["seconds"])
        body, _ = actions.read(db, world, deal_id)
    else:
        row = actions.act(db, world, deal_id, name.removesuffix("_deal"), arguments, client=caller.client)
        body, _ = actions.rendered(db, world, row)
    return json.loads(body)


def _feed(caller, path, arguments):
    """Answer from a view of the feed, as its route does."""
    one = arguments.pop("id", None) if path == "/v1/feed/facilitators" else None
    values = {} if one is None else {"id": one}
    view = feedroutes.ROUTES[path if one is None else path + "/<id>"]
    now_ns = int(caller.world.clock() * targets.SECOND)
    query = feedviews.Query(values, path, now_ns, caller.base_url)
    reply = feedroutes.respond(caller.db, view, query, {name: [str(value)] for name, value in arguments.items()})
    value = json.loads(reply.body)
    if reply.status != 200:
        raise Refusal(value["error"], value["message"])
    return value


def _check_arguments(caller, name, arguments):
    """Refuse what a route's path or query would refuse; a request body is checked where the route's is."""
    schema = next(tool["inputSchema"] for tool in caller.tools if tool["name"] == name)
    if name.endswith("_deal") and name != "get_deal":
        schema = _object({"deal_id": _deal_id()})
        arguments = {key: value for key, value in arguments.items() if key == "deal_id"}
    spec.check_against(schema, arguments)


def document(caller, name):
    """Return the text of one of the published documents."""
    if name == "openapi.json":
        return json.dumps(spec.served(caller.base_url, caller.world.settings))
    page = caller.library.pages[f"/{name}"]
    kind = next(kind for kind in page.bodies if not kind.startswith("text/html"))
    return caller.library.document(f"/{name}", kind, caller.base_url).body.decode()


# -- Paying -------------------------------------------------------------------------------------------------


def _create(caller, name, arguments, meta):
    """Create a deal by the code of the paid route, with the payment that the request's ``_meta`` carries."""
    key = arguments.pop("idempotency_key", None)
    body = chain.canonical(arguments)
    terms, refusal = payments.read_body(caller.world, body, "application/json")
    if key is not None and not (isinstance(key, str) and 0 < len(key) <= 128):
        terms, refusal = None, Refusal("invalid_request", "idempotency_key must be a text of 1 to 128 characters.")
    call = payments.Call(
        url=f"{caller.base_url}/mcp",
        body=body,
        terms=terms,
        refusal=refusal,
        signatures=_x402_headers(meta),
        authorizations=_mpp_headers(meta),
        idempotency_key=key,
        client=caller.client,
    )
    found = payments.create(caller.db, caller.world, call)
    value = json.loads(found.body)
    if found.status == 402:
        if name == "create_deal_mpp":
            raise _payment_fault(found, value, paid=bool(call.authorizations))
        return _result(value, error=True, meta=_receipts(found.headers))
    return _result(value[0] if isinstance(value, list) else value, meta=_receipts(found.headers))


def _x402_headers(meta):
    """Return the PAYMENT-SIGNATURE that the payment in ``_meta`` would be over HTTP."""
    payment = meta.get(X402_PAYMENT)
    if payment is None:
        return ()
    return (base64.b64encode(json.dumps(payment).encode()).decode(),)


def _mpp_headers(meta):
    """Return the Authorization that the credential in ``_meta`` would be over HTTP, where two fields are encoded."""
    credential = meta.get(MPP_CREDENTIAL)
    if credential is None:
        return ()
    credential = copy.deepcopy(credential)
    challenge = credential.get("challenge") if isinstance(credential, dict) else None
    for field in ("request", "opaque"):
        if isinstance(challenge, dict) and isinstance(challenge.get(field), dict):
            challenge[field] = _b64url(chain.canonical(challenge[field]))
    return ("Payment " + _b64url(json.dumps(credential).encode()),)


def _payment_fault(found, value, *, paid):
    """Return the JSON-RPC error that MPP clients look for: the challenge, and why a payment was not taken."""
    challenge = dict(re.findall(r'(\w+)="([^"]*)"', found.headers["WWW-Authenticate"]))
    for field in ("request", "opaque"):
        if field in challenge:
            challenge[field] = json.loads(base64.urlsafe_b64decode(challenge[field] + "=="))
    data = {"httpStatus": 402, "challenges": [challenge]}
    if found.headers.get("X-Svc-Invalid-Request"):
        return Fault(INVALID_PARAMS, f"{value['error']} Do not pay.", {"httpStatus": 402, "detail": value["error"]})
    if paid:
        return Fault(PAYMENT_REFUSED, "Payment Verification Failed", {**data, "failure": {"detail": value["error"]}})
    return Fault(PAYMENT_REQUIRED, "Payment Required", data)


def _receipts(headers):
    """Return the ``_meta`` that says what became of a payment."""
    found = {}
    for header, key in (("PAYMENT-RESPONSE", X402_RESPONSE), ("Payment-Receipt", MPP_RECEIPT)):
        if header in headers:
            found[key] = json.loads(base64.urlsafe_b64decode(headers[header].replace("+", "-").replace("/", "_") + "=="))
    return found


def _b64url(data):
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
