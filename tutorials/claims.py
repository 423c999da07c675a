"""The claims of the paper, and a few of ours: what is trained for each, judged and drawn.

`experiments.py` trains and measures; a *result* is what it writes into results/NAME.json. The
verdicts follow from a result by code:

* better or worse: every seed of one variant is beyond every seed of the other. Three seeds against
  three differ like this by chance in one comparison of ten, and there are dozens of comparisons
  here: a verdict is a hint with figures beside it, not a proof.
* no loss: in every seed, the change from one variant or stage to another is below a named margin.
* times are measured once: only below 0.8 or above 1.25 of the other counts.
* rare words and slopes: by 95 % intervals. Counts of parameters and operations: exactly.
* whatever overlaps is open, and so is every verdict from fewer than three seeds.

The docstring of an experiment is its paragraph in results/README.md.
"""

import math
from dataclasses import dataclass
from statistics import mean

import course
import torch
from course import mhf

STANDARD = dict(model="standard")
LANGUAGES = ("ar", "hi", "zh_Hans")


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
        """{name: flags} of backbones."""
        if self.preset != "tiny":
            return {"100m": {"preset": "100m"}, "1b": {"preset": "1b"}}
        heads = {64: 1, 128: 2, 256: 4, 384: 6}
        sizes = {
            f"D {D}": dict(hidden_size=D, num_attention_heads=A, intermediate_size=3 * D)
            for D, A in heads.items()
        }
        return sizes | {"D 128": {}}  # as the preset

    @property
    def own(self):
        """The name among `sizes` that the preset itself has."""
        return "D 128" if self.preset == "tiny" else self.preset

    def models(self, **size):
        """{name: flags} of the standard model, a deeper one, and ours; size: flags of all."""
        k = self.deeper(**size)
        found = {
            "standard": STANDARD,
            f"standard+{k}L": STANDARD | {"extra_layers": k},
            "H3": self.h3(),
            "H4": self.h4(),
            "H3 exact": self.h3(objective="exact"),
            "H4 exact": self.h4(objective="exact"),
        }
        return {name: flags | size for name, flags in found.items()}

    def deeper(self, preset=None, **size):
        """How many more layers give a standard model the parameters of H4, or just more."""
        config = mhf.Config.preset(preset or self.preset, vocab_size=self.V, **size)
        with torch.device("meta"):
            parts = mhf.GatedEmbedding(config), mhf.CascadeDecoder(config), mhf.Block(config)
        gate, decoder, block = (sum(p.numel() for p in part.parameters()) for part in parts)
        return math.ceil((self.V * config.hidden_size + gate + decoder) / block)


# ---------------------------------------------------------------------------------------------
# Judging and drawing
# ---------------------------------------------------------------------------------------------


def values(result, label, name):
    """What the seeds of a variant gave, in the order of the seeds."""
    return [run[name] for run in result["runs"] if run["label"] == label]


def labels(result):
    return list(dict.fromkeys(run["label"] for run in result["runs"]))


def compare(a, b):
    """1 if all of a are above all of b, −1 if below, 0 if their ranges overlap."""
    return (min(a) > max(b)) - (max(a) < min(b))


def verdict(comparisons):
    """A claim wants them to be 1: held if all are, not held if one is −1, else open."""
    return True if min(comparisons) == 1 else False if min(comparisons) == -1 else None


def changes(before, after):
    """Relative changes, seed by seed."""
    return [b / a - 1 for a, b in zip(before, after)]


def within(ratios, margin):
    """1 if all changes are below the margin, −1 if all are above, else 0."""
    return compare([margin], ratios)


def less(ratio):
    """Whether a cost that is measured once is less than another."""
    return True if ratio < 0.8 else False if ratio > 1.25 else None


def say(numbers, percent=False):
    """Mean (lowest to highest) as text."""
    size = mean(numbers)
    scale, digits = (100, 1) if percent else (1, 2 if size < 100 else 0)
    low, middle, high = (f"{scale * x:.{digits}f}" for x in (min(numbers), size, max(numbers)))
    return f"{middle}{' %' if percent else ''} ({low} to {high})"


def say_change(ratios):
    low, middle, high = (100 * x for x in (min(ratios), mean(ratios), max(ratios)))
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def dots(axis, result, name, ylabel):
    """A dot for each seed of a variant, and a line at their mean."""
    for i, label in enumerate(names := labels(result)):
        y = values(result, label, name)
        axis.plot([i] * len(y), y, "o", color=course.BLUE, alpha=0.6)
        axis.hlines(mean(y), i - 0.3, i + 0.3, color=course.BLACK)
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel(ylabel)


def band(axis, x, found, color, **style):
    """A line through the means of the seeds, and a band from the lowest to the highest."""
    axis.plot(x, [*map(mean, found)], color=color, **style)
    axis.fill_between(x, [*map(min, found)], [*map(max, found)], color=color, alpha=0.2)


def plain(axis):
    """Plain numbers as the marks of a logarithmic axis, an x-axis or a y-axis."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}")


def perplexities(axis, label):
    axis.set(yscale="log", ylabel=label)
    plain(axis.yaxis)


class Experiment:
    """A claim, the runs that test it, and what they say."""

    claim = paper = ""
    kind = "quality"  # what is measured of every run, one of experiments.MEASURES
    steps = 1.0  # how many times --steps a run has
    equal_time = False  # whether slower variants make fewer steps
    equal_text = False  # whether runs with larger tokens make fewer steps

    def variants(self, scale):
        """{label: flags of train.py} of the models to train."""
        raise NotImplementedError

    def judge(self, result):
        """Yields (held, sentence); held is True, False, or None where the seeds leave it open."""
        raise NotImplementedError

    def draw(self, plt, result):
        """A figure."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------
# The claims
# ---------------------------------------------------------------------------------------------


class OneId(Experiment):
    """Models with one, two and four hash functions, each with tables of three sizes, all with the
    paper's objective. If several ids only stood for a larger table, one function with many buckets
    would do as well as four with few."""

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
            texts = [
                f"{say(a, percent)} → {say(b, percent)} at {s}"
                for a, b, s in zip(one, four, self.shares)
            ]
            held = verdict([better * compare(b, a) for a, b in zip(one, four)])
            yield held, f"{what}, one id → four: {'; '.join(texts)}"
        one, few, many = (
            values(result, k, "last_word_bits")
            for k in ("H1, B = V/2", "H4, B = V/8", "H4, B = V/2")
        )
        yield (
            verdict([compare(one, few)]),
            f"bits of a last word with tables of equal size, one id of V/2 buckets → four of V/8: "
            f"{say(one)} → {say(few)}",
        )
        change = changes(many, few)
        yield (
            verdict([within(change, 0.02)]),
            f"four ids with a quarter of the buckets (V/2 → V/8), bits of a last word, margin 2 %: "
            f"{say_change(change)}",
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
                y = [[unit * x for x in v] for v in found]
                band(axis, list(self.shares), y, colour, marker=marker, label=f"H = {H}")
            axis.set(xlabel="buckets B, as a share of V", ylabel=what)
        axes[1].legend(loc="lower left")
        return figure


class Size(Experiment):
    """MultiHashFormers with the paper's two settings, H3 (about as many table rows as tokens) and
    H4 (twice as many), beside a standard model and a deeper one, to which layers were added until
    it has at least the parameters of H4. All of this at several widths and with two objectives."""

    claim = "Better than a standard and a deeper standard model, the more so the larger"
    paper = "at 100M, 1B and 3B parameters ahead of both, on the mean of ten tasks"
    kind = "final"
    steps = 2
    sizes = 2  # of those of the scale; wider ones take hours more

    def variants(self, scale):
        found = {}
        for name, size in list(scale.sizes().items())[: self.sizes]:
            found |= {f"{name}: {k}": flags for k, flags in scale.models(**size).items()}
        return found

    def pairs(self, result, deep, label):
        """{size: bits a byte of the (deeper) standard model and of this one, by seed}."""
        found = {}
        for name in labels(result):
            size, model = name.split(": ")
            if model.startswith("standard") and deep == ("+" in model):
                both = name, f"{size}: {label}"
                found[size] = [values(result, k, "bits_per_byte") for k in both]
        return found

    def judge(self, result):
        for objective, whose in (("", "the paper's objective"), (" exact", "exact")):
            for deep, rival in ((False, "a standard model"), (True, "a deeper one")):
                h3, h4 = (self.pairs(result, deep, f"{H}{objective}") for H in ("H3", "H4"))
                ahead = verdict([compare(*both) for both in h4.values()])
                h3, h4 = ({s: changes(*both) for s, both in found.items()} for found in (h3, h4))
                texts = [f"H3 {say_change(h3[s])}, H4 {say_change(h4[s])} at {s}" for s in h3]
                yield ahead, f"bits a byte of H4 below {rival}'s, {whose}: {'; '.join(texts)}"
                x = [math.log10(n) for s in h4 for n in self.parameters(result, s)]
                y = [100 * c for change in h4.values() for c in change]
                found, (low, high) = course.slope(x, y), course.interval(course.slope, x, y)
                yield (
                    verdict([compare([0], [low, high])]),
                    f"H4's difference to {rival}, {whose}, by ten times the parameters: "
                    f"{found:+.1f} points (95 % interval {low:+.1f} to {high:+.1f})",
                )

    def parameters(self, result, size):
        return values(result, f"{size}: standard", "parameters")

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True)
        for axis, (deep, rival) in zip(axes, ((False, "standard model"), (True, "deeper one"))):
            models = "H3", "H4", "H3 exact", "H4 exact"
            for label, colour, marker in zip(models, course.COLOURS, "os^D"):
                found = self.pairs(result, deep, label)
                x = [mean(self.parameters(result, size)) / 1e6 for size in found]
                y = [[100 * c for c in changes(*both)] for both in found.values()]
                band(axis, x, y, colour, marker=marker, label=label)
            axis.axhline(0, color=course.BLACK, linewidth=0.8)
            axis.set(xscale="log", xlabel="million parameters of the standard model")
            plain(axis.xaxis)
            axis.set_ylabel(f"bits a byte against a {rival} (%)")
            axis.yaxis.set_tick_params(labelleft=True)
        axes[0].legend()
        return figure


class Lsh(Experiment):
    """Four functions, of which none, one, two, three or all are locality-sensitive, so that tokens
    with a similar spelling share buckets."""

    claim = "Locality-sensitive functions give no steady gain"
    paper = "LAMBADA 30.91, …, 31.40, 31.36 with 0 … 4 of 4 functions locality-sensitive"

    def variants(self, scale):
        lsh = [{"num_lsh": n} if n else {} for n in range(5)]
        return {f"{n} of 4": scale.mhf(4, 1 / 4, **lsh[n]) for n in range(5)}

    def judge(self, result):
        panels = (("last_word_bits", "bits of a last word"), ("bits_per_byte", "bits a byte"))
        for name, what in panels:
            found = [values(result, label, name) for label in labels(result)]
            gains = [[-c for c in changes(found[0], v)] for v in found[1:]]
            text = ", ".join(map(say, found))
            yield (
                verdict([within(gain, 0.01) for gain in gains]),
                f"no gain above 1 % in {what} with 0 … 4: {text}",
            )

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
        dots(axes[0], result, "last_word_bits", "bits of a last word")
        dots(axes[1], result, "bits_per_byte", "held-out bits a byte")
        for axis in axes:
            axis.set_xlabel("locality-sensitive functions")
        return figure


class Objective(Experiment):
    """H4 trained on exact + λ · independent / H: λ = 0 is the exact objective, λ = ∞ the paper's.
    The larger λ, the surer each function is by itself: its entropy falls. Besides, more of the
    probability is on signatures of real tokens. Beside them a standard model and one id a token."""

    claim = "Sure functions or good tokens: what the weight λ of the objective trades (ours)"
    paper = "independent; the renormalised one is an option in the authors' code; no figures"
    kind = "heads"
    weights = (0.1, 0.25, 1.0, 4.0)

    def variants(self, scale):
        found = {"standard": STANDARD, "λ 0": scale.h4(objective="exact")}
        for weight in self.weights:
            found[f"λ {weight:g}"] = scale.h4(objective="joint", joint_weight=weight)
        found["λ ∞"] = scale.h4()
        one = {f"one id, {o}": scale.mhf(1, 1 / 2, o) for o in ("exact", "independent")}
        return found | one

    def judge(self, result):
        rules = [label for label in labels(result) if label.startswith("λ")]
        found = {k: values(result, k, "perplexity") for k in labels(result)}
        exact, text = found["λ 0"], ", ".join(f"{k} {say(v)}" for k, v in found.items())
        yield (
            verdict([compare(found["λ ∞"], exact)]),
            f"exact (λ = 0) below the paper's objective (λ = ∞) in calibrated perplexity: {text}",
        )
        below = verdict([compare(found["standard"], exact)])
        yield below, "exact below the standard model, at equal steps"
        entropy = {k: [mean(e) for e in values(result, k, "entropy")] for k in rules}
        mass = {k: values(result, k, "valid_mass") for k in rules}
        taus = ", ".join(f"{mean(values(result, k, 'tau')):.2f}" for k in rules)
        bits = ", ".join(f"{mean(v):.1f}" for v in entropy.values())
        shares = ", ".join(f"{mean(v):.1g}" for v in mass.values())
        yield (
            verdict([compare(entropy["λ 0"], entropy["λ ∞"]), compare(mass["λ ∞"], mass["λ 0"])]),
            f"a function is less sure with exact than with the paper's objective; by λ: entropy of "
            f"a function {bits} bits, valid mass {shares}, best τ {taus}",
        )
        both = [
            min(compare(exact, found[k]), compare(entropy["λ 0"], entropy[k])) for k in rules[1:-1]
        ]
        text = ", ".join(f"{k} {say_change(changes(exact, found[k]))}" for k in rules[1:-1])
        yield (
            verdict([max(both)]),
            f"a mixture has lower perplexity than exact and surer functions; perplexity: {text}",
        )

    def draw(self, plt, result):
        figure, axes = plt.subplots(2, 2, figsize=(9.5, 6))
        rules = [label for label in labels(result) if label.startswith("λ")]
        names = [label.split()[1] for label in rules]
        panels = (
            ("perplexity", "held-out perplexity, calibrated"),
            ("entropy", "entropy of each function (bits)"),
            ("tau", "best τ"),
            ("valid_mass", "valid mass (probability)"),
        )
        for axis, (name, what) in zip(axes.flat, panels):
            y = torch.tensor([values(result, k, name) for k in rules])
            for j, line in enumerate(y.view(len(rules), y.shape[1], -1).unbind(2)):
                colour = course.COLOURS[j] if name == "entropy" else course.BLACK
                band(axis, names, line.tolist(), colour, marker="o", label=f"function {j + 1}")
            axis.set(xlabel="λ (0: exact, ∞: independent)", ylabel=what)
        level = mean(values(result, "standard", "perplexity"))
        axes[0, 0].axhline(level, linestyle=":", color=course.BLACK)
        axes[0, 0].annotate("standard model", (0, level), (0, 3), textcoords="offset points")
        knows_nothing = math.log2(result["runs"][-1]["flags"]["num_buckets"])
        axes[0, 1].axhline(knows_nothing, linestyle=":", color=course.BLACK)
        axes[0, 1].annotate("all buckets alike", (3, knows_nothing - 0.3))
        axes[0, 1].legend()
        axes[1, 1].set_yscale("log")
        return figure


class Calibration(Experiment):
    """The τ that fits held-out text best, for one, two and four functions. The paper trains each
    function by itself. Each then gives a token's id about the token's own probability, so that the
    product of H of them is about its H-th power."""

    claim = "A product of H distributions is about H times too sharp (ours: τ repairs it)"
    paper = "probabilities are used as they are, without calibration"

    def variants(self, scale):
        many = OneId().variants(scale)
        return many | {"H4, B = V/2, exact": scale.h4(objective="exact")}

    def judge(self, result):
        taus = {H: values(result, f"H{H}, B = V/2", "tau") for H in (1, 2, 4)}
        text = ", ".join(f"{say(v)} for H = {H}" for H, v in taus.items())
        exact = say(values(result, "H4, B = V/2, exact", "tau"))
        yield (
            verdict([compare(taus[2], taus[1]), compare(taus[4], taus[2])]),
            f"best τ rises with H: {text} (B = V/2); exact objective, H = 4: {exact}",
        )
        raw, fitted = (values(result, "H4, B = V/2", k) for k in ("perplexity_at_1", "perplexity"))
        yield (
            verdict([compare(raw, fitted)]),
            f"perplexity of H = 4 at τ = 1 → at the fitted τ: {say(raw)} → {say(fitted)}",
        )

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
        for share, colour, marker in zip(OneId.shares, course.COLOURS, "os^"):
            for H in (1, 2, 4):
                taus = values(result, f"H{H}, B = {share}", "tau")
                first = {"label": f"B = {share}"} if H == 1 else {}
                axes[0].plot([H] * len(taus), taus, marker, color=colour, alpha=0.7, **first)
        names = ["H1, B = V/2", "H2, B = V/2", "H4, B = V/2", "H4, B = V/2, exact"]
        exact = values(result, names[-1], "tau")
        axes[0].plot([4] * len(exact), exact, "D", color=course.PURPLE, label="exact, B = V/2")
        axes[0].plot([1, 4], [1, 4], ":", color=course.BLACK, linewidth=1, label="τ = H")
        axes[0].set(xlabel="functions H", ylabel="best τ", xticks=(1, 2, 4))
        axes[0].legend()
        for i, (name, text) in enumerate((("perplexity_at_1", "τ = 1"), ("perplexity", "best τ"))):
            y = [mean(values(result, k, name)) for k in names]
            x = [j + 0.4 * i for j in range(4)]
            axes[1].bar(x, y, 0.38, label=text, color=course.COLOURS[i])
        axes[1].set_xticks([j + 0.2 for j in range(4)], ["H 1", "H 2", "H 4", "H 4 exact"])
        perplexities(axes[1], "held-out perplexity")
        axes[1].legend()
        return figure


class Growth(Experiment):
    """A model trained on English gets half a vocabulary more, for three other languages, and is
    trained further, half on their text and half on English. It is measured before, right after the
    expansion and after the training, with τ fitted for each text and stage. H4 is trained with the
    paper's objective, H4 exact with ours."""

    claim = "New tokens without new parameters, and nothing lost in the old language"
    paper = "32K → 48K tokens: no new parameter, English as before"
    kind = "growth"
    ours = "H4", "H4 exact"

    def variants(self, scale):
        models = scale.models()
        return {k: models[k] for k in ("standard", *self.ours)}

    def judge(self, result):
        added = {k: values(result, k, "added_parameters")[0] for k in labels(result)}
        same = all(run["old_scores_kept"] for run in result["runs"] if run["label"] in self.ours)
        yield (
            same and added["H4"] == added["H4 exact"] == 0,
            f"half a vocabulary more: no parameter for MHF, {added['standard']:,} for the standard "
            f"model; the old tokens' scores stay bit for bit: {'yes' if same else 'no'}",
        )
        for stage, what in (("expanded", "right after expanding"), ("after", "trained on")):
            change = {
                k: changes(*(values(result, k, f"old_{at}") for at in ("before", stage)))
                for k in labels(result)
            }
            for k in self.ours:
                yield (
                    verdict([within(change[k], 0.01)]),
                    f"English {what}, bits a byte, margin 1 %: {k} {say_change(change[k])}; "
                    f"standard {say_change(change['standard'])}",
                )
        rival = values(result, "standard", "new_after")
        for k in self.ours:
            before, after = (values(result, k, f"new_{at}") for at in ("before", "after"))
            yield (
                verdict([compare(rival, after)]),
                f"new languages below the standard model's {say(rival)} bits a byte after training "
                f"on: {k} {say(before)} → {say(after)}",
            )
        without, grown = (values(result, "H4 exact", f"new_{k}") for k in ("unexpanded", "after"))
        yield (
            verdict([compare(without, grown)]),
            f"worth it: the same training without new tokens, H4 exact: {say(without)}, with: "
            f"{say(grown)}",
        )

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
        stages = ["before", "expanded", "after", "unexpanded"]
        texts = ["before", "expanded", "trained\non", "trained on,\nnot expanded"]
        new = ", ".join(result["languages"])
        for axis, which, title in zip(axes, ("new", "old"), (new, "English")):
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
    """The cosine of the states of two words, at three depths of the model, beside human judgements
    of how similar the words are. Both words of a pair occur in the training text."""

    claim = "Similarity of rare words: best at the last layer but one, above the standard model"
    paper = "Spearman 0.32 at the penultimate layer (Card-660)"
    kind = "words"

    def variants(self, scale):
        models = scale.models()
        return {k: models[k] for k in ("standard", "H3", "H4", "H4 exact")}

    def found(self, result, name, label, layer):
        """Spearman of each seed, and the lowest and highest end of their intervals."""
        runs = [run["words"][name][layer] for run in result["runs"] if run["label"] == label]
        ends = [run["spearman_interval"] for run in runs]
        return [r["spearman"] for r in runs], min(e[0] for e in ends), max(e[1] for e in ends)

    def judge(self, result):
        for name in result["runs"][0]["words"]:
            rows = {k: self.found(result, name, k, "penultimate") for k in labels(result)}
            texts = [
                f"{k} {mean(v):+.2f} (seeds {min(v):+.2f} to {max(v):+.2f}, interval {low:+.2f} to "
                f"{high:+.2f})"
                for k, (v, low, high) in rows.items()
            ]
            ours, rival = rows["H4"], rows["standard"]
            noise = all(low <= 0 for _, low, _ in rows.values())
            pairs = result["runs"][0]["words"][name]["pairs"]
            yield (
                verdict([compare(ours[1:], rival[1:])]),
                f"{name}, {pairs} pairs of known words, Spearman at the penultimate layer (95 % "
                f"interval): {'; '.join(texts)}"
                + ("; every interval reaches 0: not testable at this size" if noise else ""),
            )
            last, *ends = self.found(result, name, "H4", "last")
            yield (
                verdict([compare(ours[1:], ends)]),
                f"{name}: penultimate above last layer, H4: last {mean(last):+.2f}",
            )

    def draw(self, plt, result):
        layers, names = ("input", "penultimate", "last"), list(result["runs"][0]["words"])
        figure, axes = plt.subplots(1, len(names), figsize=(4.5 * len(names), 3.6), squeeze=False)
        for axis, name in zip(axes[0], names):
            for i, label in enumerate(labels(result)):
                rows = [self.found(result, name, label, layer) for layer in layers]
                y = [mean(v) for v, _, _ in rows]
                error = [
                    [a - low for a, (_, low, _) in zip(y, rows)],
                    [high - a for a, (_, _, high) in zip(y, rows)],
                ]
                x = [j + 0.15 * (i - 1.5) for j in range(3)]
                axis.errorbar(x, y, error, fmt="os^D"[i], color=course.COLOURS[i], label=label)
            axis.axhline(0, color=course.BLACK, linewidth=0.8)
            axis.set_xticks(range(3), layers)
            pairs = result["runs"][0]["words"][name]["pairs"]
            axis.set(xlabel=f"layer; {name}, {pairs} pairs", ylabel="Spearman's ρ, 95 % interval")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
        return figure


class EqualTime(Experiment):
    """The slower a step, the fewer steps a model makes, with a whole learning rate schedule for
    them: every model trains about as long as the fastest. The extra time goes into the decoder,
    whose work grows with D, while that of the blocks grows with D²: it is measured at each width.
    For the paper's sizes the operations of the matrix products are counted."""

    claim = "Quality for the same time, not only for the same steps (ours)"
    paper = "models are compared at equal steps"
    kind = "final"
    equal_time = True

    def variants(self, scale, **size):
        found = scale.models(**size)
        del found["H3"]
        return found

    def judge(self, result):
        names = labels(result)
        cost = {k: result["widths"][result["width"]][k]["cost"] for k in names}
        found = {k: values(result, k, "perplexity") for k in names}
        steps = {k: values(result, k, "steps")[0] for k in names}
        text = ", ".join(
            f"{k} {say(v)} in {steps[k]} steps, each {cost[k]:.2f} times as long"
            for k, v in found.items()
        )
        yield (
            verdict([compare(found["standard"], found[k]) for k in names if k.startswith("H")]),
            f"perplexity below the standard model's after the same time: {text}",
        )
        for k in ("H4", "H4 exact"):
            rows = {size: found[k] for size, found in result["widths"].items()}
            narrow, *_, wide = (row["cost"] for row in rows.values())
            texts = [
                f"{row['cost']:.2f} at {size} (by operations {row['flops']:.2f}; the decoder takes "
                f"{100 * row['decoder']:.0f} % of the step)"
                for size, row in rows.items()
            ]
            yield (
                less(wide / narrow),
                f"the wider, the closer is the time of a step of {k} to the standard model's: "
                f"{', '.join(texts)}",
            )
        for k in ("H3", "H4"):
            ratios = {size: row[k] for size, row in result["flops"].items()}
            least = ratios.pop("from")
            text = ", ".join(f"{x:.2f} at {size}" for size, x in ratios.items())
            yield (
                max(ratios.values()) <= 1.1,
                f"at the paper's sizes a step of {k} costs at most 1.1 of the standard model's, by "
                f"operations: {text}; at most 1.1 from {least / 1e9:.1f} billion parameters on",
            )

    def draw(self, plt, result):
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8))
        own = result["widths"][result["width"]]
        for label, colour, marker in zip(labels(result), course.COLOURS, "os^Dv"):
            curves = [run["curve"] for run in result["runs"] if run["label"] == label]
            x = [s * own[label]["cost"] for s in curves[0]["steps"]]
            y = [mean(at) for at in zip(*(c["perplexity"] for c in curves))]
            style = dict(color=colour, marker=marker, markersize=4)
            axes[0].plot(x, y, label=label, **style)
            if all(label in found for found in result["widths"].values()):
                y = [found[label]["cost"] for found in result["widths"].values()]
                axes[1].plot(list(result["widths"]), y, **style)
        for label in ("H3 exact", "H4 exact"):
            y = [found[label]["flops"] for found in result["widths"].values()]
            axes[1].plot(list(result["widths"]), y, ":", color=course.BLACK)
            axes[1].annotate(label[:2], (3, y[-1]), (6, -4), textcoords="offset points")
        axes[0].set_xlabel("training time (1: a step of the standard model)")
        perplexities(axes[0], "perplexity of a sample, mean of the seeds")
        axes[0].legend()
        axes[1].set(xlabel="width (dotted: by operations)", ylabel="time of a step (standard: 1)")
        return figure


def paper_flops():
    """{size: {H3, H4: operations of a step, those of the standard model being 1}} at the paper's
    sizes; "from": the number of parameters from which it is 1.1, by adding layers to 1b."""
    found = {"from": {}}
    for label, flags in (("H3", dict(num_hashes=3, num_buckets=10624)), ("H4", {})):
        for size in ("100m", "1b", "3b"):
            ours, standard = (
                course.flops(mhf.Config.preset(size, model=model, **flags))
                for model in ("mhf", "standard")
            )
            found.setdefault(size, {})[label] = sum(ours.values()) / sum(standard.values())
            if size == "1b":
                config, head = mhf.Config.preset(size), standard["decoder"]
                more = ours["embedding"] + ours["decoder"] - head
                layer = standard["blocks"] / config.num_hidden_layers
                with torch.device("meta"):
                    block = sum(p.numel() for p in mhf.Block(config).parameters())
                layers = (more / 0.1 - head) / layer
                found["from"][label] = layers * block + config.vocab_size * config.hidden_size
    return found


class Starts(Experiment):
    """The paper draws the adapter and the table from N(0, 0.02). Our small presets start the table
    at N(0, 0.08), that of the standard model included, and the adapter as the identity."""

    claim = "A table that starts larger and an adapter that starts as the identity (ours)"
    paper = "both start at N(0, 0.02); no comparison"
    kind = "final"

    def variants(self, scale):
        small, exact = dict(table_initializer_range=0.02), scale.h4(objective="exact")
        return {
            "standard, table 0.02": STANDARD | small,
            "standard, table 0.08": STANDARD,
            "H4 exact: normal, 0.02": exact | small | dict(adapter_init="normal"),
            "H4 exact: identity, 0.02": exact | small,
            "H4 exact: identity, 0.08": exact,
        }

    def judge(self, result):
        found = {k: values(result, k, "perplexity") for k in labels(result)}
        text = ", ".join(f"{k} {say(v)}" for k, v in found.items())
        better = [
            compare(found["standard, table 0.02"], found["standard, table 0.08"]),
            compare(found["H4 exact: normal, 0.02"], found["H4 exact: identity, 0.08"]),
        ]
        yield verdict(better), f"lower perplexity with our start: {text}"
        for start in ("normal", "identity"):
            yield (
                verdict(
                    [compare(found["standard, table 0.02"], found[f"H4 exact: {start}, 0.02"])]
                ),
                f"exact below the standard model, both tables at 0.02, the adapter {start}",
            )

    def draw(self, plt, result):
        figure, axis = plt.subplots(figsize=(7, 3.4))
        dots(axis, result, "perplexity", "held-out perplexity, calibrated")
        axis.set_xticks(
            range(5), [k.replace(": ", ":\n").replace(", t", ",\nt") for k in labels(result)]
        )
        return figure


class Vocabulary(Experiment):
    """Tokenizers of five sizes; every run reads as much text, so that larger tokens make fewer
    steps. The table of a standard model has a row for each token. An MHF keeps one table, here of
    4,096 or 8,192 rows. Above 32,768 tokens only the costs are measured."""

    claim = "The vocabulary grows, the table does not"
    paper = "the table does not depend on V; models were trained at one V, 32,768"
    kind = "final"
    steps = 2 / 3
    equal_text = True

    def variants(self, scale):
        found = {}
        for V in self.sizes(scale):
            found[f"{V}: standard"] = STANDARD | {"tokenizer": f"bpe:{V}"}
            for line, flags in self.tables(scale).items():
                found[f"{V}: {line}"] = flags | {"tokenizer": f"bpe:{V}"}
        return found

    def sizes(self, scale):
        return [scale.V // 2 * 2**k for k in range(5)]

    def tables(self, scale):
        """{name: flags} of the MHFs, whatever the vocabulary."""
        found = {}
        for share in (1 / 4, 1 / 2):
            for objective, name in (("independent", "paper's objective"), ("exact", "exact")):
                flags = scale.mhf(4, share, objective)
                found[f"{4 * flags['num_buckets']:,} rows, {name}"] = flags
        return found

    def lines(self, result, name):
        """{model: {V: what its seeds gave}}."""
        found = {}
        for label in labels(result):
            V, model = label.split(": ")
            found.setdefault(model, {})[int(V)] = values(result, label, name)
        return found

    def judge(self, result):
        size, table, bits = (
            self.lines(result, k) for k in ("parameters", "table", "bits_per_byte")
        )
        first, *_, last = bits["standard"]
        rows = {k.split(", ")[0]: (mean(v[first]), mean(v[last])) for k, v in table.items()}
        text = ", ".join(f"{k} {a / 1e6:.2f} → {b / 1e6:.2f}" for k, (a, b) in rows.items())
        yield (
            all((a == b) == (k != "standard") for k, (a, b) in rows.items()),
            f"million parameters of the table, from {first:,} to {last:,} tokens: {text}",
        )
        base = bits.pop("standard")
        for line, found in bits.items():
            change = {V: changes(base[V], found[V]) for V in base}
            text = ", ".join(f"{say_change(c)} at {V:,}" for V, c in change.items())
            signs = {V: compare(base[V], found[V]) for V in base}
            below = ", ".join(f"{V:,}" for V, sign in signs.items() if sign == 1)
            yield (
                verdict(signs.values()),
                f"{line}: bits a byte below a standard model's at every V: {text}; below it in "
                f"every seed at {below or 'none'}",
            )
            gains = compare(change[first], change[last])
            yield verdict([gains]), f"{line}: the larger V, the better beside that model"
            best = min(found, key=lambda V: mean(found[V]))
            small = [V for V in base if mean(size["standard"][V]) <= mean(size[line][best])]
            rival = min(small or [first], key=lambda V: mean(base[V]))
            texts = [
                f"{say(y[V])} at V {V:,} with {mean(size[k][V]) / 1e6:.2f} million parameters"
                for k, y, V in ((line, found, best), ("standard", base, rival))
            ]
            yield (
                verdict([compare(base[rival], found[best])]),
                f"{line}: its best bits a byte below the best standard model that is not "
                f"larger: {' beside '.join(texts)}",
            )
        costs = {line: list(found.items())[-1] for line, found in result["costs"].items()}
        V, base = costs.pop("standard")
        for line, (_, ours) in costs.items():
            ratio = {k: ours[k] / base[k] for k in ("step", "token", "memory")}
            yield (
                less(ratio["step"]),
                f"{line}; {int(V):,} tokens: a step takes {ratio['step']:.2g} of the standard "
                f"model's time, a generated token {ratio['token']:.2f}, memory "
                f"{ratio['memory']:.2f}; {ours['parameters'] / 1e6:.1f} million parameters against "
                f"{base['parameters'] / 1e6:.1f}; signatures take {ours['table_seconds']:.1f} s",
            )

    def draw(self, plt, result):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4))
        left.sharey(middle)
        size, bits = (self.lines(result, k) for k in ("parameters", "bits_per_byte"))
        for line, colour, marker in zip(bits, course.COLOURS, "os^Dv"):
            x, y = [mean(v) / 1e6 for v in size[line].values()], [*bits[line].values()]
            style = dict(color=colour, marker=marker, markersize=5, label=line)
            left.plot(x, [*map(mean, y)], **style)
            band(middle, [*bits[line]], y, **style)
            costs = result["costs"][line]
            right.plot([int(V) for V in costs], [c["step"] for c in costs.values()], **style)
            if line == "standard":
                for V, *at in zip(bits[line], x, map(mean, y)):
                    left.annotate(f"V {V:,}", at, (-4, 6), textcoords="offset points", fontsize=8)
        left.set(xscale="log", xlabel="million parameters", ylabel="held-out bits a byte")
        plain(left.xaxis)
        middle.set(xscale="log", xlabel="vocabulary V", ylabel="held-out bits a byte")
        middle.set_xticks([*bits["standard"]], [f"{V:,}" for V in bits["standard"]], fontsize=8)
        middle.minorticks_off()
        right.set(xscale="log", yscale="log", xlabel="vocabulary V", ylabel="seconds a step")
        right.legend(fontsize=8)
        return figure


EXPERIMENTS = {
    "vocabulary": Vocabulary(),
    "one_id": OneId(),
    "size": Size(),
    "lsh": Lsh(),
    "growth": Growth(),
    "rare_words": RareWords(),
    "objective": Objective(),
    "calibration": Calibration(),
    "equal_time": EqualTime(),
    "starts": Starts(),
}


def judged(result):
    """[{held, text}]: the verdicts on a result, open if there are fewer than three seeds."""
    few = len({run["seed"] for run in result["runs"]}) < 3
    verdicts = EXPERIMENTS[result["name"]].judge(result)
    return [{"held": None if few else held, "text": text} for held, text in verdicts]
