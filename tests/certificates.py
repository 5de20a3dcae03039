"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def self_signed(folder: Path, name: str = "IP:127.0.0.1") -> dict[str, str]:
    """A certificate for a name such as `IP:127.0.0.1` or `DNS:localhost` that is its own authority: the files
    "cert" and "key"."""
    files = {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    _openssl(
        "req", "-x509", *KEY.split(), *_subject(files), "-days", "1", "-addext", f"subjectAltName={name}"
    )
    return files


def authority(folder: Path) -> Path:
    """A folder with an authority's `ca.crt` and `ca.key`."""
    folder.mkdir()
    files = {"cert": str(folder / "ca.crt"), "key": str(folder / "ca.key")}
    _openssl("req", "-x509", *KEY.split(), *_subject(files), "-days", "1")
    return folder


def issue(by: Path, folder: Path, name: str, days: int = 1) -> Path:
    """A folder as cert-manager fills a Secret: `tls.crt` for a name such as `verify` or `IP:127.0.0.1`,
    `tls.key`, and `ca.crt`. With -1 day it expired yesterday."""
    folder.mkdir()
    for file, content in certificate(by, name, days).items():
        (folder / file).write_bytes(content)
    return folder


def certificate(by: Path, name: str, days: int = 1, usage: str = "") -> dict[str, bytes]:
    """The contents of such a folder; `usage` is what the certificate is for alone, such as `serverAuth`."""
    name = name if ":" in name else f"DNS:{name}"
    files = {"cert": str(by / "request.csr"), "key": str(by / "tls.key")}
    extensions = [f"subjectAltName={name}", "basicConstraints=critical,CA:false"]
    if usage:
        extensions += ["keyUsage=digitalSignature", f"extendedKeyUsage={usage}"]
    added = [word for extension in extensions for word in ("-addext", extension)]
    _openssl("req", *KEY.split(), *_subject(files), *added)
    signer = ("-CA", str(by / "ca.crt"), "-CAkey", str(by / "ca.key"), "-copy_extensions", "copyall")
    signed = _openssl("x509", "-req", "-in", files["cert"], *signer, "-days", str(days))
    return {
        "tls.crt": signed,
        "tls.key": Path(files["key"]).read_bytes(),
        "ca.crt": (by / "ca.crt").read_bytes(),
    }


def mount(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Put files into a folder as a kubelet mounts a Secret, or replace them as it does: links to files below
    `..data`, a link that is swapped in one step."""
    folder.mkdir(exist_ok=True)
    version = folder / f"..version-{len(list(folder.iterdir()))}"
    version.mkdir()
    for file, content in contents.items():
        (version / file).write_bytes(content)
    (folder / "..data_tmp").symlink_to(version.name)
    os.replace(folder / "..data_tmp", folder / "..data")
    for file in contents:
        if not (folder / file).is_symlink():
            (folder / file).symlink_to(Path("..data") / file)
    return folder


def _subject(files: Mapping[str, str]) -> tuple[str, ...]:
    return ("-subj", "/CN=outrider", "-out", files["cert"], "-keyout", files["key"])


def _openssl(*arguments: str) -> bytes:
    return subprocess.run(["openssl", *arguments], check=True, capture_output=True).stdout
