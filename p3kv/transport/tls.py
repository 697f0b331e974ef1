"""TLS 1.3 around the links of any transport.

OpenSSL works in memory here: it makes records of bytes, and a link carries the records. So a system
call carries several of them, and any link will do.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import ssl
from datetime import datetime
from hashlib import sha256
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union, cast

from p3kv.errors import ConfigError, ProtocolError
from p3kv.transport.transport import Address, Link, Listener, Transport

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


_DIGITS = 32
"""Hexadecimal, of the number and of the proof. TLS allows 63 letters between two points."""


def make_knock(key: bytes) -> str:
    """A name to ask for, another one each time."""
    number = secrets.token_hex(_DIGITS // 2)
    return f"{number}.{_proof(key, number)}"


def is_right_knock(key: bytes, name: Optional[str]) -> bool:
    """Whether somebody who has the key has made this name."""
    number, _, proof = (name or "").partition(".")
    return hmac.compare_digest(proof.encode(), _proof(key, number).encode())


def _proof(key: bytes, number: str) -> str:
    return hmac.new(key, b"p3kv knock\0" + number.encode(), sha256).hexdigest()[:_DIGITS]


_RECORD_BYTES = 16 * 1024
"""Most bytes in a record of TLS."""
_PIECE_BYTES = 4 * _RECORD_BYTES
_RECEIVED_BYTES = 8 * _RECORD_BYTES
_EARLY_BYTES = 4096
"""Enough for a handshake, and for what a worker says before it is complete."""


class TlsLink(Link):
    """A link whose bytes are encrypted on the way, over another link."""

    def __init__(self, link: Link, context: ssl.SSLContext, knock: Optional[str] = None) -> None:
        """Owns `link` from now on. The side that connects has a knock and begins the handshake; the
        rest of it happens when bytes are received. OSError if the link is broken already."""
        self._link = link
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, knock is None, knock)
        # Small, because strangers get it, too.
        self._received = memoryview(bytearray(_EARLY_BYTES))
        self._is_closed = False
        self._is_ready = False
        """The handshake is complete."""
        self._has_ended = False
        self._early = b""
        """Bytes that this side has written before the handshake was complete."""
        self._unsent = memoryview(b"")
        """Records that the link has not taken yet."""
        self._untold_bytes = 0
        """How many of the caller's bytes are in these records. The caller hears that they are taken
        when the records have left, and repeats them until then."""
        self.descriptor = link.descriptor
        self.place = link.place
        if knock is not None:
            self._shake_hands()

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        self._check_open()
        count = self._decrypt_into(buffers)
        if count or self._has_ended:
            return count
        received = self._link.receive_into([self._received])
        if not received:
            return 0
        self._incoming.write(self._received[:received])
        count = self._decrypt_into(buffers)
        if not count and not self._has_ended:
            raise BlockingIOError
        return count

    def send(self, buffers: Sequence[memoryview]) -> int:
        self._check_open()
        if not self._is_ready:
            return self._keep(buffers)
        if not self._flush():
            raise BlockingIOError
        count, self._untold_bytes = self._untold_bytes, 0
        for piece in _pieces(buffers, count):
            self._tls.write(piece)
            if not self._flush():
                self._untold_bytes = len(piece)
                break
            count += len(piece)
        if not count:
            raise BlockingIOError
        return count

    def hold_at_most(self, size_bytes: int) -> None:
        self._link.hold_at_most(size_bytes)

    def close(self) -> None:
        self._link.close()
        if not self._is_closed:
            self._is_closed = True
            # OpenSSL's memory is some 50 KiB, and connections are freed late: objects refer to
            # each other in circles. Strangers would have this process grow for good.
            del self._tls, self._incoming, self._outgoing, self._received

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "this process has closed the link")

    def _decrypt_into(self, buffers: Sequence[memoryview]) -> int:
        """Takes bytes out of records that have come completely."""
        if not self._is_ready and not self._shake_hands():
            return 0
        count = 0
        self.holds_more = True
        try:
            for buffer in buffers:
                while len(buffer):
                    # Typeshed says neither what it takes nor what it returns then.
                    read = cast(int, self._tls.read(len(buffer), cast(bytearray, buffer)))
                    if not read:
                        self._has_ended = True
                        self.holds_more = False
                        return count
                    buffer = buffer[read:]
                    count += read
        except ssl.SSLWantReadError:
            self.holds_more = False
        except ssl.SSLError as error:
            reason = f"what came is not what was sent ({_why(error)})"
            raise OSError(errno.EBADMSG, reason) from error
        return count

    def _shake_hands(self) -> bool:
        """Goes on with the handshake; returns whether it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if self._outgoing.pending:
                self.is_known = True  # OpenSSL answers nobody else
            self._flush()
            return False
        except ssl.SSLCertVerificationError as error:
            self._flush()  # it says there why
            raise ProtocolError(
                f"what answers in its place {self.place} can't show the certificate of this job "
                f"({error.verify_message}). Does its address belong to another program, or does "
                "somebody intercept the connection?"
            ) from error
        except ssl.SSLError as error:
            # Without an answer, which would only help strangers.
            raise ProtocolError(f"its TLS handshake is wrong ({_why(error)})") from error
        self._is_ready = True
        self._received = memoryview(bytearray(_RECEIVED_BYTES))
        if self._early:
            self._tls.write(self._early)
        self._flush()
        return True

    def _keep(self, buffers: Sequence[memoryview]) -> int:
        kept = b"".join(buffers)[: _EARLY_BYTES - len(self._early)]
        if not kept:
            raise BlockingIOError
        self._early += kept
        return len(kept)

    def _flush(self) -> bool:
        """Send OpenSSL's records over the link; return whether it has taken all."""
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                count = self._link.send([self._unsent])
            except (BlockingIOError, InterruptedError):
                return False
            self._unsent = self._unsent[count:]
            if self._unsent:
                return False
        return True


class TlsListener(Listener):
    """Encrypts the links of another listener, which it owns from now on."""

    def __init__(self, listener: Listener, context: ssl.SSLContext) -> None:
        self._listener = listener
        self._context = context
        self.address = listener.address
        self.descriptor = listener.descriptor

    def accept(self, most: int) -> Tuple[List[Link], bool]:
        links, no_room = self._listener.accept(most)
        return [TlsLink(link, self._context) for link in links], no_room

    def close(self) -> None:
        self._listener.close()


class Tls(Transport):
    """Encrypts the links of another transport, between processes that have the same key."""

    def __init__(self, transport: Transport, key: bytes) -> None:
        """`key` has 32 bytes that only the job's processes know. Raises ConfigError where this
        Python can't encrypt."""
        super().__init__(transport.silence_timeout_s)
        self._transport = transport
        self._key = key
        self._certificate = make_certificate(key)

    def listen(self, host: str) -> Listener:
        context = context_of_server(self._certificate)
        context.sni_callback = self._refuse_strangers
        return TlsListener(self._transport.listen(host), context)

    def connect(self, address: Address, timeout_s: float) -> Link:
        link = self._transport.connect(address, timeout_s)
        return TlsLink(link, context_of_worker(self._certificate), make_knock(self._key))

    def _refuse_strangers(
        self, tls: ssl.SSLObject, name: Optional[str], context: ssl.SSLContext
    ) -> Optional[int]:
        """OpenSSL asks before it answers a hello; a number refuses it."""
        known = is_right_knock(self._key, name)
        return None if known else int(ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)


def _pieces(buffers: Sequence[memoryview], skip_bytes: int) -> Iterator[Union[memoryview, bytes]]:
    """Bytes of `buffers` after the first `skip_bytes`, in pieces for OpenSSL. Small buffers are
    joined, because each piece begins a record. Large ones are not copied."""
    small: List[memoryview] = []
    room_bytes = _RECORD_BYTES
    for buffer in buffers:
        skipped = min(skip_bytes, len(buffer))
        skip_bytes -= skipped
        buffer = buffer[skipped:]
        while len(buffer):
            if not small and len(buffer) >= _RECORD_BYTES:
                yield buffer[:_PIECE_BYTES]
                buffer = buffer[_PIECE_BYTES:]
                continue
            small.append(buffer[:room_bytes])
            room_bytes -= len(small[-1])
            buffer = buffer[len(small[-1]) :]
            if not room_bytes:
                yield b"".join(small)
                small, room_bytes = [], _RECORD_BYTES
    if small:
        yield b"".join(small)


def _why(error: ssl.SSLError) -> str:
    """OpenSSL's reason in words: "wrong version number"."""
    return (error.reason or str(error)).replace("_", " ").lower()
