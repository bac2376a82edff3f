"""What the service is compared with: a bare Flask route, and the official x402 middleware before a trivial one."""

import os

from flask import Flask, Response

PRICE = {"amount": "20292000", "asset": "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"}
DOMAIN = {"name": "USD Coin", "version": "2"}
TREASURY = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8"


def bare():
    """Return an application that does nothing: the least a request costs here."""
    app = Flask("bare")

    @app.get("/v1/deals/<deal_id>")
    def read(deal_id):
        return Response(b'{"state":"funded"}', content_type="application/json")

    return app


def middleware():
    """Return a trivial paid route behind x402's own Flask middleware, set up as its documents show."""
    from x402 import x402ResourceServerSync
    from x402.http import FacilitatorConfig, HTTPFacilitatorClientSync
    from x402.http.middleware.flask import payment_middleware
    from x402.mechanisms.evm.exact import ExactEvmServerScheme

    app = Flask("middleware")

    @app.post("/x402/deal")
    def paid():
        return {"ok": True}

    server = x402ResourceServerSync(HTTPFacilitatorClientSync(FacilitatorConfig(url=os.environ["STUB_URL"])))
    server.register("eip155:8453", ExactEvmServerScheme())
    offer = {"scheme": "exact", "network": "eip155:8453", "price": {**PRICE, "extra": DOMAIN}, "payTo": TREASURY}
    payment_middleware(app, {"POST /x402/deal": {"accepts": offer, "description": "A deal"}}, server)
    return app
