"""The busiest requests, answered before Flask wakes: the paid endpoint, and the read of a deal.

Only their plain answers are made here. Whatever is odd in a request, is refused or fails goes to Flask, which has the
words for it.
"""

import io

import actions
import deals
import deprecations
import payments
from answers import BODY_CAP, connection, paid_call

PAID = ("/x402/deal", "/mpp/deal")
DEALS = "/v1/deals/"
STATUS = {200: "200 OK", 202: "202 ACCEPTED", 402: "402 PAYMENT REQUIRED"}


class Express:
    """WSGI middleware before the ``application`` that knows all the rest.

    ``headers`` go with every answer, ``for_pages`` only with those to the scripts of a web page: browsers, unlike
    agents, say with Origin that they ask for one. What an answer raises goes to the application in the environment,
    as ``deals.error``, to be said there: a call that has begun is never begun again.
    """

    def __init__(self, application, world, *, headers, for_pages):
        self.application, self.world = application, world
        self.always, self.for_pages = headers, [*headers, *for_pages]

    def __call__(self, environ, start_response):
        try:
            found = None if deprecations.DEPRECATIONS else self._answer(environ)  # their headers are Flask's business
        except Exception as error:
            environ["deals.error"], found = error, None
        if found is None:
            return self.application(environ, start_response)
        status, headers, body = found
        more = self.for_pages if "HTTP_ORIGIN" in environ else self.always
        start_response(status, [*headers.items(), ("Content-Length", str(len(body))), *more])
        return [body]

    def _answer(self, environ):
        """Return (status, headers, body), or None: then it is not for us."""
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if method == "POST" and path in PAID:
            return self._deal_call(environ)
        if method == "GET" and path.startswith(DEALS) and deals.DEAL_ID.fullmatch(path, len(DEALS)):
            return self._deal_read(environ, path[len(DEALS) :])
        return None

    def _deal_call(self, environ):
        """Answer a call whose body has a known length."""
        length = environ.get("CONTENT_LENGTH") or ""
        if not (length.isdecimal() and len(length) < 9 and int(length) <= BODY_CAP) or "HTTP_TRANSFER_ENCODING" in environ:
            return None
        try:
            body = environ["wsgi.input"].read(int(length))
        except OSError:  # the client has gone; Flask will notice it too
            return None
        environ["wsgi.input"] = io.BytesIO(body)
        if len(body) < int(length):
            return None
        answer = payments.create(connection(self.world), self.world, paid_call(self.world, environ, body))
        return STATUS[answer.status], answer.headers, answer.body

    def _deal_read(self, environ, deal_id):
        if "HTTP_IF_NONE_MATCH" in environ:
            return None
        body, etag = actions.read(connection(self.world), self.world, deal_id)
        return "200 OK", {"ETag": etag, "Cache-Control": "no-cache"}, body
