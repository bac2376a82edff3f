"""Every setting: its environment variable, its safe default and its check, in one place."""

import dataclasses
import os
import re
from urllib.parse import urlsplit

USDC_ON_BASE = "0x833589fcd6edb6e08f4c7c32d4f71b54bda02913"
SANDBOX_DOLLAR = "0x5a4db0c5a4db0c5a4db0c5a4db0c5a4db0c5a4db"  # no contract anywhere answers at this address
CHAIN_ID = 8453
NETWORK = f"eip155:{CHAIN_ID}"


class Wrong(ValueError):
    """A setting that the service refuses to start with; the sentence says what to do."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The configuration of one service. Money is in base units, durations in seconds unless named."""

    mode: str = "sandbox"
    database: str = "deals.db"
    base_url: str = ""  # empty only in the sandbox: the request's own host
    service_name: str = "Deal Holding Service"
    contact: str = ""
    wallets: tuple[str, ...] = ("wallet.json",)
    passphrase: str = ""
    secrets: str = ""
    treasury: str = ""  # empty: the address of the master key
    facilitators: tuple[str, ...] = ("https://facilitator.payai.network", "https://facilitator.openx402.ai")
    facilitator_token: str = ""
    rpc_url: str = "https://mainnet.base.org"
    proxies: int = 0
    min_amount_units: int = 500_000
    max_amount_units: int = 500_000_000
    fee_units: int = 92_000
    fee_percent: int = 1
    decide_hours: int = 168
    answer_hours: int = 24
    max_in_flight: int = 64
    max_in_flight_per_client: int = 16
    confirmations: int = 0
    settle_seconds: float = 25.0
    chain_patience: float = 6.0

    @property
    def sandbox(self):
        return self.mode == "sandbox"

    @property
    def asset(self):
        """The token's address in lower case."""
        return SANDBOX_DOLLAR if self.sandbox else USDC_ON_BASE

    @property
    def asset_domain(self):
        """Name and version of the token's EIP-712 domain."""
        return ("Sandbox Dollar", "1") if self.sandbox else ("USD Coin", "2")

    @property
    def secrets_path(self):
        return self.secrets or f"{self.database}.secrets"

    def price_units(self, amount_units):
        """What the buyer pays for a deal of ``amount_units``: a fixed fee and a share, rounded down."""
        return self.fee_units + amount_units * (100 + self.fee_percent) // 100


def load(environ=os.environ):
    """Read the settings from the environment. Raises :class:`Wrong` with one sentence."""
    mode = environ.get("DEALS_MODE", "sandbox")
    if mode not in ("sandbox", "live"):
        raise Wrong("DEALS_MODE must be sandbox or live.")
    text = {
        field: environ[name]
        for field, name in {
            "database": "DEALS_DATABASE",
            "base_url": "DEALS_BASE_URL",
            "service_name": "DEALS_SERVICE_NAME",
            "contact": "DEALS_CONTACT",
            "secrets": "DEALS_SECRETS",
            "treasury": "DEALS_TREASURY",
            "rpc_url": "DEALS_RPC_URL",
            "facilitator_token": "DEALS_FACILITATOR_TOKEN",
        }.items()
        if environ.get(name)
    }
    numbers = {
        field: _number(environ, name, low, high)
        for field, (name, low, high) in {
            "proxies": ("DEALS_PROXIES", 0, 10),
            "min_amount_units": ("DEALS_MIN_AMOUNT_UNITS", 10_000, 10**12),
            "max_amount_units": ("DEALS_MAX_AMOUNT_UNITS", 10_000, 10**12),
            "fee_units": ("DEALS_FEE_UNITS", 0, 10**9),
            "fee_percent": ("DEALS_FEE_PERCENT", 0, 50),
            "decide_hours": ("DEALS_DECIDE_HOURS", 1, 24 * 90),
            "answer_hours": ("DEALS_ANSWER_HOURS", 1, 24 * 365),
            "max_in_flight": ("DEALS_MAX_IN_FLIGHT", 1, 10_000),
            "max_in_flight_per_client": ("DEALS_MAX_IN_FLIGHT_PER_CLIENT", 1, 10_000),
            "confirmations": ("DEALS_CONFIRMATIONS", 0, 1_000),
        }.items()
        if environ.get(name)
    }
    found = {**text, **numbers, "mode": mode, "passphrase": _passphrase(environ)}
    if "confirmations" not in found and mode == "live":
        found["confirmations"] = 5  # ten seconds on Base: a payout counts once it is this deep
    if environ.get("DEALS_WALLET"):
        found["wallets"] = tuple(_list(environ["DEALS_WALLET"]))
    if environ.get("DEALS_FACILITATORS"):
        found["facilitators"] = tuple(url.rstrip("/") for url in _list(environ["DEALS_FACILITATORS"]))
    found["base_url"] = found.get("base_url", "").rstrip("/")
    settings = Settings(**found)
    _check(settings)
    return settings


def _check(settings):
    if settings.base_url and urlsplit(settings.base_url).scheme not in ("http", "https"):
        raise Wrong("DEALS_BASE_URL must be a full URL such as https://deals.example.")
    if not settings.sandbox and not settings.base_url:
        raise Wrong("DEALS_BASE_URL is required in live mode: clients refuse to pay for another URL than they called.")
    if settings.treasury and not re.fullmatch(r"0x[0-9a-fA-F]{40}", settings.treasury):
        raise Wrong("DEALS_TREASURY must be an address: 0x and 40 hex digits.")
    if settings.min_amount_units > settings.max_amount_units:
        raise Wrong("DEALS_MIN_AMOUNT_UNITS must not be above DEALS_MAX_AMOUNT_UNITS.")
    if "\n" in settings.service_name:
        raise Wrong("DEALS_SERVICE_NAME must be one line: it is the first line of every text that sellers sign.")


def _number(environ, name, low, high):
    value = environ[name]
    if not value.isdecimal() or not low <= int(value) <= high:
        raise Wrong(f"{name} must be a whole number from {low} to {high}.")
    return int(value)


def _list(value):
    return [item.strip() for item in value.split(",") if item.strip()]


def _passphrase(environ):
    path = environ.get("DEALS_WALLET_PASSPHRASE_FILE")
    if not path:
        return environ.get("DEALS_WALLET_PASSPHRASE", "")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().rstrip("\r\n")
    except OSError as error:
        raise Wrong(f"DEALS_WALLET_PASSPHRASE_FILE cannot be read: {error.strerror}.") from error
