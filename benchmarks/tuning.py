"""What `vllm-fl tune` finds: duration of each trial, the best mix, its confirmed ratio, and that ratio in new engines.

    python benchmarks/tuning.py MODEL [--policy POLICY] [--budget 4m] [--mode compiled] [--workload 64x256:32]
        [--wall 430] [--options '--max-num-batched-tokens 4096'] [--check 8] [--out DIR] [--output FILE]
    python benchmarks/tuning.py quickstart --mode eager --policy present --plugin tuning_implementations \\
        --workload 4x32:16 --budget 90s --runs 5 --check 12 --resident

MODEL is `quickstart`, or a folder; one without weights gets random ones, with which the accuracy gate sees no more than
NaN and failures. The baseline is POLICY, by default policies/flaggems.yaml. Modes: `compiled` has torch.compile and, on
a GPU, CUDA graphs; `captured` CUDA graphs alone; `eager` neither. After --wall seconds a search is interrupted as by
Ctrl-C, and what it has found so far is reported; so it is when this script is told to end (SIGTERM).

--check ROUNDS measures baseline and policy file in new engines: one after the other, or, with --resident, both loaded
and by turns, the waiting one stopped. Which of two engines is loaded first has an effect of its own on a CPU (4 % and
16 % were seen), so that is done twice, in both orders, and the ratio is the geometric mean of the two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sides import Engine, Side, WorkerError, machine, requests, version

HERE = Path(__file__).parent
MODES = {
    "compiled": [],
    "captured": ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'],
    "eager": ["--enforce-eager"],
}
#: How long an interrupted search may take to write its result.
GRACE_S = 40.0


def engine_options(arguments: argparse.Namespace) -> list[str]:
    """vLLM's, for the search and for the check."""
    count, prompt, answer = arguments.workload
    options = ["--max-model-len", str(prompt + answer + 8), "--max-num-seqs", str(max(count, 128))]
    if arguments.model != "quickstart" and not list(Path(arguments.model).glob("*.safetensors")):
        options += ["--load-format", "dummy", "--skip-tokenizer-init"]
    return [*options, *MODES[arguments.mode], *shlex.split(arguments.options)]


# The search


def command(arguments: argparse.Namespace, out: Path) -> list[str]:
    """The command line of the search."""
    count, prompt, answer = arguments.workload
    return [
        *(sys.executable, "-m", "vllm_fl", "tune", arguments.model, "--policy", arguments.policy),
        *("--budget", arguments.budget, "--sampler", arguments.sampler, "--out", str(out), "--json"),
        *("--requests", str(count), "--input-len", str(prompt), "--output-len", str(answer)),
        *engine_options(arguments),
    ]


def tune(arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Run one search and say what came of it; ``wall_s`` and ``exit_code`` are those of the command."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tune.json", "study.db"):
        (out / name).unlink(missing_ok=True)
    begin = time.monotonic()
    with (out / "printed.json").open("wb") as printed:
        process = subprocess.Popen(command(arguments, out), stdout=printed)
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
    log = out / "vllm.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    for line in lines:
        if re.search(r"\[vllm_fl\.\S+\].* in [\d.]+ s$|\[vllm_fl\.\S+\].* took [\d.]+ s$", line):
            say(line)
    found = result(out)
    found.update(wall_s=round(time.monotonic() - begin, 1), exit_code=process.wait())
    if not found["trials"]:
        say((out / "printed.json").read_text(encoding="utf-8"))
        say("\n".join(lines[-40:]))
    show(found)
    return found


def result(folder: Path) -> dict[str, Any]:
    """What the search wrote; of one that wrote nothing, the trials in its study."""
    written = folder / "tune.json"
    if written.exists():
        found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        return found
    trials: list[dict[str, Any]] = []
    if (folder / "study.db").exists():
        import optuna

        storage = optuna.storages.get_storage(f"sqlite:///{folder / 'study.db'}")
        for study in storage.get_all_studies():  # one, or none if the search has not begun
            kept = [trial.user_attrs.get("vllm_fl_trial") for trial in storage.get_all_trials(study._study_id)]
            trials += [json.loads(trial) for trial in kept if trial is not None]
        for trial in trials:
            trial["changed"] = {n: i for n, i in trial["mix"].items() if trial["against"][n] != i}
    return {"trials": trials, "stop": "killed", "ratio": None, "changed": {}, "remarks": [], "shares": {}}


def show(found: dict[str, Any]) -> None:
    """A table without any library."""
    for operator, share in found["shares"].items():
        say(f"{operator:36} {share:7.1%}  {found['baseline'][operator]:20} {found['changed'].get(operator, '')}")
    for trial in found["trials"]:
        what = ", ".join(f"{name}={chosen}" for name, chosen in trial["changed"].items())
        ratio = f"{trial['outcome']}, x{math.exp(trial['log_ratio']):.3f}"
        outcome = f"{trial['reason']}: {trial['text'][:90]}" if trial["reason"] else ratio
        say(f"trial {trial['number']:3} {trial['seconds']:6.1f} s {trial['rounds']:3} rounds  {what}: {outcome}")
    durations = [trial["seconds"] for trial in found["trials"]]
    if durations:
        say(f"trials: median {statistics.median(durations):.1f} s, longest {max(durations):.1f} s")
    ratio = found["ratio"]
    confirmed = f"{ratio['ratio']:.4f} ({ratio['low']:.4f}-{ratio['high']:.4f})" if ratio else "none"
    say(f"{len(durations)} trials, {found['wall_s']} s in all, ended by: {found['stop']}; confirmed ratio: {confirmed}")
    for remark in found["remarks"]:
        say(remark)


# The check


def worker(configuration: dict[str, Any]) -> None:
    """Loads an engine; each request is one round of the workload, the answer its time in seconds."""
    replies = os.fdopen(configuration["reply_fd"], "w", buffering=1)
    from vllm_fl.cli.models import run_model
    from vllm_fl.engines import Engine as VllmEngine
    from vllm_fl.engines import Workload

    work = Workload(*configuration["workload"])
    with (
        run_model(configuration["model"], configuration["options"], None) as run,
        VllmEngine({**run.arguments, "enable_prefix_caching": False}) as engine,
    ):
        for variant in (1, 2):
            engine.generate(work.prompts(engine.vocabulary, variant), work.output_tokens)
        for number, _ in enumerate(requests(configuration, {}, replies)):
            prompts = work.prompts(engine.vocabulary, 3 + number)
            begin = time.perf_counter()
            engine.generate(prompts, work.output_tokens)
            print(json.dumps({"seconds": time.perf_counter() - begin}), file=replies)


def check(arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Times of the rounds of both sides in new engines, and the ratio of their medians."""
    baseline = {"VLLM_FL_CONFIG": arguments.policy} if Path(arguments.policy).is_file() else {}
    sides = [
        Side("baseline", environment={**os.environ, **baseline}),
        Side("tuned", environment={**os.environ, "VLLM_FL_CONFIG": str(out / "policy.yaml")}),
    ]
    configuration = {
        "model": arguments.model,
        "options": engine_options(arguments),
        "workload": list(arguments.workload),
    }

    def start(side: Side) -> Engine:
        log = out / f"check-{side.name}.log"
        engine = Engine(side, Path(__file__), configuration, log, stops=arguments.resident)
        engine.load()
        return engine

    groups = [sides, sides[::-1]] if arguments.resident else [[side] for side in sides]
    ratios = []
    for group in groups:
        engines: list[Engine] = []
        done = len(sides[0].rounds)
        try:
            for side in group:
                engines.append(start(side))
            for number in range(arguments.check):
                for engine in engines if number % 2 == 0 else reversed(engines):
                    engine.side.rounds.append(engine.measure(number)["seconds"])
        except WorkerError as error:
            say(str(error))
            return {"error": str(error)}
        finally:
            for engine in engines:
                engine.close()
        if arguments.resident:
            baseline_s, tuned_s = (statistics.median(side.rounds[done:]) for side in sides)
            ratios.append(baseline_s / tuned_s)
    ratio = statistics.geometric_mean(ratios) if ratios else sides[0].median / sides[1].median
    say(f"in new engines: {ratio:.4f}, medians of {arguments.check} rounds")
    return {"ratio": ratio, **{side.name: [round(s, 4) for s in side.rounds] for side in sides}}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def workload(text: str) -> tuple[int, int, int]:
    """``REQUESTSxPROMPT:ANSWER``, the last two in tokens."""
    match = re.fullmatch(r"(\d+)x(\d+):(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 64x256:32 (requests x tokens in : tokens out)")
    count, prompt, answer = map(int, match.groups())
    return count, prompt, answer


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    top.add_argument("model", nargs="?", help="quickstart, or a folder with a config.json")
    top.add_argument("--policy", default=str(HERE / "policies" / "flaggems.yaml"), help="the baseline's")
    top.add_argument("--plugin", metavar="MODULE", help="of this folder: more implementations, which come first")
    top.add_argument("--budget", default="4m", help="of the search (default: 4m)")
    top.add_argument("--sampler", default="greedy", help="as for vllm-fl tune (default: greedy)")
    top.add_argument("--mode", default="compiled", choices=MODES)
    top.add_argument("--workload", type=workload, default="64x256:32", help="default: 64x256:32")
    top.add_argument("--wall", type=float, default=430.0, help="seconds until a search is interrupted (default: 430)")
    top.add_argument("--runs", type=int, default=1, help="searches, one after the other (default: 1)")
    top.add_argument("--check", type=int, default=0, metavar="ROUNDS", help="measure in new engines (default: not)")
    top.add_argument("--resident", action="store_true", help="the engines of --check stay loaded and take turns")
    top.add_argument("--options", default="", help="more options of vLLM, in one string")
    top.add_argument("--out", type=Path, default=Path("vllm-fl-tune"), help="folder for what the searches write")
    top.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there instead of standard output")
    top.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    return top


def main() -> int:
    arguments = parser().parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return 0
    if arguments.model != "quickstart" and not (Path(arguments.model or "") / "config.json").is_file():
        parser().error(f"MODEL: {arguments.model!r} is neither quickstart nor a folder with a config.json")
    if arguments.plugin:
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ.update(PYTHONPATH=path, VLLM_FL_PLUGIN_MODULES=arguments.plugin, VLLM_FL_PREFER="vendor")
    runs = []
    for number in range(arguments.runs):
        out = arguments.out / f"run{number + 1}" if arguments.runs > 1 else arguments.out
        found = tune(arguments, out.resolve())
        if arguments.check and (out / "policy.yaml").exists():
            found["check"] = check(arguments, out.resolve())
        runs.append(found)
    document = {
        "benchmark": "tuning",
        "model": Path(arguments.model).name,
        "policy": Path(arguments.policy).name,
        "mode": arguments.mode,
        "budget": arguments.budget,
        "machine": machine(),
        "versions": {
            name: version(name) for name in ("vllm", "torch", "triton", "flag_gems", "vllm-fl-core", "vllm-fl-nvidia")
        },
        "runs": runs,
    }
    text = json.dumps(document, indent=1)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0 if all(run["trials"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
