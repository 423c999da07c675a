"""tutorials/harness.py: its numbers against `log_probs`, also through the real harness if there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_DATASETS_OFFLINE"] = "1"  # before datasets is imported
os.environ["DISABLE_MULTIPROC"] = "1"  # the harness's standard errors, in this process

import pytest
import torch
from conftest import FIXTURES, random_checkpoint, refused

import mhf
from support.tokenizer import Tokenizer

SCRIPT = Path(mhf.__file__).parent / "tutorials" / "harness.py"
sys.path.insert(0, str(SCRIPT.parent))
import harness  # noqa: E402

harness.LM = None  # the command refuses to run without the package; most of these tests do
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT = "".join(f"the {a} of {b}, or not to be {a}\n" for a in NUMBERS for b in NUMBERS)
TEXT += "漢字仮名交じり文の例 " * 40 + "éééé 🙂🙂 " * 20
WORDS = Tokenizer.train([TEXT], 320)
WINDOW, GREEDY = 64, (0.0, None, None)


@pytest.fixture(scope="module", params=[False, True], ids=["mhf", "standard"])
def checkpoint(request, tmp_path_factory):
    """A checkpoint of either class, of calibration 1.25; the standard one has 5 unused ids."""
    folder, standard = tmp_path_factory.mktemp("checkpoint"), request.param
    return random_checkpoint(folder, WORDS, unused=5 * standard, standard=standard)


@pytest.fixture
def model(checkpoint):
    return mhf.load(checkpoint)


def plain(model, context, continuation):
    """log P of a continuation, within 1e-3, and whether it is greedy: window after window."""
    ids, log_p, greedy = torch.tensor([*context, *continuation]), 0.0, True
    for start in range(len(context), len(ids), WINDOW):
        row = ids[: start + WINDOW][-WINDOW - 1 :]
        targets = ids[start : start + WINDOW]
        log_probs = model.log_probs(row[None, :-1])[0, -len(targets) :]  # (length, V)
        log_p += log_probs.gather(-1, targets[:, None]).double().sum().item()
        greedy &= log_probs.argmax(-1).equal(targets)
    return pytest.approx(log_p, abs=1e-3), greedy


@pytest.mark.parametrize("tau", [1.0, 1.25, 3.0])
def test_scores_are_those_of_log_probs(model, monkeypatch, tau):
    """In batches of any lengths, as each pair alone: too long, longer than a window, empty."""
    model.config.calibration = tau
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(len(WORDS), (4 * WINDOW,), generator=rng).tolist()
    pairs = [(ids[n : 3 * n], ids[5 * n : 5 * n + 1 + n % 4]) for n in range(1, 7)]
    pairs += [(ids[: WINDOW + 20], ids[:1]), (ids[:1], ids[1 : WINDOW + 20]), (ids[:9], [])]
    greedy = list(model.generate(ids[:9], 3, temperature=0))
    pairs += [(ids[:9], greedy), (ids[:9], [*greedy[:2], (greedy[2] + 1) % len(WORDS)])]
    expected, sizes, whole = [plain(model, *pair) for pair in pairs], [], model.token_scores
    monkeypatch.setattr(model, "token_scores", lambda h: sizes.append(len(h)) or whole(h))
    model.config.vocab_size = 2**23  # for the size of a chunk alone: 2^25 numbers, 4 positions
    found = harness.Adapter(model, WORDS, batch_size=3).score_all(pairs)
    assert found == expected and [greedy for _, greedy in found[-3:]] == [True, True, False]
    assert max(sizes) == 4 and sum(sizes) == sum(len(target) for _, target in pairs)


def test_one_token_is_greedy(model, monkeypatch):
    """Of scores that differ by one bit the larger one; of equal scores, the lowest id."""
    row = torch.full((model.config.vocab_size,), -50.0)
    row[5], row[30], model.config.calibration = 1.0, -1.0, 3.0
    row[9] = row[12] = torch.nextafter(row[5], torch.tensor(2.0))
    monkeypatch.setattr(model, "token_scores", lambda h: row.expand(len(h), -1))
    assert (row / 3.0).log_softmax(-1)[[5, 9]].unique().numel() == 1
    found = harness.score(model, [([1], [token]) for token in (5, 9, 12)])
    assert [greedy for _, greedy in found] == [False, True, False]


ENDS = [
    ([], 9, ["the one of two", "seven 漢字"]),
    (["ne o"], 9, ["the o", "seven 漢字"]),  # begins inside one token, ends inside another
    (["§", "ven", "e of", "ne o"], 2, ["the one", "seve"]),
    (["§", "ven", "e of", "ne o"], 9, ["the o", "se"]),
]


@pytest.mark.parametrize("until, limit, expected", ENDS)
def test_where_a_text_ends(until, limit, expected):
    """Before the first stop string, at end-of-text or the limit, each row for itself; no seed."""
    rows = [[*WORDS.encode(text), WORDS.eot] for text in ("the one of two", "seven 漢字")]
    steps = torch.tensor([(row + [7] * 9)[:9] for row in rows]).T  # 7: what follows does not count
    stream = iter(steps[:limit])
    made = SimpleNamespace(generate=lambda _, n, t, k, p, stop: (n, k) == (limit, 5) and stream)
    assert harness.write(made, WORDS, [[1], [2]], until, limit, (0.7, 5, 0.9)) == expected
    assert (next(stream, None) is None) == (limit == 2)


SETTINGS = [
    ({"until": "\n", "max_gen_toks": 9, "temperature": 0}, (("\n",), 9, GREEDY)),
    ({"until": ["a", "", "b"], "max_new_tokens": 7}, (("a", "b"), 7, GREEDY)),
    ({"do_sample": False, "temperature": 0.7, "top_k": 0}, ((), 256, GREEDY)),
    ({"do_sample": True, "until": None}, ((), 256, (1.0, None, None))),
    ({"temperature": 0.7, "top_k": 5, "top_p": 0.9}, ((), 256, (0.7, 5, 0.9))),
]


@pytest.mark.parametrize("wanted, expected", SETTINGS)
def test_generation_settings(wanted, expected):
    """Greedy unless a task says do_sample, or gives a temperature above 0."""
    assert harness.generation_settings(wanted) == expected


@pytest.mark.parametrize("eos, text", [(99, "ab"), ([99, 98], "a"), (None, "abcd")])
def test_end_of_text_is_what_config_json_says(checkpoint, tmp_path, eos, text):
    """eos_token_id, a number or a list, ends texts and stands for an empty context, if any."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    key = '"eos_token_id": '
    edit(folder / "config.json", f"{key}{WORDS.eot}", key + json.dumps(eos))
    model, words = harness.open_checkpoint(harness.parse(["--checkpoint", str(folder)]))
    words.ends = words.ends if eos else []  # as a published tokenizer has it
    lm, empty = harness.Adapter(model, words), [SimpleNamespace(args=("", "a"))]
    if eos:
        assert lm.loglikelihood(empty) == [plain(model, [99], [97])]
    else:
        refused(lambda: lm.loglikelihood(empty), "has none; name it in", "as eos_token_id")
    model.generate = lambda *_, stop: iter([[97], [98], [99], [100]])
    assert lm.generate_until([SimpleNamespace(args=("a", {}))]) == [text]


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Call main() with flags; returns (status, standard output, last line of standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(**flags):
        flags = [w for k, v in flags.items() if v for w in (f"--{k}", *str(v).split())]
        status, (out, err) = harness.main(flags), capsys.readouterr()
        return status, out, err.splitlines()[-1] if err else ""

    return call


FOLDERS = ("arc", "hellaswag", "lambada", "openbookqa", "piqa", "sciq", "super_glue", "winogrande")
MISTAKES = [
    (dict(calibration="0"), "--calibration must be a positive number, not 0"),
    (dict(batch_size="0"), "--batch_size must be from 1 to 4294967295, not 0"),
    (dict(include_path="no/folder"), "--include_path: there is no folder no/folder"),
    (dict(output="no/folder/x.json"), "--output no/folder/x.json must name a file, in a folder"),
    (dict(checkpoint=None), "there is no checkpoint under runs/ yet: run `python train.py` first"),
    (dict(checkpoint="no/such/run"), "no/such/run"),
    (dict(checkpoint="bare"), "tokenizer"),
    (dict(checkpoint="bare", tokenizer="large"), "330 tokens, the checkpoint only 32"),
    (dict(), "the evaluation harness is not installed: pip install lm_eval"),
]


@pytest.mark.parametrize("flags, sentence", MISTAKES, ids=lambda x: str(x)[:30])
def test_mistakes_are_one_sentence(checkpoint, call, monkeypatch, flags, sentence):
    """Exit status 2, nothing on standard output. bare: no tokenizer; large: one of more tokens."""
    shutil.copytree(checkpoint, "bare", ignore=lambda *_: ["tokenizer.tiktoken"])
    Tokenizer.train([TEXT], 330).save("large")
    monkeypatch.setattr(harness, "LM", None if flags else object)
    status, out, err = call(**dict(checkpoint=checkpoint) | flags)
    assert (status, out) == (2, "") and err.startswith("harness.py: error: ") and sentence in err


def test_help_needs_no_harness():
    """Whatever the encoding of the terminal."""
    code = "import runpy, sys; sys.modules['lm_eval'] = None; sys.argv = ['', '--help']; "
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env)
    assert "τ; 1 is".encode() in done.stdout and not done.returncode


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with tasks; the real harness knows no more than a few of its 14,000, and is fast."""
    lm_eval, module = pytest.importorskip("lm_eval"), pytest.importorskip("lm_eval.tasks")
    paper = [str(Path(module.__file__).parent / name) for name in FOLDERS]
    whole, every = lm_eval.simple_evaluate, module.TaskManager
    how = {"log_samples": True, "bootstrap_iters": 0}
    few = lambda include_path: every(None, include_path or paper, False)  # noqa: E731
    monkeypatch.setattr(module, "TaskManager", few)
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda lm, **given: whole(lm, **given | how))
    monkeypatch.setattr(pytest.importorskip("lm_eval.evaluator"), "add_env_info", lambda r: None)
    folder = shutil.copytree(FIXTURES / "harness", tmp_path / "tasks")
    for file in folder.glob("*.yaml"):
        edit(file, "FOLDER", folder.as_posix())
    return folder


def edit(file, old, new):
    file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def plain_answer(model, context, wanted=None):
    """The right answer to a request of the harness, by its rule of where a context ends."""
    if wanted is None:  # a whole text
        return plain(model, [WORDS.eot], WORDS.encode(context))[0]
    if isinstance(wanted, str):
        end = len(context.rstrip())
        before, whole = WORDS.encode(context[:end]), WORDS.encode(context + wanted)
        # "t" + "o" is one token: then "o" is encoded apart.
        return [*plain(model, before or [WORDS.eot], whole[len(before) :] or WORDS.encode(wanted))]
    limit, stops = wanted["max_gen_toks"], ["<|endoftext|>", *wanted["until"]]
    ids = WORDS.encode(context)[-max(WINDOW - limit, WINDOW // 2) :]
    text = WORDS.decode(model.generate(ids, limit, temperature=0))
    return text[: min((text.find(stop) for stop in stops if stop in text), default=None)]


@pytest.mark.parametrize("size, shots, limit, cut", [(1, 0, 12, 5), (64, 1, 60, 10)])
def test_every_answer(model, checkpoint, tasks, call, monkeypatch, size, shots, limit, cut):
    """Of each kind of task: what log_probs gives; --output tells how, and what was special."""
    sizes, score = [], harness.score
    monkeypatch.setattr(harness, "score", lambda *a: sizes.append(len(a[1])) or score(*a))
    flags = dict(checkpoint=checkpoint, include_path=tasks, tasks="mhf_choice mhf_[lpw]*", limit=6)
    flags |= dict(calibration=2, batch_size=size, num_fewshot=f"{shots}", seed=3)
    edit(tasks / "mhf_write.yaml", "max_gen_toks: 12", f"max_gen_toks: {limit}")
    status, out, _ = call(output="found.json", device="cpu", **flags)
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    model.config.calibration = 2.0
    for task in ("mhf_choice", "mhf_last_word", "mhf_perplexity", "mhf_write"):
        assert f"|{task}" in out
        for sample in found["samples"][task]:
            for request, [answer] in zip(sample["arguments"], sample["resps"], strict=True):
                assert answer == plain_answer(model, *request)
    assert status == 0 and max(sizes) == min(size, 20)
    assert f"{checkpoint}: calibration τ 2, context 64 tokens, device cpu, limit 6\n" in out
    counts = {harness.SHORTENED: cut, harness.APART: 1}
    assert "".join(f"{n} of 27 requests: {what}\n" for what, n in counts.items()) in out
    assert found["checkpoint"] == str(checkpoint) and "--calibration 2" in found["command"]
    assert found["config"]["torch_seed"] == 3 and found["n-shot"]["mhf_choice"] == shots


WRONG = [
    ("mhf_choice", ".jsonl", ".gone", "your own the data_files they name"),
    ("mhf_choice", "{{choices}}", "{{choices", "correct the task's file"),
    ("mhf_write", "do_sample: false", "num_beams: 4", "generation_kwargs num_beams: only until, "),
    ("mhf_chioce", "", "", "unknown task mhf_chioce; the harness knows mhf_choice, mhf_write; a"),
    (None, "", "", "named tasks need a network for their data"),
]


@pytest.mark.parametrize("name, old, new, sentence", WRONG)
def test_tasks_with_a_mistake(checkpoint, tasks, call, name, old, new, sentence):
    """One sentence, exit status 2. The tasks of the paper are all there; their data is not."""
    if old:
        edit(tasks / f"{name}.yaml", old, new)
    status, _, err = call(checkpoint=checkpoint, include_path=name and tasks, tasks=name)
    assert status == 2 and err.startswith("harness.py: error: ") and sentence in err
    assert name or all(task in err for task in harness.PAPER)
