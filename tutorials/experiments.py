"""Evidence: claims of the paper, measured anew, small enough for a laptop.

    python tutorials/experiments.py one_id           one claim from end to end; `--help` lists all
    python tutorials/experiments.py all              every one; runs are shared between them
    python tutorials/experiments.py --readme         write the results into the README's table
    python tutorials/experiments.py size --preset 100m --device cuda      larger, on a GPU
    python tutorials/experiments.py lsh --data notes/ -- --weight_decay 0  what train.py takes

An experiment trains its models with train.py, a run for each variant and seed, measures them and
writes tutorials/results/NAME.json and NAME.png. It may be killed at any time: the same command goes
on. Two variants differ when the ranges of their seeds do not overlap; nothing else is called a
difference.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median

import course
import numpy as np
import torch
from course import ROOT, mhf, train

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RESULTS = ROOT / "tutorials" / "results"
PACKAGES = ("torch", "mmh3", "numpy", "tiktoken", "rustbpe")
NEW_LANGUAGES = ("ar", "hi", "zh_Hans")


# ---------------------------------------------------------------------------------------------
# What is trained
# ---------------------------------------------------------------------------------------------


@dataclass
class Scale:
    """How large the models of an experiment are. Bucket counts are the paper's shares of V."""

    preset: str
    V: int

    def mhf(self, H, share, objective="independent", **more):
        """Flags of train.py for H functions with B = share · V buckets."""
        return dict(num_hashes=H, num_buckets=round(self.V * share), objective=objective) | more

    def h3(self, **more):  # as many rows as a standard table: the paper's H3B10K
        return self.mhf(3, 10624 / 32768, **more)

    def h4(self, **more):  # twice as many: H4B16K
        return self.mhf(4, 1 / 2, **more)

    def sizes(self):
        """{name: flags} of two or three sizes of the backbone."""
        if self.preset != "tiny":
            return {"100m": {"preset": "100m"}, "1b": {"preset": "1b"}}
        wide = {D: dict(num_attention_heads=D // 64, intermediate_size=3 * D) for D in (64, 192)}
        small, large = (dict(hidden_size=D, **more) for D, more in wide.items())
        return {"D 64": small, "D 128": {}, "D 192": large}

    def deeper(self, size):
        """How many more layers give a standard model the parameters of H4, or just more."""
        flags = {"preset": self.preset} | size
        config = mhf.Config.preset(flags.pop("preset"), vocab_size=self.V, **flags)
        with torch.device("meta"):
            parts = mhf.GatedEmbedding(config), mhf.CascadeDecoder(config), mhf.Block(config)
        gate, decoder, block = (sum(p.numel() for p in part.parameters()) for part in parts)
        return math.ceil((self.V * config.hidden_size + gate + decoder) / block)


STANDARD = dict(model="standard")


class Experiment:
    """A claim, the runs that test it, and what they say. A result is what its JSON file holds."""

    claim = paper = ""
    kind = "quality"  # what is measured of every run, one of MEASURES

    def variants(self, scale):
        """{label: flags of train.py} of the models to train."""
        raise NotImplementedError

    def extra(self, scale, args):
        """Entries of the result that belong to no single run."""
        return {}

    def judge(self, result):
        """[(held, sentence)]; held is True, False, or None where the seeds leave it open."""
        raise NotImplementedError

    def draw(self, plt, result):
        """A figure."""
        raise NotImplementedError


def values(result, label, name):
    """What the seeds of a variant gave."""
    return [run[name] for run in result["runs"] if run["label"] == label]


def labels(result):
    return list(dict.fromkeys(run["label"] for run in result["runs"]))


def compare(a, b):
    """1 if all of a are above all of b, −1 if below, 0 if their ranges overlap."""
    return (min(a) > max(b)) - (max(a) < min(b))


def verdict(ahead):
    """Of comparisons that a claim wants to be 1: all are, one is the opposite, or it is open."""
    return True if min(ahead) == 1 else False if min(ahead) == -1 else None


def say(numbers, percent=False):
    """Mean (lowest–highest) as text."""
    size = mean(numbers)
    scale, digits = (100, 1) if percent else (1, 2 if size < 10 else 1 if size < 100 else 0)
    low, middle, high = (
        f"{scale * x:.{digits}f}" for x in (min(numbers), mean(numbers), max(numbers))
    )
    return f"{middle}{' %' if percent else ''} ({low}–{high})"


def bars(axis, result, name, names=None, scale=1, rotation=0):
    """A dot for every seed and a bar for their mean, for each variant."""
    names = names or labels(result)
    for i, label in enumerate(names):
        y = [scale * v for v in values(result, label, name)]
        axis.bar(i, mean(y), color=course.SKY, width=0.7)
        axis.plot([i] * len(y), y, "o", color=course.BLACK, markersize=4)
    axis.set_xticks(range(len(names)), names, rotation=rotation)


def perplexities(axis, label="held-out perplexity, calibrated"):
    """A logarithmic axis whose marks are plain numbers."""
    axis.set(yscale="log", ylabel=label)
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")


# ---------------------------------------------------------------------------------------------
# The claims
# ---------------------------------------------------------------------------------------------


class OneId(Experiment):
    claim = "One id a token is not enough; four are, whatever the number of buckets"
    paper = "LAMBADA with one id 4.29, 14.30 at best (B 16K); with four about 30 at every B"
    shares = {"V/8": 1 / 8, "V/4": 1 / 4, "V/2": 1 / 2}

    def variants(self, scale):
        return {
            f"H{H}, B = {name}": scale.mhf(H, share)
            for H in (1, 2, 4)
            for name, share in self.shares.items()
        }

    def judge(self, result):
        for name, percent, better, what in (
            ("last_word", True, 1, "last words right"),
            ("last_word_bits", False, -1, "bits of a last word"),
            ("top1", True, 1, "next tokens right"),
        ):
            one, four = (
                [values(result, f"H{H}, B = {s}", name) for s in self.shares] for H in (1, 4)
            )
            ahead = [better * compare(b, a) for a, b in zip(one, four)]
            texts = [
                f"{say(a, percent)} → {say(b, percent)} at {s}"
                for a, b, s in zip(one, four, self.shares)
            ]
            yield verdict(ahead), f"{what}, one id → four: {'; '.join(texts)}"
        least, most = (values(result, f"H4, B = {s}", "top1") for s in ("V/8", "V/2"))
        gain = mean(most) / mean(least) - 1
        yield (
            compare(most, least) == 0,
            f"four ids from V/8 to V/2 buckets: {100 * gain:+.0f} % next tokens right",
        )

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4))
        panels = (
            ("last_word", 100, "last words right (%)"),
            ("last_word_bits", 1, "bits of a last word"),
            ("top1", 100, "next tokens right (%)"),
        )
        for axis, (name, unit, what) in zip(axes, panels):
            for H, colour, marker in zip(
                (1, 2, 4), (course.VERMILION, course.ORANGE, course.BLUE), "s^o"
            ):
                found = [values(result, f"H{H}, B = {s}", name) for s in self.shares]
                y = [unit * mean(v) for v in found]
                axis.plot(list(self.shares), y, color=colour, marker=marker, label=f"H = {H}")
                low, high = ([unit * edge(v) for v in found] for edge in (min, max))
                axis.fill_between(list(self.shares), low, high, color=colour, alpha=0.2)
            axis.set(xlabel="buckets B, as a share of V", ylabel=what)
        axes[0].legend(loc="lower right")
        return figure


class Size(Experiment):
    claim = "Better than a standard and a deeper standard model, the more so the larger"
    paper = "at 100M, 1B and 3B ahead of both on the mean of ten tasks"

    def variants(self, scale):
        found = {}
        for name, size in scale.sizes().items():
            k = scale.deeper(size)
            for label, flags in (
                ("standard", STANDARD),
                (f"standard+{k}L", STANDARD | {"extra_layers": k}),
                ("H3", scale.h3()),
                ("H4", scale.h4()),
                ("H3 exact", scale.h3(objective="exact")),
                ("H4 exact", scale.h4(objective="exact")),
            ):
                found[f"{name}: {label}"] = flags | size
        return found

    def judge(self, result):
        names = labels(result)
        sizes = list(dict.fromkeys(n.split(": ")[0] for n in names))
        for ours in ("H4", "H4 exact"):
            for rival in ("standard", "standard+"):
                ahead, gains = [], []
                for size in sizes:
                    other = next(
                        n for n in names
                        if n.startswith(f"{size}: {rival}") and (rival[-1] == "+") == ("+" in n)
                    )  # fmt: skip
                    a, b = (values(result, n, "bits_per_byte") for n in (f"{size}: {ours}", other))
                    ahead.append(-compare(a, b))
                    gains.append(1 - mean(a) / mean(b))
                held = verdict(ahead)
                grows = all(x < y for x, y in zip(gains, gains[1:]))
                text = ", ".join(f"{100 * g:+.1f} % at {s}" for s, g in zip(sizes, gains))
                name = "a standard model" if rival == "standard" else "a deeper one"
                yield (
                    held,
                    f"{ours} ({'paper' if ours == 'H4' else 'ours'}) against {name}, fewer bits a "
                    f"byte: {text}{'; grows with size' if grows else '; no steady growth'}",
                )

    def draw(self, plt, result):
        names = labels(result)
        sizes = list(dict.fromkeys(n.split(": ")[0] for n in names))
        figure, axes = plt.subplots(1, len(sizes), figsize=(9.5, 3.8), sharey=True)
        for axis, size in zip(axes, sizes):
            mine = [n for n in names if n.startswith(size + ":")]
            bars(axis, result, "bits_per_byte", mine)
            axis.set_xticks(range(len(mine)), [n.split(": ")[1] for n in mine], rotation=60)
            axis.set_xlabel(size)
        every = [run["bits_per_byte"] for run in result["runs"]]
        axes[0].set(ylabel="held-out bits a byte", ylim=(min(every) - 0.1, max(every) + 0.05))
        return figure


class Lsh(Experiment):
    claim = "Locality-sensitive functions give no steady gain"
    paper = "LAMBADA 30.91, …, 31.40, 31.36 with 0 … 4 of 4 functions locality-sensitive"

    def variants(self, scale):
        lsh = [{"num_lsh": n} if n else {} for n in range(5)]
        return {f"{n} of 4": scale.mhf(4, 1 / 4, **lsh[n]) for n in range(5)}

    def judge(self, result):
        names = labels(result)
        for name, percent, better, what in (
            ("last_word", True, 1, "last words right"),
            ("bits_per_byte", False, -1, "bits a byte"),
        ):
            found = [values(result, label, name) for label in names]
            ahead = [better * compare(v, found[0]) for v in found[1:]]
            text = ", ".join(say(v, percent) for v in found)
            yield all(a < 1 for a in ahead), f"{what} with 0 … 4: {text}"

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
        bars(axes[0], result, "last_word", scale=100)
        bars(axes[1], result, "bits_per_byte")
        axes[0].set(ylabel="last words right (%)")
        every = [run["bits_per_byte"] for run in result["runs"]]
        axes[1].set(ylabel="held-out bits a byte", ylim=(min(every) - 0.1, max(every) + 0.05))
        for axis in axes:
            axis.set_xlabel("locality-sensitive functions")
        return figure


class Objective(Experiment):
    claim = "Training the renormalised probability itself (ours: exact, joint)"
    paper = "an option in the authors' code; no figures"

    def variants(self, scale):
        ours = {name: scale.h4(objective=name) for name in mhf.OBJECTIVES}
        return {"standard": STANDARD} | ours

    def judge(self, result):
        found = {k: values(result, k, "perplexity") for k in labels(result)}
        paper = values(result, "independent", "paper_perplexity")
        better = compare(found["independent"], found["exact"]) == 1
        yield (
            better,
            "perplexity, calibrated: "
            + ", ".join(f"{k} {say(v)}" for k, v in found.items())
            + f"; independent at τ = 1, the paper's rule: {say(paper)}",
        )
        mass = {k: values(result, k, "valid_mass") for k in ("independent", "exact")}
        text = ", ".join(f"{k} {mean(v):.1g}" for k, v in mass.items())
        yield compare(*mass.values()) == 1, f"but its functions alone say less: valid mass {text}"

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6))
        for label, colour, marker in zip(labels(result), course.COLOURS, "os^D"):
            for run in result["runs"]:
                if run["label"] == label:
                    steps, style = run["curve"]["steps"], dict(color=colour, marker=marker)
                    first = {"label": label} if run["seed"] == 1 else {}
                    axes[0].plot(steps, run["curve"]["perplexity"], **style, **first, markersize=4)
                    if label != "standard":
                        axes[1].plot(steps, run["curve"]["valid_mass"], **style, markersize=4)
        perplexities(axes[0])
        axes[1].set(ylabel="valid mass (probability)", yscale="log")
        for axis in axes:
            axis.set_xlabel("step")
        axes[0].legend()
        return figure


class Calibration(Experiment):
    claim = "A product of H distributions is about H times too sharp (ours: τ repairs it)"
    paper = "no calibration"

    def variants(self, scale):
        many = OneId().variants(scale)
        return many | {"H4, B = V/2, exact": scale.h4(objective="exact")}

    def judge(self, result):
        taus = {H: values(result, f"H{H}, B = V/2", "tau") for H in (1, 2, 4)}
        rises = compare(taus[4], taus[2]) == compare(taus[2], taus[1]) == 1
        text = ", ".join(f"{say(v)} for H = {H}" for H, v in taus.items())
        exact = say(values(result, "H4, B = V/2, exact", "tau"))
        yield rises, f"best τ rises with H: {text} (B = V/2); exact objective, H = 4: {exact}"
        raw, fitted = (values(result, "H4, B = V/2", k) for k in ("paper_perplexity", "perplexity"))
        yield (
            compare(raw, fitted) == 1,
            f"perplexity of H = 4 at τ = 1 and at the fitted τ: {say(raw)}, {say(fitted)}",
        )

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
        shares, last = list(OneId.shares), labels(result)[-1]
        for share, colour, marker in zip(shares, course.COLOURS, "os^"):
            for run in result["runs"]:
                H, _, buckets = run["label"].partition(", B = ")
                if buckets == share:
                    first = {"label": f"B = {share}"} if (run["seed"], H) == (1, "H1") else {}
                    axes[0].plot(int(H[1:]), run["tau"], marker, color=colour, alpha=0.7, **first)
        exact = values(result, last, "tau")
        axes[0].plot([4] * len(exact), exact, "D", color=course.PURPLE, label="exact, B = V/2")
        axes[0].plot([1, 4], [1, 4], ":", color=course.BLACK, linewidth=1, label="τ = H")
        axes[0].set(xlabel="functions H", ylabel="best τ", xticks=(1, 2, 4))
        axes[0].legend()
        names = ["H1, B = V/2", "H2, B = V/2", "H4, B = V/2", last]
        for i, (name, text) in enumerate((("paper_perplexity", "τ = 1"), ("perplexity", "best τ"))):
            y = [mean(values(result, k, name)) for k in names]
            x = [j + 0.4 * i for j in range(4)]
            axes[1].bar(x, y, 0.38, label=text, color=course.COLOURS[i])
        axes[1].set_xticks([j + 0.2 for j in range(4)], ["H 1", "H 2", "H 4", "H 4 exact"])
        perplexities(axes[1], "held-out perplexity")
        axes[1].legend()
        return figure


class Growth(Experiment):
    claim = "New tokens without new parameters, and nothing lost in the old language"
    paper = "32K → 48K tokens: no new parameter, English as before"
    kind = "growth"

    def variants(self, scale):
        return {"standard": STANDARD, "H4": scale.h4(), "H4 exact": scale.h4(objective="exact")}

    def judge(self, result):
        names = labels(result)
        added = {k: values(result, k, "added_parameters")[0] for k in names}
        same = all(run["old_scores_kept"] for run in result["runs"] if run["label"] != "standard")
        yield (
            same and not added["H4"],
            f"parameters added for half a vocabulary more: H4 {added['H4']}, standard "
            f"{added['standard']:,}; scores of the old tokens bit for bit the same: {same}",
        )
        for which, claim in (("new", "new languages"), ("old", "English")):
            texts = [
                f"{k} {say(values(result, k, f'{which}_before'))} → "
                f"{say(values(result, k, f'{which}_after'))}"
                for k in names
            ]
            for k in ("H4", "H4 exact"):
                before, after = (values(result, k, f"{which}_{at}") for at in ("before", "after"))
                if which == "old":
                    loss = mean(after) / mean(before) - 1
                    yield (
                        compare(after, before) < 1,
                        f"English of {k} after training on with replay: {100 * loss:+.1f} % bits",
                    )
            rival, ours = (values(result, k, f"{which}_after") for k in ("standard", "H4 exact"))
            yield (
                None if (c := compare(rival, ours)) == 0 else c == 1,
                f"bits a byte of {claim}, before and after: {', '.join(texts)}",
            )

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
        stages = ["before", "expanded", "after", "unexpanded"]
        texts = ["before", "expanded", "trained\non", "trained on,\nnot expanded"]
        for axis, which, title in zip(axes, ("new", "old"), (", ".join(NEW_LANGUAGES), "English")):
            for i, label in enumerate(labels(result)):
                found = [values(result, label, f"{which}_{stage}") for stage in stages]
                x = [j + 0.27 * (i - 1) for j in range(len(stages))]
                axis.bar(x, [mean(v) for v in found], 0.25, label=label, color=course.COLOURS[i])
                for at, v in zip(x, found):
                    axis.plot([at] * len(v), v, ".", color=course.BLACK, markersize=4)
            axis.set_xticks(range(len(stages)), texts)
            axis.set(ylabel=f"bits a byte, {title}")
        axes[0].legend()
        return figure


class RareWords(Experiment):
    claim = "Rare words: similarity is best at the last layer but one, above the standard model"
    paper = "Spearman 0.32 at the penultimate layer (Card-660)"
    kind = "words"

    def variants(self, scale):
        return {
            "standard": STANDARD,
            "H3": scale.h3(),
            "H4": scale.h4(),
            "H4 exact": scale.h4(objective="exact"),
        }

    def judge(self, result):
        for name in course.SIMILARITIES:
            low, high, texts = {}, {}, []
            for label in labels(result):
                found = [run["words"][name] for run in result["runs"] if run["label"] == label]
                layer = [f["penultimate"] for f in found]
                low[label], high[label] = (
                    mean(f["spearman_interval"][i] for f in layer) for i in (0, 1)
                )
                middle, last = mean(f["spearman"] for f in layer), mean(
                    f["last"]["spearman"] for f in found
                )  # fmt: skip
                ends = f"{low[label]:+.2f} to {high[label]:+.2f}"
                texts.append(f"{label} {middle:+.2f} ({ends}; last layer {last:+.2f})")
            held = True if low["H4"] > high["standard"] else None
            note = "" if held else "; the intervals overlap"
            if max(low.values()) <= 0:
                note = "; none above 0: not testable at this size"
            pairs = found[0]["pairs"]
            yield (
                held,
                f"{name}, {pairs} known pairs, Spearman at the penultimate layer (95 % interval): "
                f"{', '.join(texts)}{note}",
            )

    def draw(self, plt, result):
        layers = ("input", "penultimate", "last")
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
        for axis, name in zip(axes, course.SIMILARITIES):
            for i, label in enumerate(labels(result)):
                found = [run["words"][name] for run in result["runs"] if run["label"] == label]
                y = [mean(f[layer]["spearman"] for f in found) for layer in layers]
                ends = [
                    [mean(f[layer]["spearman_interval"][k] for f in found) for layer in layers]
                    for k in (0, 1)
                ]
                x = [j + 0.15 * (i - 1.5) for j in range(3)]
                error = [np.subtract(y, ends[0]), np.subtract(ends[1], y)]
                axis.errorbar(x, y, error, fmt="os^D"[i], color=course.COLOURS[i], label=label)
            axis.axhline(0, color=course.BLACK, linewidth=0.8)
            axis.set_xticks(range(3), layers)
            pairs = result["runs"][0]["words"][name]["pairs"]
            axis.set_xlabel(f"layer; {name}, {pairs} pairs")
        axes[0].set(ylabel="Spearman's ρ, 95 % interval")
        axes[1].legend()
        return figure


class EqualTime(Experiment):
    claim = "Quality for the same time, not only for the same steps (ours)"
    paper = "compares at equal steps"

    def variants(self, scale):
        k = scale.deeper({})
        return {
            "standard": STANDARD,
            f"standard+{k}L": STANDARD | {"extra_layers": k},
            "H4": scale.h4(),
            "H3 exact": scale.h3(objective="exact"),
            "H4 exact": scale.h4(objective="exact"),
        }

    def extra(self, scale, args):
        """Seconds of a step: all models in turn, the median of several rounds."""
        runs = {k: untrained(args, flags) for k, flags in self.variants(scale).items()}
        seconds = {k: [] for k in runs}
        for round_ in range(args.rounds + 1):
            for label, run in runs.items():
                began = time.perf_counter()
                run.advance()
                if round_:
                    seconds[label].append(time.perf_counter() - began)
        return {"step_seconds": {k: median(v) for k, v in seconds.items()}}

    def at_time(self, result, label, seconds):
        """Perplexity of every seed after so many seconds, between two evaluations."""
        step = seconds / result["step_seconds"][label]
        curves = [run["curve"] for run in result["runs"] if run["label"] == label]
        return [float(np.interp(step, c["steps"], c["perplexity"])) for c in curves]

    def judge(self, result):
        steps, cost = result["runs"][0]["steps"], result["step_seconds"]
        names = labels(result)
        shortest = min(cost.values()) * steps
        found = {k: self.at_time(result, k, shortest) for k in names}
        slower = ", ".join(f"{k} {cost[k] / cost['standard']:.1f}" for k in names[1:])
        text = ", ".join(f"{k} {say(v)}" for k, v in found.items())
        better = compare(found["standard"], found["H4 exact"])
        yield (
            None if better == 0 else better == 1,
            f"perplexity when the fastest has made its {steps} steps: {text}; time of a step, "
            f"standard 1: {slower}",
        )

    def draw(self, plt, result):
        figure, axis = plt.subplots(figsize=(7, 3.8))
        for label, colour, marker in zip(labels(result), course.COLOURS, "os^Dv"):
            curves = [run["curve"] for run in result["runs"] if run["label"] == label]
            x = [s * result["step_seconds"][label] for s in curves[0]["steps"]]
            y = [mean(at) for at in zip(*(c["perplexity"] for c in curves))]
            axis.plot(x, y, color=colour, marker=marker, markersize=4, label=label)
        axis.set(xlabel="training time (s, one thread)")
        perplexities(axis)
        axis.legend()
        return figure


EXPERIMENTS = {
    "one_id": OneId(),
    "size": Size(),
    "lsh": Lsh(),
    "growth": Growth(),
    "rare_words": RareWords(),
    "objective": Objective(),
    "calibration": Calibration(),
    "equal_time": EqualTime(),
}


# ---------------------------------------------------------------------------------------------
# What is measured of a run
# ---------------------------------------------------------------------------------------------


def loaded(folder):
    """(model, corpus, settings) of a finished run."""
    about = train.read_run(folder)["settings"]
    model = mhf.load(folder).requires_grad_(False)
    return model, course.corpus(about["tokenizer"], about["data"]), about


def quality(folder, args):
    """Held-out numbers of train.py, last words, perplexity at the paper's τ = 1, the curve."""
    model, corpus, about = loaded(folder)
    window = min(128, model.config.max_position_embeddings)
    passages = course.last_words(corpus.held_out, corpus.tokenizer, window, args.passages)
    right, nats = zip(*course.last_word_results(model, passages))
    total, count = course.nats(model, corpus.held_out, tau=1.0, windows=64)
    log, size = train.read_log(folder, "perplexity"), model.num_parameters()
    return train.read_run(folder)["final"] | {
        "last_word": float(np.mean(right)),
        "last_word_bits": float(np.mean(nats)) / math.log(2),
        "passages": len(passages),
        "paper_perplexity": math.exp(min(total / count, 700)),
        "parameters": size["total"],
        "table": size["table"],
        "curve": {
            "steps": [int(row["step"]) for row in log],
            "perplexity": [row["perplexity"] for row in log],
            "valid_mass": [row.get("valid_mass", math.nan) for row in log],
        },
    }


def translations():
    """(training, validation, test) sentences of the new languages: 8, 1 and 1 of every ten."""
    every = [s for language in NEW_LANGUAGES for s in course.django(language)]
    parts = [s for i, s in enumerate(every) if i % 10 not in (0, 5)], every[::10], every[5::10]
    return ["\n".join(part) for part in parts]


def growth(folder, args):
    """Half a vocabulary more for three new languages, then training on, half of it replay.

    Bits a byte of test sentences: before; expanded; after training on; and of the same training
    without expansion. One τ for English and the new languages, fitted on validation sentences.
    """
    found, (new, new_validation, new_test) = {}, translations()
    for stage, expand in (("after", True), ("unexpanded", False)):
        model, corpus, about = loaded(folder)
        tokenizer, parameters = corpus.tokenizer, model.num_parameters()["total"]
        held_out, half = corpus.held_out[: args.growth_tokens], args.growth_tokens // 2
        validation, test = (tokenizer.decode(part) for part in (held_out[:half], held_out[half:]))

        tests = {"new": new_test, "old": test}
        if expand:
            found |= bits(model, tokenizer, tests, "before")
            tokenizer, found["old_scores_kept"] = expanded(model, tokenizer, new, held_out)
            found["added_parameters"] = model.num_parameters()["total"] - parameters
            found |= bits(model, tokenizer, tests, "expanded")
        texts = [np.array(tokenizer.encode(new)), corpus.training]
        rows = about["tokens_per_step"] // model.config.max_position_embeddings
        for _ in course.fit(model, texts, args.growth_steps, about["seed"], 1e-3, rows):
            pass
        ids = [np.array(tokenizer.encode(text)) for text in (new_validation, validation)]
        pairs = [pair for part in ids for pair in course.predictions(model, part, 16)]
        model.config.calibration = train.fit_calibration(*(torch.cat(p) for p in zip(*pairs)))
        found |= bits(model, tokenizer, tests, stage)
    return found | {"growth_steps": args.growth_steps}


def bits(model, tokenizer, texts, stage):
    return {f"{k}_{stage}": course.bits_per_byte(model, tokenizer, t) for k, t in texts.items()}


def expanded(model, tokenizer, text, ids):
    """(tokenizer with half a vocabulary more, whether the old tokens' scores stayed the same)."""
    before, size = [scores for scores, _ in course.predictions(model, ids, 4)], len(tokenizer)
    tokenizer = course.extended(tokenizer, text, size // 2)
    model.expand([tokenizer.token_bytes(i) for i in range(size, len(tokenizer))])
    after = [scores[:, :size] for scores, _ in course.predictions(model, ids, 4)]
    return tokenizer, all(map(torch.equal, before, after))


def words(folder, args):
    """Correlation of the words' cosines with human judgements, by data set and layer."""
    model, corpus, _ = loaded(folder)
    counts, found = course.word_counts(corpus), {}
    for name in course.SIMILARITIES:
        pairs = [
            p for p in course.similarities(name) if min(counts[w] for w in p[:2]) >= args.known
        ]
        vocabulary = sorted({w for pair in pairs for w in pair[:2]})
        states, at = course.word_states(model, corpus.tokenizer, vocabulary), vocabulary.index
        human, found[name] = [score for *_, score in pairs], {"pairs": len(pairs)}
        for layer, rows in states.items():
            rows = torch.nn.functional.normalize(rows, dim=-1)  # (W, D)
            cosine = [float(rows[at(a)] @ rows[at(b)]) for a, b, _ in pairs]
            found[name][layer] = {
                "pearson": course.pearson(cosine, human),
                "spearman": course.spearman(cosine, human),
                "spearman_interval": course.interval(course.spearman, cosine, human),
            }
    return {"words": found}


MEASURES = {"quality": quality, "growth": growth, "words": words}


# ---------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------


def common_flags(args):
    """Flags of train.py that all runs share."""
    flags = dict(preset=args.preset, tokenizer=f"bpe:{args.vocab_size}", steps=args.steps)
    flags |= dict(eval_every=50, eval_tokens=8192, threads=1)
    if args.device != "cpu":
        flags |= dict(device=args.device)
    return flags | ({"data": args.data} if args.data else {})


def command_line(flags):
    return [f"--{k}={v}" for k, v in flags.items() if k != "data"] + [
        *(["--data", *flags["data"]] if "data" in flags else [])
    ]


def store(args):
    """The folder of the runs that share these flags."""
    common = common_flags(args) | ({"more": args.more} if args.more else {})
    key = hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()[:8]
    return Path(args.out) / f"{args.preset}-{key}"


def run_folder(args, flags, seed):
    return store(args) / "-".join([*(f"{k}_{flags[k]}" for k in sorted(flags)), f"seed_{seed}"])


def is_finished(folder):
    return (folder / "run.json").is_file() and "final" in train.read_run(folder)


def train_run(args, flags, seed):
    """Train, or go on with, one run in a process of its own.

    If this process is killed, that one goes on, and keeps the lock: a second start waits for it.
    """
    folder = run_folder(args, flags, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".txt")
    with open(folder.with_suffix(".lock"), "w") as lock, open(log, "a", encoding="utf-8") as file:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_finished(folder):
            return
        if (folder / "last").is_file():
            chosen = ["--resume", str(folder)]
        else:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed at once
            own = flags | {"seed": seed, "out": folder.parent, "name": folder.name}
            chosen = command_line(common_flags(args) | own) + args.more
        keep = {"pass_fds": [lock.fileno()]} if fcntl else {}
        command = [sys.executable, ROOT / "train.py", *chosen]
        done = subprocess.run(command, stdout=file, stderr=file, **keep)
    if not is_finished(folder):
        lines = log.read_text(encoding="utf-8").strip().splitlines() or ["?"]
        raise ValueError(f"{folder} ended with status {done.returncode} ({lines[-1]}); see {log}")


def measured(args, kind, label, flags, seed):
    """The entry of a run in the result: what is known of it and what is measured."""
    torch.set_num_threads(1)
    folder = run_folder(args, flags, seed)
    settings = {"quality": args.passages, "words": args.known}
    settings["growth"] = [args.growth_steps, args.growth_tokens]
    key = "-".join(str(x) for x in np.ravel(settings[kind]))
    kept = folder / f"measured-{kind}-{key}.json"
    if not kept.is_file():
        train.write_text(kept, json.dumps(MEASURES[kind](folder, args)))
    last = train.read_log(folder, "loss")[-1]
    about = {"label": label, "seed": seed, "flags": flags, "steps": int(last["step"])}
    about |= {"tokens": int(last["tokens"]), "seconds": round(last["seconds"], 1)}
    return about | json.loads(kept.read_text(encoding="utf-8"))


def untrained(args, flags):
    """A run that keeps no files, to time its steps."""
    given = train.parse(command_line(common_flags(args) | flags) + args.more)
    settings, fields = train.settings_of(given)
    corpus = train.prepare(settings)
    fields = {"vocab_size": len(corpus.tokenizer), "pad_token_id": corpus.tokenizer.eot} | fields
    config = mhf.Config.preset(settings.preset, settings.extra_layers, **fields)
    return train.Run(settings, config, corpus, None)


def estimate(args, work):
    """Seconds that the unfinished runs will take: one step of each kind is made and timed."""
    speed, total = {}, 0.0
    for _, kind, _, flags, seed in work:
        folder = run_folder(args, flags, seed)
        name = str(flags)
        if name not in speed and not is_finished(folder):
            run = untrained(args, flags)
            run.advance()
            run.advance()
            speed[name] = run.seconds / 2
        if not is_finished(folder):
            total += speed[name] * args.steps * 1.2  # and its evaluations
        total += {"quality": 10, "words": 5, "growth": 150}[kind]
    return total / args.jobs


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
    """tutorials/results/NAME.json and NAME.png."""
    experiment, scale = EXPERIMENTS[name], Scale(args.preset, args.vocab_size)
    versions = {"python": platform.python_version()} | {p: version(p) for p in PACKAGES}
    about = train.read_run(run_folder(args, runs[0]["flags"], runs[0]["seed"]))
    result = {
        "name": name,
        "claim": experiment.claim,
        "paper": experiment.paper,
        "command": " ".join(["python tutorials/experiments.py", name, *args.given]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine() | {"threads_per_run": 1, "jobs": args.jobs},
        "versions": versions,
        "data": f"{about['data']} ({about['data_hash']})",
        "settings": common_flags(args) | {"precision": about["precision"], "more": args.more},
        "runs": runs,
    }
    result = rounded(result | experiment.extra(scale, args))
    verdicts = [{"held": held, "text": text} for held, text in experiment.judge(result)]
    result["verdicts"] = verdicts
    args.results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    train.write_text(args.results / f"{name}.json", text + "\n")
    draw(args.results / f"{name}.json")
    for verdict in verdicts:
        print(f"  {WORDS[verdict['held']]}: {verdict['text']}")


def draw(path):
    """The picture of a result file, beside it."""
    result, plt = json.loads(path.read_text(encoding="utf-8")), course.pyplot()
    figure = EXPERIMENTS[result["name"]].draw(plt, result)
    figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
    plt.close(figure)


WORDS = {True: "held", False: "did not hold", None: "open"}
MARKS = "<!-- evidence, written by tutorials/experiments.py --readme -->", "<!-- /evidence -->"


def table(folder):
    """The claims and what came of them, in Markdown, from the result files."""
    files = [folder / f"{name}.json" for name in EXPERIMENTS]
    results = [json.loads(f.read_text(encoding="utf-8")) for f in files if f.is_file()]
    yield "| claim | paper | here, mean and range over the seeds |"
    yield "|---|---|---|"
    for result in results:
        verdicts = [f"*{WORDS[v['held']]}:* {v['text']}" for v in result["verdicts"]]
        link = f"tutorials/results/{result['name']}"
        claim = f"{result['claim']} ([figures]({link}.json), [picture]({link}.png))"
        yield f"| {claim} | {result['paper']} | {'<br>'.join(verdicts)} |"


def write_readme(folder, path):
    """Put the table between its marks in the README."""
    text = train.read_text(path)
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    new = "\n".join([MARKS[0], *table(folder), MARKS[1]])
    train.write_text(Path(path), before + new + after)


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def parse(argv):
    argv, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (
        argv, [],
    )  # fmt: skip
    names = "; ".join(f"{k}: {e.claim}" for k, e in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=names,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"{', '.join(EXPERIMENTS)}, or all")
    add("--readme", action="store_true", help="write the result files into the README's table")
    add("--draw", action="store_true", help="draw the pictures of the result files anew")
    add("--preset", default="tiny", choices=[p for p in mhf.PRESETS], help="default tiny")
    add("--device", default="cpu", help="cpu (default), auto, cuda, mps")
    add("--vocab_size", type=int, help="V of the tokenizer (default 4,096; 32,768 above tiny)")
    add("--steps", type=int, default=300, help="training steps of a run (default 300)")
    add("--seeds", type=int, default=3, help="how many, from 1 (default 3)")
    add("--jobs", type=int, help="runs at a time, a thread each (default: cores; 1 on a GPU)")
    add("--data", nargs="+", help="as train.py's; default Shakespeare")
    add("--passages", type=int, default=1000, help="last words asked for (default 1000)")
    add("--known", type=int, default=5, help="rare_words: occurrences of a known word (default 5)")
    add("--growth_steps", type=int, default=50, help="growth: steps of training on (default 50)")
    add("--growth_tokens", type=int, default=16384, help="growth: English tokens (default 16384)")
    add("--rounds", type=int, default=7, help="equal_time: timed steps of each (default 7)")
    add("--out", default="runs/experiments", help="folder of the runs")
    add("--results", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(argv)
    args.more, args.given = more, [a for a in argv if a not in args.names]
    args.given += ["--", *more] if more else []
    args.vocab_size = args.vocab_size or (4096 if args.preset == "tiny" else 32768)
    args.jobs = args.jobs or ((os.cpu_count() or 1) if args.device == "cpu" else 1)
    if args.names == ["all"]:
        args.names = list(EXPERIMENTS)
    for name in args.names:
        if name not in EXPERIMENTS:
            raise ValueError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    for name in ("steps", "seeds", "jobs", "passages", "known", "growth_steps", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be from 1, not {getattr(args, name)}")
    return args


def run(args):
    scale = Scale(args.preset, args.vocab_size)
    torch.set_num_threads(1)
    work = [
        (name, EXPERIMENTS[name].kind, label, flags, seed)
        for seed in range(1, args.seeds + 1)
        for name in args.names
        for label, flags in EXPERIMENTS[name].variants(scale).items()
    ]
    minutes = estimate(args, work) / 60
    print(f"{len(work)} runs, {args.jobs} at a time: about {minutes:.0f} minutes; in {store(args)}")
    runs = {name: [] for name in args.names}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        unique = {run_folder(args, *item[3:]): item[3:] for item in work}
        training = [pool.submit(train_run, args, *item) for item in unique.values()]
        for folder, future in zip(unique, training):
            future.result()
            print(f"  trained: {folder.name}", flush=True)
        for item in {(str(run_folder(args, *i[3:])), i[1]): i for i in work}.values():
            pool.submit(measured, args, *item[1:])
        pool.shutdown()
    for name, *item in work:
        runs[name].append(measured(args, *item))
    for name in args.names:
        print(f"{name}: {EXPERIMENTS[name].claim}")
        write_result(args, name, runs[name])


def main(argv=None):
    """Returns the exit status: 2 for a user's mistake, 130 for Ctrl-C."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if args.names:
            run(args)
        if args.draw:
            for path in sorted(args.results.glob("*.json")):
                draw(path)
        if args.readme:
            write_readme(args.results, ROOT / "README.md")
        return 0
    except (ValueError, train.RunError, OSError) as error:
        print(f"experiments.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
