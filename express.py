"""The two busiest requests, answered before Flask wakes: the quote for a sound body, and the read of a deal.

Only when all is plain. Whatever is odd, fails or is refused goes to Flask, which then answers it from the
beginning; nothing is lost by that, because neither request moves money.
"""

import io

import actions
import deprecations
import payments
from answers import BODY_CAP, base_url, connection, paid_call

PAID = ("/x402/deal", "/mpp/deal")
DEALS = "/v1/deals/"


class Express:
    """WSGI middleware before the Flask ``application`` that knows all the rest."""

    def __init__(self, application, world):
        self.application, self.world = application, world

    def __call__(self, environ, start_response):
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        found = None
        if deprecations.DEPRECATIONS:  # their headers are Flask's business
            pass
        elif method == "POST" and path in PAID:
            found = self._quote(environ)
        elif method == "GET" and path.startswith(DEALS):
            found = self._deal(environ, path[len(DEALS) :])
        if found is None:
            return self.application(environ, start_response)
        status, headers, body = found
        start_response(status, [*headers.items(), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _quote(self, environ):
        """Return (status, headers, body) of the quote for an unpaid call, or None."""
        length = environ.get("CONTENT_LENGTH") or ""
        if "HTTP_PAYMENT_SIGNATURE" in environ or "HTTP_AUTHORIZATION" in environ or "HTTP_TRANSFER_ENCODING" in environ:
            return None
        if not (length.isdecimal() and len(length) < 9 and int(length) <= BODY_CAP):
            return None
        body = environ["wsgi.input"].read(int(length))
        environ["wsgi.input"] = io.BytesIO(body)  # for Flask, should it come to that
        if len(body) < int(length):
            return None
        try:
            call = paid_call(self.world, environ, body)
            if call.refusal:
                return None
            answer = payments.create(connection(self.world), self.world, call)
        except Exception:
            return None
        return "402 PAYMENT REQUIRED", answer.headers, answer.body

    def _deal(self, environ, deal_id):
        """Return (status, headers, body) of a deal's record, or None."""
        if "HTTP_IF_NONE_MATCH" in environ:
            return None
        try:
            body, etag = actions.read(connection(self.world), self.world, deal_id)
        except Exception:
            return None
        return "200 OK", {"ETag": etag, "Cache-Control": "no-cache"}, body
