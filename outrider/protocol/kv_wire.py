"""Converts transfers of keys and values between protobuf messages and `outrider.protocol.kv_parts`."""

from __future__ import annotations

from typing import assert_never

from outrider.internal.v1 import verify_pb2
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.kv_parts import KvLayout, KvPages, KvPart, KvTokens
from outrider.protocol.same_names import fields_of, plain_fields


def kv_part_to_pb(part: KvPart) -> verify_pb2.KvPart:
    """A part for the wire."""
    match part:
        case KvTokens():
            return verify_pb2.KvPart(tokens=verify_pb2.KvTokens(**fields_of(part)))
        case KvLayout():
            return verify_pb2.KvPart(layout=verify_pb2.KvLayout(**fields_of(part)))
        case KvPages():
            return verify_pb2.KvPart(pages=verify_pb2.KvPages(**fields_of(part)))
        case _:
            assert_never(part)


def kv_part_from_pb(pb: verify_pb2.KvPart) -> KvPart:
    """A part from the wire.

    Raises:
        InvalidRequest: the part is empty, or its columns differ in length.
    """
    match pb.WhichOneof("part"):
        case "tokens":
            return KvTokens(**plain_fields(pb.tokens))
        case "layout":
            return KvLayout(**plain_fields(pb.layout))
        case "pages":
            pages = KvPages(**plain_fields(pb.pages))
            if len(pages.contents) != len(pages.digests):
                raise InvalidRequest(
                    "part.pages.digests", f"must be {len(pages.contents)}, one for each page"
                )
            return pages
        case _:
            raise InvalidRequest("part", "must be tokens, layout or pages")
