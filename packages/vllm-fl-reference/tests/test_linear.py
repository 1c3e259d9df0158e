"""Packed linear layers give what plain ones give, in eager mode and in compiled graphs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_fl_reference.linear import PackedHeadMethod, PackedLinearMethod, _packed, can_pack, pack_linear_layers

pytestmark = pytest.mark.skipif(not can_pack(), reason="no bfloat16 products through oneDNN on this processor")


class Layer(nn.Module):
    """As much of a vLLM layer as the packing looks at."""

    def __init__(self, weight: torch.Tensor, method: object, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self.quant_method = method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


def linear(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> Layer:
    torch.manual_seed(rows * columns)
    return Layer(
        torch.randn(rows, columns, dtype=dtype),
        UnquantizedLinearMethod(),
        torch.randn(rows, dtype=dtype) if bias else None,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (33, 65), (1, 7), (192, 576)])
@pytest.mark.parametrize("shape", [(0,), (1,), (15,), (130,), (2, 3)])
def test_packed_product_against_float64(shape: tuple[int, ...], rows: int, columns: int, bias: bool) -> None:
    layer = linear(rows, columns, bias=bias)
    x = torch.randn(*shape, columns, dtype=torch.bfloat16)
    want = x.double() @ layer.weight.double().T
    if layer.bias is not None:
        want += layer.bias.double()
    pack_linear_layers(nn.Sequential(layer))
    assert isinstance(layer.quant_method, PackedLinearMethod)
    got = layer(x)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=1.6e-2, atol=2e-2 * columns**0.5)


def test_weight_becomes_a_handle_and_the_size_is_told() -> None:
    layer = linear(64, 32)
    assert pack_linear_layers(nn.Sequential(layer)) == 64 * 32 * 2
    assert (layer.weight.dtype, layer.weight.numel()) == (torch.int64, 1)
    with pytest.raises(RuntimeError):
        nn.functional.linear(torch.randn(2, 32, dtype=torch.bfloat16), layer.weight)


def test_packed_weights_go_with_the_model() -> None:
    model = nn.Module()
    model.layer, model.lm_head = linear(64, 32), linear(96, 32)
    model.lm_head.quant_method = UnquantizedEmbeddingMethod()
    gc.collect()
    before = len(_packed)
    pack_linear_layers(model)
    assert len(_packed) == before + 2
    del model
    gc.collect()
    assert len(_packed) == before


def test_float32_and_foreign_methods_stay() -> None:
    class Foreign(UnquantizedLinearMethod):
        pass

    plain, foreign = linear(8, 8, torch.float32), Layer(torch.randn(8, 8, dtype=torch.bfloat16), Foreign())
    assert pack_linear_layers(nn.Sequential(plain, foreign)) == 0
    assert type(plain.quant_method) is UnquantizedLinearMethod
    assert type(foreign.quant_method) is Foreign


def test_head_keeps_the_weight_that_the_embedding_reads() -> None:
    model = nn.Module()
    model.embedding = model.lm_head = Layer(torch.randn(96, 32, dtype=torch.bfloat16), UnquantizedEmbeddingMethod())
    weight = model.lm_head.weight.clone()
    pack_linear_layers(model)
    assert isinstance(model.lm_head.quant_method, PackedHeadMethod)
    ids = torch.tensor([0, 95])
    assert torch.equal(model.embedding.quant_method.embedding(model.embedding, ids), weight[ids])
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(model.lm_head(x), nn.functional.linear(x, weight), rtol=1.6e-2, atol=0.1)


def test_compiled_graph_is_whole_and_layers_share_it() -> None:
    first, second = linear(64, 32), linear(64, 32)
    second.weight.data.neg_()
    pack_linear_layers(nn.ModuleList([first, second]))
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x, layer: layer(x), backend=counter, fullgraph=True)
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(x, first), first(x))
    torch.testing.assert_close(compiled(x, second), -first(x))


def test_custom_operator_is_well_formed() -> None:
    layer = linear(16, 32, bias=True)
    pack_linear_layers(nn.Sequential(layer))
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.vllm_fl_reference.packed_linear, (x, layer.weight.data, layer.bias, 16))
