"""Routing against the reference, on the inputs of the catalogue and on hard ones."""

from __future__ import annotations

import functools
import zlib

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, check, cut, maker

from vllm_fl.catalog import CATALOG
from vllm_fl.flagos.kernels.moe_routing import grouped_topk, topk_sigmoid, topk_softmax

KERNELS = {"topk_softmax": topk_softmax, "topk_sigmoid": topk_sigmoid, "grouped_topk": grouped_topk}


@functools.cache
def cases(name: str, dtype: torch.dtype) -> dict[str, tuple[object, ...]]:
    seed = zlib.crc32(name.encode())
    return {case.name: case.args for case in CATALOG[name].cases(maker(dtype, seed)) if not case.kwargs}


def _is_quick(case: str) -> bool:
    """The large cases take the interpreter seconds; there one of each is enough."""
    return (
        DEVICE != "cpu"
        or not case.startswith(("large", "DeepSeek"))
        or case.endswith((" sigmoid, bias", "large, bias"))
    )


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in KERNELS for case in cases(name, torch.float32) if _is_quick(case)],
    ids=str,
)
def test_inputs_of_the_catalogue(device: str, name: str, case: str) -> None:
    check(KERNELS[name], name, *cases(name, torch.float32)[case])


def outputs(tokens: int, topk: int, indices: torch.dtype = torch.int32) -> tuple[torch.Tensor, ...]:
    dtypes = (torch.float32, indices, torch.int32)
    return tuple(torch.full((tokens, topk), -1, dtype=dtype, device=DEVICE) for dtype in dtypes)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid"])
def test_dtypes_of_logits(device: str, name: str, dtype: torch.dtype) -> None:
    logits = cases(name, dtype)["regular"][3]
    check(KERNELS[name], name, *outputs(7, 2), logits, True)


@pytest.mark.parametrize("indices", [torch.int64, torch.uint32], ids=str)
def test_dtypes_of_indices(device: str, indices: torch.dtype) -> None:
    logits = cases("topk_softmax", torch.float32)["regular"][3]
    want, got = outputs(7, 2), outputs(7, 2, indices)
    topk_softmax(*want, logits)
    topk_softmax(*got, logits)
    assert torch.equal(got[1].to(torch.int32), want[1])


def test_the_most_that_there_may_be(device: str) -> None:
    check(topk_softmax, "topk_softmax", *outputs(2, 32), maker().permutation(2 * 1024).view(2, 1024) * 0.01, True)


def test_rows_of_wider_tensors(device: str) -> None:
    written = tuple(cut(x, 50, 3) for x in outputs(3, 4))
    check(topk_softmax, "topk_softmax", *written, cut(cases("topk_softmax", torch.float32)["odd"][3], 40), False)


@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid"])
def test_equal_scores_go_by_number(device: str, name: str) -> None:
    weights, ids, order = outputs(3, 4)
    KERNELS[name](weights, ids, order, torch.ones(3, 70, device=device))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert order.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_logits_of_minus_infinity(device: str) -> None:
    """Experts that are masked out have weight 0, and come last."""
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]], device=device)
    weights, ids, order = outputs(1, 3)
    topk_softmax(weights, ids, order, logits, True)
    assert ids.tolist()[0][:2] == [3, 1]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.7310586, 0.2689414, 0.0]]))


def test_large_logits(device: str) -> None:
    """float32 sigmoids of all of these are 1; the order is that of the logits."""
    weights, ids, order = outputs(1, 2)
    topk_sigmoid(weights, ids, order, torch.tensor([[100.0, 300.0, 200.0]], device=device), True, None, 3.0)
    assert (ids.tolist(), weights.tolist()) == ([[1, 2]], [[1.5, 1.5]])


def test_scores_of_half_precision_in_groups(device: str) -> None:
    args = cases("grouped_topk", torch.float32)["DeepSeek-V3, sigmoid"]
    scores = args[0].half()
    weights, ids = grouped_topk(scores, *args[1:])
    want_weights, want_ids = grouped_topk(scores.float(), *args[1:])
    assert torch.equal(ids, want_ids)
    assert torch.equal(weights, want_weights)


def test_refusals(device: str) -> None:
    logits = torch.zeros(2, 2048, device=device)
    reasons = []
    for call in (
        lambda: topk_softmax(*outputs(2, 2), logits),
        lambda: topk_sigmoid(*outputs(2, 33), logits[:, :64]),
        lambda: topk_sigmoid(*outputs(2, 9), logits[:, :8]),
        lambda: topk_softmax(*outputs(2, 2), logits[:, ::32]),
        lambda: grouped_topk(logits[:, :64], 8, 2, 2, False, 1.0, None, 3),
        lambda: grouped_topk(logits[:, :64].double(), 8, 2, 2, False, 1.0),
    ):
        with pytest.raises(NotImplementedError) as caught:
            call()
        reasons.append(str(caught.value))
    assert reasons == [
        "2048 experts, at most 1024",
        "topk: 33 of 64 experts, at most 32",
        "topk: 9 of 8 experts, at most 8",
        "gating_output: the last dimension has stride 32, expected 1",
        "scoring_func: 3 is not one of 0, 1, 2",
        "scores: float64 is computed in float32 here",
    ]
