"""TLS and mutual TLS from PEM files, for servers and channels, which also use renewed files while they run.

A new certificate is tested before it is used: it must parse, fit its key and be valid now. A server checks
the files at every handshake, a channel at its calls; existing connections keep their first certificates.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.protocol.errors import ConfigError
from outrider.rpc.reloading import Contents, Reloaded

SYSTEM = "system"
"""Value of a setting that stands for the system's authorities instead of a file."""
CHECK_SECONDS = 1.0
"""Least seconds between checks of the files by a channel's calls."""
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts that fit together; None for those that are not set."""

    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    authorities: bytes | None = None
    expires: float = 0.0
    """End of the certificate's validity in Unix seconds; 0 without a certificate."""


def server_certificates(cert: str, key: str, ca: str) -> Reloaded[Certificates] | None:
    """The certificates of a server; None if `cert` is empty. With `ca`, clients must present a certificate
    that it issued.

    Raises:
        ConfigError: a file cannot be read or used, or only one of `cert` and `key` is set.
    """
    if not _paired("tls_cert", cert, "tls_key", key):
        if ca:
            raise ConfigError("tls_ca: needs tls_cert and tls_key")
        return None
    return _reloaded("server", {"tls_cert": cert, "tls_key": key, "tls_ca": ca}, 0.0)


def client_certificates(
    ca: str, cert: str = "", key: str = "", names: str = "tls_client"
) -> Reloaded[Certificates] | None:
    """The certificates of a client; None if `ca` is empty, which means plaintext. `names` begins the names of
    the three settings.

    Raises:
        ConfigError: a file cannot be read or used, or only one of `cert` and `key` is set.
    """
    paired = _paired(f"{names}_cert", cert, f"{names}_key", key)
    if not ca:
        if paired:
            raise ConfigError(f"{names}_ca: must be set when a client certificate is")
        return None
    authorities = "" if ca == SYSTEM else ca
    files = {f"{names}_cert": cert, f"{names}_key": key, f"{names}_ca": authorities}
    return _reloaded("client", files, CHECK_SECONDS)


def server_credentials(certificates: Reloaded[Certificates]) -> grpc.ServerCredentials:
    """Credentials that present the files' certificate at the time of each handshake."""
    used = certificates.value
    mutual = used.authorities is not None

    def renewed() -> Any:
        """The new configuration; None to keep the present one."""
        nonlocal used
        current = certificates.current()
        if current is used:
            return None
        used = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), renewed, mutual)


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Credentials of a channel."""
    return grpc.ssl_channel_credentials(certificates.authorities, certificates.key, certificates.certificate)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    assert certificates.key is not None
    assert certificates.certificate is not None
    pair = (certificates.key, certificates.certificate)
    return grpc.ssl_server_certificate_configuration([pair], certificates.authorities)


def _reloaded(role: str, files: Mapping[str, str], period: float) -> Reloaded[Certificates]:
    """`files` name certificate, key and authorities, in this order."""
    cert, key, ca = files

    def make(contents: Contents) -> Certificates:
        authorities = contents.get(ca)
        if authorities is not None:
            _check_authorities(ca, authorities)
        if cert not in contents:
            return Certificates(authorities=authorities)
        chain = contents[cert]
        expires = _try_out(role, (cert, files[cert], chain), (key, files[key]))
        return Certificates(chain, contents[key], authorities, expires)

    return Reloaded(f"{role}_certificate", files, make, period=period)


def _check_authorities(setting: str, pem: bytes) -> None:
    """Raise ConfigError unless there is an authority that has not expired."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{setting}: is no PEM file of certificates ({_reason(error)})") from None
    ends = [ssl.cert_time_to_seconds(str(found["notAfter"])) for found in context.get_ca_certs()]
    if ends and max(ends) < time.time():
        raise ConfigError(f"{setting}: every authority in it has expired")


def _try_out(role: str, chain: tuple[str, str, bytes], key: tuple[str, str]) -> float:
    """Test a certificate with a handshake in memory; returns the end of its validity in Unix seconds.

    Raises:
        ConfigError: the certificate does not parse, or is not for this key, this role or the present time.
    """
    (cert_setting, cert_path, pem), (key_setting, key_path) = chain, key
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    trusting = client if role == "server" else server
    trusting.verify_mode = ssl.CERT_REQUIRED
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    leaf = _CERTIFICATE.search(pem.decode("ascii", "replace"))
    if leaf is None:
        raise ConfigError(f"{cert_setting}: is no PEM file of certificates")
    try:
        trusting.load_verify_locations(cadata=leaf.group())
        for context in (server, client):
            context.load_cert_chain(cert_path, key_path, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"{cert_setting}, {key_setting}: cannot be used ({_reason(error)})") from None
    try:
        shown = _shake_hands(server, client, trusting)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{cert_setting}: would be refused ({_reason(error)})") from None
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, trusting: ssl.SSLContext
) -> Mapping[str, object]:
    """The certificate that the `trusting` side received."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for _ in range(4):  # round trips; TLS 1.2 needs two
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = sides[0 if trusting is client else 1].getpeercert()
    if not shown:
        raise ValueError("no certificate was shown")
    return shown


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    """The cause of an error, without OpenSSL's file names and numbers."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    reason = getattr(error, "reason", None) or str(error)
    return str(reason).lower().replace("_", " ")


def _paired(cert_name: str, cert: str, key_name: str, key: str) -> bool:
    if bool(cert) != bool(key):
        missing, present = (key_name, cert_name) if cert else (cert_name, key_name)
        raise ConfigError(f"{missing}: must be set when {present} is")
    return bool(cert)
