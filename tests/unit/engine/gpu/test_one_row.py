"""The forward of one token, by kernels in Triton's interpreter, against torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from outrider.engine.fused_decoder.activation import NAMES
from outrider.engine.fused_decoder.decoder import Norm
from outrider.engine.gpu import one_row
from outrider.engine.gpu.one_row import OneRowProduct
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading import check_forward, loader
from outrider.engine.loading.check_forward import run_plain
from outrider.engine.runner import Segment
from outrider.protocol.errors import ModelError
from tests.models import build_model

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The largest error accepted, relative to the result's length."""
SHAPES = [(512, 64), (600, 44), (96, 200)]
"""Numbers of a row and columns: whole blocks and cut ones, more columns than numbers and fewer."""


def layer(shape: tuple[int, int], dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    """A layer of random weights."""
    torch.manual_seed(0)
    return nn.Linear(*shape, bias=bias).to(dtype).requires_grad_(False)


def exact(made: nn.Linear, x: Tensor, norm: Norm | None) -> Tensor:
    """The product in double precision."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    return linear(x, made.weight.double(), None if made.bias is None else made.bias.double())


def close(found: Tensor, wanted: Tensor) -> bool:
    """True when the error is small for the dtype of what was found."""
    return bool((found.double() - wanted).norm() <= NEAR[found.dtype] * wanted.norm())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_torch_s(shape, dtype, bias, normed):
    """With the norm before it; and added to a row that is there."""
    made, x = layer(shape, dtype, bias=bias), torch.randn(1, shape[0]).to(dtype)
    norm = Norm((torch.rand(shape[0]) + 0.5).to(dtype), 1e-5) if normed else None
    product, wanted = OneRowProduct(made, norm), exact(made, x, norm)
    assert close(product(x), wanted)
    hidden = torch.randn(1, shape[1]).to(dtype)
    total = wanted + hidden.double()
    product.add(x, hidden)
    assert close(hidden, total)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_a_gate_is_applied(activation, weight):
    """To the first half of the product, times the second half; norms may have weights of float32 (Gemma)."""
    made, x = layer((300, 120), torch.bfloat16, bias=True), torch.randn(1, 300).bfloat16()
    norm = Norm((torch.rand(300) + 0.5).to(weight), 1e-6)
    gate, up = exact(made, x, norm).chunk(2, -1)
    assert close(OneRowProduct(made, norm, NAMES[activation])(x), activation(gate) * up)


def test_other_rows_than_one_are_refused():
    """The kernel would read beside them."""
    product = OneRowProduct(layer((64, 96), torch.float32, bias=False))
    with pytest.raises(ValueError, match="what a product takes is"):
        product(torch.zeros(2, 64))
    with pytest.raises(ValueError, match="the result of a product is"):
        product.add(torch.zeros(1, 64), torch.zeros(1, 64))


def few_programs(patch):
    """Let each program of a product of one row compute many columns."""
    patch.setattr(one_row, "NARROW", 32)
    patch.setattr(one_row, "WIDE", 64)


@pytest.fixture
def folder(tmp_path):
    """A tiny model."""
    return str(build_model("llama", tmp_path, num_hidden_layers=1))


@pytest.fixture
def loaded(folder, monkeypatch):
    """The model in bfloat16 with the linear layers of torch, and few programs: interpreting takes time."""
    monkeypatch.setattr(loader, "pack_linears", lambda *_: 0)
    few_programs(monkeypatch)
    return loader.load_model(folder, dtype="bfloat16", device="cpu", threads=1)


def test_tokens_alone_have_the_logits_of_tokens_together(loaded):
    """Numbers are rounded at the same places, so that a text does not depend on how its tokens came."""
    runner = GraphRunner(loaded, 16, 4, buckets=())
    together, alone = (SequenceKv.open(runner.pool, []) for _ in range(2))
    tokens = [(7 * index + 3) % 290 for index in range(12)]
    expected = runner.forward([Segment(together, tokens, None, range(12))])
    found = torch.cat([runner.forward([Segment(alone, [token], None, [0])]) for token in tokens])
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    assert ((found - expected).norm(dim=-1) < 0.01 * spread).all()


def test_the_check_at_load_computes_tokens_alone(folder, loaded, monkeypatch):
    """A forward of one token that computes something else is found."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    plain = run_plain(network, loaded.context_length)
    monkeypatch.setattr(check_forward, "make_runner", partial(GraphRunner, buckets=()))
    check_forward.check_paged(loaded, plain)
    monkeypatch.setattr(OneRowProduct, "add", lambda product, x, hidden: None)
    with pytest.raises(ModelError, match="tokens one by one"):
        check_forward.check_paged(loaded, plain)
