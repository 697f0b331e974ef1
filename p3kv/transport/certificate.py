"""The certificate by which workers know their job's servers: it follows from the job's secret.

So no process has to send it, and who does not have the secret can't show it. No authority signs it,
and it names no host.
"""

from __future__ import annotations

import os
import ssl
from datetime import datetime
from typing import NamedTuple

from p3kv.errors import ConfigError

_NAME = "p3kv"
# For ever: hosts need not agree on the time. The certificate counts as long as the secret does.
_FROM, _UNTIL = datetime(2000, 1, 1), datetime(9999, 12, 31)


class Certificate(NamedTuple):
    """A certificate and its secret key, both in PEM."""

    public: bytes
    key: bytes


def check_package() -> None:
    """Raises ConfigError where the package that makes certificates is missing."""
    try:
        from cryptography import x509  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"P3KV_ENCRYPT=1 needs the package 'cryptography', and this Python has none that works "
            f"({error}). Install it on all hosts: pip install 'cryptography>=38'"
        ) from error


def make_certificate(seed: bytes) -> Certificate:
    """The certificate whose Ed25519 key is `seed`, of 32 bytes; signed by this key.

    It is byte for byte the same in all processes, since Ed25519's signatures have no random part.
    Raises ConfigError where the package that makes it is missing.
    """
    check_package()
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    unsigned = x509.CertificateBuilder(name, name, key.public_key(), 1, _FROM, _UNTIL)
    return Certificate(
        unsigned.sign(key, None).public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def context_of_server(certificate: Certificate) -> ssl.SSLContext:
    """How a server speaks TLS: it shows the certificate."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no worker comes back with one
    # OpenSSL reads a key from a file only. This one has no name and is on no disk.
    file = os.memfd_create("p3kv")
    try:
        os.write(file, certificate.public + certificate.key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context


def context_of_worker(certificate: Certificate) -> ssl.SSLContext:
    """How a worker speaks TLS: with who has the key of this certificate, and with nobody else."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate.public.decode())
    return context


def _context(protocol: int) -> ssl.SSLContext:
    if not ssl.HAS_TLSv1_3:
        raise ConfigError(
            f"P3KV_ENCRYPT=1 needs TLS 1.3, which this Python does not have with its "
            f"{ssl.OPENSSL_VERSION}. Use a Python with OpenSSL 1.1.1 or newer"
        )
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
