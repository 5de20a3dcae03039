"""Checks in another process that a constraint is sound and that the tokens of a resumed text follow it.

It is another process because a malicious constraint may keep the grammar library busy for seconds, or make it
end its process. The constraint is compiled for a vocabulary of single bytes, which suffices and loads fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.constraint import Constraint
from outrider.protocol.errors import InvalidRequest

TOKEN_BYTES = 4
"""Bytes that a token id counts in the queue."""


@dataclass(frozen=True, slots=True)
class ConstraintCheck:
    """A constraint, the tokens that were already generated under it, and the tokens that end a text."""

    constraint: Constraint
    generated: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    over_bounds = "takes more time or memory to compile than a constraint may; simplify it"

    @property
    def field(self) -> str:
        """The field of the request that has the constraint."""
        return self.constraint.field

    @property
    def size(self) -> int:
        """Bytes that the job counts in the queue."""
        return self.constraint.size + TOKEN_BYTES * len(self.generated)

    def complete(self, tokenizer: TextTokenizer) -> bool:
        """Whether the generated tokens are a whole text that nothing can follow.

        Raises:
            InvalidRequest: the constraint is wrong, or a token does not follow it.
        """
        from outrider.grammar.compiling import compiled  # the orchestrator itself does not load the library
        from outrider.grammar.matcher import Matcher, replay
        from outrider.grammar.vocabulary import BYTE_EOS, bytes_alone

        matcher = Matcher(compiled(self.constraint, bytes_alone()))
        for index, token in enumerate(self.generated):
            spelled = [BYTE_EOS] if token in self.ends else list(tokenizer.spelling(token))
            if replay(matcher, spelled) < len(spelled):
                raise InvalidRequest(f"resume_token_ids[{index}]", f"does not follow {self.field}")
        if problem := matcher.settle():
            raise InvalidRequest(self.field, problem)
        return matcher.complete
