"""The service as MCP tools: two revisions, the same code and errors as the routes, paid by the official clients."""

import base64
import json
import os
import socket
import sys
import threading
import time
import types

import anyio
import mcp
import mcp.shared.exceptions
import pytest
import werkzeug.serving
from eth_account import Account
from x402 import x402Client
from x402.mcp import x402MCPClient
from x402.mechanisms.evm.exact import ExactEvmScheme

import cli
import sandbox
import spec

NOW, BEFORE = "2026-07-28", "2025-11-25"
META = {
    "io.modelcontextprotocol/protocolVersion": NOW,
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


@pytest.fixture
def rpc(client):
    """Send one message; returns the response."""

    def send(method, params=None, *, number=1, headers=None, **more):
        message = {"jsonrpc": "2.0", "method": method, "params": params or {}, "id": number, **more}
        return client.post("/mcp", json=message, headers=headers or {})

    return send


@pytest.fixture
def call(rpc):
    """Call a tool in the earlier revision; returns the result."""

    def send(name, arguments=None, meta=None):
        params = {"name": name, "arguments": arguments or {}, **({"_meta": meta} if meta else {})}
        return rpc("tools/call", params).json["result"]

    return send


def modern(rpc, method, params=None, **headers):
    params = {**(params or {}), "_meta": META}
    sent = {"MCP-Protocol-Version": NOW, "Mcp-Method": method}
    if method == "tools/call":
        sent["Mcp-Name"] = params["name"]
    return rpc(method, params, headers={**sent, **headers})


# -- The protocol -------------------------------------------------------------------------------------------


def test_the_earlier_revision_begins_with_initialize(rpc):
    hello = {"protocolVersion": BEFORE, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    result = rpc("initialize", hello).json["result"]
    assert result["protocolVersion"] == BEFORE
    assert result["capabilities"]["tools"] == {}
    assert "never pay again" in result["instructions"]


def test_a_client_of_an_older_revision_is_offered_the_one_that_is_spoken(rpc):
    hello = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    assert rpc("initialize", hello).json["result"]["protocolVersion"] == BEFORE


def test_the_current_revision_needs_no_handshake(rpc):
    answer = modern(rpc, "server/discover")
    assert answer.status_code == 200
    assert answer.json["result"]["supportedVersions"] == [NOW, BEFORE]
    assert answer.json["result"]["resultType"] == "complete"
    listed = modern(rpc, "tools/list").json["result"]
    assert listed["cacheScope"] == "public" and listed["ttlMs"] > 0


@pytest.mark.parametrize(
    "wrong", [{"Mcp-Method": "tools/list"}, {"Mcp-Name": "get_deal"}, {"MCP-Protocol-Version": BEFORE}]
)
def test_routing_headers_that_contradict_the_body_are_refused(rpc, wrong):
    answer = modern(rpc, "tools/call", {"name": "health", "arguments": {}}, **wrong)
    assert (answer.status_code, answer.json["error"]["code"]) == (400, -32020)


def test_an_unknown_revision_is_refused_with_those_that_are_known(rpc):
    meta = {**META, "io.modelcontextprotocol/protocolVersion": "2031-01-01"}
    headers = {"MCP-Protocol-Version": "2031-01-01", "Mcp-Method": "tools/list"}
    for params in ({"_meta": meta}, {}):
        answer = rpc("tools/list", params, headers=headers)
        assert (answer.status_code, answer.json["error"]["code"]) == (400, -32022)
        assert answer.json["error"]["data"] == {"supported": [NOW, BEFORE], "requested": "2031-01-01"}


def test_a_request_of_the_current_revision_that_does_not_say_so_itself_is_refused(rpc):
    answer = rpc("tools/list", {}, headers={"MCP-Protocol-Version": NOW})
    assert (answer.status_code, answer.json["error"]["code"]) == (400, -32602)


def test_a_notification_gets_no_answer(client):
    answer = client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (answer.status_code, answer.data) == (202, b"")


@pytest.mark.parametrize(
    "body, code",
    [(b"{", -32700), (b"\xff", -32700), (b"[]", -32600), (b"[{}]", -32600), (b"{}", -32600), (b'"x"', -32600),
     (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600), (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
     (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}', -32602), (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
     (b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}', -32700), (b"[" * 5000, -32700)],
)  # fmt: skip
def test_what_is_no_message_is_refused(client, body, code):
    answer = client.post("/mcp", data=body, content_type="application/json")
    assert (answer.status_code, answer.json["error"]["code"]) == (400, code)


def test_an_unknown_method_is_refused(rpc):
    answer = rpc("resources/list")
    assert (answer.status_code, answer.json["error"]["code"]) == (404, -32601)


@pytest.mark.parametrize("params", [{"name": "nothing"}, {}, {"name": 1}, {"name": "health", "arguments": []}])
def test_an_unknown_tool_or_arguments_that_are_none_are_refused(rpc, params):
    assert rpc("tools/call", params).json["error"]["code"] == -32602


def test_the_endpoint_takes_only_posts_of_json(client):
    assert client.get("/mcp").status_code == 405
    assert client.delete("/mcp").status_code == 405
    assert client.post("/mcp", data="{}", content_type="text/plain").status_code == 415


# -- The tools ----------------------------------------------------------------------------------------------


def test_there_is_a_tool_for_every_route_but_the_facilitator_s(app, rpc):
    names = {tool["name"] for tool in rpc("tools/list").json["result"]["tools"]}
    actions = {f"{action}_deal" for action in ("accept", "deliver", "refund", "confirm", "cancel", "dispute", "statement", "split")}
    assert names == actions | {
        "create_deal", "create_deal_mpp", "get_deal", "list_endpoints", "ask", "read_document", "health", "facilitators",
        "feedback", "feed_summary", "feed_events", "feed_capabilities", "feed_standards", "sandbox_faucet", "sandbox_balance", "sandbox_skip",
    }  # fmt: skip


def test_the_tools_schemas_are_the_published_ones(rpc):
    found = {tool["name"]: tool["inputSchema"] for tool in rpc("tools/list").json["result"]["tools"]}
    published = spec.document()["components"]["schemas"]
    terms = dict(found["create_deal"]["properties"])
    terms.pop("idempotency_key")
    assert terms == published["DealRequest"]["properties"]
    dispute = dict(found["dispute_deal"]["properties"])
    dispute.pop("deal_id")
    assert dispute == published["DisputeAction"]["properties"]
    assert found["dispute_deal"]["required"] == ["deal_id", "reason"]


def test_what_costs_money_and_what_is_final_says_so(rpc):
    found = {tool["name"]: tool for tool in rpc("tools/list").json["result"]["tools"]}
    assert found["create_deal"]["description"].startswith("COSTS MONEY: amount_usd x 1.01 + 0.092 dollars")
    for name in ("confirm_deal", "cancel_deal", "refund_deal", "split_deal"):
        assert "FINAL" in found[name]["description"] and found[name]["annotations"]["destructiveHint"]
    assert found["get_deal"]["annotations"]["readOnlyHint"]


def test_a_refusal_of_the_service_is_a_result_with_its_code_and_page(call):
    result = call("get_deal", {"deal_id": "deal_" + "a" * 26})
    assert result["isError"]
    assert result["structuredContent"]["error"] == "not_found"
    assert result["structuredContent"]["docs"] == "http://deals.test/docs/errors/not_found"
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]


@pytest.mark.parametrize(
    "name, arguments",
    [("get_deal", {}), ("get_deal", {"deal_id": "x"}), ("get_deal", {"deal_id": 1}), ("ask", {}), ("ask", {"q": 1}),
     ("accept_deal", {}), ("accept_deal", {"deal_id": []}), ("read_document", {"name": "../cli.py"}), ("health", {"x": 1}),
     ("feedback", {}), ("list_endpoints", {"limit": 0}), ("list_endpoints", {"cursor": "x"}), ("sandbox_balance", {}),
     ("sandbox_faucet", {"address": "x"}), ("sandbox_skip", {"deal_id": "deal_" + "a" * 26})],
)  # fmt: skip
def test_wrong_arguments_are_refused_as_the_routes_refuse_them(call, name, arguments):
    result = call(name, arguments)
    assert (result["isError"], result["structuredContent"]["error"]) == (True, "invalid_request")


def test_a_deal_is_read_and_acted_on_as_over_http(call, client, buyer, seller):
    deal = buyer.deal(seller)
    assert call("get_deal", {"deal_id": deal})["structuredContent"] == client.get(f"/v1/deals/{deal}").json
    asked = call("accept_deal", {"deal_id": deal})["structuredContent"]
    assert (asked["error"], asked["sign"]) == ("proof_required", client.post(f"/v1/deals/{deal}/accept", json={}).json["sign"])
    accepted = call("accept_deal", {"deal_id": deal, **seller.proof(deal, "accept")})
    assert (accepted["isError"], accepted["structuredContent"]["state"]) == (False, "accepted")
    call("deliver_deal", {"deal_id": deal, **seller.proof(deal, "deliver", {"note": "Done."})})
    released = call("confirm_deal", {"deal_id": deal, "secret": "correct horse battery staple"})
    assert released["structuredContent"] == client.get(f"/v1/deals/{deal}").json
    assert released["structuredContent"]["state"] == "released"


def test_the_free_tools_say_what_the_routes_say(call, client):
    assert call("list_endpoints")["structuredContent"] == client.get("/endpoints").json
    assert call("ask", {"q": "fee"})["structuredContent"] == client.get("/ask?q=fee").json
    assert call("health")["structuredContent"] == client.get("/health").json
    for name, path in [("facilitators", "facilitators"), ("feed_summary", "summary"), ("feed_events", "events"),
                       ("feed_capabilities", "capabilities"), ("feed_standards", "standards")]:  # fmt: skip
        asked = {"scheme": "exact"} if path == "capabilities" else {}
        found = client.get(f"/v1/feed/{path}", query_string=asked).json["data"]
        assert call(name, asked)["structuredContent"]["data"] == found
    assert call("facilitators", {"id": "nobody"})["structuredContent"]["error"] == "not_found"
    assert call("feed_events", {"limit": 0})["structuredContent"]["error"] == "invalid_request"
    assert call("read_document", {"name": "agents.md"})["content"][0]["text"] == client.get("/agents.md").get_data(as_text=True)
    assert json.loads(call("read_document", {"name": "openapi.json"})["content"][0]["text"]) == client.get("/openapi.json").json
    assert call("feedback", {"message": "Hello."})["structuredContent"]["id"].startswith("feedback_")


def test_the_documents_limit_holds_for_the_tools_that_read_them(call, client):
    for _ in range(120):
        client.get("/llms.txt")
    result = call("ask", {"q": "fee"})
    assert (result["structuredContent"]["error"], result["structuredContent"]["retry_after_seconds"]) == ("rate_limited", 60)
    assert not call("list_endpoints")["isError"]


# -- Paying -------------------------------------------------------------------------------------------------


def test_an_unpaid_call_is_an_error_result_with_the_quote_of_the_route(call, client, buyer, seller):
    body = buyer.request(seller)
    result = call("create_deal", body)
    quote = buyer.quote(body).json
    assert result["isError"]
    assert result["structuredContent"]["accepts"] == quote["accepts"]
    assert result["structuredContent"]["extensions"]["deal"] == quote["extensions"]["deal"]
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]


def test_an_invalid_body_is_quoted_with_the_reason_and_no_deal(call):
    quote = call("create_deal", {"amount_usd": "1"})["structuredContent"]
    assert quote["error"].startswith("invalid_request: ")
    assert quote["extensions"]["deal"]["info"]["id"] is None


def test_an_invalid_body_gives_mpp_clients_nothing_to_pay(rpc):
    answer = rpc("tools/call", {"name": "create_deal_mpp", "arguments": {"amount_usd": "1"}}).json
    assert answer["error"]["code"] == -32602
    assert "challenges" not in answer["error"]["data"]


def paid(call, buyer, body):
    """Pay for a deal by x402's MCP transport; returns the result and the payment."""
    quote = types.SimpleNamespace(json=call("create_deal", body)["structuredContent"])
    payment = json.loads(base64.b64decode(buyer.x402(quote)["PAYMENT-SIGNATURE"]))
    return call("create_deal", body, {"x402/payment": payment}), payment


def test_a_payment_in_meta_funds_the_deal_once(call, client, buyer, seller, db):
    body = buyer.request(seller)
    result, payment = paid(call, buyer, body)
    assert (result["isError"], result["structuredContent"]["state"]) == (False, "funded")
    settled = result["_meta"]["x402/payment-response"]
    assert (settled["success"], settled["transaction"]) == (True, result["structuredContent"]["payment"]["transaction"])
    assert call("create_deal", body, {"x402/payment": payment}) == result
    header = {"PAYMENT-SIGNATURE": base64.b64encode(json.dumps(payment).encode()).decode()}
    assert client.post("/x402/deal", json=body, headers=header).json == [result["structuredContent"]]
    assert db.execute("SELECT count(*) AS n FROM payments").fetchone()["n"] == 1


def test_an_idempotency_key_is_honoured(call, buyer, seller):
    body = buyer.request(seller)
    quote = types.SimpleNamespace(json=call("create_deal", body)["structuredContent"])
    payment = json.loads(base64.b64decode(buyer.x402(quote)["PAYMENT-SIGNATURE"]))
    assert not call("create_deal", {**body, "idempotency_key": "k"}, {"x402/payment": payment})["isError"]
    other = buyer.request(seller, ref="other")
    quote = types.SimpleNamespace(json=call("create_deal", other)["structuredContent"])
    payment = json.loads(base64.b64decode(buyer.x402(quote)["PAYMENT-SIGNATURE"]))
    result = call("create_deal", {**other, "idempotency_key": "k"}, {"x402/payment": payment})
    assert result["structuredContent"]["error"] == "idempotency_conflict"


@pytest.mark.parametrize("meta", [{"x402/payment": "x"}, {"x402/payment": {}}, {"x402/payment": []}, {"x402/payment": 1.5},
                                  {"org.paymentauth/credential": "x"}, {"org.paymentauth/credential": {"challenge": {"request": {"a": 1.5}}}},
                                  {"x402/payment": {}, "org.paymentauth/credential": {}}])  # fmt: skip
def test_a_payment_that_cannot_be_read_is_refused(call, buyer, seller, meta):
    result = call("create_deal", buyer.request(seller), meta)
    assert (result["isError"], result["structuredContent"]["error"]) == (True, "invalid_payment")


# -- The official clients -----------------------------------------------------------------------------------


@pytest.fixture
def served(app, clock):
    """The app on a real port, its clock set to what the clients' is; yields its address."""
    clock.now = time.time()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = werkzeug.serving.make_server("127.0.0.1", port, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.shutdown()
    thread.join()


@pytest.fixture
def wallet(world):
    account = Account.from_key("0x" + "11" * 32)
    sandbox.mint(world.facilitators[0].connect(), account.address.lower(), 1_000_000_000)
    return account


def terms(seller):
    return {"amount_usd": "20.00", "seller_address": seller.address, "network": "base", "secret_hash": "ab" * 32}


@pytest.mark.parametrize("mode, version", [("auto", NOW), ("legacy", BEFORE)])
def test_the_official_client_lists_and_calls_tools_in_both_revisions(served, mode, version):
    async def story():
        async with mcp.Client(f"{served}/mcp", mode=mode) as client:
            assert client.protocol_version == version
            names = [tool.name for tool in (await client.list_tools()).tools]
            found = await client.call_tool("ask", {"q": "fee"})
            assert "create_deal" in names and not found.is_error and found.structured_content["results"]

    anyio.run(story)


class Session:
    """What x402's client expects of an MCP client: one call with the whole params, results with wire names."""

    def __init__(self, client):
        self.client = client

    async def call_tool(self, params, **options):
        found = await self.client.call_tool(params["name"], params["arguments"], meta=params.get("_meta"))
        return types.SimpleNamespace(
            content=[item.model_dump() for item in found.content], isError=found.is_error, _meta=found.meta or {},
            structuredContent=found.structured_content,
        )  # fmt: skip


def test_x402_s_own_mcp_client_pays_for_a_deal(served, world, wallet, seller):
    payer = x402Client().register("eip155:8453", ExactEvmScheme(wallet))
    token = world.terminal.token.address
    payer.set_spend_controls({"allowed_assets": [{"network": "eip155:8453", "asset": token, "max_amount_per_payment": "600000000"}]})

    async def story():
        async with mcp.Client(f"{served}/mcp") as client:
            return await x402MCPClient(Session(client), payer).call_tool("create_deal", terms(seller))

    result = anyio.run(story)
    assert result.payment_made and not result.is_error
    assert result.payment_response.success
    record = json.loads(result.content[0]["text"])
    assert (record["state"], record["payment"]["payer"]) == ("funded", wallet.address)


def test_pympp_s_own_mcp_client_pays_for_a_deal(served, world, wallet, seller, monkeypatch):
    # pympp 0.16 was written for the SDK's first version, where this exception had another name.
    monkeypatch.setattr(mcp.shared.exceptions, "McpError", mcp.shared.exceptions.MCPError, raising=False)
    from mpp.extensions.mcp.client import McpClient
    from mpp.methods.evm import client as evm

    charge = evm.charge(
        currency=world.terminal.token.address, chain_id=8453, decimals=6, account=wallet, max_amount="600",
        authorization={"name": "Sandbox Dollar", "version": "1"},
    )  # fmt: skip

    async def story():
        async with mcp.Client(f"{served}/mcp") as client:
            return await McpClient(client, methods=[charge]).call_tool("create_deal_mpp", terms(seller))

    result = anyio.run(story)
    record = result.result.structured_content
    assert (record["state"], record["payment"]["protocol"]) == ("funded", "mpp")
    assert result.receipt.reference == record["payment"]["transaction"]


def test_the_stdio_server_speaks_to_the_official_client(settings):
    environ = {**os.environ, "DEALS_DATABASE": settings.database, "DEALS_WALLET": settings.wallets[0]}

    async def story():
        server = mcp.StdioServerParameters(command=sys.executable, args=[cli.__file__, "mcp"], env=environ)
        async with mcp.Client(mcp.stdio_client(server)) as client:
            found = await client.call_tool("read_document", {"name": "pricing.md"})
            assert found.content[0].text.startswith("# Prices")

    anyio.run(story)
