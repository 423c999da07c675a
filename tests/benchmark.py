"""Measure speed and memory.

python tests/benchmark.py              all of it; writes tests/benchmark_results/README.md
python tests/benchmark.py generation   one part, printed: training, generation, tables
python tests/benchmark.py --quick      small sizes, in a minute, printed
python tests/benchmark.py --gpu        training steps of 100m and 1b on a GPU, printed
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "benchmark_results" / "README.md"
sys.path.insert(0, str(ROOT))

import mhf  # noqa: E402
import train  # noqa: E402
from support import data  # noqa: E402
from support.tokenizer import END, PATTERN, Tokenizer  # noqa: E402

ABOUT = """\
# Speed and memory

`python tests/benchmark.py`, medians of {rounds} rounds in turn; {machine}; {date}.
"""
FULL = dict(rounds=5, steps={"tiny": {}, "100m": dict(max_position_embeddings=512)})
FULL |= dict(contexts=(16, 512), tables=(131_072, 1_000_000), compiled=(False,))
QUICK = dict(rounds=2, steps={"tiny": dict(num_hidden_layers=2)})
QUICK |= dict(contexts=(16, 64), tables=(131_072,), compiled=(False,))
GPU = FULL | dict(steps={"100m": {}, "1b": {}}, compiled=(False, True))


def seconds(job, *arguments):
    began = time.perf_counter()
    job(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turn(jobs, rounds):
    """{name: job that returns its seconds} -> {name: seconds of each round}; one to warm up."""
    every = [{name: job() for name, job in jobs.items()} for _ in range(rounds + 1)]
    return {name: [found[name] for found in every[1:]] for name in jobs}


def line(name, samples, unit, note=""):
    """A line of a table; it is also printed at once."""
    figures = statistics.median(samples), min(samples), max(samples)
    middle, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in figures)
    print(text := f"| {name} | {middle} {unit} | {low} to {high} | {note} |", flush=True)
    return text


def step(run, precision, objective):
    run.settings.precision, run.config.objective = precision, objective
    return seconds(run.advance)


def make_runs(preset, device, compile=False, **fields):
    """A train.Run of each model, on random tokens."""
    V = mhf.PRESETS[preset].get("vocab_size", 8192)
    ranks = {bytes([i]): i for i in range(256)} | {b"word %d" % i: i for i in range(256, V - 1)}
    tokenizer = Tokenizer("made up", PATTERN, ranks, {END: V - 1})
    ids = np.random.default_rng(0).integers(0, V, 100_000)
    corpus = data.Corpus("random", "", tokenizer, ids, ids)
    for model in ("standard", "mhf"):
        fields |= dict(model=model, vocab_size=V, pad_token_id=tokenizer.eot)
        config = mhf.Config.preset(preset, **fields)
        rows = 32 if device.type == "cuda" else 8 if preset == "tiny" else 1
        how = dict(tokens_per_step=rows * config.max_position_embeddings, device=str(device))
        settings = train.Settings(steps=1000, learning_rate=1e-4, compile=compile, **how)
        yield train.Run(settings, config, corpus, None)


def training(sizes, device):  # as every part: yields the lines of a table with this title
    """Training steps, as train.py makes them"""
    best = mhf.choose_precision("auto", device)
    precisions = [best] if device.type == "cuda" else dict.fromkeys(["fp32", best])
    for preset, compiled in itertools.product(sizes["steps"], sizes["compiled"]):
        standard, ours = make_runs(preset, device, compiled, **sizes["steps"][preset])
        tokens = ours.settings.tokens_per_step
        for precision in precisions:
            jobs = {"standard": partial(step, standard, precision, "exact")}
            jobs |= {f"mhf, {o}": partial(step, ours, precision, o) for o in mhf.OBJECTIVES}
            found = in_turn(jobs, sizes["rounds"])
            for name, took in found.items():
                how = f"{preset}{', compiled' * compiled}, {precision}, {tokens:,} tokens: {name}"
                ratio = statistics.median(a / b for a, b in zip(found["standard"], took))
                yield line(how, [tokens / t for t in took], "tok/s", f"{ratio:.2f} x standard")


def generation(sizes, device):
    """Generation at tiny, batch 1; reading the prompt is not in the time"""
    count, jobs = min(64, max(sizes["contexts"])), {}

    def job(model, context):
        stream = model.generate(torch.arange(context) + 1, count + 1, seed=0)
        next(stream)  # reads the prompt
        return seconds(list, stream)

    for run in make_runs("tiny", device, max_position_embeddings=2 * max(sizes["contexts"])):
        for T in sizes["contexts"]:
            jobs[f"{run.config.model}, behind {T} tokens"] = partial(job, run.model.eval(), T)
    for name, took in in_turn(jobs, sizes["rounds"]).items():
        yield line(name, [count / s for s in took], "tok/s")


def tables(sizes, device):
    """Signature tables at H 4, B 16,384, and the most that Python allocates for one"""
    for size in sizes["tables"]:
        tokens = [b"token %d" % i for i in range(size)]
        job = partial(mhf.SignatureTable.extend, tokens=tokens)
        took = [seconds(job, mhf.SignatureTable(4, 16384)) for _ in range(sizes["rounds"])]
        tracemalloc.start()
        job(mhf.SignatureTable(4, 16384))
        megabytes = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        yield line(f"{size:,} tokens", took, "s", f"{megabytes:,.0f} MB")


PARTS = {part.__name__: part for part in (training, generation, tables)}


def main(argv=None):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args(argv)
    device = mhf.choose_device("auto" if given.gpu else "cpu")
    small = given.quick or (given.gpu and device.type == "cpu")  # without a GPU the code runs, too
    sizes = QUICK if small else GPU if given.gpu else FULL
    cpu = re.search("Model name: *(.*)|$", subprocess.getoutput("lscpu"))[1] or "a CPU"
    machine = f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}"
    page = [ABOUT.format(machine=machine, date=time.strftime("%Y-%m-%d"), **sizes)]
    for part in [given.part] if given.part else ["training"] if given.gpu else PARTS:
        page.append(f"\n## {PARTS[part].__doc__}\n\n| | median | range | |\n|---|---|---|---|")
        print(page[-1])
        page += PARTS[part](sizes, device)
    if not (given.part or given.quick or given.gpu):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
