"""What Triton's interpreter keeps is what it would make anew."""

from __future__ import annotations

import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic

from tests.unit.engine.gpu import interpreter

TYPES = [
    core.float32,
    core.int1,
    core.pointer_type(core.float32),
    core.pointer_type(core.float32, const=True),
]
SHAPES = [[8], [1, 8], [8, 1], [16, 4, 2], [core.constexpr(8)]]


def test_a_kept_type_is_the_one_that_was_made():
    """By element and sizes, also when it is asked for again."""
    make = interpreter._kept(core.block_type.__init__)
    for element in (*TYPES, *TYPES):
        for shape in (*SHAPES, core.tuple([4, 2])):
            expected, found = core.block_type(element, shape), object.__new__(core.block_type)
            make(found, element, shape)
            assert found == expected
            assert found.element_ty is element
            assert (found.name, found.numel) == (expected.name, expected.numel)


@pytest.mark.parametrize(("shape", "error"), [([], TypeError), ([3], ValueError), ([2, 6], ValueError)])
def test_what_is_no_shape_is_refused_each_time(shape, error):
    """Nothing of a refused type is kept."""
    make = interpreter._kept(core.block_type.__init__)
    for _ in range(2):
        with pytest.raises(error):
            make(object.__new__(core.block_type), core.float32, shape)


def test_a_tensor_with_a_kept_shape_is_the_one_that_was_made():
    """Its handle and type are its own; tensors of one shape, and no others, share it."""
    make = interpreter._with_kept_shapes(core.tensor.__init__)
    shapes = set()
    for round_ in range(2):
        for kind in (*TYPES, *(core.block_type(each, [8, 1]) for each in TYPES)):
            expected, found = core.tensor(round_, kind), object.__new__(core.tensor)
            make(found, round_, kind)
            assert vars(found).keys() == vars(expected).keys()
            assert (found.handle, found.type, found.dtype) == (round_, kind, expected.dtype)
            assert found.shape == expected.shape
            assert found.numel == expected.numel
            shapes.add(id(found.shape))
    assert len(shapes) == 2


def test_operands_of_one_shape_stay_as_they_are():
    """Others are broadcast as before."""
    asked = []
    broadcast = interpreter._unless_alike(lambda *given: asked.append(given))
    left, right = (core.tensor(None, core.block_type(core.float32, [8])) for _ in range(2))
    broadcast(None, left, right)
    assert asked == [(None, left, right)], "each has a shape of its own here"
    right.shape = left.shape
    assert broadcast(None, left, right) == (left, right)
    assert TritonSemantic.broadcast_impl_value(None, left, right) == (left, right)
    assert len(asked) == 1
