"""The tutorials as texts, what they share (tutorials/course.py), and the evidence's arithmetic.

The tutorials themselves are executed by `python tutorials/notebooks.py --execute`.
"""

import hashlib
import inspect
import io
import json
import math
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import jupytext
import numpy as np
import pytest
import torch
from conftest import build, one_sentence
from matplotlib import image

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "tutorials"
sys.path.insert(0, str(TUTORIALS))

import answers  # noqa: E402
import claims  # noqa: E402
import course  # noqa: E402
import experiments  # noqa: E402
import notebooks  # noqa: E402
from course import mhf, train  # noqa: E402

SCRIPTS = notebooks.scripts()
TEXTS = [TUTORIALS / "README.md", ROOT / "README.md", *TUTORIALS.glob("*/README.md")]
by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)


def markdown(script):
    """The texts of a tutorial, without the comment signs."""
    cells = jupytext.read(script).cells
    return "\n\n".join(c.source for c in cells if c.cell_type == "markdown")


def code(script):
    return "\n".join(c.source for c in jupytext.read(script).cells if c.cell_type == "code")


# ---------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------


def test_there_are_nine():
    assert [script.stem[:2] for script in SCRIPTS] == [f"0{i}" for i in range(1, 10)]


def test_notebooks_are_what_the_scripts_give():
    """Each .ipynb is byte for byte what its .py gives: no output, no edit of its own."""
    assert notebooks.differing() == set()
    for script in SCRIPTS:
        cells = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
        assert not any(c.get("outputs") or c.get("execution_count") for c in cells)


@by_name
def test_a_tutorial_has_its_parts(script):
    """A heading with its number, three exercises, a summary, asserts, pictures."""
    text, number = markdown(script), script.stem[:2]
    assert text.startswith(f"# {number} · ")
    exercises = text.partition("## Exercises")[2]
    assert re.findall(r"^(\d)\. \*", exercises, re.MULTILINE) == ["1", "2", "3"]
    assert "What we saw" in text
    assert code(script).count("assert ") >= 5 and code(script).count("course.show(") >= 3


@by_name
def test_every_exercise_has_an_answer(script):
    for i in (1, 2, 3):
        answer = getattr(answers, f"answer_{script.stem[:2]}_{i}")
        assert len(answer.__doc__) > 40 and "assert" in inspect.getsource(answer)


def test_no_answer_is_without_its_exercise():
    found = [name for name in dir(answers) if name.startswith("answer_")]
    assert len(found) == 3 * len(SCRIPTS)


@pytest.mark.parametrize("path", [*SCRIPTS, *TEXTS], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_links_lead_somewhere(path):
    """A link of a text to a file of the project is to one that exists, and its heading, too."""
    text = markdown(path) if path.suffix == ".py" else path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    for link in map("".join, links):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, heading = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in anchors, link


NUMBER = re.compile(r"(?<![\w.,\-])\d[\d,]*(?:\.\d+)?(?![\w]|[.,]\d)")


@by_name
def test_numbers_of_the_text_stand_in_the_code(script):
    """A figure (with a decimal point, or of three digits) that a text names is asserted beside it.

    Exempt are formulas, `code`, links, the head and the exercises.
    """
    rest = markdown(script).partition("\n\n## ")[2].partition("## Exercises")[0]
    for pattern in (r"\$\$.*?\$\$", r"\$[^$]*\$", r"```.*?```", r"`[^`]*`", r"\[[^]]*\]\([^)]*\)"):
        rest = re.sub(pattern, " ", rest, flags=re.DOTALL)
    source = code(script).replace("_", "").replace(",", "")
    missing = []
    for number in NUMBER.findall(rest):
        plain = number.replace(",", "")
        if ("." in plain or len(plain) >= 3) and not re.search(rf"(?<![\d.]){plain}(?!\d)", source):
            percent = f"{float(plain) / 100:g}" if "." in plain or len(plain) < 3 else None
            if not (percent and percent in source):
                missing.append(number)
    assert not missing


# ---------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------

PO = """
msgid ""
msgstr ""
"Language: xx\\n"

# a comment
msgid "Are you sure?"
msgstr "Sicher?"

#, python-format
msgid "a \\"quoted\\" "
"line"
msgstr "eine \\"Zeile\\""

msgid "nothing"
msgstr ""

#, fuzzy
msgid "doubtful"
msgstr "zweifelhaft"

msgctxt "month"
msgid "%d day"
msgid_plural "%d days"
msgstr[0] "%d Tag"
msgstr[1] "%d Tage"

#~ msgid "gone"
#~ msgstr "weg"
"""


def test_catalogues_are_read():
    """Pairs in order: joined lines, escapes, plurals; no header, nothing untranslated or fuzzy."""
    assert list(course.read_po(PO)) == [
        ("Are you sure?", "Sicher?"),
        ('a "quoted" line', 'eine "Zeile"'),
        ("%d day", "%d Tag"),
        ("%d day", "%d Tage"),
    ]


@pytest.fixture
def archives(tmp_path, monkeypatch):
    """Small archives of the same form in a cache of their own."""
    monkeypatch.setenv("MHF_CACHE", str(tmp_path))
    with zipfile.ZipFile(tmp_path / course.DJANGO.file, "w") as archive:
        for language in ("xx", "de"):
            archive.writestr(f"django/conf/locale/{language}/LC_MESSAGES/django.po", PO)
        archive.writestr("django/conf/locale/xx/LC_MESSAGES/djangojs.po", "no catalogue")
    with tarfile.open(tmp_path / course.GENSIM.file, "w:gz") as archive:
        for name in course.SIMILARITIES.values():
            about = tarfile.TarInfo(f"gensim-4.4.0/gensim/test/test_data/{name}")
            text = b"# a heading\nold\tnew\t1.58\n"
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text))
    for archive in (course.DJANGO, course.GENSIM):
        digest = hashlib.sha256((tmp_path / archive.file).read_bytes()).hexdigest()
        monkeypatch.setattr(archive, "sha256", digest)


def test_sentences_of_a_language(archives):
    """Each once, in order; English stands beside the translations."""
    assert course.django("xx") == ["Sicher?", 'eine "Zeile"', "%d Tag", "%d Tage"]
    assert course.django("en") == ["Are you sure?", 'a "quoted" line', "%d day"]


def test_a_language_that_is_not_there_is_named(archives):
    with pytest.raises(ValueError, match="no language 'yy'; it has de, xx") as error:
        course.django("yy")
    one_sentence(error)


def test_judgements_are_read(archives, tmp_path):
    """WordSim-353 and SimLex-999 from the archive; a file of one's own, with a heading or not."""
    assert course.similarities("simlex999") == [("old", "new", 1.58)]
    card = tmp_path / "card660.tsv"
    card.write_text("word1\tword2\tscore\nactinium\tthorium\t3.5\n\n", encoding="utf-8")
    assert course.similarities(card) == [("actinium", "thorium", 3.5)]
    card.write_text("kombucha\tginger beer\t2.25\textra\n", encoding="utf-8")
    assert course.similarities(card) == [("kombucha", "ginger beer", 2.25)]


@pytest.mark.parametrize("text", ["a\tb\t1\nc d 2\n", "a\tb\t1\nc\td\tno number\n"])
def test_judgements_that_are_none_are_named(text, tmp_path):
    path = tmp_path / "words.tsv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="words.tsv, line 2") as error:
        course.similarities(path)
    one_sentence(error)


def test_a_file_without_judgements_is_refused(tmp_path):
    path = tmp_path / "empty.tsv"
    path.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no line of word, word and score") as error:
        course.similarities(path)
    one_sentence(error)


def test_a_source_distribution_is_fetched_and_none_of_its_code_runs(tmp_path, monkeypatch):
    """pip hands out the archive, although its setup.py would fail and its build needs a package."""
    index = tmp_path / "index"
    index.mkdir()
    with tarfile.open(index / "thing-1.0.tar.gz", "w:gz") as archive:
        for name, text in (
            ("setup.py", b"raise SystemExit('it ran')"),
            ("pyproject.toml", b"[build-system]\nrequires = ['no-such-thing']\n"),
            ("PKG-INFO", b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"),
        ):
            about = tarfile.TarInfo(f"thing-1.0/{name}")
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    thing = train.Archive("thing==1.0", "thing-1.0.tar.gz", "", "a thing", "go without")
    course.fetch_source(thing, tmp_path)
    assert (tmp_path / thing.file).read_bytes() == (index / thing.file).read_bytes()
    missing = train.Archive("other==1.0", "other-1.0.tar.gz", "", "another", "go without")
    with pytest.raises(ValueError, match="other-1.0.tar.gz could not be fetched.*; go without"):
        course.fetch_source(missing, tmp_path / "elsewhere")


# ---------------------------------------------------------------------------------------------
# Tokens, measures
# ---------------------------------------------------------------------------------------------

ENGLISH = "the cat sat on the mat, and the dog lay by the door. Who is there? " * 40
GREEK = "ἄνδρα μοι ἔννεπε, μοῦσα, πολύτροπον, ὃς μάλα πολλὰ " * 40


@pytest.fixture(scope="module")
def tokenizer():
    return mhf.Tokenizer.train(ENGLISH, 280)


def test_an_extended_tokenizer_cuts_english_as_before(tokenizer):
    """Old ids stay; new ones are above, not ASCII, and make the new script shorter."""
    longer = course.extended(tokenizer, GREEK + ENGLISH, 30)
    assert len(longer) == len(tokenizer) + 30 and longer.eot == tokenizer.eot
    assert longer.encode(ENGLISH) == tokenizer.encode(ENGLISH)
    assert not any(longer.token_bytes(i).isascii() for i in range(len(tokenizer), len(longer)))
    ids = longer.encode(GREEK)
    assert longer.decode(ids) == GREEK and len(ids) < len(tokenizer.encode(GREEK)) / 1.3
    assert sum(i >= len(tokenizer) for i in ids) > len(ids) / 2


def test_last_words_are_those_of_sentences(tokenizer):
    """The word before a full stop, with its blank; what stands before it; together the window."""
    text = ENGLISH * 3
    found = course.last_words(np.array(tokenizer.encode(text)), tokenizer, 32, 50)
    assert len(found) == 50
    for context, word in found:
        assert tokenizer.decode(word) in (" door", " there")
        assert len(context) + len(word) == 32 and tokenizer.decode(context + word) in text
    with pytest.raises(ValueError, match="too short for last words") as error:
        course.last_words(tokenizer.encode("Too short."), tokenizer, 32, 5)
    one_sentence(error)


def small(standard=False, V=280):
    return build(H=3, B=40, V=V, standard=standard).eval().requires_grad_(False)


@pytest.mark.parametrize("standard", [False, True])
def test_last_word_accuracy_is_greedy(standard):
    """Right are exactly the words that greedy generation gives; rows do not disturb each other."""
    model, rng, passages = small(standard), np.random.default_rng(0), []
    for i in range(7):
        context = rng.integers(3, 200, 5 + 2 * i).tolist()
        word = list(model.generate(context, 1 + i % 3, temperature=0))
        if i in (2, 5):
            word[-1] = (word[-1] + 1) % 200
        passages.append((context, word))
    found = list(course.last_word_results(model, passages, rows=3))
    assert [right for right, _ in found] == [1, 1, 0, 1, 1, 0, 1]
    assert course.last_word_accuracy(model, passages) == pytest.approx(5 / 7)
    for (context, word), (_, nats) in zip(passages, found):
        log_p = model.log_probs(torch.tensor([context + word]))[0, len(context) - 1 : -1]
        assert nats == pytest.approx(-log_p[range(len(word)), word].sum().item(), abs=1e-4)


@pytest.mark.parametrize("standard", [False, True])
def test_nats_are_those_of_log_probs(standard):
    """Every token but the first is a target once; tau divides the scores."""
    model, ids = small(standard), np.arange(100, 175)
    model.config.calibration = 1.7
    T = model.config.max_position_embeddings
    expected = 0.0
    for start in range(0, 74, T):
        row = torch.from_numpy(ids[start : start + T + 1])
        log_p = model.log_probs(row[None, :-1])[0]
        expected -= log_p.gather(-1, row[1:, None]).sum().item()
    total, count = course.nats(model, ids)
    assert count == 74 and total == pytest.approx(expected, rel=1e-5)
    assert course.nats(model, ids, tau=1.0)[0] != pytest.approx(expected, rel=1e-3)
    assert course.nats(model, ids, windows=1)[1] == T


def test_bits_per_byte(tokenizer):
    model, text = small(V=len(tokenizer)), "the cat sat on the mäuse"
    total, _ = course.nats(model, np.array(tokenizer.encode(text)))
    bits = course.bits_per_byte(model, tokenizer, text)
    assert bits == pytest.approx(total / math.log(2) / 25, rel=1e-6)


def test_word_states_are_the_models(tokenizer):
    """Of a word read alone, behind a blank: the mean over its tokens, at three depths."""
    model = small(V=len(tokenizer))
    found = course.word_states(model, tokenizer, ["cat", "zebra"])
    ids = torch.tensor([tokenizer.encode(" zebra")])
    states, layers = model(ids, return_layers=True)
    assert ids.shape[1] > 1
    for name, expected in (
        ("input", model.embed(ids)), ("penultimate", layers[-2]), ("last", states),
    ):  # fmt: skip
        assert torch.allclose(found[name][1], expected[0].mean(0), atol=1e-5)


def test_correlations():
    """Ranks share ties; Spearman is Pearson of ranks; intervals hold the truth and are narrower
    for more pairs."""
    assert course.ranks([3, 1, 3, 2]).tolist() == [2.5, 0, 2.5, 1]
    x = np.array([1.0, 2, 3, 4, 5])
    assert course.pearson(x, 2 * x + 1) == pytest.approx(1)
    assert course.spearman(x, np.exp(x)) == pytest.approx(1)
    assert course.spearman(x, -(x**3)) == pytest.approx(-1)
    rng = np.random.default_rng(1)
    y = rng.normal(size=400)
    noisy = y + rng.normal(size=400)
    low, high = course.interval(course.pearson, noisy, y)
    assert low < 0.707 < high and high - low < 0.2
    few = course.interval(course.pearson, noisy[:30], y[:30])
    assert few[1] - few[0] > high - low


@pytest.mark.parametrize("standard", [False, True])
def test_fit_learns(standard):
    """The loss falls, the model is frozen afterwards, and the same seed gives the same losses."""
    ids = np.tile(np.arange(20, 40), 30)
    first, second = (
        [loss for _, loss in course.fit(small(standard), ids, 12, learning_rate=1e-2, rows=4)]
        for _ in range(2)
    )
    assert first == second and first[-1] < 0.8 * first[0]
    model = small(standard)
    mixed = [loss for _, loss in course.fit(model, [ids, ids + 100], 3, rows=4)]
    assert len(mixed) == 3 and not any(p.requires_grad for p in model.parameters())


# ---------------------------------------------------------------------------------------------
# Evidence
# ---------------------------------------------------------------------------------------------

RESULTS = sorted(experiments.RESULTS.glob("*.json"))
by_result = pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)


def test_every_experiment_has_its_result():
    assert {path.stem for path in RESULTS} == set(claims.EXPERIMENTS)


@by_result
def test_a_result_says_where_it_comes_from(path):
    """Command, date, machine, versions, data; three seeds at least, each with tokens and steps."""
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["command"].startswith(f"python tutorials/experiments.py {path.stem}")
    assert result["machine"]["cpu"] and result["versions"]["torch"] and result["data"]
    variants = claims.EXPERIMENTS[path.stem].variants(claims.Scale("tiny", 4096))
    assert claims.labels(result) == list(variants)
    for label, flags in variants.items():
        runs = [run for run in result["runs"] if run["label"] == label]
        assert sorted(run["seed"] for run in runs) == [1, 2, 3]
        assert all(run["flags"] | flags == run["flags"] for run in runs)
        assert all(run["tokens"] == run["steps"] * 2048 > 0 for run in runs)


@by_result
def test_verdicts_follow_from_the_runs(path):
    """Judged anew, a result file gives the verdicts that stand in it."""
    result = json.loads(path.read_text(encoding="utf-8"))
    assert claims.judged(result) == result["verdicts"]


@by_result
def test_a_picture_is_a_picture(path):
    """Small, opaque (to be read on a dark page, too), and not blank."""
    picture = path.with_suffix(".png")
    pixels = image.imread(picture)
    assert picture.stat().st_size < 2**17 and pixels[..., :3].std() > 0.05
    assert pixels.shape[-1] == 3 or pixels[..., 3].min() == 1
    assert tuple(pixels[0, 0, :3]) == (1, 1, 1)


@by_result
def test_axes_are_labelled(path):
    """Every axis of a picture says what it shows, in words or with its bars' names."""
    plt = course.pyplot()
    result = json.loads(path.read_text(encoding="utf-8"))
    figure = claims.EXPERIMENTS[path.stem].draw(plt, result)
    figure.canvas.draw()
    for axis in figure.axes:
        names = [t.get_text() for t in axis.get_xticklabels()]
        assert axis.get_xlabel() or any(re.search("[a-z]", n) for n in names)
        assert axis.get_ylabel()
    plt.close(figure)


def test_the_readme_has_the_table_of_the_results():
    """What stands between the marks is what the result files give."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    inside = text.split(experiments.MARKS[0])[1].split(experiments.MARKS[1])[0].strip()
    assert inside == "\n".join(experiments.table(experiments.RESULTS))


def test_a_difference_is_one_whose_ranges_do_not_overlap():
    assert claims.compare([3, 4], [1, 2]) == 1
    assert claims.compare([1, 2], [3, 4]) == -1
    assert claims.compare([1, 3], [2, 4]) == claims.compare([1], [1]) == 0
    assert [claims.verdict(c) for c in ([1, 1], [1, 0], [1, -1])] == [True, None, False]


def test_no_change_is_within_a_margin_in_every_seed():
    """Seed by seed, although the seeds differ more among themselves than before and after."""
    worse = claims.changes([2.20, 2.24, 2.28], [2.25, 2.29, 2.33])
    assert min(worse) > 0.02 and claims.within(worse, 0.01) is False
    assert claims.within(worse, 0.03) is True
    assert claims.within([0.005, 0.02], 0.01) is None


def result_of(name, seeds=3, shift=0.0, **means):
    """A result of which every run's measures are these, ± 1 % by seed; shift: {label: factor}."""
    experiment = claims.EXPERIMENTS[name]
    runs = [
        {"label": label, "seed": seed, "steps": 300}
        | {k: v * (1 + 0.01 * (seed - 2)) * (shift or {}).get(label, 1) for k, v in means.items()}
        for label in experiment.variants(claims.Scale("tiny", 4096))
        for seed in range(1, seeds + 1)
    ]
    return {"name": name, "runs": runs}


LAST = dict(last_word=0.1, last_word_bits=15.0, top1=0.2)


@pytest.mark.parametrize("factor, held", [(0.8, True), (1.25, False), (1.0, None)])
def test_one_id_can_fail(factor, held):
    """Bits of a last word of four ids lower, higher or level: held, not held, open."""
    shift = {f"H4, B = {s}": factor for s in claims.OneId.shares}
    verdicts = claims.judged(result_of("one_id", shift=shift, last_word_bits=15.0, **{
        k: v for k, v in LAST.items() if k != "last_word_bits"
    }))  # fmt: skip
    assert verdicts[1]["held"] is held and "bits of a last word" in verdicts[1]["text"]
    assert verdicts[3]["held"] is held and verdicts[4]["held"] is True
    apart = shift | {"H4, B = V/8": factor * 1.05}
    assert claims.judged(result_of("one_id", shift=apart, **LAST))[4]["held"] is False


@pytest.mark.parametrize("factor, held", [(0.9, True), (1.1, False), (1.0, None)])
def test_size_can_fail(factor, held):
    shift = {f"{D}: H4{o}": factor for D in ("D 64", "D 128") for o in ("", " exact")}
    verdicts = claims.judged(result_of("size", shift=shift, bits_per_byte=2.3))
    assert [v["held"] for v in verdicts] == [held, held, None] * 2
    growing = shift | {"D 128: H4": 0.8, "D 128: H4 exact": 0.8, "D 64: H4": 0.9}
    assert claims.judged(result_of("size", shift=growing, bits_per_byte=2.3))[2]["held"] is True


def test_lsh_that_gains_fails_its_claim():
    level = dict(last_word_bits=15.0, bits_per_byte=2.3)
    assert [v["held"] for v in claims.judged(result_of("lsh", **level))] == [True, True]
    better = result_of("lsh", shift={"3 of 4": 0.95}, **level)
    assert [v["held"] for v in claims.judged(better)] == [False, False]


def test_objectives_can_fail():
    means = dict(perplexity=150.0, perplexity_at_1=9000.0, valid_mass=0.05)
    assert [v["held"] for v in claims.judged(result_of("objective", **means))] == [None] * 3
    good = result_of("objective", shift={"exact": 0.9}, **means)
    assert [v["held"] for v in claims.judged(good)] == [True, True, True]
    bad = result_of("objective", shift={"exact": 1.1}, **means)
    assert [v["held"] for v in claims.judged(bad)] == [False, False, False]


def test_calibration_can_fail():
    means = dict(tau=1.5, perplexity=200.0, perplexity_at_1=200.0)
    assert [v["held"] for v in claims.judged(result_of("calibration", **means))] == [None, None]
    result = result_of("calibration", **means)
    for run in result["runs"]:
        run["tau"] *= int(run["label"][1])
        run["perplexity_at_1"] *= int(run["label"][1])
    assert [v["held"] for v in claims.judged(result)] == [True, True]


def test_growth_can_fail():
    """Parameters, scores, English, new languages: each claim has figures that end it."""
    stages = ("before", "expanded", "after", "unexpanded")
    means = {f"{which}_{stage}": 3.0 for which in ("new", "old") for stage in stages}
    result = result_of("growth", added_parameters=0, **means)
    for run in result["runs"]:
        run["old_scores_kept"] = True
    assert [v["held"] for v in claims.judged(result)] == [True] * 5 + [None] * 3
    for run in result["runs"]:
        if run["label"] != "standard":
            run["old_scores_kept"] = run["seed"] != 2
            run["old_expanded"] *= 1.02
            run["old_after"] *= 1.02
            run["new_after"] *= 1.1
    assert [v["held"] for v in claims.judged(result)] == [False] * 8


def test_rare_words_can_be_above_below_and_noise():
    def judged(ours):
        experiment = claims.EXPERIMENTS["rare_words"]
        result = result_of("rare_words")
        for run in result["runs"]:
            low, high = ours if run["label"] == "H4" else (0.1, 0.2)
            layer = {"spearman": (low + high) / 2, "spearman_interval": [low, high]}
            other = {"spearman": 0.15, "spearman_interval": [0.1, 0.2]}
            layers = {"input": other, "penultimate": layer, "last": other}
            run["words"] = {"pairs353": {"pairs": 100} | layers}
        assert len(labels := claims.labels(result)) == 4 and labels == list(
            experiment.variants(claims.Scale("tiny", 4096))
        )
        return [v["held"] for v in claims.judged(result)]

    assert judged((0.3, 0.4)) == [True, True]
    assert judged((0.0, 0.05)) == [False, False]
    assert judged((0.1, 0.3)) == [None, None]


def test_equal_time_can_fail():
    def judged(factor):
        result = result_of("equal_time", shift={"H4": factor, "H4 exact": factor}, perplexity=150.0)
        result["cost_of_a_step"] = dict.fromkeys(claims.labels(result), 1.5)
        return [v["held"] for v in claims.judged(result)]

    assert judged(0.8) == [True, True, None] and judged(1.2) == [False, False, None]


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(seeds):
    shift = {f"H4, B = {s}": 0.5 for s in claims.OneId.shares}
    verdicts = claims.judged(result_of("one_id", seeds, shift, **LAST))
    assert {v["held"] for v in verdicts} == {None}


def test_deeper_has_the_parameters_of_h4():
    """standard+kL has as many parameters as H4 or at most one layer more; at the paper's 100m
    size, too."""
    for preset, V, size in (("tiny", 4096, {}), ("100m", 32768, {"preset": "100m"})):
        scale = claims.Scale(preset, V)
        k = scale.deeper(size)
        flags = {k: v for k, v in scale.h4().items() if k != "objective"}
        with torch.device("meta"):
            config = mhf.Config.preset(preset, vocab_size=V, **flags)
            parts = mhf.GatedEmbedding(config), mhf.CascadeDecoder(config), mhf.Block(config)
        gate, cascade, block = (sum(p.numel() for p in part.parameters()) for part in parts)
        needed = V * config.hidden_size + gate + cascade
        assert (k - 1) * block < needed <= k * block


WRONG = [
    (["nothing"], "no experiment 'nothing'"),
    ([], "name an experiment: one_id, size"),
    (["lsh", "--seeds", "0"], "--seeds must be from 1, not 0"),
    (["lsh", "--jobs", "0"], "--jobs must be from 1, not 0"),
    (["lsh", "--vocab_size", "0"], "--vocab_size must be from 1, not 0"),
    (["growth", "--growth_tokens", "-5"], "--growth_tokens must be from 1, not -5"),
    (["lsh", "--", "--seed=7", "--steps=3"], "behind --: --seed, --steps is what"),
    (["size", "--preset", "100m"], "--preset 100m needs more text"),
    (["lsh", "--steps", "7"], "holds a result with another steps"),
    (["lsh", "--device", "cuda:99"], "--device cuda:99 is not to be had"),
]


@pytest.mark.parametrize("flags, words", WRONG, ids=lambda x: " ".join(x)[:40])
def test_a_mistake_is_one_sentence(flags, words, capsys, tmp_path):
    """Exit status 2, before anything is trained."""
    if "another" in words:
        (tmp_path / "lsh.json").write_text('{"settings": {"steps": 300, "more": []}}')
        before = experiments.common_flags(experiments.parse(["lsh"])) | {"more": []}
        (tmp_path / "lsh.json").write_text(json.dumps({"settings": before}), encoding="utf-8")
        flags = [*flags, "--results", str(tmp_path)]
    elif "cuda" in words:
        flags = [*flags, "--results", str(tmp_path)]
    assert experiments.main(flags) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_command_is_recorded_whole():
    args = experiments.parse(["size", "lsh", "--out", "size", "--", "--weight_decay=0"])
    assert args.names == ["size", "lsh"]
    assert args.given == ["--out", "size", "--", "--weight_decay=0"]


def test_a_tutorial_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["notebooks.py", "12"])
    assert notebooks.main() == 2
    assert capsys.readouterr().err == "no tutorial begins with 12\n"


SMALL = ["--vocab_size", "280", "--seeds", "1", "--steps", "3", "--passages", "5", "--jobs", "1"]
SMALL += ["--", "--num_hidden_layers=2", "--max_position_embeddings=64", "--hidden_size=32"]
SMALL += ["--intermediate_size=32", "--bottle_neck_dim=8", "--tokens_per_step=256"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(ENGLISH * 20, encoding="utf-8")
    return str(path)


def test_a_run_repeats_and_resumes(tmp_path, text):
    """The same small run in two folders gives the same numbers, although the second one was
    stopped halfway and went on; a third call trains nothing."""
    found, flags = [], claims.Scale("tiny", 280).h4()
    for stop in (None, 2):
        extra = ["--out", str(tmp_path / f"runs-{stop}"), "--data", text]
        args = experiments.parse(["one_id", *extra, *SMALL])
        if stop:
            args.more.append(f"--stop_after={stop}")
            with pytest.raises(ValueError, match="ended with status 0"):
                experiments.train_run(args, flags, 1)
            folder = experiments.run_folder(args, flags, 1)
            args.more.pop()
            experiments.store(args).mkdir(parents=True)
            folder.rename(experiments.store(args) / folder.name)
        experiments.train_run(args, flags, 1)
        entry = experiments.measured(args, "quality", "H4", flags, 1)
        assert entry["steps"] == 3 and entry["passages"] == 5
        found.append({k: v for k, v in entry.items() if k != "seconds"})
    assert found[0] == found[1]
    before = experiments.run_folder(args, flags, 1).stat().st_mtime_ns
    experiments.train_run(args, flags, 1)
    assert experiments.run_folder(args, flags, 1).stat().st_mtime_ns == before
    folder = experiments.run_folder(args, flags, 1)
    (folder / "mhf.py").write_text("# another\n", encoding="utf-8")
    with pytest.raises(ValueError, match="was trained with another mhf.py") as error:
        experiments.train_run(args, flags, 1)
    one_sentence(error)
