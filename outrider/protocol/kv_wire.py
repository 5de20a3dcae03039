"""Parts of keys and values on their way: protobuf messages <-> `outrider.protocol.kv_parts`."""

from __future__ import annotations

from typing import assert_never

from outrider.internal.v1 import verify_pb2
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.kv_parts import KvLayout, KvPages, KvPart, KvTokens


def kv_part_to_pb(part: KvPart) -> verify_pb2.KvPart:
    """A part for the wire."""
    match part:
        case KvTokens(token_ids):
            return verify_pb2.KvPart(tokens=verify_pb2.KvTokens(token_ids=token_ids))
        case KvLayout():
            layout = verify_pb2.KvLayout(
                weights=part.weights,
                arithmetic=part.arithmetic,
                dtype=part.dtype,
                page_size=part.page_size,
                shape=part.shape,
            )
            return verify_pb2.KvPart(layout=layout)
        case KvPages(first, contents, digests):
            return verify_pb2.KvPart(
                pages=verify_pb2.KvPages(first=first, contents=contents, digests=digests)
            )
        case _:
            assert_never(part)


def kv_part_from_pb(pb: verify_pb2.KvPart) -> KvPart:
    """A part from the wire.

    Raises:
        InvalidRequest: it is empty, or its columns differ in length.
    """
    match pb.WhichOneof("part"):
        case "tokens":
            return KvTokens(tuple(pb.tokens.token_ids))
        case "layout":
            layout = pb.layout
            return KvLayout(layout.weights, layout.arithmetic, layout.dtype, layout.page_size, layout.shape)
        case "pages":
            contents, digests = tuple(pb.pages.contents), tuple(pb.pages.digests)
            if len(contents) != len(digests):
                raise InvalidRequest("part.pages.digests", f"must be {len(contents)}, one for each page")
            return KvPages(pb.pages.first, contents, digests)
        case _:
            raise InvalidRequest("part", "must be tokens, layout or pages")
