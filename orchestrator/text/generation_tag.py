"""`{% generation %} ... {% endgeneration %}` in chat templates: marks text that the model itself writes.

It exists for training. Here only the text between the tags matters, as in `transformers` when the mask of
these tokens is not asked for.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """The tag. Variables that a template sets between the two are not visible after them."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The text between the tags."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
