"""The TLS of the gateway's server, which uses renewed files while it runs."""

from __future__ import annotations

import ssl

from outrider.config import GatewayConfig
from outrider.rpc.reloading import Reloaded
from outrider.rpc.tls import Certificates

REFUSALS = ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED")
"""Reasons of OpenSSL for refusing a client's certificate."""


class _Handshake(ssl.SSLObject):
    """A handshake that tells a client why its certificate is refused.

    Event loops send what OpenSSL has written only if the handshake goes on: at an error they close the
    connection first, and the client sees no reason.
    """

    _refusal: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """See `ssl`. A refusal is raised only when the client has sent more; without that, the event loop's
        limit on the time of a handshake ends it."""
        if self._refusal is not None:
            raise self._refusal
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason not in REFUSALS:
                raise
            self._refusal = error
            raise ssl.SSLWantReadError from error


class ServerTls:
    """Shows the files' certificate at the time of each handshake; with `tls_ca`, clients must show one that
    the authorities of that time issued."""

    def __init__(self, config: GatewayConfig, certificates: Reloaded[Certificates]) -> None:
        self.context = _context(config)
        """Begins each handshake."""
        self.context.sni_callback = self._renew
        self.context.sslobject_class = _Handshake
        self._config = config
        self._certificates = certificates
        self._used = certificates.value
        self._current = self.context

    def _renew(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Go on with the current files. OpenSSL calls this early in a handshake, also for clients that name
        no server."""
        certificates = self._certificates.current()
        if certificates is not self._used:
            self._load(certificates)
        connection.context = self._current

    def _load(self, certificates: Certificates) -> None:
        try:
            self._current = _context(self._config)
        except OSError:  # they change again just now, so the next handshake reads them; SSLError is one
            return
        self._used = certificates


def _context(config: GatewayConfig) -> ssl.SSLContext:
    """The context of the files as they are. It is a new one, because authorities cannot be taken from one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(config.tls_cert, config.tls_key)
    if config.tls_ca:
        context.load_verify_locations(config.tls_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
