"""TLS and mutual TLS credentials from PEM files, for servers and channels."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import grpc

from outrider.errors import ConfigError


def server_credentials(cert: str, key: str, ca: str) -> grpc.ServerCredentials | None:
    """Credentials of a server; None when `cert` is empty. With `ca`, clients must present a certificate.

    The files are read again at every handshake, so that a renewed certificate is taken up without a restart.

    Raises:
        ConfigError: a file cannot be read, or only one of `cert` and `key` is set.
    """
    if not _paired("tls_cert", cert, "tls_key", key):
        if ca:
            raise ConfigError("tls_ca: needs tls_cert and tls_key")
        return None

    def current() -> grpc.ServerCertificateConfiguration:
        authorities = _read("tls_ca", ca) if ca else None
        pair = (_read("tls_key", key), _read("tls_cert", cert))
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    first = latest = current()

    def fetch() -> grpc.ServerCertificateConfiguration:
        nonlocal latest
        with suppress(ConfigError):  # being replaced just now: go on with the ones at hand
            latest = current()
        return latest

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=bool(ca))


def channel_credentials(ca: str, cert: str = "", key: str = "") -> grpc.ChannelCredentials | None:
    """Credentials of a client; None when `ca` is empty. "system" stands for the system's authorities.

    Raises:
        ConfigError: a file cannot be read, or only one of `cert` and `key` is set.
    """
    paired = _paired("tls_client_cert", cert, "tls_client_key", key)
    if not ca:
        if paired:
            raise ConfigError("tls_client_ca: must be set when a client certificate is")
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=None if ca == "system" else _read("tls_client_ca", ca),
        private_key=_read("tls_client_key", key) if paired else None,
        certificate_chain=_read("tls_client_cert", cert) if paired else None,
    )


def _paired(cert_name: str, cert: str, key_name: str, key: str) -> bool:
    if bool(cert) != bool(key):
        missing, present = (key_name, cert_name) if cert else (cert_name, key_name)
        raise ConfigError(f"{missing}: must be set when {present} is")
    return bool(cert)


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path!r} ({error.strerror})") from error
