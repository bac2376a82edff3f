"""How the service is found: the list of paid endpoints, the x402 bazaar entry, the well-known documents."""

import base64

import spec
from deals import Refusal

DEFAULT_LIMIT, MOST_LIMIT = 10, 50
ENDPOINTS = (
    ("deal", "Hold a payment between a buyer and a seller until the buyer confirms or the timers decide."),
)


def entries(base_url):
    """Return the paid endpoints as published."""
    return [
        {
            "name": name,
            "method": "POST",
            "path": f"/x402/{name}",
            "mppPath": f"/mpp/{name}",
            "quote": f"GET {base_url}/x402/{name} answers HTTP 402 with the live quote, without payment.",
            "summary": summary,
        }
        for name, summary in ENDPOINTS
    ]


def page(items, limit, cursor):
    """Return one page of ``items``. ``limit`` and ``cursor`` are the texts of the query, or None.

    Refuses a malformed one with invalid_request.
    """
    number = DEFAULT_LIMIT
    if limit is not None:
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MOST_LIMIT):
            raise Refusal("invalid_request", f"limit must be a whole number from 1 to {MOST_LIMIT}.")
        number = int(limit)
    start = 0 if cursor is None else _read_cursor(cursor, len(items))
    more = start + number < len(items)
    return {
        "items": items[start : start + number],
        "next_cursor": _cursor(start + number) if more else None,
        "total": len(items),
    }


def _cursor(start):
    return base64.urlsafe_b64encode(b"from:%d" % start).decode().rstrip("=")


def _read_cursor(cursor, length):
    # What a cursor may be is what was given out: everything else is malformed, whatever it decodes to.
    for start in range(1, length):
        if cursor == _cursor(start):
            return start
    raise Refusal("invalid_request", "cursor must be the next_cursor of the previous page.")


def index(base_url, mode):
    """Return the /v1 index: the entries of /endpoints, and where everything else is."""
    names = {
        "openapi": "/openapi.json", "agents": "/agents.md", "llms": "/llms.txt", "pricing": "/pricing.md", "docs": "/docs",
        "ask": "/ask", "endpoints": "/endpoints", "mcp": "/mcp", "health": "/health", "feedback": "/feedback",
        "deprecation_policy": "/deprecation-policy",
    }  # fmt: skip
    return {
        "version": spec.document()["info"]["version"],
        "mode": mode,
        "items": entries(base_url),
        "links": {name: base_url + path for name, path in names.items()},
    }


# -- x402 bazaar --------------------------------------------------------------------------------------------


def bazaar():
    """Return the x402 ``bazaar`` extension of the quote: how to call the endpoint, and a schema of just that.

    Facilitators copy it into their catalogues; the schema must describe ``info`` and stand by itself.
    """
    schemas = spec.document()["components"]["schemas"]
    request = schemas["DealRequest"]
    example = spec.document()["components"]["examples"]["receipt"]["value"][0]
    shown = {name: example[name] for name in ("id", "state", "amount_usd", "price_usd", "deliver_by")}
    return {
        "info": {
            "input": {"type": "http", "method": "POST", "bodyType": "json", "body": request["examples"][0]},
            "output": {"type": "json", "example": [shown]},
        },
        "schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "input": {
                    "type": "object",
                    "properties": {
                        "type": {"type": "string", "const": "http"},
                        "method": {"type": "string", "enum": ["POST"]},
                        "bodyType": {"type": "string", "enum": ["json"]},
                        "body": _terse(request),
                    },
                    "required": ["type", "method", "bodyType", "body"],
                    "additionalProperties": False,
                },
                "output": {
                    "type": "object",
                    "properties": {"type": {"type": "string"}, "example": {"type": "array"}},
                    "required": ["type"],
                },
            },
            "required": ["input"],
        },
    }


def _terse(schema):
    """Return a schema without its prose: every quote carries it, in a header."""
    if isinstance(schema, dict):
        return {name: _terse(part) for name, part in schema.items() if name not in ("description", "examples")}
    return schema


# -- Well-known documents -----------------------------------------------------------------------------------
# Each has a reader: x402scan sniffs an origin for /.well-known/x402 (github.com/Merit-Systems/x402scan, pull
# request 459; proposed as a standard in github.com/x402-foundation/x402, issue 869); agent-readiness scanners and
# crawlers read the API catalogue (RFC 9727) and the MCP server card (SEP-1649 and SEP-2127 of the Model Context Protocol).


def x402(base_url):
    """Return /.well-known/x402: the paid resources of this origin."""
    return {
        "version": 1,
        "resources": [f"{base_url}{path}" for name, _ in ENDPOINTS for path in (f"/x402/{name}", f"/mpp/{name}")],
        "instructions": f"POST the terms of a deal; GET answers the quote. Read {base_url}/agents.md first.",
    }


def api_catalog(base_url):
    """Return /.well-known/api-catalog as a linkset (RFC 9727, RFC 9264)."""
    return {
        "linkset": [
            {
                "anchor": f"{base_url}/",
                "service-desc": [{"href": f"{base_url}/openapi.json", "type": "application/json"}],
                "service-doc": [
                    {"href": f"{base_url}/docs", "type": "text/html"},
                    {"href": f"{base_url}/agents.md", "type": "text/markdown"},
                ],
                "status": [{"href": f"{base_url}/health", "type": "application/json"}],
            }
        ]
    }


def mcp_card(base_url, settings, tools, versions):
    """Return /.well-known/mcp/server-card.json."""
    return {
        "$schema": "https://static.modelcontextprotocol.io/schemas/mcp-server-card/v1.json",
        "version": "1.0",
        "protocolVersion": versions[0],
        "serverInfo": {
            "name": "deal-holding-service",
            "title": settings.service_name,
            "version": spec.document()["info"]["version"],
        },
        "description": "Holds a payment between two agents until delivery. Paid by x402 or MPP; no keys, no accounts.",
        "documentationUrl": f"{base_url}/docs/mcp",
        "transport": {"type": "streamable-http", "endpoint": "/mcp"},
        "capabilities": {"tools": {}},
        "authentication": {"required": False, "schemes": []},
        "tools": [{"name": tool["name"], "description": tool["description"]} for tool in tools],
    }


def homepage_links(base_url):
    """Return the Link header of the landing page (RFC 8288): where machines should look instead."""
    links = [("service-desc", "/openapi.json"), ("service-doc", "/docs"), ("api-catalog", "/.well-known/api-catalog"),
             ("describedby", "/llms.txt")]  # fmt: skip
    return ", ".join(f'<{base_url}{path}>; rel="{rel}"' for rel, path in links)
