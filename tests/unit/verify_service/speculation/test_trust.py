"""How far estimates are believed."""

from __future__ import annotations

from verify_service.speculation.several_drafts import Trust


def test_a_new_draft_is_believed() -> None:
    """Nothing is held against it yet."""
    assert Trust().factor == 1.0


def test_a_calibrated_draft_stays_believed() -> None:
    """Right as often as predicted, the factor stays near one."""
    trust = Trust()
    for position in range(200):
        trust.observe(0.5, right=position % 2 == 0)
        assert trust.factor > 0.9


def test_a_liar_is_disbelieved_within_a_few_positions_and_may_come_back() -> None:
    """Sure and always wrong: a tenth within thirty positions; right again, believed again."""
    trust = Trust()
    for _ in range(60):
        trust.observe(1.0, right=False)
    assert trust.factor < 0.2
    for _ in range(100):
        trust.observe(1.0, right=True)
    assert trust.factor > 0.9


def test_a_modest_draft_is_not_believed_more_than_it_says() -> None:
    """The factor never exceeds one: a child would outrank its parent."""
    trust = Trust()
    for _ in range(50):
        trust.observe(0.1, right=True)
    assert trust.factor == 1.0
