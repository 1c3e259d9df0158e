"""Attention and mixture of experts on an accelerator: our kernels beside vLLM's, on the shapes of Qwen3 models.

    python benchmarks/flagos_moe_attention.py --json moe_attention.json [--only attention,experts] [--tune]

Prints one JSON line a case: for each provider microseconds a call, median over replays of a CUDA graph (`eager` where
it cannot be captured), and the relative error (root of mean squares) against float64, of a part of the result where
the whole would take long. A provider that fails has its error in the line, and the rest goes on.

``--tune`` times other launch configurations instead: of the experts' two products for each number of tokens (the rule
is ``tiles`` of ``kernels.fused_moe``), and of attention (``_tile`` of ``kernels.paged_attention``). A line has the
best of them, and what the rule takes.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from flagos_kernels import environment, measure
from moe_attention_cases import (
    ATTENTION,
    DECODES,
    DTYPE,
    EXPERTS,
    PREFILLS,
    TOKENS,
    Case,
    attention,
    cases,
    expert_inputs,
)

from vllm_fl.flagos.kernels import fused_moe, paged_attention
from vllm_fl.flagos.kernels.fused_moe import Tile

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on an H200


def run(case: Case, repeats: int) -> dict[str, Any]:
    """The line of a case."""
    torch.manual_seed(0)
    line: dict[str, Any] = {}
    try:
        providers, rows, want = case.make()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:400], "at": traceback.format_exc()[-600:]}
    for name, make in providers.items():
        try:
            call = make()
            got = call()[rows].double()
            error = ((got - want).norm() / want.norm()).item()
            line[name] = {"error": float(f"{error:.3g}"), **measure(call, repeats)}
        except Exception as problem:  # one failing provider must not hide the others
            line[name] = {"failed": f"{type(problem).__name__}: {problem}"[:400], "at": traceback.format_exc()[-600:]}
            torch.cuda.synchronize()  # raises if the device is lost
    ours = line["flagos"].get("us")
    if ours:
        line["theirs/ours"] = {
            name: round(line[name]["us"] / ours, 3) for name in providers if name != "flagos" and "us" in line[name]
        }
    torch.cuda.empty_cache()
    return line


# Launch configurations


def candidates(rows: int, halves: int) -> Iterator[Tile]:
    """Those that fit: halves is 2 for the gated product, whose columns are those of one half."""
    depths = ((64, 3), (64, 4), (128, 2), (128, 3))
    for columns, (depth, stages), warps in itertools.product((32, 64, 128, 256), depths, (4, 8)):
        loaded = (rows + halves * columns) * depth * 2 * stages
        per_warp = rows * columns * halves // warps
        if loaded <= SHARED_MEMORY and 256 <= per_warp <= 4096 and columns * halves >= min(2 * rows, 128):
            for band in (1, 16) if rows == 128 else (1,):
                yield Tile(rows, columns, depth, band, warps, stages)


def tune_experts(model: str, tokens: int, repeats: int) -> dict[str, Any]:
    """The whole operator with each first product, and then with each second one behind the best first."""
    inputs = expert_inputs(model, tokens)
    experts, topk, hidden, inner = EXPERTS[model]
    decide = inspect.unwrap(fused_moe.fused_experts)  # a plan would keep the tiles that it was made with
    sparse = inspect.signature(decide).parameters["sparse"].default
    grouped = tokens > 1 and tokens * topk * sparse > experts
    rule = fused_moe.tiles(tokens * topk, experts, inner, hidden, inputs[0], is_grouped=grouped, is_gated=True)

    def time(first: Tile, second: Tile) -> float:
        with mock.patch.object(fused_moe, "tiles", return_value=(first, second)):
            try:
                return measure(lambda: decide(*inputs), repeats)["us"]
            except Exception:
                return float("inf")

    found: list[tuple[float, Tile, Tile]] = [(time(*rule), *rule)]
    line: dict[str, Any] = {"rule_us": found[0][0], "rule": list(map(tuple, rule))}
    for rows in sorted({max(rule[0].rows // 2, 16), rule[0].rows, min(rule[0].rows * 2, 128)}):
        second = rule[1]._replace(rows=rows)
        firsts = sorted((time(first, second), first) for first in candidates(rows, 2))
        found += [(us, first, second) for us, first in firsts]
        best = firsts[0][1]
        found += [(time(best, second), best, second) for second in candidates(rows, 1)]
    found.sort()
    line["best"] = [{"us": us, "first": tuple(first), "second": tuple(second)} for us, first, second in found[:6]]
    return line


def tune_attention(model: str, requests: int, length: int, query_len: int, repeats: int) -> dict[str, Any]:
    """Other tiles, and longer queries with one loop and with two. Rows are heads of a group times tokens."""
    call = attention(model, requests, length, query_len).make()[0]["flagos"]()
    heads, kv_heads, size = ATTENTION[model]
    group = heads // kv_heads

    def time(tile: Any, two_loops: bool) -> float:
        parts = {"_tile": lambda *args: tile or rule(*args), "_TWO_LOOPS": two_loops, "_attend_batch": decide}
        with mock.patch.multiple(paged_attention, **parts):
            try:
                return measure(call, repeats)["us"]
            except Exception:
                return float("inf")

    rule, decide = paged_attention._tile, inspect.unwrap(paged_attention._attend_batch)
    line: dict[str, Any] = {"rule_us": time(None, paged_attention._TWO_LOOPS)}
    like = torch.empty(0, dtype=DTYPE, device="cuda")
    line["rule"] = tuple(rule(query_len, size, group, like))
    rows, warps = ((max(16, group),), (1, 2, 4)) if query_len == 1 else ((64, 128, 256), (4, 8, 16))
    tiles = itertools.product(rows, (32, 64, 128), warps, (2, 3, 4))
    loops = (False,) if query_len == 1 else (False, True)
    found = sorted((time(paged_attention._Tile(*tile), two), tile, two) for tile in tiles for two in loops)
    line["best"] = [{"us": us, "tile": tile, "two_loops": two} for us, tile, two in found[:8]]
    return line


def tuning(tokens: list[int], repeats: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Titles, and what measures them."""
    for model in EXPERTS:
        for t in tokens:
            yield f"experts {model} T={t}", partial(tune_experts, model, t, repeats)
    for model in ATTENTION:
        for requests, length in DECODES:
            title = f"attention {model} decode {requests}x{length}"
            yield title, partial(tune_attention, model, requests, length, 1, repeats)
        for requests, length in PREFILLS:
            title = f"attention {model} prefill {requests}x{length}"
            yield title, partial(tune_attention, model, requests, length, length, repeats)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the lines to this file as well")
    parser.add_argument("--only", default="", help="comma-separated parts of titles of the cases to run")
    parser.add_argument("--repeats", type=int, default=15, help="replays of each graph (default: %(default)s)")
    parser.add_argument("--tune", action="store_true", help="time other launch configurations")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(TOKENS), help="experts to --tune (default: %(default)s)"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device; the kernels' tests run without one: tox -e flagos", file=sys.stderr)
        return 2
    work: Iterable[tuple[str, Callable[[], dict[str, Any]]]]
    if options.tune:
        work = tuning(options.tokens, options.repeats)
    else:
        work = ((case.title, partial(run, case, options.repeats)) for case in cases())
    lines = [json.dumps(environment())]
    print(lines[0], flush=True)
    for title, job in work:
        if not any(part in title for part in options.only.split(",")):
            continue
        lines.append(json.dumps({"case": title, **job()}))
        print(lines[-1], flush=True)
        if options.json is not None:
            options.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
