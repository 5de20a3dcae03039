"""Certificates for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

NEW = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"


def self_signed(folder: Path, name: str = "IP:127.0.0.1") -> dict[str, str]:
    """A certificate for a name such as `IP:127.0.0.1` or `DNS:localhost` that is its own authority: the files
    "cert" and "key"."""
    files = {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    _make(files["cert"], files["key"], "-addext", f"subjectAltName={name}")
    return files


def authority(folder: Path) -> Path:
    """A folder with an authority's `ca.crt` and `ca.key`."""
    folder.mkdir()
    _make(folder / "ca.crt", folder / "ca.key")
    return folder


def issue(by: Path, folder: Path, name: str) -> Path:
    """A folder as cert-manager fills a Secret: `tls.crt` for a DNS name, `tls.key`, and `ca.crt`."""
    folder.mkdir()
    signer = ["-CA", str(by / "ca.crt"), "-CAkey", str(by / "ca.key")]
    extensions = [f"subjectAltName=DNS:{name}", "basicConstraints=critical,CA:false"]
    added = [word for extension in extensions for word in ("-addext", extension)]
    _make(folder / "tls.crt", folder / "tls.key", *signer, *added)
    (folder / "ca.crt").write_bytes((by / "ca.crt").read_bytes())
    return folder


def _make(cert: Path | str, key: Path | str, *arguments: str) -> None:
    command = [*NEW.split(), "-subj", "/CN=outrider", "-out", str(cert), "-keyout", str(key), *arguments]
    subprocess.run(command, check=True, capture_output=True)
