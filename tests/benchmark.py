"""Measure speed and memory: one command, one table, every row beside those it is compared with.

    python tests/benchmark.py                     all parts
    python tests/benchmark.py --quick             all parts, smaller, in under 2 minutes
    python tests/benchmark.py --only a,b          some parts
    python tests/benchmark.py --gpu --budget 300  training steps of 100m and 1b on a GPU (seconds)

Parts: a decoder alone, b full training step, c generation, d signature table, e scoring the
vocabulary, f cost against B, H, V and T. Rows that are compared run in turn, A B C A B C …, in one
process; the first round warms up and measures memory, the others are timed: median (min–max).
Ratios are medians of the rounds' own ratios. Extra memory is the growth over what was in use
before, at its peak, less the gradients of the parameters. `formulations.py` says what the forms
published, plain and lean are.
"""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in train.py

import argparse
import copy
import re
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from formulations import (
    FORMS,
    Trainee,
    build,
    drop_gradients,
    flops_per_token,
    head_config,
    head_job,
)
from measure import Bench, check, compare, machine, markdown, picture, save

import mhf
import train

RESULTS = Path(__file__).with_name("benchmark_results")
# Dense matrix products in bf16 (T4: fp16) by the makers' data sheets, FLOP/s.
CHIPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "T4": 65e12}

FULL = dict(
    rounds=5, precisions=("fp32", "bf16"), positions=2048,
    decoders={
        "tiny": (128, 2048), "D 256": (256, 2048), "small": (512, 2048), "100m": (768, 16384),
    },
    steps={"tiny": (16, 256), "100m": (1, 512)}, exact=("tiny",),  # with that objective, too
    without_plain=("100m",),  # where it would take minutes; published is what lean is held to
    fields={},  # of the presets' configurations, changed
    micro={},  # tokens at a time by form; else train.py's default
    contexts=(16, 512), generated=(64, 8),  # tokens with and without cache
    tables=(32768, 131072, 1_000_000), added=16000,
    vocabularies=((8192, 2048), (32768, 16384), (1_000_000, 16384)), scores=2**24,
    cost_shape=(256, 256), cost_tokens=1024,  # D and positions of B, H, V; tokens of a step of T
    B=(512, 1024, 2048, 4096, 8192, 16384), H=(1, 2, 3, 4, 6, 8),
    V=(2048, 8192, 32768, 131072), T=(64, 128, 256, 512, 1024),
)  # fmt: skip
QUICK = FULL | dict(
    rounds=3, positions=512,
    decoders={"tiny": (128, 2048), "D 256": (256, 2048), "small": (512, 2048)},
    steps={"tiny": (4, 256)}, generated=(24, 4), tables=(32768, 131072),
    vocabularies=((8192, 2048), (32768, 16384)), scores=2**22, cost_shape=(256, 128),
    cost_tokens=512, B=(512, 2048, 8192), H=(1, 2, 4, 8), V=(2048, 8192, 32768), T=(64, 512),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------


def step_rows(bench, part, setting, config, rows, length, cases, **panel):
    """Training steps of all cases (form, objective, precision), in turn: {case: row}."""
    standard = Trainee(build(replace(config, model="standard"), bench.device))
    ours = Trainee(build(config, bench.device))
    if ("published", "independent", "bf16") in cases:
        pure = Trainee(copy.deepcopy(ours.model).bfloat16())
    x, y = torch.randint(1, config.vocab_size, (2, rows, length), device=bench.device)
    jobs, more, names = {}, {}, {}
    for form, objective, precision in cases:
        low = (form, precision) == ("published", "bf16")
        who = standard if form == "standard" else pure if low else ours
        micro = who.micro_batch(form, x, bench.sizes.micro.get(form))
        key = f"{form}, exact" if objective == "exact" else form, precision
        cast = "fp32" if low else precision
        jobs[key] = who.job(who.loss(form), objective, x, y, micro, cast)
        flops = x.numel() * flops_per_token(who.model, length)
        more[key] = {"micro_batch": micro, "flops": flops} | panel
        names[form, objective, precision] = key
    found = bench.measure(part, setting, jobs, x.numel(), more=more)
    return {case: found[key] for case, key in names.items()}


def decoder(bench):
    """Decoder alone, forward and backward of the independent objective."""
    M = bench.sizes.positions
    aims = {("100m", 2048): ((1.5, 1.2), (0.1, 0.25)), ("D 256", 2048): ((1.8, 1.35),)}
    for name, (D, B) in bench.sizes.decoders.items():
        model, forms = build(head_config(D, B), bench.device), ["published", "plain", "lean"]
        if name in bench.sizes.without_plain:
            forms.remove("plain")
        cases = [(form, precision) for precision in bench.sizes.precisions for form in forms]
        jobs = {(f, p): head_job(model, f, "independent", M, p) for f, p in cases}
        rows = bench.measure("a", f"{name}: D {D}, B {B}, {M} positions", jobs, M)
        for (form, precision), row in rows.items():
            if form != "published":
                mine = aims.get((name, M), ()) if form == "lean" else ()
                compare(row, rows["published", precision], *mine)


def step(bench):
    """Full training steps with fused AdamW and clipping."""
    aims = {("tiny", 4096, "fp32"): (1.3, 1.15), ("tiny", 4096, "bf16"): (1.6, 1.4)}
    aims |= {("100m", 512, "fp32"): (1.15, 1.05), ("100m", 512, "bf16"): (1.3, 1.15)}
    for preset, (N, T) in bench.sizes.steps.items():
        forms = [(form, "independent") for form in FORMS]
        forms += [(f, "exact") for f in ("plain", "lean") if preset in bench.sizes.exact]
        if preset in bench.sizes.without_plain:
            forms = [form for form in forms if form[0] != "plain"]
        cases = [(*form, precision) for precision in bench.sizes.precisions for form in forms]
        config = mhf.Config.preset(preset, **bench.sizes.fields)
        rows = step_rows(bench, "b", f"{preset}: {N} × {T} tokens", config, N, T, cases)
        for (form, objective, precision), row in rows.items():
            seconds, peak = statistics.median(row["seconds"]), bench.matrix_peak(precision)
            row["share"] = row["flops"] / seconds / peak
            if form == "lean":
                small = (0.75, 0.6) if preset == "tiny" else ()
                compare(row, rows["standard", "independent", precision], small)
                if plain := rows.get(("plain", objective, precision)):
                    compare(row, plain)
            if form in ("plain", "lean") and objective == "independent":
                fast = aims.get((preset, N * T, precision), ()) if form == "lean" else ()
                compare(row, rows["published", objective, precision], fast)


@torch.no_grad()
def recompute(model, count, ids):
    """`count` more tokens, the whole context encoded for each."""
    for _ in range(count):
        x = torch.tensor([ids], device=model.model.cos.device)  # (1, T)
        scores = model.token_scores(model.model(model.embed(x))[:, -1])  # (1, V)
        probs = (scores / model.config.calibration).softmax(-1)  # (1, V)
        ids = [*ids, int(torch.multinomial(probs, 1))]


def generation(bench):
    """Generation at tiny, one row, temperature 1; reading the prompt is not in the time."""
    contexts, (many, few) = bench.sizes.contexts, bench.sizes.generated
    fields = {"max_position_embeddings": 2 * max(contexts)} | bench.sizes.fields
    model = build(mhf.Config.preset("tiny", **fields), bench.device).eval()
    jobs, prepare, tokens = {}, {}, {}

    def started(ids):
        stream = model.generate(ids, many + 1)
        next(stream)
        return stream

    for T in contexts:
        ids = torch.randint(1, model.config.vocab_size, (T,)).tolist()
        cached, whole = (f"context {T}, with cache", "fp32"), (f"context {T}, recomputed", "fp32")
        jobs |= {cached: lambda s: sum(s) * 0, whole: partial(recompute, model, few)}
        prepare |= {cached: partial(started, ids), whole: partial(list, ids)}
        tokens |= {cached: many, whole: few}
    rows = list(bench.measure("c", "tiny, one row", jobs, tokens, prepare).values())
    for row in rows:
        row["extra_memory"] = None
    short, _, long, recomputed = rows
    check(short, "{} tok/s; a second line: 142", short["tokens_per_second"], (400, 400))
    compare(long, recomputed, (8, 8))
    slower = short["tokens_per_second"] / long["tokens_per_second"]
    check(long, f"{{}} × the time per token at {contexts[0]}", slower, (1.3, 1.3), low=True)


TABLE_MEMORY = """
import sys, torch, mhf, train
tokens, cpu = [b"token %d" % i for i in range(int(sys.argv[1]))], torch.device("cpu")
before = train.peak_memory(cpu)
mhf.SignatureTable(4, 16384).extend(tokens)
print(round(2**30 * (train.peak_memory(cpu) - before)))
"""


def table_memory(count):
    """Bytes by which a process of its own grows with a table, or None: only Linux tells."""
    if not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, "-c", TABLE_MEMORY, str(count)]
    return int(subprocess.check_output(command, cwd=Path(__file__).parents[1]))


def table(bench):
    """Signature tables of distinct byte strings at H4 B16384; the strings are made before."""
    sizes, added = bench.sizes.tables, bench.sizes.added
    tokens = [b"token %d" % i for i in range(sizes[-1] + (bench.sizes.rounds + 1) * added)]

    def make(count):
        made = mhf.SignatureTable(4, 16384)
        made.extend(tokens[:count])
        return made

    for V in sizes:
        job = {("make", ""): lambda V=V: len(make(V)) * 0}
        (row,) = bench.measure("d", f"{V:,} tokens", job).values()
        row["extra_memory"] = table_memory(V)
        if V == 1_000_000:
            check(row, "{} s", statistics.median(row["seconds"]), (4, 4), low=True)
            if row["extra_memory"] is not None:
                check(row, "{} MB", row["extra_memory"] / 1e6, (400, 400), low=True)
    made, parts = make(sizes[-1]), iter(range(sizes[-1], len(tokens), added))
    new = {("add", ""): lambda: tokens[(i := next(parts)) : i + added]}
    setting = f"{added:,} more to {sizes[-1]:,}"
    (row,) = bench.measure("d", setting, {("add", ""): made.extend}, prepare=new).values()
    if sizes[-1] == 1_000_000:
        check(row, "{} s", statistics.median(row["seconds"]), (0.1, 0.1), low=True)


def gather(log_p, columns):
    """log p (M, H, B), ids (H, V) -> scores (M, V)."""
    return sum(log_p[:, j].index_select(1, ids) for j, ids in enumerate(columns))


def columns_of(log_p):
    """(M, H, B) -> (H·B, M), as token_scores lays it out."""
    return log_p.flatten(1).T.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def scoring(bench):
    """Scores of all V tokens from log p (M, H, B): a gather for each function, or embedding_bag."""
    for V, B in bench.sizes.vocabularies:
        signatures = mhf.SignatureTable.from_ids(torch.randint(1, B, (V, 4)), None, B)
        with bench.device:
            model = mhf.MultiHashFormer(head_config(8, B), signatures)
        columns = model.model.hash_map.T.contiguous()  # (H, V)
        for M in (1, max(2, min(512, bench.sizes.scores // V))):
            log_p = torch.randn(M, 4, B, device=bench.device).log_softmax(-1)
            jobs = {
                ("H gathers", "fp32"): lambda p=log_p, c=columns: gather(p, c) is None,
                ("embedding_bag", "fp32"): lambda p=log_p, model=model: (
                    model.sum_over_signatures(columns_of(p)) is None
                ),
            }
            compare(*reversed(bench.measure("e", f"V {V:,}, {M} positions", jobs).values()))


def cost(bench):
    """Cost against B, H and V (loss alone), and T (whole step), one at a time; in float32."""
    D, M = bench.sizes.cost_shape
    for panel, name, objective, forms in (
        ("B", "num_buckets", "independent", ("published", "plain", "lean")),
        ("H", "num_hashes", "independent", ("published", "plain", "lean")),
        ("V", "vocab_size", "exact", ("standard", "plain", "lean")),
    ):
        for value in getattr(bench.sizes, panel):
            ours = replace(head_config(D, 2048), **{name: value})
            configs = {form: replace(ours, model="standard" if form == "standard" else "mhf")
                       for form in forms}  # fmt: skip
            jobs = {
                (form, "fp32"): head_job(build(config, bench.device), form, objective, M)
                for form, config in configs.items()
            }
            more = {key: {"panel": panel, "x": value} for key in jobs}
            bench.measure("f", f"{panel} {value}, D {D}, {M} positions", jobs, M, more=more)
    for T in bench.sizes.T:
        config = mhf.Config.preset("tiny", **{"max_position_embeddings": T} | bench.sizes.fields)
        cases = [(form, "independent", "fp32") for form in ("standard", "plain", "lean")]
        N = max(1, bench.sizes.cost_tokens // T)
        step_rows(bench, "f", f"tiny: {N} × {T} tokens", config, N, T, cases, panel="T", x=T)


PARTS = {"a": decoder, "b": step, "c": generation, "d": table, "e": scoring, "f": cost}


# ---------------------------------------------------------------------------------------------
# GPU
# ---------------------------------------------------------------------------------------------


def chip_peak(bench, precision):
    """FLOP/s: the maker's number for known chips, else the largest measured matrix product."""
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else ""
    known = (peak for chip, peak in CHIPS.items() if re.search(rf"\b{chip}\b", name))
    return next(known, None) or bench.matrix_peak(precision)


def gpu(bench, presets, rows, length):
    """Steps of the presets on random tokens, all at once, until the deadline.

    bf16 (fp16 with loss scaling on chips that have none), eager and compiled, plain and lean in
    turn; then fp16 at the first preset. A group that would not end in time, going by the longest
    before it, is left out and named.
    """
    cuda = bench.device.type == "cuda"
    usual = train.choose_precision("auto", bench.device)[0] if cuda else "bf16"
    groups = [(preset, usual, compiled) for preset in presets for compiled in (False, True)]
    trainee, longest = (None, None), 10.0
    for preset, precision, compiled in [*groups, (presets[0], "fp16", False)]:
        began = time.perf_counter()
        name = f"{preset}, {'compiled' if compiled else 'eager'}"
        left, needed = bench.deadline - began, 2 * longest + 40 * compiled
        if needed > left:
            print(f"  left out: {name}, {precision}: {left:.0f} s left, {needed:.0f} may be needed")
            continue
        try:
            if trainee[0] != preset:
                trainee = None, None  # its memory is needed
                config = mhf.Config.preset(preset, **bench.sizes.fields)
                trainee = preset, Trainee(build(config, bench.device))
            peak = chip_peak(bench, precision) if precision == usual else None
            gpu_group(bench, name, trainee[1], precision, compiled, rows, length, peak)
        except RuntimeError as error:  # out of memory with one sequence; no compiler
            reason = str(error).strip().splitlines()[0]
            print(f"  failed: {name}, {precision}: {type(error).__name__}: {reason}")
        longest = max(longest, time.perf_counter() - began)
        print(f"  {name}, {precision}: {time.perf_counter() - began:.0f} s", flush=True)


def gpu_group(bench, name, trainee, precision, compiled, rows, length, peak=None):
    """Plain and lean in turn, with `rows` sequences, halved until they fit."""
    model = trainee.model
    if compiled:
        mhf.lean_loss = torch.compiler.disable(mhf.lean_loss)  # it takes gradients itself
    loss = torch.compile(model.loss) if compiled else model.loss
    x, y = torch.randint(1, model.config.vocab_size, (2, rows, length), device=bench.device)
    jobs = {
        (form, precision): trainee.job(
            partial(loss, head=form), "independent", x, y, rows, precision
        )
        for form in ("plain", "lean")
    }
    flops = x.numel() * flops_per_token(model, length)
    more = {key: {"flops": flops, "micro_batch": rows, "compiled": compiled} for key in jobs}
    try:
        found = bench.measure("gpu", f"{name}, {rows} × {length}", jobs, x.numel(), more=more)
    except RuntimeError as error:
        if rows == 1 or not train.is_out_of_memory(error):
            raise
        found = None
    if found is None:  # here, where the error no longer holds what it was about to use
        drop_gradients(model)
        torch.cuda.empty_cache()
        return gpu_group(bench, name, trainee, precision, compiled, rows // 2, length, peak)
    for row in found.values() if peak else ():
        row["share"] = flops / statistics.median(row["seconds"]) / peak
        check(row, "{} of the peak", row["share"], (0.45,) if bench.device.type == "cuda" else ())
    compare(found["lean", precision], found["plain", precision])


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def parse(argv):
    """The flags; a mistake is one sentence and exit status 2."""
    parser = argparse.ArgumentParser(
        description="Measure speed and memory; see the head of this file.", allow_abbrev=False
    )
    parser.error = lambda text: parser.exit(2, f"benchmark.py: {text}\n")
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller, in under 2 minutes")
    add("--only", metavar="a,b,…", help=f"of the parts {', '.join(PARTS)}")
    add("--gpu", action="store_true", help="training steps of 100m and 1b; tiny without a GPU")
    add("--budget", type=float, default=300, help="seconds for --gpu (default 300)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--threads", type=int, help="CPU threads")
    given = parser.parse_args(argv)
    unknown = set(given.only.split(",")) - set(PARTS) if given.only else ()
    if unknown:
        parser.error(f"--only {given.only}: the parts are {', '.join(PARTS)}")
    if given.gpu and (given.only or given.quick):
        parser.error("--gpu is a mode of its own, without --only and --quick")
    if given.threads is not None and not 1 <= given.threads <= 1024:
        parser.error(f"--threads must be from 1 to 1024, not {given.threads}")
    if not 0 < given.budget < float("inf"):
        parser.error(f"--budget must be a positive number of seconds, not {given.budget:g}")
    try:
        if given.device == "auto":
            given.device = "cuda" if torch.cuda.is_available() else "cpu"
        if given.device == "mps":
            raise ValueError("--device is auto, cpu or cuda, not mps: its memory is not measured")
        given.device = mhf.choose_device(given.device)[0]
    except ValueError as error:
        parser.error(str(error))
    return given


def main(argv=None):
    given = parse(argv)
    if given.threads:
        torch.set_num_threads(given.threads)
    bench, about = Bench(QUICK if given.quick else FULL, given.device), machine(given.device)
    print("; ".join(f"{k} {v}" for k, v in about.items()), flush=True)
    if given.gpu:
        cuda, bench.deadline = given.device.type == "cuda", time.perf_counter() + given.budget
        name = "gpu" if cuda else "gpu-tried-on-cpu"
        if not cuda:  # float16 products are slow on most
            bench.sizes.fields = {"hidden_size": 64, "num_buckets": 128, "vocab_size": 512}
        gpu(bench, *((("100m", "1b"), 8, 2048) if cuda else (("tiny",), 2, 64)))
    else:
        only = sorted(given.only.split(",")) if given.only else list(PARTS)
        name = "-".join(["quick" if given.quick else "full", *(only if given.only else ())])
        for letter in only:
            began, part = time.perf_counter(), PARTS[letter]
            torch.manual_seed(0)
            part(bench)
            print(
                f"part {letter} ({part.__name__}): {time.perf_counter() - began:.0f} s", flush=True
            )
    save(bench, about, RESULTS / f"{name}.json")
    print(f"\n{markdown(bench.rows)}\n\nall samples: {RESULTS.name}/{name}.json")
    if any(row["part"] == "f" for row in bench.rows):
        picture(bench.rows, RESULTS / f"{name}.png")
        print(f"part f: {RESULTS.name}/{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
