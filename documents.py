"""The published documents: one set of sources in docs/, the live figures in them, as Markdown and as pages.

Pure functions of the sources and the figures: nothing here knows HTTP, the clock or the deals.
"""

import base64
import dataclasses
import functools
import hashlib
import pathlib
import re

import jinja2
import markupsafe
import mistune

import chain
import deals
import deprecations
import limits
import spec
from deals import Refusal

HERE = pathlib.Path(__file__).parent
# Rendered once with this address in place of the real one, which in the sandbox differs from client to client.
BASE = "https://base-url.invalid"
MARKDOWN, HTML, TEXT = "text/markdown; charset=utf-8", "text/html; charset=utf-8", "text/plain; charset=utf-8"
SVG = "image/svg+xml"
BODY_CAP = 65536

# path -> (source in docs/, the media types it is offered in, the preferred one first)
SOURCES = {
    "/": ("landing.md", (HTML, MARKDOWN)),
    "/llms.txt": ("llms.txt", (TEXT,)),
    "/agents.md": ("agents.md", (MARKDOWN, HTML)),
    "/pricing.md": ("pricing.md", (MARKDOWN, HTML)),
    "/deprecation-policy": ("deprecation-policy.md", (HTML, MARKDOWN)),
    "/docs": ("index.md", (HTML, MARKDOWN)),
    "/docs/deals": ("deals.md", (HTML, MARKDOWN)),
    "/docs/trust": ("trust.md", (HTML, MARKDOWN)),
    "/docs/mcp": ("mcp.md", (HTML, MARKDOWN)),
    "/docs/sandbox": ("sandbox.md", (HTML, MARKDOWN)),
    "/docs/states.svg": ("states.svg", (SVG,)),
    "/favicon.svg": ("favicon.svg", (SVG,)),
    "/robots.txt": ("robots.txt", (TEXT,)),
}


@dataclasses.dataclass(frozen=True)
class Page:
    """One document in every form it is offered in."""

    path: str
    title: str
    bodies: dict  # media type -> bytes, the preferred one first; BASE stands for the service's address
    sections: tuple = ()  # (heading, anchor, plain text), for the index that /ask searches

    @functools.cached_property
    def kinds(self):
        """The media types, the preferred one first."""
        return tuple(self.bodies)


@dataclasses.dataclass(frozen=True)
class Document:
    """What is served: the bytes, their media type and their strong validator."""

    body: bytes
    media_type: str
    etag: str


# -- Figures ------------------------------------------------------------------------------------------------


def figures(settings, *, master_key, treasury, receipt_signer, tools=(), mcp_versions=()):
    """Return every figure that a source may name, from the settings and from the published schema."""
    fields = spec.document()["components"]["schemas"]["DealRequest"]["properties"]
    domain_name, domain_version = settings.asset_domain
    asset = chain.checksum(settings.asset)
    return {
        "name": settings.service_name,
        "contact": settings.contact,
        "sandbox": settings.sandbox,
        "version": spec.document()["info"]["version"],
        "base_url": BASE,
        "currency": "sandbox dollars" if settings.sandbox else "USDC",
        "asset": asset,
        "domain_name": domain_name,
        "domain_version": domain_version,
        "chain_id": 8453,
        "master_key": master_key.hex(),
        "treasury": chain.checksum(treasury),
        "receipt_signer": chain.checksum(receipt_signer),
        "body_cap": BODY_CAP,
        "free_most": limits.FREE_MOST,
        "free_seconds": limits.FREE_SECONDS,
        "notice_days": deprecations.NOTICE_DAYS,
        "deprecations": deprecations.rows(),
        "default_hours": deals.DEFAULT_HOURS,
        "deadline_min": fields["deadline_hours"]["minimum"],
        "deadline_max": fields["deadline_hours"]["maximum"],
        "review_min": fields["review_hours"]["minimum"],
        "review_max": fields["review_hours"]["maximum"],
        "decide_hours": settings.decide_hours,
        "answer_hours": settings.answer_hours,
        "guarantee_days": deals.GUARANTEE_GRACE // (24 * deals.HOUR),
        "smallest_usd": deals.usd(deals.SMALLEST_TRANSFER),
        "mcp_tools": tools,
        "mcp_versions": " and ".join(mcp_versions),
        **_prices(settings),
        **client_lines(settings),
    }


def _prices(settings):
    def price(units):
        return deals.usd(settings.price_units(units))

    amounts = [settings.min_amount_units, 5_000_000, 20_000_000, 100_000_000, settings.max_amount_units]
    amounts = sorted({units for units in amounts if amounts[0] <= units <= amounts[-1]})
    return {
        "min_usd": deals.usd(settings.min_amount_units),
        "max_usd": deals.usd(settings.max_amount_units),
        "fee_usd": deals.usd(settings.fee_units),
        "price_factor": f"{1 + settings.fee_percent / 100:.2f}",
        "price_min": price(settings.min_amount_units),
        "price_max": price(settings.max_amount_units),
        "price_of_20": price(20_000_000),
        "price_rows": [
            {"amount": deals.usd(units), "price": price(units), "fee": deals.usd(settings.price_units(units) - units)}
            for units in amounts
        ],
    }


def client_lines(settings):
    """Return the lines that raise the SDKs' default limits, just above our highest price."""
    most = -(-settings.price_units(settings.max_amount_units) // 100_000_000) * 100  # dollars, in full hundreds
    asset = chain.checksum(settings.asset)
    if not settings.sandbox:
        return {
            "x402_limit_line": f'client.set_spend_controls({{"max_amount_per_payment": "${most}"}})',
            "x402_limit_line_ts": f'client.setSpendControls({{ maxAmountPerPayment: "${most}" }})',
            "mpp_charge": f'evm.charge(currency=BASE_USDC, account=buyer, max_amount="{most}")',
        }
    name, version = settings.asset_domain
    units = most * 1_000_000
    return {
        "x402_limit_line": 'client.set_spend_controls({"allowed_assets": [{"network": "eip155:8453",'
        f' "asset": "{asset}", "max_amount_per_payment": "{units}"}}]}})',
        "x402_limit_line_ts": 'client.setSpendControls({ allowedAssets: [{ network: "eip155:8453",'
        f' asset: "{asset}", maxAmountPerPayment: "{units}" }}] }})',
        "mpp_charge": f'evm.charge(currency="{asset}", chain_id=8453, decimals=6, account=buyer, max_amount="{most}",'
        f' authorization={{"name": "{name}", "version": "{version}"}})',
    }


# -- Rendering ----------------------------------------------------------------------------------------------


def build(facts, frame):
    """Render every page; returns {path: Page}. Fails at start, not in an answer, when a source names no figure."""
    sources = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "docs"), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    pages = {}
    for path, (source, types) in SOURCES.items():
        if path == "/docs/sandbox" and not facts["sandbox"]:
            continue
        text = sources.get_template(source).render(facts)
        pages[path] = _page(path, text, types, frame)
    for path, text in _error_sources(sources.get_template("errors.md").render(facts)):
        pages[path] = _page(path, text, (HTML, MARKDOWN), frame)
    pages["/favicon.ico"] = dataclasses.replace(pages["/favicon.svg"], path="/favicon.ico")
    return pages


def _error_sources(text):
    """Yield (path, Markdown) of one page per error code, and of the list of them."""
    advice = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=\n## |\Z)", text, re.MULTILINE | re.DOTALL))
    statuses, meanings = _codes()
    if set(advice) != set(statuses):
        raise ValueError(f"docs/errors.md and the codes differ: {sorted(set(advice) ^ set(statuses))}")
    lines = [f"| [`{code}`](/docs/errors/{code}) | {statuses[code]} | {meanings[code]} |" for code in statuses]
    head = "# Errors\n\nEvery error answer is `{\"error\": code, \"message\": sentence, \"docs\": link}`. Codes are stable.\n\n"
    yield "/docs/errors", head + "| Code | Status | Meaning |\n|---|---|---|\n" + "\n".join(lines) + "\n"
    for code, how in advice.items():
        yield (
            f"/docs/errors/{code}",
            f"# {code}\n\n**Status {statuses[code]}.** {meanings[code]}\n\n## How to mend it\n\n{how.strip()}\n\n"
            "[All errors](/docs/errors)\n",
        )


def _codes():
    """Return ({code: status}, {code: meaning}) from the published document."""
    schema = spec.document()["components"]["schemas"]["ErrorCode"]
    return schema["x-statuses"], dict(re.findall(r"^- `(\w+)` \d+: (.*)$", schema["description"], re.MULTILINE))


def _page(path, text, types, frame):
    if types[0] in (TEXT, SVG):
        return Page(path, path, {types[0]: text.encode()}, _sections(text) if path == "/llms.txt" else ())
    title = re.match(r"# (.*)", text)[1]
    bodies = {MARKDOWN: text.encode()}
    if HTML in types:
        bodies[HTML] = frame(title, text, path)
    return Page(path, title, {kind: bodies[kind] for kind in types}, _sections(text))


def frame(facts):
    """Return a function that puts Markdown into the page that all pages share."""
    style = (HERE / "templates" / "style.css").read_text()
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True)
    template = environment.get_template("page.html")

    def compose(title, text, source):
        content = markupsafe.Markup(_html(text))
        page = template.render(facts, title=title, content=content, source=source, style=markupsafe.Markup(style))
        return page.encode()

    return compose


def style_hash():
    """Return the CSP source expression of the one style sheet, which stands inside the pages."""
    style = (HERE / "templates" / "style.css").read_text()
    return f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"


class _Renderer(mistune.HTMLRenderer):
    """HTML whose headings can be linked to; raw HTML in a source is shown, not passed on."""

    def heading(self, text, level, **attrs):
        return f'<h{level} id="{slug(re.sub("<[^>]*>", "", text))}">{text}</h{level}>\n'


def _html(text):
    return mistune.create_markdown(renderer=_Renderer(escape=True), plugins=["table"])(text)


def slug(heading):
    """Return a heading's anchor."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def _sections(text):
    """Split Markdown at its second-level headings into (heading, anchor, text)."""
    found = []
    for part in re.split(r"^(?=##? )", text, flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        if body.strip():
            heading = heading.lstrip("# ").strip()
            found.append((heading, slug(heading), body.strip()))
    return tuple(found)


# -- Serving ------------------------------------------------------------------------------------------------


class Library:
    """All pages, ready to serve under any base address; composed once per address, form and worker."""

    def __init__(self, pages, frame):
        self.pages, self._frame = pages, frame
        self._ready = {}

    def compose(self, title, text, base_url):
        """Return a page made for one request out of Markdown."""
        return stamped(self._frame(title, text, "").replace(BASE.encode(), base_url.encode()), HTML)

    def document(self, path, media_type, base_url):
        """Return the Document of a page in one of its forms. Refuses with not_found."""
        key = path, media_type, base_url
        if key not in self._ready:
            page = self.pages.get(path)
            if page is None:
                raise Refusal("not_found", "There is no such page; /docs has the list.")
            if len(self._ready) >= 256:  # a sandbox may be called by any name; forget them all now and then
                self._ready.clear()
            body = page.bodies[media_type].replace(BASE.encode(), base_url.encode())
            self._ready[key] = stamped(body, media_type)
        return self._ready[key]


def stamped(body, media_type):
    """Return bytes as a Document with their validator."""
    return Document(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
