"""Key material on disk: the operator's wallets, and the service's own secrets that hold no money."""

import json
import os
import secrets
import sys

import coincurve

import chain

SANDBOX_PASSPHRASE = "sandbox"  # a sandbox wallet guards a dollar that exists nowhere


class Locked(Exception):
    """A key file is missing or does not open; the sentence says what to do."""


def create_wallet(path, passphrase, *, sandbox=False):
    """Make a master key in a new encrypted keystore file; returns its public key M (33 bytes)."""
    secret = secrets.token_bytes(32)
    rounds = {"kdf": "pbkdf2", "iterations": 1000} if sandbox else {}
    _write(path, json.dumps(_account().encrypt(secret, passphrase, **rounds)))
    return coincurve.PublicKey.from_secret(secret).format()


def open_wallets(settings):
    """Decrypt every configured wallet; returns {public key M: secret}. Only operator commands call this."""
    passphrase = settings.passphrase or (SANDBOX_PASSPHRASE if settings.sandbox else "")
    found = {}
    for path in settings.wallets:
        try:
            with open(path, encoding="utf-8") as file:
                secret = bytes(_account().decrypt(json.load(file), passphrase))
        except FileNotFoundError:
            raise Locked(f"The wallet {path} does not exist: run `python cli.py init`, or set DEALS_WALLET.") from None
        except ValueError as error:
            raise Locked(f"The wallet {path} does not open ({error}): check the passphrase.") from None
        found[coincurve.PublicKey.from_secret(secret).format()] = secret
    return found


def _account():
    """Import the keystore's library when a wallet is opened: the web process never needs it.

    One of its parts raises the interpreter's recursion limit beyond what the stack bears; this puts it back.
    """
    limit = sys.getrecursionlimit()
    from eth_account import Account

    sys.setrecursionlimit(limit)
    return Account


def create_secrets(path):
    """Make the receipt key and the first challenge secret."""
    _write(path, json.dumps({"receipt_key": secrets.token_hex(32), "challenge_secrets": [secrets.token_hex(32)]}))


def rotate_secret(path):
    """Put a fresh challenge secret first; challenges issued under the previous one stay good."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    found["challenge_secrets"] = [secrets.token_hex(32), *found["challenge_secrets"][:1]]
    _write(f"{path}.new", json.dumps(found))
    os.replace(f"{path}.new", path)


def load_secrets(path):
    """Return (receipt key, challenge secrets newest first) as bytes."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        raise Locked(f"{path} does not exist: run `python cli.py init`.") from None
    return bytes.fromhex(found["receipt_key"]), tuple(map(bytes.fromhex, found["challenge_secrets"]))


def receipt_address(receipt_key):
    """Return the address that receipts are signed by."""
    return chain.address_of(coincurve.PublicKey.from_secret(receipt_key).format())


def _write(path, text):
    """Write a new file that only its owner may read; never over an existing one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
