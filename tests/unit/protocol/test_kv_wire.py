"""Parts of keys and values come back from the wire as they were."""

from __future__ import annotations

import pytest

from outrider.internal.v1 import verify_pb2
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.kv_parts import KvLayout, KvPages, KvPart, KvTokens, page_digest
from outrider.protocol.kv_wire import kv_part_from_pb, kv_part_to_pb

PARTS: list[KvPart] = [
    KvTokens((1, 2, 300)),
    KvLayout("weights", "bfloat16 fused amx", "bfloat16", 16, "2x16x4x8"),
    KvPages(3, (b"one", b"two"), (b"1", b"2")),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_part_survives_the_wire(part: KvPart) -> None:
    """To protobuf and back."""
    assert kv_part_from_pb(kv_part_to_pb(part)) == part


@pytest.mark.parametrize(
    "pb",
    [verify_pb2.KvPart(), verify_pb2.KvPart(pages=verify_pb2.KvPages(contents=[b"one"]))],
    ids=["empty", "no digest"],
)
def test_a_malformed_part_is_refused(pb: verify_pb2.KvPart) -> None:
    """By the field at fault."""
    with pytest.raises(InvalidRequest, match="part"):
        kv_part_from_pb(pb)


def test_a_digest_depends_on_bytes_and_tokens() -> None:
    """The same bytes after other tokens have another one."""
    assert page_digest(b"key", b"page") == page_digest(b"key", b"page")
    assert (
        len({page_digest(b"key", b"page"), page_digest(b"kez", b"page"), page_digest(b"key", b"pagf")}) == 3
    )


def test_layouts_that_differ_have_different_names() -> None:
    """In any of what makes them."""
    layouts = [KvLayout("w", "a", "d", 1, "s")]
    layouts += [KvLayout(*changed) for changed in (("x", "a", "d", 1, "s"), ("w", "a", "d", 2, "s"))]
    assert len({layout.name for layout in layouts}) == 3
    layouts[0].check(KvLayout("w", "a", "d", 1, "s"))
    with pytest.raises(InvalidRequest, match="page_size"):
        layouts[0].check(layouts[2])
