"""Measures resharding on this machine: `make bench`, or `python scripts/bench_reshard.py`.

Two jobs of real ranks on gloo, built by Megatron's own loop at degrees 4 and 3 (7 processes):

1. speed-up: the exchanges of one step of a 32-layer model at hidden 512, as this project makes them
   (per reshard group) against one exchange per parameter, in turns, in the same processes. Both
   keep two exchanges under way; only the grouping differs.
2. share: a few training steps at hidden 512 with 2048 tokens per replica and all overlap on; the
   time that the training thread of a healthy rank is blocked by resharding, over the step time.

Prints a table and writes build/bench_reshard.json. Timings are ratios of one run: quote those.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

DEGREES = (4, 3)
HIDDEN_SIZE = 512
WARM_UP_ROUNDS = 2
TARGET_SPEEDUP = 3.0
TARGET_SHARE = 0.01
RESULT_VARIABLE = "BENCH_RESHARD_RESULT"


def flags(num_layers: int, seq_length: int, train_iters: int) -> list[str]:
    """Megatron's flags of one job; one sequence per replica and step."""
    sizes = {
        "num-layers": num_layers,
        "hidden-size": HIDDEN_SIZE,
        "num-attention-heads": 16,
        "ffn-hidden-size": 4 * HIDDEN_SIZE,
        "seq-length": seq_length,
        "max-position-embeddings": seq_length,
        "micro-batch-size": 1,
        "global-batch-size": len(DEGREES),
        "train-iters": train_iters,
        "vocab-size": 1000,
        "tensor-model-parallel-size": max(DEGREES),
        "ntp-degrees": ",".join(map(str, DEGREES)),
        "lr": 1e-4,
        "eval-iters": 0,
        "eval-interval": 1000,
        "log-interval": 1,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "tokenizer-type": "NullTokenizer",
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
    }
    switches = [
        "--ntp",
        "--mock-data",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ]
    return [word for key, value in sizes.items() for word in (f"--{key}", str(value))] + switches


# --- in a rank ----------------------------------------------------------------------------------


def _run_all(exchanges: list[list[Any]]) -> None:
    """One direction of one step, two exchanges under way."""
    flat = [exchange for group in exchanges for exchange in group]
    for index, exchange in enumerate(flat):
        exchange.start(index % 2)
        if index:
            flat[index - 1].finish()
    if flat:
        flat[-1].finish()


def _measure_exchanges(chunk: Any, rounds: int) -> dict[str, Any]:
    """Seconds of both groupings, in turns; counts and bytes of one round of ours."""
    import torch
    import torch.distributed as dist

    from megatron_ntp.integration.reshard import Resharder, flat_grad, minimum_nbytes
    from megatron_ntp.integration.sync_model import ReshardGroup

    model = chunk.ntp_model
    counters = model.ntp.counters
    single = copy.copy(model)
    single.groups = [ReshardGroup(i, sp.name, [sp]) for i, sp in enumerate(model.params)]
    plans = {
        name: (Resharder(m).pre(flat_grad), Resharder(m).post())
        for name, m in (("grouped", model), ("per_parameter", single))
    }
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    report: dict[str, Any] = {}
    for turn in range(WARM_UP_ROUNDS + rounds):
        for name, (pre, post) in plans.items():
            dist.barrier(group=model.ntp.group("reshard").group)
            counters.reset()
            began = time.perf_counter()
            with torch.no_grad():
                _run_all(pre)
                _run_all(post)
            dist.barrier(group=model.ntp.group("reshard").group)
            if turn >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - began)
            report[name] = {"exchanges": counters.exchanges, "bytes": counters.bytes_sent}
    for name, values in seconds.items():
        report[name]["seconds"] = values
    report["bytes_minimum"] = sum(minimum_nbytes(model))
    return report


def _rank_main(job: str, rounds: int, words: list[str]) -> None:
    """Runs the training script of this checkout with one observer around the optimizer step."""
    from megatron_ntp.integration.optimizer import NTPOptimizer

    result = Path(os.environ[RESULT_VARIABLE]) / f"{job}-{os.environ['RANK']}.json"
    original = NTPOptimizer.step
    ends: list[tuple[float, float]] = []

    def step(self: Any) -> Any:
        if job == "exchanges":
            result.write_text(json.dumps(_measure_exchanges(self.ntp_chunks[0], rounds)))
            sys.stdout.flush()
            os._exit(0)
        answers = original(self)
        ends.append((time.perf_counter(), self.ntp.counters.blocked_s))
        report = {
            "is_extra": self.ntp.is_extra,
            "degree": self.ntp.degree,
            "step_seconds": [b[0] - a[0] for a, b in itertools.pairwise(ends)],
            "blocked_seconds": [b[1] - a[1] for a, b in itertools.pairwise(ends)],
        }
        result.write_text(json.dumps(report))
        return answers

    NTPOptimizer.step = step  # type: ignore[method-assign]
    script = Path(__file__).with_name("pretrain_gpt.py")
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


# --- the command --------------------------------------------------------------------------------


def _run_job(job: str, words: list[str], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Runs one job to its end; what each rank reported, in rank order."""
    from megatron_ntp.rehearsal.processes import Job, start_cold

    for old in folder.glob(f"{job}-*.json"):
        old.unlink()
    own = [__file__, "--rank-job", job, "--rounds", str(rounds)]
    start = ["run", "--cpu", *own, *words]
    os.environ[RESULT_VARIABLE] = str(folder)
    with Job(start, sum(DEGREES), folder / f"{job}-logs", start_cold) as processes:
        while processes.running:
            processes.check()
            time.sleep(0.2)
        processes.check()
    return [json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in range(sum(DEGREES))]


def speedup(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of job 1. The healthy replica's ranks come first."""
    healthy = reports[: max(DEGREES)]
    ratios = [
        single / grouped
        for grouped, single in zip(
            healthy[0]["grouped"]["seconds"], healthy[0]["per_parameter"]["seconds"], strict=True
        )
    ]
    return {
        "speedup_vs_per_parameter": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "exchanges_per_step": healthy[0]["grouped"]["exchanges"],
        "exchanges_per_step_per_parameter": healthy[0]["per_parameter"]["exchanges"],
        "bytes": sum(report["grouped"]["bytes"] for report in healthy),
        "bytes_minimum": healthy[0]["bytes_minimum"],
    }


def share(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of job 2: the healthy core rank that is blocked longest."""
    healthy = [report for report in reports if report["degree"] == max(DEGREES)]
    shares = [
        sum(report["blocked_seconds"][1:]) / sum(report["step_seconds"][1:]) for report in healthy
    ]
    return {
        "reshard_share_of_step": max(shares),
        "reshard_share_by_rank": shares,
        "step_seconds": statistics.median(healthy[0]["step_seconds"][1:]),
    }


def main() -> int:
    """Runs both jobs, prints the table and writes the figures."""
    parser = argparse.ArgumentParser(description="Measure resharding on CPU ranks (gloo).")
    parser.add_argument("--layers", type=int, default=32, help="layers of the speed-up job")
    parser.add_argument("--share-layers", type=int, default=2, help="layers of the share job")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per replica and step")
    parser.add_argument("--steps", type=int, default=5, help="steps of the share job")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of the speed-up job")
    parser.add_argument("--output", default="build/bench_reshard.json")
    options = parser.parse_args()
    output = Path(options.output)
    folder = output.parent.absolute() / "bench_reshard"
    folder.mkdir(parents=True, exist_ok=True)
    print("job 1 of 2: exchanges alone ...", flush=True)
    words = flags(options.layers, 32, 2)
    figures = speedup(_run_job("exchanges", words, options.rounds, folder))
    print("job 2 of 2: training steps ...", flush=True)
    words = flags(options.share_layers, options.tokens, options.steps)
    figures |= share(_run_job("steps", words, options.rounds, folder))
    output.write_text(json.dumps(figures, indent=1) + "\n")
    rows = (
        ("speed-up against parameter by parameter", "speedup_vs_per_parameter", "{:.2f} x"),
        ("exchanges per step", "exchanges_per_step", "{}"),
        ("  parameter by parameter", "exchanges_per_step_per_parameter", "{}"),
        ("bytes per step", "bytes", "{:,}"),
        ("  fewest possible", "bytes_minimum", "{:,}"),
        ("share of a step blocked by resharding", "reshard_share_of_step", "{:.2%}"),
    )
    for title, key, form in rows:
        print(f"{title:<42}{form.format(figures[key]):>16}")
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    if "--rank-job" in sys.argv:
        at = sys.argv.index("--rank-job")
        _rank_main(sys.argv[at + 1], int(sys.argv[at + 3]), sys.argv[at + 4 :])
    else:
        sys.exit(main())
