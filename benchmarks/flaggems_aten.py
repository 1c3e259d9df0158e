"""Every ATen function that FlagGems can replace, beside PyTorch's own on the same arguments; on an accelerator.

    pip install expecttest
    python benchmarks/flaggems_aten.py --json flaggems_aten.json [--only mul,fill] [--jobs 8]

The arguments are those of PyTorch's own operator tests: several dtypes, broadcast, empty and strided tensors, results
in place. Each call that they make of an ATen function in FlagGems' table is made twice, and results and written
arguments are compared, with the memory around them; of functions that draw random numbers dtype and shape alone.
FlagGems' tuned kernels have one configuration here, so that nothing is tuned.

Exit codes: 0 every function that ``USE_FLAGGEMS=1`` replaces is right, 1 one is not.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SAMPLES = 8  # of an operator and dtype
CALLS = 40  # of an ATen function, each of another kind
#: Their values are drawn, or not set at all.
VALUELESS = ("bernoulli_", "exponential_", "multinomial", "native_dropout", "normal", "rand", "uniform_", "empty")
#: bfloat16 has 8 bits. FlagGems computes exponentials and logarithms of float32 by approximations.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-3}


def name_of(function: Any) -> str:
    """As in FlagGems' table: ``add.Tensor``, and ``mm`` without an overload."""
    base: str = function._schema.name.removeprefix("aten::")
    return base if function._overloadname == "default" else f"{base}.{function._overloadname}"


def tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def twins(values: Any) -> Any:
    """The same tensors, on copies of their storages; those that share one still do."""
    copies: dict[int, torch.UntypedStorage] = {}

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        copy = copies.setdefault(storage._cdata, storage.clone())
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            copy, value.storage_offset(), value.shape, value.stride()
        )

    return tree_map(twin, values)


def whole(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """All that their storages hold, so that a write beside a view is seen."""
    return [torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage()) for t in values]


def difference(wanted: torch.Tensor, got: torch.Tensor, valueless: bool) -> str | None:
    """What is not the same; None if nothing is."""
    if wanted.dtype != got.dtype:
        return f"{got.dtype} for {wanted.dtype}"
    if wanted.shape != got.shape:
        return "another shape"
    if valueless or not wanted.numel():
        return None
    tolerance = TOLERANCE.get(wanted.dtype, 0.0)
    near = torch.isclose(got.cpu(), wanted.cpu(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return None if near.all() else "other values"


def kind(name: str, values: Any) -> str:
    """The sort of a call; of each sort one is compared."""
    shown = [
        f"{t.dim()}d {str(t.dtype).removeprefix('torch.')}{'' if t.is_contiguous() else ' strided'}"
        f"{'' if t.numel() else ' empty'}{'' if t.device.type != 'cpu' else ' cpu'}"
        for t in tensors(values)
    ]
    same = len({t.shape for t in tensors(values)}) == 1
    return f"{name}({', '.join(shown)}{'' if same else ', of several shapes'})"


class BothWays(TorchDispatchMode):
    """Makes each call of a function in `table` on `device` a second time, with what stands there; keeps differences."""

    def __init__(self, table: dict[str, Callable[..., Any]], device: str) -> None:
        super().__init__()
        self.table, self.device = table, device
        self.kinds: dict[str, set[str]] = {}
        self.found: dict[str, dict[str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        replacement = self.table.get(name)
        given = tensors(args, kwargs)
        device = given[0].device if given else torch.device(kwargs.get("device") or "cpu")
        if replacement is None or device.type != self.device or any(t.is_complex() or t.is_sparse for t in given):
            return func(*args, **kwargs)
        sort = kind(name, (args, kwargs))
        known = self.kinds.setdefault(name, set())
        if sort in known or len(known) >= CALLS:
            return func(*args, **kwargs)
        other_args, other_kwargs = twins((args, kwargs))
        result = func(*args, **kwargs)
        known.add(sort)
        try:
            other = replacement(*other_args, **other_kwargs)
            torch.accelerator.synchronize()
        except Exception as error:  # whatever a kernel raises is the finding
            self.keep(name, f"{type(error).__name__}: {str(error)[:100]}", sort)
            torch.accelerator.synchronize()  # raises again if the device is lost, which ends this process
            return result
        valueless = name.startswith(VALUELESS)
        results, others = tensors(result), tensors(other)
        if len(results) != len(others):
            self.keep(name, f"{len(others)} results for {len(results)}", sort)
            return result
        written, other_written = whole(given), whole(tensors(other_args, other_kwargs))
        for wanted, got in zip([*results, *written], [*others, *other_written], strict=True):
            if what := difference(wanted, got, valueless):
                self.keep(name, what, sort)
        return result

    def keep(self, name: str, what: str, sort: str) -> None:
        self.found.setdefault(name, {}).setdefault(what, sort)


def replacements() -> dict[str, Callable[..., Any]]:
    """ATen function -> FlagGems' function, whose tuned kernels keep one configuration."""
    from vllm_fl.flagos.flaggems import gems

    flag_gems = gems()
    for module in list(sys.modules.values()):
        if "flag_gems" not in str(getattr(module, "__file__", "")):  # those of devices have other names
            continue
        for kernel in list(vars(module).values()):
            while kernel is not None:
                if isinstance(getattr(kernel, "configs", None), list):  # the smallest tile compiles fastest
                    kernel.configs = sorted(kernel.configs, key=lambda c: math.prod(map(int, c.kwargs.values())))[:1]
                kernel = getattr(kernel, "fn", None)
    return {entry[0]: entry[1] for entry in flag_gems._FULL_CONFIG if len(entry) < 3 or entry[2]()}


def operators(table: Any) -> list[int]:
    """Those of PyTorch's operator tests that have the name of a function in `table`, by their numbers."""
    from torch.testing._internal.common_methods_invocations import op_db

    bases = {name.partition(".")[0].strip("_") for name in table}
    return [
        number
        for number, op in enumerate(op_db)
        if bases & {n.rpartition(".")[2].strip("_") for n in (op.name, op.aten_name, *(a.name for a in op.aliases))}
    ]


def samples(op: Any, device: str) -> Iterator[Callable[[], Any]]:
    """Calls of an operator: of every dtype, strided too, and in place."""
    for dtype in DTYPES:
        if dtype not in op.supported_dtypes(device):
            continue
        for sample in itertools.islice(op.sample_inputs(device, dtype), SAMPLES):
            for one in (sample, sample.noncontiguous()):
                for variant in filter(None, (op.op, op.inplace_variant)):
                    yield lambda v=variant, s=one: v(s.input, *s.args, **s.kwargs)


def plain_writes(device: str) -> Iterator[Callable[[], Any]]:
    """What has no test of its own in PyTorch: writes into whole, strided and empty tensors."""
    for dtype in DTYPES:
        for shape in ((4, 8), (0, 8)):
            whole = torch.ones(shape, dtype=dtype, device=device)
            for x in (whole, whole.T, whole[:, ::2], whole[:, 1]):
                yield lambda x=x: x.zero_()
                yield lambda x=x: x.fill_(2)
                yield lambda x=x: x.fill_(torch.tensor(3))
                yield lambda x=x: x.fill_(torch.tensor(3, device=device))
                yield lambda x=x: x.copy_(torch.arange(x.numel()).reshape(x.shape))
                yield lambda x=x: x.copy_(torch.arange(x.numel(), device=device).reshape(x.shape))
                yield lambda x=x: x.copy_(torch.zeros(x.shape[-1:], device=device))


def worker(numbers: list[int], device: str, seconds: int) -> None:
    """A JSON line before each operator and one behind it. An operator that hangs ends the process."""
    from torch.testing._internal.common_methods_invocations import op_db

    both = BothWays(replacements(), device)
    for number in numbers:
        print(json.dumps({"started": number}), flush=True)
        faulthandler.dump_traceback_later(seconds, exit=True)
        calls = plain_writes(device) if number < 0 else samples(op_db[number], device)
        with torch.no_grad():
            while True:
                try:
                    if (call := next(calls, None)) is None:
                        break
                    with both:
                        call()
                except torch.AcceleratorError:
                    break
                except Exception:  # a sample that PyTorch itself refuses, such as a broadcast in place
                    continue
        line = {"done": number, "kinds": {n: len(k) for n, k in both.kinds.items()}, "found": both.found}
        print(json.dumps(line), flush=True)
        torch.accelerator.synchronize()  # a lost device ends this process, and the rest has a new one


_running: set[subprocess.Popen[str]] = set()
_stopped = threading.Event()


def stop(number: int, frame: Any) -> None:
    """On a signal: the report is of what has been compared so far."""
    _stopped.set()
    for process in list(_running):
        process.kill()


def share(numbers: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """What workers, one after the other, find for these operators."""
    kinds: dict[str, int] = {}
    found: dict[str, dict[str, str]] = {}
    lost: list[int] = []
    while numbers and not _stopped.is_set():
        command = [sys.executable, __file__, "--worker", json.dumps(numbers), "--timeout", str(options.timeout)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            assert process.stdout is not None
            _running.add(process)
            last: dict[str, Any] = {}
            started = None
            for text in process.stdout:
                if text.startswith('{"started"'):
                    started = json.loads(text)["started"]
                elif text.startswith('{"done"'):
                    last, started = json.loads(text), None
                    numbers = numbers[numbers.index(last["done"]) + 1 :]
            _running.discard(process)
        if started is not None or not last:  # it did not survive this one
            lost.append(numbers.pop(0 if started is None else numbers.index(started)))
        add(last, kinds, found)
    return {"kinds": kinds, "found": found, "lost": lost}


def add(more: dict[str, Any], kinds: dict[str, int], found: dict[str, dict[str, str]]) -> None:
    """Add what a worker, or a share, has compared and found."""
    for name, count in more.get("kinds", {}).items():
        kinds[name] = kinds.get(name, 0) + count
    for name, what in more.get("found", {}).items():
        found.setdefault(name, {}).update(what)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write everything to this file as well")
    parser.add_argument("--only", default="", help="comma-separated names of ATen functions, without overloads")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: the cores)")
    parser.add_argument("--timeout", type=int, default=60, help="seconds an operator may take (default: 60)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.worker:
        worker(json.loads(options.worker), torch.accelerator.current_accelerator().type, options.timeout)
        return 0
    if not torch.accelerator.is_available():
        print("no accelerator", file=sys.stderr)
        return 2
    from torch.testing._internal.common_methods_invocations import op_db

    from vllm_fl.flagos.aten import REPLACED, flaggems_table

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    functions = dict(flaggems_table() or ())
    table = list(functions)
    if options.only:
        table = [name for name in table if name.partition(".")[0].strip("_") in options.only.split(",")]
    numbers = [-1, *operators(table)]
    with ThreadPoolExecutor(options.jobs) as pool:
        shares = list(pool.map(lambda job: share(numbers[job :: options.jobs], options), range(options.jobs)))
    found: dict[str, dict[str, str]] = {}
    kinds: dict[str, int] = {}
    for each in shares:
        add(each, kinds, found)
    if _stopped.is_set():
        print("stopped; operators count as lost where their process was stopped")
    lost = [op_db[n].name if n >= 0 else "plain writes" for each in shares for n in each["lost"]]
    wrong = sorted(name for name in found if functions[name] in REPLACED)
    for name in sorted(found):
        print(f"{name:32} {'WRONG' if name in wrong else 'left out'}  {found[name]}")
    print(f"{len(kinds)} functions compared, {len(found)} differ, of which {len(wrong)} are replaced")
    print(f"not called: {' '.join(sorted(set(table) - set(kinds)))}")
    print(f"operators whose process was lost: {' '.join(lost) or 'none'}")
    if options.json:
        report = {"kinds": kinds, "found": found, "lost": lost, "torch": torch.__version__}
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
