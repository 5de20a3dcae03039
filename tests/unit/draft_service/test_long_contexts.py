"""What a verdict costs a draft session depends on the verdict, not on how long the context is."""

from __future__ import annotations

from draft_service.drafters.lookup import SequenceLookup
from outrider.protocol.messages import Verdict
from tests.allocations import usually_allocated
from tests.unit.draft_service.fakes import proposal, request, session

SHORT, LONG = 1_000, 32_000
KILOBYTE = 1024


def test_re_rooting_copies_nothing_of_the_context():
    """The tree and the lookup take the new tokens; what is held for a moment is as much at any length."""
    sizes = []
    for length in (SHORT, LONG):
        tokens = tuple(place * 31 % 97 for place in range(length))
        held, lookup = session(opening=request(tokens)), SequenceLookup(tokens)
        while not lookup.index():
            pass

        def step(held=held, lookup=lookup):
            held.grow(held.take() if held.root_pending else None, proposal((10, 60), (11, 30)))
            held.commit(Verdict(held.step + 1, held.tree.committed_length, (10, 12, 13)), 0.0)
            lookup.append((10, 12, 13))
            lookup.propose(8, 8)
            held.next_block(ready=True, now=0.0)

        sizes.append(usually_allocated(step))
    assert sizes[1] < sizes[0] + 4 * KILOBYTE
