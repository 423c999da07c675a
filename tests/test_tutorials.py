"""The tutorials as texts, what they share (tutorials/course.py), and how the evidence is judged."""

import inspect
import json
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FIXTURES, build, close, refused
from matplotlib import image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from support.cache import Archive
from support.tokenizer import Tokenizer

ROOT = FIXTURES.parent.parent
sys.path.append(str(ROOT / "tutorials"))

import answers  # noqa: E402
import claims  # noqa: E402
import course  # noqa: E402
import experiments  # noqa: E402
import notebooks  # noqa: E402
from course import mhf, train  # noqa: E402

each, SCRIPTS, RESULTS = pytest.mark.parametrize, notebooks.scripts(), experiments.RESULTS


def fixture(name):
    return (FIXTURES / "course" / name).read_text(encoding="utf-8")


def test_what_is_generated_is_up_to_date():
    """Nine notebooks, without output, byte for byte; the README has the table of the results."""
    assert [script.stem[:2] for script in SCRIPTS] == [f"0{i}" for i in range(1, 10)]
    assert notebooks.differing() == set()
    notes = [cell for script in SCRIPTS for cell in notebooks.notebook(script).cells]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notes)
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    inside = text.split(experiments.MARKS[0])[1].split(experiments.MARKS[1])[0].strip()
    assert inside == "\n".join(experiments.table(RESULTS)).strip()
    assert inside.count("###") == len(claims.EXPERIMENTS)


@each("script", SCRIPTS, ids=lambda s: s.stem)
def test_a_tutorial_has_its_parts(script):
    """A heading, a summary, asserts, pictures, three exercises with answers; no fault of text."""
    assert not [*notebooks.faults(script)]
    text, code = ("\n\n".join(notebooks.cells(script, kind)) for kind in ("markdown", "code"))
    assert text.startswith(f"# {script.stem[:2]} · ") and "What we saw" in text
    assert code.count("assert ") >= 5 and code.count("course.show(") >= 3
    exercises = re.findall(r"^(\d)\. \*", text.partition("## Exercises")[2], re.MULTILINE)
    found = [getattr(answers, f"answer_{script.stem[:2]}_{i}") for i in exercises]
    assert all(len(a.__doc__) > 40 and "assert" in inspect.getsource(a) for a in found)
    assert len(found) == 3 and sum(name.startswith("answer_") for name in dir(answers)) == 27


def test_faults_of_a_text_are_found():
    """Numbers that no code has, links to files and headings that are not there; no READMEs have."""
    text = "# 1\n\n## A\n`4.5` 12, 1,234 and 5.5 %; 0.25, 999 times [7.5](x)\n## Exercises\n8.5"
    assert [*notebooks.missing_numbers(text, "1_234 0.055 10.25")] == ["0.25", "999"]
    readme = ROOT / "tutorials" / "README.md"
    links = "[a](answers.py) [b](nowhere.py) [c](https://x.y) [d](README.md#routes) [e](#no-such)"
    assert [*notebooks.dead_links(links, readme)] == ["nowhere.py", "#no-such"]
    for path in [readme, ROOT / "README.md", *readme.parent.glob("*/README.md")]:
        assert not [*notebooks.dead_links(path.read_text(encoding="utf-8"), path)]


@each("folder", [ROOT, ROOT / "tutorials"], ids=lambda folder: folder.name)
def test_the_first_cell_works_in_a_kernel_started_in(folder):
    """Its imports find course.py, although a kernel has no script whose folder is on its path."""
    imports = [notebooks.cells(script, "code")[0].partition("\nplt = ")[0] for script in SCRIPTS]
    code = "import json, sys\npath = [*sys.path]\nfor cell in json.loads(sys.argv[1]):\n"
    code += "    exec(cell)\n    del sys.modules['course']\n    sys.path[:] = path"
    subprocess.run([sys.executable, "-c", code, json.dumps(imports)], cwd=folder, check=True)


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Makes an archive of files {name: text}, which is then what course.py fetches."""

    def pack(kind, files):
        for path, text in ((tmp_path / name, text) for name, text in files.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        top = [*files][0].partition("/")[0]
        packed = shutil.make_archive(tmp_path / top, kind, tmp_path, top)
        monkeypatch.setattr(course, "fetched", lambda *_: packed)

    return pack


def test_sentences_of_a_language(pack):
    """Each once, in order: joined lines, escapes, plurals; nothing untranslated, fuzzy or gone."""
    po = fixture("example.po")
    texts = {"xx/LC_MESSAGES/django": po, "de/LC_MESSAGES/django": po, "xx/LC_MESSAGES/js": ""}
    pack("zip", {f"django/conf/locale/{name}.po": text for name, text in texts.items()})
    assert course.django("xx") == ["Sicher?", 'eine "Zeile"', "%d Tag", "%d Tage"]
    assert course.django("en") == ["Are you sure?", 'a "quoted" line', "%d day"]
    refused(lambda: course.django("yy"), "no language 'yy'; it has de, xx")


def test_judgements_are_read(pack, tmp_path):
    """In small letters, no word beside itself; of the archive or a file, with a heading or not."""
    text = "# a\nOld\tnew\t1.58\nA\ta\t9\n"
    pack("gztar", {"gensim-4.4.0/gensim/test/test_data/simlex999.txt": text})
    assert course.similarities("simlex999") == [("old", "new", 1.58)]
    for heading in ("word1\tword2\tscore\n", "# a comment\n\n", ""):
        text = heading + "kombucha\tginger beer\t2.25\textra\n"
        (tmp_path / "card.tsv").write_text(text, encoding="utf-8")
        assert course.similarities(tmp_path / "card.tsv") == [("kombucha", "ginger beer", 2.25)]
    refused(lambda: course.read_similarities("a\tb\t1\nc d 2\n", "it"), "it, line 2")
    refused(lambda: course.read_similarities("#\n", "it"), "it has no line of word, word and")


def test_a_source_distribution_is_fetched_and_none_of_its_code_runs(pack, tmp_path, monkeypatch):
    """pip hands out the archive, although its setup.py would fail and its build needs a package."""
    files = {"setup.py": "raise SystemExit('it ran')", "PKG-INFO": "Metadata-Version: 2.1"}
    files |= {"pyproject.toml": "[build-system]\nrequires = ['no-such-thing']\n"}
    pack("gztar", {f"thing-1.0/{name}": text for name, text in files.items()})
    for name, value in {"NO_INDEX": 1, "FIND_LINKS": tmp_path, "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))
    (found := tmp_path / "found").mkdir()
    course.fetch_source(Archive("thing==1.0", "thing-1.0.tar.gz", "", "a thing"), found)
    assert (found / "thing-1.0.tar.gz").stat().st_size > 100


ENGLISH = "the cat sat on the mat, and the dog lay by the door. Who is there? " * 120
TOKENIZER = Tokenizer.train([ENGLISH], 280)


@pytest.fixture(params=["mhf", "standard"])
def small(request):
    standard = request.param == "standard"
    return build(H=3, B=40, V=280, calibration=1.7, standard=standard).requires_grad_(False)


def test_last_words_are_those_of_sentences():
    """The word before a full stop, with its blank; what stands before it; together the window."""
    found = course.last_words(np.array(TOKENIZER.encode(ENGLISH)), TOKENIZER, 32, 50)
    assert len(found) == 50 and {len(context + word) for context, word in found} == {32}
    assert {TOKENIZER.decode(word) for _, word in found} == {" door", " there"}
    assert all(TOKENIZER.decode(context + word) in ENGLISH for context, word in found)
    short = TOKENIZER.encode("Too short.")
    refused(lambda: course.last_words(short, TOKENIZER, 32, 5), "too short for last words")


def test_last_word_accuracy_is_greedy(small):
    """Right are exactly the words that greedy generation gives; rows do not disturb each other."""
    rng, passages = np.random.default_rng(0), []
    for i in range(7):
        context = rng.integers(3, 200, 5 + 2 * i).tolist()
        word = list(small.generate(context, 1 + i % 3, temperature=0))
        word[-1] = (word[-1] + (i in (2, 5))) % 280
        passages.append((context, word))
    right, nats = zip(*course.last_word_results(small, passages, rows=3))
    assert right == (1, 1, 0, 1, 1, 0, 1)
    assert course.last_word_accuracy(small, passages) == pytest.approx(5 / 7)
    for (context, word), found in zip(passages, nats):
        log_p = small.log_probs(torch.tensor([context + word]))[0, len(context) - 1 : -1]
        assert found == pytest.approx(-log_p[range(len(word)), word].sum().item(), abs=1e-4)


def test_bits_are_those_of_log_probs(small):
    """Every token but the first is a target once; tau divides the scores; ä has two bytes."""
    ids, T = np.array(TOKENIZER.encode(text := "the mäuse " * 9)), 32
    expected = 0.0
    for start in range(0, len(ids) - 1, T):
        row = torch.from_numpy(ids[start : start + T + 1])
        expected -= small.log_probs(row[None, :-1])[0].gather(-1, row[1:, None]).sum().item()
    assert [len(y) for _, y in course.predictions(small, ids, 1)] == [T] != [len(ids) - 1]
    bits = expected / math.log(2) / 99
    assert course.bits_per_byte(small, TOKENIZER, text) == pytest.approx(bits, rel=1e-5)


def test_word_states_are_the_models(small):
    """Of a word read alone, after a blank: the mean over its tokens, at three depths."""
    words = ["cat", "zebra", "dog", "horse"]  # not all of one length in tokens
    found = course.word_states(small, TOKENIZER, words)
    for i, word in enumerate(words):
        ids = torch.tensor([TOKENIZER.encode(" " + word)])
        states, layers = small(ids, return_layers=True)
        expected = dict(input=small.embed(ids), penultimate=layers[-2], last=states)
        assert found.keys() == expected.keys()
        for name, layer in expected.items():
            close(found[name][i], layer[0].mean(0))


def test_correlations():
    """Ranks share ties; Spearman is Pearson of ranks; an interval holds the truth and narrows."""
    x, rng = np.array([1.0, 2, 3, 4, 5]), np.random.default_rng(1)
    assert course.ranks([3, 1, 3, 2]).tolist() == [2.5, 0, 2.5, 1]
    found = course.pearson(x, 2 * x + 1), course.spearman(x, np.exp(x)), course.spearman(x, -(x**3))
    assert found == pytest.approx((1, 1, -1))
    noisy = (y := rng.normal(size=400)) + rng.normal(size=400)
    low, high = course.interval(course.pearson, noisy, y)
    few = course.interval(course.pearson, noisy[:30], y[:30])
    assert low < 0.5**0.5 < high and high - low < min(0.2, few[1] - few[0])


@each("kind", ["mhf", "standard"])
def test_fit_learns(kind):
    """The loss falls, is repeatable, is the mean of all sequences; the model ends frozen."""
    ids, losses = np.tile(np.arange(20, 40), 30), []
    for texts, steps, rows in ((ids, 12, 4), (ids, 12, 4), (ids, 1, 20), ([ids, ids + 9], 2, 4)):
        model = course.small(TOKENIZER, model=kind, max_position_embeddings=32)
        expected = model.loss(*course.batch(ids, seed=0, step=1, rows=20, length=32)).item()
        found = course.fit(model, texts, steps, learning_rate=1e-2, rows=rows)
        losses.append([loss for _, loss in found])
        assert not any(p.requires_grad for p in model.parameters())
    assert losses[0] == losses[1] and losses[0][-1] < 0.8 * losses[0][0]
    assert losses[2] == pytest.approx([expected], rel=1e-5) and len(losses[3]) == 2


@each("name", claims.EXPERIMENTS)
def test_a_result_says_where_it_comes_from(name):
    """Command, machine, versions, data, and each of three seeds; judged again it says the same."""
    result = experiments.read_json(RESULTS / f"{name}.json")
    assert result["command"].startswith(f"python tutorials/experiments.py {name}")
    assert result["machine"]["cpu"] and result["versions"]["torch"] and result["data"]
    variants = claims.EXPERIMENTS[name].variants(claims.Scale("tiny", 4096))
    found = [(run["label"], run["seed"]) for run in result["runs"]]
    assert found == [(label, seed) for label in variants for seed in (1, 2, 3)]
    for run in result["runs"]:
        assert run["flags"] | variants[run["label"]] == run["flags"]
        assert run["tokens"] == run["steps"] * 2048 > 0
    assert claims.judged(result) == result["verdicts"]


@each("name", claims.EXPERIMENTS)
def test_a_picture_says_what_it_shows(name):
    """Small, opaque (to be read on a dark page, too), not blank; every axis has words."""
    pixels, plt = image.imread(picture := RESULTS / f"{name}.png"), course.pyplot()
    assert picture.stat().st_size < 2**17 and pixels[..., :3].std() > 0.05
    assert tuple(pixels[0, 0, :3]) == (1, 1, 1) and pixels[..., 3:].min(initial=1) == 1
    result = experiments.read_json(picture.with_suffix(".json"))
    figure = claims.EXPERIMENTS[name].draw(plt, result)
    figure.canvas.draw()
    for axis in figure.axes:
        names = " ".join(t.get_text() for t in axis.get_xticklabels())
        assert axis.get_ylabel() and (axis.get_xlabel() or re.search("[a-z]", names))
    plt.close(figure)


def verdicts(name, factors, seeds):
    """+ held, - did not, ? open; factors: {pattern of "label measure seed": factor}."""

    def factor(what):
        return math.prod(f for pattern, f in factors.items() if re.match(pattern, what))

    measures, runs = json.loads(fixture("measures.json")), []
    scale = claims.Scale("tiny", 4096)
    labels = claims.EXPERIMENTS[name].variants(scale)
    for label, seed in ((label, seed) for label in labels for seed in range(1, seeds + 1)):
        runs.append(run := {"label": label, "seed": seed})
        for measure, value in measures.items():
            run[measure] = value * (1 + 0.01 * (seed - 2)) * factor(f"{label} {measure} {seed}")
        words = {k: {"spearman": x, "spearman_interval": [x, 2 * x]} for k, x in run.items()}
        run["words"] = {"a list": words | {"pairs": 9}}
        run["entropy"] = [run["bits_per_byte"]]
    result = {"name": name, "runs": runs, "width": "D 128"}
    costs = ("cost", "flops", "decoder", "step", "token", "memory", "parameters", "table_seconds")
    result["widths"] = {
        D: {label: {k: factor(f"{D}: {label} {k}") for k in costs} for label in labels}
        for D in ("D 64", "D 128")
    }
    result["flops"] = {k: {H: factor(f"{H} {k}") for H in ("H3", "H4")} for k in ("3b", "from")}
    lines = dict.fromkeys(label.split(": ")[-1] for label in labels)
    result["costs"] = {k: {"4096": {c: factor(f"{k} {c}") for c in costs}} for k in lines}
    return "".join({True: "+", False: "-", None: "?"}[v["held"]] for v in claims.judged(result))


@each("name, factors, expected", json.loads(fixture("judged.json")))
def test_a_claim_can_hold_and_can_fail(name, factors, expected):
    """Each claim has figures that end it; ranges that overlap decide nothing, nor do two seeds."""
    assert verdicts(name, factors, seeds=3) == expected
    assert set(verdicts(name, factors, seeds=2)) == {"?"}


@each("preset, V", [("tiny", 4096), ("100m", 32768)])
def test_deeper_has_the_parameters_of_h4(preset, V):
    """standard+kL has as many parameters as H4 or at most one layer more."""
    scale = claims.Scale(preset, V)
    with torch.device("meta"):
        config = mhf.Config.preset(preset, **scale.h4(vocab_size=V))
        parts = mhf.GatedEmbedding(config), mhf.CascadeDecoder(config), mhf.Block(config)
    gate, cascade, block = (sum(p.numel() for p in part.parameters()) for part in parts)
    layers = (V * config.hidden_size + gate + cascade) / block
    assert 0 <= scale.deeper() - layers < 1


@each("line", fixture("mistakes.txt").splitlines())
def test_a_mistake_is_one_sentence(line, capsys):
    """Exit status 2, before anything is trained."""
    script, flags, words = line.split("|")
    assert {"notebooks": notebooks, "experiments": experiments}[script].main(flags.split()) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def tiny(folder):
    """Flags of an experiment that takes seconds."""
    (folder / "text.txt").write_text(ENGLISH * 7, encoding="utf-8")
    flags = f"--data {folder}/text.txt --vocab_size 280 --steps 3 --passages 5 --jobs 1 --rounds 1 "
    flags += "-- --num_hidden_layers=2 --max_position_embeddings=64 --hidden_size=32 "
    return (flags + "--intermediate_size=32 --bottle_neck_dim=8 --tokens_per_step=256").split()


def test_a_run_repeats_and_resumes(tmp_path):
    """A run stopped halfway gives the same numbers; a finished one is kept, if mhf.py is."""
    found, flags, given = [], claims.Scale("tiny", 280).h4(), tiny(tmp_path)
    for stop, out in enumerate(["--out", str(tmp_path / name)] for name in ("whole", "stopped")):
        args = experiments.parse(["one_id", *out, *given])
        assert args.given == [*out, *given]
        folder = experiments.run_folder(args, flags, 1)
        if stop:
            own = {"seed": 1, "out": folder.parent, "name": folder.name, "stop_after": 2}
            own |= experiments.common_flags(args) | flags
            assert train.main(experiments.command_line(own) + args.more) == 0
        experiments.train_run(args, flags, 1)
        found.append(experiments.measured(args, "quality", "H4", flags, 1) | {"seconds": 0})
    assert found[0] == found[1] and found[0]["steps"] == 3 and found[0]["passages"] == 5
    before = folder.stat().st_mtime_ns
    experiments.train_run(args, flags, 1)
    assert folder.stat().st_mtime_ns == before
    (folder / "mhf.py").write_text("# another\n", encoding="utf-8")
    refused(lambda: experiments.train_run(args, flags, 1), "was trained with another mhf.py")


@each("kind", ["mhf", "standard"])
def test_flops_are_those_that_a_counter_finds(kind):
    """Of a step's matrix products, forward and backward: the formula and torch's counter agree."""
    model = course.small(TOKENIZER, model=kind, num_hashes=3, num_attention_heads=4)
    ids = torch.randint(1, 99, (2, model.config.max_position_embeddings))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(ids, ids).backward()
    assert counter.get_total_flops() == sum(course.flops(model.config).values()) * ids.numel()


def test_the_entropy_of_heads(monkeypatch):
    """A function that guesses among B buckets has log2(B) bits, one that is sure none."""
    model = course.small(TOKENIZER, num_hashes=2, num_buckets=128)
    logits = torch.zeros(2, 128)  # (H, B)
    logits[1, 5] = 200
    forward = lambda h, _: logits.expand(*h.shape[:-1], 2, 128)  # noqa: E731
    monkeypatch.setattr(model.hash_head, "forward", forward)
    corpus = SimpleNamespace(tokenizer=TOKENIZER, held_out=np.arange(1000) % 90)
    monkeypatch.setattr(experiments, "loaded", lambda *_: (model, corpus, None))
    monkeypatch.setattr(experiments, "final", lambda *_: {"tau": 3.0})
    found = experiments.heads(None, SimpleNamespace(device="cpu", eval_tokens=512))
    assert found["entropy"] == pytest.approx([7, 0]) and found["tau"] == 3


def test_slope():
    """Of a line, exactly, whatever the order; none for a single x."""
    assert course.slope([3, 1, 2], [-6, -2, -4]) == pytest.approx(-2)
    assert math.isnan(course.slope([1, 1], [0, 5]))


def test_equal_text(monkeypatch):
    """Where tokens are half as large, twice as many steps read as much text."""
    sizes = {"bpe:2048": 200, "bpe:4096": 100, "bpe:8192": 80, "bpe:16384": 50, "bpe:32768": 40}
    corpora = {name: SimpleNamespace(training=range(size)) for name, size in sizes.items()}
    monkeypatch.setattr(experiments.data, "prepare", lambda _, name: corpora[name])
    args = experiments.parse(["vocabulary", "--steps", "300"])
    found = experiments.variants(args, "vocabulary")
    steps = {flags["tokenizer"]: flags["steps"] for flags in found.values()}
    assert list(steps.values()) == [400, 200, 160, 100, 80] and len(found) == 25


def test_what_a_vocabulary_costs(tmp_path):
    """More tokens are more parameters for a standard model alone; each token is there once.

    What steps take is measured once and kept, so that a run that goes on starts at once.
    """
    args = experiments.parse(["vocabulary", "--out", str(tmp_path), *tiny(tmp_path)])
    assert len({*experiments.many_tokens(args, 300).hashed_bytes()}) == 300
    for flags, more in ((claims.STANDARD, 20 * 32), (claims.Scale("tiny", 280).h4(), 0)):
        few, many = (experiments.cost_of_vocabulary(args, flags, V) for V in (280, 300))
        assert many["parameters"] - few["parameters"] == more
        assert min(many["step"], many["token"]) > 1e-5  # seconds: no forward pass is faster
        assert min(many["memory"], many["table_seconds"]) >= 0
    work = [("size", "final", "standard", claims.STANDARD, seed) for seed in (1, 2)]
    found = experiments.estimate(args, work)
    assert found == experiments.estimate(args, work) and len({*found.values()}) == 1
