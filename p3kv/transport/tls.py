"""TLS 1.3 around the links of any transport.

OpenSSL works in memory here: it makes records of bytes, and a link carries the records. So a system
call carries several of them, and any link will do.
"""

from __future__ import annotations

import errno
import ssl
from functools import partial
from typing import Iterator, List, Optional, Sequence, Tuple, Union, cast

from p3kv.errors import ProtocolError
from p3kv.transport.certificate import context_of_server, context_of_worker, make_certificate
from p3kv.transport.knock import is_right_knock, make_knock
from p3kv.transport.transport import Address, Link, Listener, Transport

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
        """Gives the link what OpenSSL has made; returns whether it has taken all."""
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
        """`key` has 32 bytes that only the job's processes know.

        Raises ConfigError where this Python can't encrypt.
        """
        super().__init__(transport.silence_timeout_s)
        self._transport = transport
        self._key = key
        self._certificate = make_certificate(key)

    def listen(self, host: str) -> Listener:
        context = context_of_server(self._certificate)
        context.sni_callback = partial(_refuse_strangers, self._key)
        return TlsListener(self._transport.listen(host), context)

    def connect(self, address: Address, timeout_s: float) -> Link:
        link = self._transport.connect(address, timeout_s)
        return TlsLink(link, context_of_worker(self._certificate), make_knock(self._key))


def _refuse_strangers(
    key: bytes, tls: ssl.SSLObject, name: Optional[str], context: ssl.SSLContext
) -> Optional[int]:
    """OpenSSL asks before it answers a hello; a number refuses it."""
    return None if is_right_knock(key, name) else int(ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)


def _pieces(buffers: Sequence[memoryview], skip_bytes: int) -> Iterator[Union[memoryview, bytes]]:
    """Bytes of `buffers` after the first `skip_bytes`, in pieces for OpenSSL.

    Small buffers are joined, because each piece begins a record. Large ones are not copied.
    """
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
