"""Evidence: claims of the paper, measured again, small enough for a laptop.

    python tutorials/experiments.py one_id           one claim from end to end; `--help` lists all
    python tutorials/experiments.py all              every one; runs are shared between them
    python tutorials/experiments.py --readme         write the results into results/README.md
    python tutorials/experiments.py lsh --data notes/ --results mine -- --weight_decay 0
    python tutorials/experiments.py size --preset 100m --device cuda --data fineweb-edu.jsonl

An experiment (claims.py says what and why) trains its models with train.py, a run for each variant
and seed, measures them and writes results/NAME.json and NAME.png. It may be killed at any time: the
same command goes on. Flags after -- are train.py's and hold for every run.
"""

import argparse
import contextlib
import hashlib
import inspect
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median

import course
import numpy as np
import torch
from claims import EXPERIMENTS, LANGUAGES, STANDARD, Scale, judged, paper_flops
from course import ROOT, mhf, train

from support import data
from support import evaluate as evaluation
from support.runs import RunFailed, read_json, read_log, read_run, write_text
from support.tokenizer import END, Tokenizer

RESULTS = ROOT / "tutorials" / "results"
PACKAGES = ("torch", "mmh3", "numpy", "tiktoken", "rustbpe")


# ---------------------------------------------------------------------------------------------
# What is measured of a run
# ---------------------------------------------------------------------------------------------


def loaded(folder, device):
    """(model, corpus, settings) of a finished run."""
    about = read_run(folder)["settings"]
    model = mhf.load(folder).to(device).requires_grad_(False)
    return model, course.corpus(about["tokenizer"], about["data"]), about


def quality(folder, args):
    """Held-out numbers, in float32: tau and train.py's measures on the first half of the text, last
    words with this tau on the second half; perplexity at tau = 1, too."""
    model, corpus, _ = loaded(folder, args.device)
    half, sizes = len(corpus.held_out) // 2, course.token_sizes(corpus.tokenizer)
    first, second = corpus.held_out[:half], corpus.held_out[half:]
    how = model, first, sizes, contextlib.nullcontext, args.eval_tokens
    found, raw = evaluation.evaluate(*how), evaluation.evaluate(*how, tau=1.0)
    model.config.calibration = found["tau"]
    window = min(128, model.config.max_position_embeddings)
    passages = course.last_words(second, corpus.tokenizer, window, args.passages)
    right, nats = zip(*course.last_word_results(model, passages))
    return found | {
        "perplexity_at_1": raw["perplexity"],
        "last_word": mean(right),
        "last_word_bits": mean(nats) / math.log(2),
        "passages": len(passages),
    }


def translations(languages):
    """Training, validation and test text: of each language's sentences 80, 10 and 10 %.

    In blocks, because the forms of one sentence (plurals) stand beside each other.
    """
    parts = [], [], []
    for language in languages:
        every = course.django(language)
        for part, (a, b) in zip(parts, ((0, 0.8), (0.8, 0.9), (0.9, 1.0))):
            part += every[int(a * len(every)) : int(b * len(every))]
    return ["\n".join(part) + "\n" for part in parts]


def growth(folder, args):
    """Half a vocabulary more for new languages, then further training, half of it on the old text.

    Bits per byte of test texts: before, expanded, after the training, and after the same training
    without expansion. Each text has its own tau at each stage, fitted on validation text of its
    kind: otherwise a text that the model has never seen would be measured by how wrong tau is.
    """
    found, (new, *held_out) = {}, translations(args.languages)
    for stage, expand in (("after", True), ("unexpanded", False)):
        model, corpus, about = loaded(folder, args.device)
        tokenizer, parameters = corpus.tokenizer, model.num_parameters()["total"]
        halves = np.array_split(ids := corpus.held_out[: args.growth_tokens], 2)
        english = [course.text_of(tokenizer, half) for half in halves]
        if expand:
            found |= bits(model, tokenizer, held_out, english, "before")
            tokenizer, found["old_scores_kept"] = expanded(model, tokenizer, new, ids)
            found["added_parameters"] = model.num_parameters()["total"] - parameters
            found |= bits(model, tokenizer, held_out, english, "expanded")
        texts = [np.array(tokenizer.encode(new)), corpus.training]
        rows = about["tokens_per_step"] // model.config.max_position_embeddings
        for _ in course.fit(model, texts, args.growth_steps, about["seed"], 1e-3, rows):
            pass
        found |= bits(model, tokenizer, held_out, english, stage)
    return found


def bits(model, tokenizer, new, old, stage):
    """Bits per byte of the test texts; new, old: pairs (validation text, test text)."""
    found = {}
    for which, (validation, test) in (("new", new), ("old", old)):
        pairs = zip(*course.predictions(model, np.array(tokenizer.encode(validation)), 16))
        model.config.calibration = evaluation.fit_calibration(*map(torch.cat, pairs))
        found[f"{which}_{stage}"] = course.bits_per_byte(model, tokenizer, test)
    return found


def expanded(model, tokenizer, text, ids):
    """(tokenizer with half a vocabulary more, whether the old tokens' scores are the same)."""
    before, size = [scores for scores, _ in course.predictions(model, ids, 4)], len(tokenizer)
    tokenizer = course.extended(tokenizer, text, size // 2)
    model.expand([tokenizer.token_bytes(i) for i in range(size, len(tokenizer))])
    after = [scores[:, :size] for scores, _ in course.predictions(model, ids, 4)]
    return tokenizer, all(map(torch.equal, before, after))


def words(folder, args):
    """Correlation of the words' cosines with human judgements, by data set and layer."""
    model, corpus, _ = loaded(folder, args.device)
    counts, found = course.word_counts(corpus), {}
    for name in (*course.SIMILARITIES, *args.pairs):
        pairs = [
            p for p in course.similarities(name) if min(counts[w] for w in p[:2]) >= args.known
        ]
        if len(pairs) < 10:
            raise ValueError(
                f"{name}: the training text has only {len(pairs)} pairs whose words occur "
                f"{args.known} times each; 10 are needed, or a lower --known"
            )
        vocabulary = sorted({w for pair in pairs for w in pair[:2]})
        states, at = course.word_states(model, corpus.tokenizer, vocabulary), vocabulary.index
        human, found[Path(name).stem] = [score for *_, score in pairs], {"pairs": len(pairs)}
        for layer, rows in states.items():
            rows = torch.nn.functional.normalize(rows, dim=-1)  # (W, D)
            cosine = [float(rows[at(a)] @ rows[at(b)]) for a, b, _ in pairs]
            found[Path(name).stem][layer] = {
                "pearson": course.pearson(cosine, human),
                "spearman": course.spearman(cosine, human),
                "pearson_interval": course.interval(course.pearson, cosine, human),
                "spearman_interval": course.interval(course.spearman, cosine, human),
            }
    return {"words": found}


def final(folder, _):
    """What train.py measured at the end."""
    return read_run(folder)["final"]


@torch.no_grad()
def heads(folder, args):
    """What `final` gives, and the mean entropy (bits) of each function's prediction."""
    model, corpus, _ = loaded(folder, args.device)
    if model.config.model == "standard":
        return final(folder, args) | {"entropy": []}
    ids, entropy = torch.tensor(corpus.held_out[: args.eval_tokens].astype(int)), []
    for window in ids.to(model.device).split(model.config.max_position_embeddings):
        log_p = model.bucket_log_probs(model(window[None])[0])  # (T, H, B)
        entropy.append(-(log_p.exp() * log_p).sum(-1) / math.log(2))  # (T, H)
    return final(folder, args) | {"entropy": torch.cat(entropy).mean(0).tolist()}


MEASURES = {"quality": quality, "growth": growth, "words": words, "final": final, "heads": heads}


# ---------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------


def common_flags(args):
    """Flags of train.py that all runs share."""
    flags = dict(preset=args.preset, tokenizer=f"bpe:{args.vocab_size}", steps=args.steps)
    flags |= dict(eval_every=max(1, args.steps // 6), eval_tokens=8192, threads=1)
    if args.device != "cpu":
        flags |= dict(device=args.device)
    return flags | ({"data": args.data} if args.data else {})


def command_line(flags):
    """Flags as train.py's arguments."""
    flags = dict(flags)
    paths = flags.pop("data", None)
    return [f"--{k}={v}" for k, v in flags.items()] + (["--data", *paths] if paths else [])


def store(args):
    """The folder of the runs that share these flags."""
    common = common_flags(args) | ({"more": args.more} if args.more else {})
    return Path(args.out) / f"{args.preset}-{digest(common)}"


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def run_folder(args, flags, seed):
    parts = [*(f"{k}_{flags[k]}" for k in sorted(flags)), f"seed_{seed}"]
    return store(args) / "-".join(parts).replace(":", "")  # bpe:4096 would be no name on Windows


def is_finished(folder):
    return (folder / "run.json").is_file() and "final" in read_run(folder)


def train_run(args, flags, seed):
    """Train, or go on with, one run in a process of its own."""
    folder = run_folder(args, flags, seed)
    if is_finished(folder):
        return check_source(folder)
    if (folder / "last").is_file():
        chosen = ["--resume", str(folder)]
    else:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed as it started
        own = flags | {"seed": seed, "out": folder.parent, "name": folder.name}
        chosen = command_line(common_flags(args) | own) + args.more
    log = folder.parent / f"{folder.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        command = [sys.executable, ROOT / "train.py", *chosen]
        done = subprocess.run(command, stdout=file, stderr=file)
    if not is_finished(folder):
        lines = log.read_text(encoding="utf-8").strip().splitlines() or ["?"]
        raise RunFailed(f"{folder} ended with status {done.returncode} ({lines[-1]}); see {log}")


def check_source(folder):
    """ValueError if a finished run was made with another mhf.py than the present one."""
    if (folder / "mhf.py").read_bytes() != Path(mhf.__file__).read_bytes():
        raise ValueError(
            f"{folder} was trained with another mhf.py than the present one: remove it to train "
            "it again, or name another --out"
        )


def measured(args, kind, label, flags, seed):
    """The entry of a run in the result: what is known of it, and what is measured once and kept."""
    torch.set_num_threads(1)
    folder = run_folder(args, flags, seed)
    depends = {
        "quality": [args.passages, args.eval_tokens],
        "growth": [args.growth_steps, args.growth_tokens, *args.languages],
        "words": [args.known, *args.pairs],
        "final": [],
        "heads": [args.eval_tokens],
    }
    more = (expanded, translations) if kind == "growth" else ()
    source = [inspect.getsource(p) for p in (MEASURES[kind], bits, *more, course, evaluation)]
    path = folder / f"measured-{kind}-{digest([depends[kind], source])}.json"
    last, log = read_log(folder, "loss")[-1], read_log(folder, "perplexity")
    size = read_run(folder)["parameters"]
    about = {"label": label, "seed": seed, "flags": flags, "steps": int(last["step"])}
    about |= {"tokens": int(last["tokens"]), "seconds": round(last["seconds"], 1)}
    about |= {"parameters": size["total"], "table": size["table"]}
    about["curve"] = {
        "steps": [int(row["step"]) for row in log],
        "perplexity": [row["perplexity"] for row in log],
    }
    return about | kept(path, partial(MEASURES[kind], folder, args))


def untrained(args, flags, corpus=None):
    """A run without files, to time its steps."""
    given = train.parse(command_line(common_flags(args) | flags) + args.more)
    settings, fields = train.split_flags(given)
    corpus = corpus or data.prepare(settings.data, settings.tokenizer)
    fields = {"vocab_size": len(corpus.tokenizer), "pad_token_id": corpus.tokenizer.eot} | fields
    return train.Run(settings, mhf.Config.preset(settings.preset, **fields), corpus, None)


def kept(path, job):
    """What job() gives, made once and kept in a JSON file."""
    if not path.is_file():
        write_text(path, json.dumps(job()))
    return read_json(path)


def bare(run):
    """A step without the decoder."""
    decoder = run.model.loss_per_position  # compiled, where --compile is among the flags
    run.model.loss_per_position = lambda h, targets: h.sum(-1)
    run.advance()
    run.model.loss_per_position = decoder


def costs(args, models):
    """{label: cost, decoder, flops} of models, by steps in turn; medians of several rounds.

    cost: what a step takes, one of the standard model being 1; decoder: the share that a step
    without it saves; flops: operations of the matrix products, those of the standard model being 1.
    Rounded, so that it decides on steps in tens.
    """
    runs = {label: untrained(args, flags) for label, flags in models.items()}
    jobs = {(label, job): [] for label in runs for job in (train.Run.advance, bare)}
    for number in range(args.rounds + 1):
        for (label, job), seconds in jobs.items():
            began = time.perf_counter()
            job(runs[label])
            if number:  # the first warms up
                seconds.append(time.perf_counter() - began)
    whole, rest = ({k: median(jobs[k, job]) for k in runs} for job in (train.Run.advance, bare))
    flops = {k: sum(course.flops(run.config).values()) for k, run in runs.items()}
    return {
        k: {
            "cost": round(whole[k] / whole["standard"], 2),
            "decoder": round(1 - rest[k] / whole[k], 3),
            "flops": flops[k] / flops["standard"],
        }
        for k in runs
    }


def widths(args):
    """{size: costs} of the variants of equal_time at every size, each measured once."""
    experiment, scale = EXPERIMENTS["equal_time"], Scale(args.preset, args.vocab_size)
    jobs = {
        name: partial(costs, args, experiment.variants(scale, **size))
        for name, size in scale.sizes().items()
    }
    return {name: kept(store(args) / f"costs-{name}.json", job) for name, job in jobs.items()}


def many_tokens(args, V):
    """A tokenizer of V tokens: pieces of words, then words, then sequences of words of the text."""
    corpus = data.prepare(args.data, f"bpe:{args.vocab_size}")
    encoding = corpus.tokenizer.encoding
    tokens = dict.fromkeys(sorted(encoding._mergeable_ranks, key=encoding._mergeable_ranks.get))
    words = re.findall(rb"\s?\S+", course.text_of(corpus.tokenizer, corpus.training).encode())
    for n in range(1, 6):
        if len(tokens) < V:
            tokens |= dict.fromkeys(b"".join(words[i : i + n]) for i in range(len(words) - n))
    ranks = {token: i for i, token in enumerate(itertools.islice(tokens, V - 1))}
    return Tokenizer(f"{V} tokens", encoding._pat_str, ranks, {END: V - 1})


def cost_of_vocabulary(args, flags, V):
    """What V tokens cost a model, on random ids: parameters; seconds for the signatures, a step and
    a generated token; megabytes at the peak beyond those of the program. Not on Windows."""
    import resource

    torch.set_num_threads(1)
    tokenizer = many_tokens(args, V)
    ids = np.random.default_rng(0).integers(0, V, 10_000)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if flags != STANDARD:
        mhf.SignatureTable(flags["num_hashes"], flags["num_buckets"]).extend(
            tokenizer.hashed_bytes(), V - 1
        )
    found = {"table_seconds": time.perf_counter() - began}
    run = untrained(args, flags, data.Corpus("random", "", tokenizer, ids, ids))
    steps = [run.advance()["seconds"] for _ in range(2 + args.rounds // 4)]  # the first warms up
    found["step"] = (steps[-1] - steps[0]) / (len(steps) - 1)
    stream = run.model.eval().generate(ids[:16], 9, seed=0)
    next(stream)  # reads the prompt
    began, count = time.perf_counter(), len(list(stream))
    found["token"] = (time.perf_counter() - began) / count
    found["memory"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit
    return found | {"parameters": run.model.num_parameters()["total"]}


def apart(job, *arguments):
    """What job gives in a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(job, arguments)


def vocabulary_costs(args):
    """{model: {V: costs}}, each measured once, in a process of its own."""
    experiment, scale, found = EXPERIMENTS["vocabulary"], Scale(args.preset, args.vocab_size), {}
    for line, flags in {"standard": STANDARD, **experiment.tables(scale)}.items():
        for V in (*experiment.sizes(scale), 2**17, 10**6):
            job = partial(apart, cost_of_vocabulary, args, flags, V)
            found.setdefault(line, {})[str(V)] = kept(store(args) / f"costs-{line}-{V}.json", job)
    return found


def variants(args, name):
    """{label: flags} of an experiment, with the number of steps where it is not --steps."""
    experiment, scale = EXPERIMENTS[name], Scale(args.preset, args.vocab_size)
    found = experiment.variants(scale)
    steps = dict.fromkeys(found, args.steps * experiment.steps)
    if experiment.equal_time:  # slower models make fewer steps
        cost = {k: row["cost"] for k, row in widths(args)[scale.own].items()}
        steps = {k: round(args.steps * min(cost.values()) / cost[k], -1) for k in found}
    if experiment.equal_text:  # the larger the tokens, the fewer steps read a text
        usual = len(data.prepare(args.data, f"bpe:{args.vocab_size}").training)
        texts = {k: data.prepare(args.data, found[k]["tokenizer"]).training for k in found}
        steps = {k: n * len(texts[k]) / usual for k, n in steps.items()}
    for label, n in steps.items():
        if round(n) != args.steps:
            found[label] = found[label] | {"steps": max(1, round(n))}
    return found


def estimate(args, work):
    """{folder: seconds that its run will take, by two steps of its kind} of unfinished runs."""

    def speed(flags):
        run = untrained(args, flags)
        run.advance()
        return {"step": run.advance()["seconds"] / 2}

    found = {}
    for _, kind, _, flags, seed in work:
        if not is_finished(folder := run_folder(args, flags, seed)):
            steps = 1.3 * flags.get("steps", args.steps)
            steps += 3 * args.growth_steps if kind == "growth" else 0
            timed = kept(store(args) / f"speed-{digest(flags)}.json", partial(speed, flags))
            found[folder] = steps * timed["step"]
    return found


# ---------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------


def machine():
    """What the figures were made on."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((x.split(": ")[1] for x in lines if x.startswith("model name")), name)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": name, "cores": os.cpu_count(), "gpu": gpu, "system": platform.system()}


def rounded(value):
    """Floats with six digits, wherever they stand; NaN is None."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    return value


def write_result(args, name, runs):
    """results/NAME.json and NAME.png; prints the verdicts."""
    experiment = EXPERIMENTS[name]
    about = read_run(run_folder(args, runs[0]["flags"], runs[0]["seed"]))
    versions = {"python": platform.python_version()} | {p: version(p) for p in PACKAGES}
    result = {
        "name": name,
        "claim": experiment.claim,
        "paper": experiment.paper,
        "command": shlex.join(["python", "tutorials/experiments.py", name, *args.given]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine() | {"threads_per_run": 1, "jobs": args.jobs},
        "versions": versions | {"torch": about["torch"]},
        "data": f"{about['data']} ({about['data_hash']})",
        "settings": settings_of(args) | {"precision": about["settings"]["precision"]},
        "languages": list(args.languages),
        "runs": runs,
    }
    if name == "equal_time":
        own = Scale(args.preset, args.vocab_size).own
        result |= {"width": own, "widths": widths(args), "flops": paper_flops()}
    if name == "vocabulary":
        result["costs"] = vocabulary_costs(args)
    result = rounded(result)
    result["verdicts"] = judged(result)
    args.results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    write_text(args.results / f"{name}.json", text + "\n")
    draw(args.results / f"{name}.json")
    for verdict in result["verdicts"]:
        print(f"  {WORDS[verdict['held']]}: {verdict['text']}")


def settings_of(args):
    return common_flags(args) | {"more": args.more}


def check_results(args):
    """ValueError if a result of other settings stands where this one will be written."""
    for name in args.names:
        path = args.results / f"{name}.json"
        if path.is_file():
            result, now = read_json(path), settings_of(args)
            before = result["settings"]
            names = [k for k in before | now if k != "precision"]
            differing = [k for k in names if before.get(k) != now.get(k)]
            if args.seeds < len({run["seed"] for run in result["runs"]}):
                differing.append("number of seeds")
            if differing:
                raise ValueError(
                    f"{path} holds a result with another {', '.join(differing)}: name another "
                    "folder with --results, or remove it"
                )


def draw(path):
    """The picture of a result file, beside it."""
    result, plt = read_json(path), course.pyplot()
    figure = EXPERIMENTS[result["name"]].draw(plt, result)
    figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
    plt.close(figure)


WORDS = {True: "held", False: "did not hold", None: "open"}
MARKS = "<!-- evidence, written by tutorials/experiments.py --readme -->", "<!-- /evidence -->"


def table(folder):
    """A paragraph and a figure for each claim, in Markdown, from the result files: lines."""
    for name, experiment in EXPERIMENTS.items():
        if not (file := folder / f"{name}.json").is_file():
            continue
        result = read_json(file)
        headline, *others = result["verdicts"]
        count = Counter(WORDS[v["held"]] for v in others)
        counts = ", ".join(f"{count[word]} {word}" for word in WORDS.values())
        yield from ("", f"### {experiment.claim}", "", " ".join(inspect.getdoc(experiment).split()))
        yield f"In the paper: {experiment.paper}."
        yield f"**Here, {WORDS[headline['held']]}:** {headline['text']}."
        yield from ("", f"![{experiment.claim}]({name}.png)", "")
        yield f"<details><summary>{made_with(result)} More verdicts: {counts}.</summary>"
        yield from ("", "| | mean (lowest to highest) over the seeds |", "|---|---|")
        yield from (f"| {WORDS[v['held']]} | {v['text']} |" for v in others)
        yield from ("", f"All figures are in [{name}.json]({name}.json).", "", "</details>")


def made_with(result):
    """How a result was made, in a sentence."""
    runs, settings = result["runs"], result["settings"]
    few, many = (f"{edge(run['tokens'] for run in runs):,}" for edge in (min, max))
    tokens = few if few == many else f"{few} to {many}"
    seeds = len({run["seed"] for run in runs})
    return (
        f"<code>{result['command']}</code>, {result['date']}, "
        f"{result['machine']['gpu'] or result['machine']['cpu']}, {settings['precision']}, torch "
        f"{result['versions']['torch']}; {result['data']}; {len(runs)} runs, {seeds} seeds, "
        f"{tokens} tokens a run."
    )


def write_readme(path):
    """Put the table between its marks in README.md, from the result files beside it."""
    if not (lines := list(table(path.parent))):
        raise ValueError(f"{path.parent} has no result files")
    text = path.read_text(encoding="utf-8") if path.is_file() else "\n".join(MARKS) + "\n"
    before, _, rest = text.partition(MARKS[0])
    new = "\n".join([MARKS[0], *lines, MARKS[1]])
    write_text(path, before + new + rest.partition(MARKS[1])[2])


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------

OURS = {"steps", "seed", "out", "name", "preset", "tokenizer", "device", "data", "threads", "model"}
OURS |= {"num_hashes", "num_buckets", "num_lsh", "objective", "extra_layers", "resume", "compare"}
OURS |= {"prepare", "stop_after", "eval_every", "eval_tokens"}


def parse(argv):
    """The command line; ValueError for a mistake in it."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{k:<12} {e.claim}" for k, e in EXPERIMENTS.items()),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="one or several of the list below, or all")
    add("--readme", action="store_true", help="write the README.md of the result files")
    add("--draw", action="store_true", help="draw the pictures of the result files again")
    add("--preset", default="tiny", choices=["tiny", "100m"], help="default tiny")
    add("--device", default="cpu", help="cpu (default), cuda, cuda:N, mps")
    add("--vocab_size", type=int, help="V of the tokenizer (default 4,096; 32,768 above tiny)")
    add("--steps", type=int, default=300, help="training steps of a run (default 300)")
    add("--seeds", type=int, default=3, help="how many, from 1; verdicts need 3 (default 3)")
    add("--jobs", type=int, help="runs at a time, a thread each (default: cores; 1 on a GPU)")
    add("--data", nargs="+", help="as train.py's; default Shakespeare")
    add("--passages", type=int, default=1000, help="last words asked for (default 1000)")
    add("--eval_tokens", type=int, default=2**15, help="held-out tokens (default 32768)")
    add("--known", type=int, default=5, help="rare_words: occurrences of a known word (default 5)")
    add("--pairs", nargs="+", default=[], help="rare_words: more files, Card-660's for example")
    add("--languages", nargs="+", default=LANGUAGES, help=f"growth (default {' '.join(LANGUAGES)})")
    add("--growth_steps", type=int, default=50, help="growth: steps of training on (default 50)")
    add("--growth_tokens", type=int, default=16384, help="growth: English tokens (default 16384)")
    add("--rounds", type=int, default=7, help="equal_time: timed steps of each (default 7)")
    add("--out", default="runs/experiments", help="folder of the runs")
    add("--results", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(argv[:cut])
    args.more = argv[cut + 1 :]
    args.given = argv[next((i for i, a in enumerate(argv) if a not in args.names), len(argv)) :]
    args.names = list(EXPERIMENTS if args.names == ["all"] else dict.fromkeys(args.names))
    if not (args.names or args.readme or args.draw):
        raise ValueError(f"name an experiment: {', '.join(EXPERIMENTS)}, or all")
    for name in args.names:
        if name not in EXPERIMENTS:
            raise ValueError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    if args.vocab_size is None:
        args.vocab_size = 4096 if args.preset == "tiny" else 32768
    if args.jobs is None:
        args.jobs = (os.cpu_count() or 1) if args.device == "cpu" else 1
    counts = "steps seeds jobs passages known growth_steps growth_tokens rounds eval_tokens"
    for name in (*counts.split(), "vocab_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be from 1, not {getattr(args, name)}")
    scale = Scale(args.preset, args.vocab_size)
    varied = [flags for name in args.names for flags in EXPERIMENTS[name].variants(scale).values()]
    if clash := sorted(train.parse(args.more).keys() & OURS.union(*varied)):
        raise ValueError(f"after --: --{', --'.join(clash)} is what the experiment itself sets")
    if args.names and args.preset != "tiny" and not args.data:
        raise ValueError(
            f"--preset {args.preset} needs more text than the 1.2 million tokens of Shakespeare: "
            "name one with --data"
        )
    return args


def run(args):
    torch.set_num_threads(1)
    args.device = str(mhf.choose_device(args.device))
    check_results(args)
    plan = [
        (name, EXPERIMENTS[name].kind, label, flags, seed)
        for name in args.names
        for label, flags in variants(args, name).items()
        for seed in range(1, args.seeds + 1)
    ]
    work = sorted(plan, key=lambda item: item[-1])  # a first seed of everything, then the second
    runs = {run_folder(args, *item[3:]): item[3:] for item in work}
    seconds = estimate(args, work)
    print(
        f"{len(runs)} runs in {store(args)}, {len(runs) - len(seconds)} of them there; {args.jobs} "
        f"at a time: about {sum(seconds.values()) / 60 / args.jobs:.0f} minutes to train",
        flush=True,
    )
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(train_run, args, *item): f for f, item in runs.items()}
        try:
            for future in as_completed(futures):
                future.result()
                seconds.pop(folder := futures[future], 0)
                left = sum(seconds.values()) / 60 / args.jobs
                print(f"  trained: {folder.name}; about {left:.0f} minutes left", flush=True)
        except BaseException:  # the runs that have begun end; the others do not begin
            pool.shutdown(cancel_futures=True)
            raise
    once = {(run_folder(args, *item[3:]), item[1]): item for item in work}
    with get_context("spawn").Pool(args.jobs) as pool:
        waiting = [(k, pool.apply_async(measured, (args, *i[1:]))) for k, i in once.items()]
        for (folder, kind), entry in waiting:
            entry.get()
            print(f"  measured ({kind}): {folder.name}", flush=True)
    for name in args.names:
        print(f"{name}: {EXPERIMENTS[name].claim}")
        write_result(args, name, [measured(args, *item) for of, *item in plan if of == name])


def main(argv=None):
    """Returns the exit status: 2 for a user's mistake, 1 for a failed run, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):  # τ and → on whatever terminal or pipe
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if args.names:
            run(args)
        if args.draw:
            for path in sorted(args.results.glob("*.json")):
                draw(path)
        if args.readme:
            write_readme(args.results / "README.md")
        return 0
    except (ValueError, OSError, RunFailed) as error:
        print(f"experiments.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
