"""`{% generation %} ... {% endgeneration %}` of chat templates: around the text that a model writes itself.

It is there for training. Here the text between the tags is all that counts, as in `transformers` when nobody
asks which tokens those are.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """The tag; what a template sets between the two is not known behind them."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The text between the tags."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
