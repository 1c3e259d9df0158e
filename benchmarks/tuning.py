"""What `vllm-fl tune` finds on a GPU, with CUDA graphs: duration of each trial, the best mix and its confirmed ratio.

    python benchmarks/tuning.py MODEL [--policy policies/flaggems.yaml] [--budget 4m] [--mode compiled]
        [--workload 64x256:32] [--wall 450] [--options '--max-num-seqs 128 ...'] [--out DIR] [--output FILE]

MODEL is a folder with a config.json; the weights are random, so the accuracy gate sees no more than NaN and failures.
The baseline is the policy file. Modes: `compiled` has torch.compile and CUDA graphs, `captured` CUDA graphs alone,
`eager` neither. After --wall seconds the search is interrupted as by Ctrl-C, and what it has found so far is reported;
so it is when this script is told to end (SIGTERM).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sides import machine, version

HERE = Path(__file__).parent
MODES = {
    "compiled": [],
    "captured": ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'],
    "eager": ["--enforce-eager"],
}
#: How long an interrupted search may take to write its result.
GRACE_S = 40.0


def command(arguments: argparse.Namespace) -> list[str]:
    """The command line of the search."""
    requests, prompt, answer = arguments.workload
    return [
        *(sys.executable, "-m", "vllm_fl", "tune", str(arguments.model), "--policy", str(arguments.policy)),
        *("--budget", arguments.budget, "--sampler", arguments.sampler, "--out", str(arguments.out), "--json"),
        *("--requests", str(requests), "--input-len", str(prompt), "--output-len", str(answer)),
        *("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", str(prompt + answer + 8)),
        *("--max-num-seqs", str(max(requests, 128)), "--gpu-memory-utilization", "0.88"),
        *MODES[arguments.mode],
        *shlex.split(arguments.options),
    ]


def tune(arguments: argparse.Namespace) -> tuple[int | None, float]:
    """Run the search; its exit code, None if it had to be killed, and how long it took, seconds."""
    begin = time.monotonic()
    with (arguments.out / "printed.json").open("wb") as printed:
        process = subprocess.Popen(command(arguments), stdout=printed)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGINT))
    try:
        process.wait(arguments.wall)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        say(f"interrupted after {time.monotonic() - begin:.0f} s")
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the engine ends with it
    return process.poll(), time.monotonic() - begin


def result(folder: Path) -> dict[str, Any]:
    """What the search wrote; of one that wrote nothing, the trials in its study."""
    written = folder / "tune.json"
    if written.exists():
        found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        return found
    trials: list[dict[str, Any]] = []
    if (folder / "study.db").exists():
        import optuna

        study = optuna.load_study(study_name="vllm-fl tune", storage=f"sqlite:///{folder / 'study.db'}")
        kept = [trial.user_attrs["vllm_fl_trial"] for trial in study.trials if "vllm_fl_trial" in trial.user_attrs]
        trials = [json.loads(trial) for trial in kept]
        for trial in trials:
            trial["changed"] = {n: i for n, i in trial["mix"].items() if trial["against"][n] != i}
    return {"trials": trials, "stop": "killed", "ratio": None, "changed": {}, "remarks": [], "shares": {}}


def show(found: dict[str, Any], wall_s: float) -> None:
    """A table without any library."""
    for operator, share in found["shares"].items():
        say(f"{operator:36} {share:7.1%}  {found['baseline'][operator]:20} {found['changed'].get(operator, '')}")
    for trial in found["trials"]:
        ratio = 2.718281828459045 ** trial["log_ratio"]
        what = ", ".join(f"{name}={chosen}" for name, chosen in trial["changed"].items())
        outcome = f"{trial['reason']}: {trial['text'][:90]}" if trial["reason"] else f"{trial['outcome']}, x{ratio:.3f}"
        say(f"trial {trial['number']:3} {trial['seconds']:6.1f} s {trial['rounds']:3} rounds  {what}: {outcome}")
    durations = [trial["seconds"] for trial in found["trials"]]
    if durations:
        say(f"trials: median {statistics.median(durations):.1f} s, longest {max(durations):.1f} s")
    ratio = found["ratio"]
    confirmed = f"{ratio['ratio']:.4f} ({ratio['low']:.4f}-{ratio['high']:.4f})" if ratio else "none"
    say(f"{len(durations)} trials, {wall_s:.0f} s in all, ended by: {found['stop']}; confirmed ratio: {confirmed}")
    for remark in found["remarks"]:
        say(remark)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def workload(text: str) -> tuple[int, int, int]:
    """``REQUESTSxPROMPT:ANSWER``, the last two in tokens."""
    match = re.fullmatch(r"(\d+)x(\d+):(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 64x256:32 (requests x tokens in : tokens out)")
    requests, prompt, answer = map(int, match.groups())
    return requests, prompt, answer


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    top.add_argument("model", type=Path, help="folder with a config.json")
    top.add_argument("--policy", type=Path, default=HERE / "policies" / "flaggems.yaml", help="of the baseline")
    top.add_argument("--budget", default="4m", help="of the search (default: 4m)")
    top.add_argument("--sampler", default="greedy", help="as for vllm-fl tune (default: greedy)")
    top.add_argument("--mode", default="compiled", choices=MODES)
    top.add_argument("--workload", type=workload, default="64x256:32", help="default: 64x256:32")
    top.add_argument("--wall", type=float, default=430.0, help="seconds until the search is interrupted (default: 430)")
    top.add_argument("--options", default="", help="more options of vLLM, in one string")
    top.add_argument("--out", type=Path, default=Path("vllm-fl-tune"), help="folder for what the search writes")
    top.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there instead of standard output")
    return top


def main() -> int:
    arguments = parser().parse_args()
    if not (arguments.model / "config.json").is_file():
        parser().error(f"MODEL: {arguments.model} is not a folder with a config.json")
    if not arguments.policy.is_file():
        parser().error(f"--policy: there is no file {arguments.policy}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in ("tune.json", "study.db"):
        (arguments.out / name).unlink(missing_ok=True)
    code, wall_s = tune(arguments)
    found = result(arguments.out)
    if not found["trials"]:
        say((arguments.out / "printed.json").read_text(encoding="utf-8"))
        log = arguments.out / "vllm.log"
        say("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]) if log.exists() else "")
    show(found, wall_s)
    document = {
        "benchmark": "tuning",
        "model": arguments.model.name,
        "policy": arguments.policy.name,
        "mode": arguments.mode,
        "budget": arguments.budget,
        "wall_s": round(wall_s, 1),
        "exit_code": code,
        "machine": machine(),
        "versions": {
            name: version(name) for name in ("vllm", "torch", "triton", "flag_gems", "vllm-fl-core", "vllm-fl-nvidia")
        },
        "result": found,
    }
    text = json.dumps(document, indent=1)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0 if found["trials"] else 1


if __name__ == "__main__":
    sys.exit(main())
