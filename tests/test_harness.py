"""tutorials/harness.py: its numbers against `log_probs`, also through the real harness if there."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = "1"  # before datasets is imported
os.environ["DISABLE_MULTIPROC"] = "1"  # the harness's standard errors, in this process

import pytest
import torch
from conftest import FIXTURES, build, close, random_checkpoint

import mhf

SCRIPT = Path(mhf.__file__).parent / "tutorials" / "harness.py"
sys.path.insert(0, str(SCRIPT.parent))
import harness  # noqa: E402

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT = "".join(f"the {a} of {b}, or not to be {a}\n" for a in NUMBERS for b in NUMBERS)
WORDS = TEXT + "漢字仮名交じり文の例 " * 40 + "éééé 🙂🙂 " * 20
WINDOW = 64
GREEDY = (0.0, None, None)
TASKS = ("mhf_choice", "mhf_last_word", "mhf_perplexity", "mhf_write")


@pytest.fixture(scope="module")
def words():
    return mhf.Tokenizer.train(WORDS, 320)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, words):
    """A checkpoint folder of each class, of fitted calibration 1.25; the standard one has 5 ids
    that are no token's. The seeds are ones whose greedy texts are varied."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for standard in (False, True):
        how = dict(unused=5 * standard, max_position_embeddings=WINDOW, seed=9 if standard else 6)
        random_checkpoint(folder / str(standard), words, standard=standard, **how)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["mhf", "standard"])
def checkpoint(request, checkpoints):
    return checkpoints / str(request.param)


def plain_score(model, context, continuation):
    """log P of a continuation, one sequence, all of (T, V), and whether it is greedy."""
    ids = torch.tensor([*context, *continuation])[-model.config.max_position_embeddings - 1 :]
    log_probs = model.log_probs(ids[None, :-1])[0, -len(continuation) :].detach()  # (length, V)
    log_p = log_probs.gather(-1, ids[-len(continuation) :, None]).double().sum().item()
    return log_p, log_probs.argmax(-1).tolist() == list(continuation)


def plain_pair(words, context, continuation):
    """The token ids as the harness defines them, for a context that may be empty."""
    blanks = context[len(context.rstrip()) :]
    context, continuation = context[: len(context) - len(blanks)], blanks + continuation
    before = words.encode(context)
    return before or [words.eot], words.encode(context + continuation)[len(before) :]


def plain_text(model, words, prompt, until, limit):
    """Greedy decoding, token by token, cut where the first stop string begins."""
    ids, text = list(prompt), ""
    for _ in range(limit):
        ids.append(model.log_probs(torch.tensor([ids]))[0, -1].argmax().item())
        if ids[-1] == words.eot:
            break
        text = words.decode(ids[len(prompt) :])
        if any(stop in text for stop in until):
            return text[: min(text.find(stop) for stop in until if stop in text)]
    return text


def a_stop(model, words, prompt):
    """A greedy text of 12 tokens, and a piece of it that is in no token alone."""
    text = plain_text(model, words, prompt, (), 12)
    for start in range(3, len(text) - 4):
        stop = text[start : start + 4]
        alone = any(stop in words.decode([i]) for i in range(len(words)))
        if text.find(stop) == start and "\ufffd" not in stop and not alone:
            return text, stop
    raise AssertionError(f"no such piece in {text!r}")


def some_pairs(model, words, count=7):
    """Contexts and continuations of many lengths; one is greedy, one context is too long."""
    g, V = torch.Generator().manual_seed(1), len(words)
    ids = torch.randint(V, (4 * WINDOW,), generator=g).tolist()
    pairs = [(ids[n : 3 * n], ids[5 * n : 5 * n + 1 + n % 4]) for n in range(1, count)]
    greedy = list(model.generate(ids[:9], 3, temperature=0))
    almost = [*greedy[:2], (greedy[2] + 1) % V]
    pairs += [(ids[:9], greedy), (ids[:9], almost)]
    return [*pairs, (ids[: WINDOW + 20], ids[100:110]), (ids, greedy[:1])]


# What the model is asked, in token ids


@pytest.mark.parametrize("tau", [1.0, 1.25, 3.0])
def test_scores_are_those_of_log_probs(checkpoint, words, tau):
    """A padded batch gives what log_probs gives each pair alone, within 1e-4 (float32 sums of up
    to 10 terms); a too long context loses its beginning."""
    model = mhf.load(checkpoint)
    model.config.calibration = tau
    pairs = some_pairs(model, words)
    found, expected = harness.score(model, pairs), [plain_score(model, *pair) for pair in pairs]
    close([log_p for log_p, _ in found], [log_p for log_p, _ in expected], atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [greedy for _, greedy in found].count(True) in (1, 2)


def test_few_positions_are_scored_at_a_time(checkpoint, words, monkeypatch):
    """Only the states before continuation tokens reach token_scores, 2^25 numbers at a time."""
    model, sizes = mhf.load(checkpoint), []
    pairs = some_pairs(model, words)
    expected = harness.score(model, pairs)
    model.config.vocab_size = 2**23  # for the size of a chunk alone: 4 positions
    whole = type(model).token_scores

    def counted(self, h):
        sizes.append(len(h))
        return whole(self, h)

    monkeypatch.setattr(type(model), "token_scores", counted)
    close(torch.tensor(harness.score(model, pairs)), torch.tensor(expected))
    assert max(sizes) == 4 and sum(sizes) == sum(len(target) for _, target in pairs)


def test_of_tokens_that_share_a_signature_the_first_is_greedy():
    """Single-ID: the tokens of a bucket have equal log P; greedy is the one of lowest id, which
    is what generate() writes, whatever the calibration."""
    model, context = build(H=1, B=4, V=20, seed=1), [3, 5]
    for tau in (1.0, 7.0):
        model.config.calibration = tau
        found = harness.score(model, [(context, [token]) for token in range(20)])
        best = max(log_p for log_p, _ in found)
        tied = [token for token, (log_p, _) in enumerate(found) if log_p == best]
        greedy = [token for token, (_, greedy) in enumerate(found) if greedy]
        assert len(tied) > 1 and greedy == tied[:1]
        assert greedy == list(model.generate(context, 1, temperature=0))


def test_rounding_makes_no_second_greedy_token(checkpoint, monkeypatch):
    """Two scores that differ by one bit, and not after log_softmax: only the larger is greedy."""
    model = mhf.load(checkpoint)
    low = torch.tensor(1.0)
    high = torch.nextafter(low, torch.tensor(2.0))
    row = torch.full((model.config.vocab_size,), -50.0)
    row[5], row[9] = low, high
    row[30] = -low
    model.config.calibration = 3.0
    logs = (row / 3.0).log_softmax(-1)
    monkeypatch.setattr(type(model), "token_scores", lambda self, h: row.expand(len(h), -1))
    assert logs[5] == logs[9]
    assert [g for _, g in harness.score(model, [([1], [5]), ([1], [9])])] == [False, True]


def test_texts_end_at_a_stop_string_across_tokens(checkpoint, words):
    """The stop string begins inside one token and ends in another; the text before it remains."""
    model, prompt = mhf.load(checkpoint), words.encode("the one of")
    whole, stop = a_stop(model, words, prompt)
    before = [whole[: whole.find(stop)]]
    for until in ((stop,), ("§", stop), (stop[1:], stop)):
        assert harness.write(model, words, [prompt], until, 12, GREEDY) == before
    assert harness.write(model, words, [prompt], (), 12, GREEDY) == [whole]
    assert harness.write(model, words, [prompt], (), 0, GREEDY) == [""]


def test_texts_of_a_batch_are_those_of_each_alone(checkpoint, words):
    """Greedy texts of prompts of different lengths, which stop at different steps."""
    model = mhf.load(checkpoint)
    prompts = [words.encode(text) for text in ("the one of two, or", "seven", "漢字", "é of")]
    alone = [plain_text(model, words, prompt, ("e", "o"), 15) for prompt in prompts]
    assert harness.write(model, words, prompts, ("e", "o"), 15, GREEDY) == alone
    assert len({len(text) for text in alone}) > 1


def test_end_of_text_ends_a_text(checkpoint, words, monkeypatch):
    """The end-of-text token is not part of the text, nor is what generate() fills the row with."""
    steps = [words.encode("a"), [words.eot], words.encode("b")]
    made = [torch.tensor([step[0], words.encode("x")[0]]) for step in steps]
    monkeypatch.setattr(mhf.LanguageModel, "generate", lambda *a, **k: iter(made))
    assert harness.write(mhf.load(checkpoint), words, [[1], [2]], (), 3, GREEDY) == ["a", "xxx"]


@pytest.mark.parametrize(
    "wanted, expected",
    [
        ({}, ((), 256, (0.0, None, None))),
        ({"until": "\n", "max_gen_toks": 9}, (("\n",), 9, (0.0, None, None))),
        ({"until": ["a", "", "b"], "max_new_tokens": 7}, (("a", "b"), 7, (0.0, None, None))),
        ({"do_sample": False, "temperature": 0.7}, ((), 256, (0.0, None, None))),
        ({"do_sample": True}, ((), 256, (1.0, None, None))),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9}, ((), 256, (0.7, 5, 0.9))),
        ({"until": None, "temperature": 0, "top_k": 0}, ((), 256, (0.0, None, None))),
    ],
)
def test_generation_settings(wanted, expected):
    """Greedy unless a task says do_sample, or gives a temperature above 0."""
    assert harness.generation_settings(wanted) == expected


def test_unknown_generation_settings_are_refused():
    """Beam search, for example, would change the numbers: no silence."""
    with pytest.raises(ValueError, match="num_beams: only until, .* take them out of the task"):
        harness.generation_settings({"until": ["\n"], "num_beams": 4})


# Without the harness


def start(code, *flags):
    """A Python program that runs harness.py with some modules missing."""
    code = f"import runpy, sys; {code}; sys.argv = sys.argv[1:]"
    code += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(SCRIPT), *map(str, flags)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", cwd=SCRIPT.parent.parent)


def test_help_needs_nothing():
    """--help without lm_eval, torch and the packages of mhf.py."""
    missing = "sys.modules |= dict.fromkeys(['lm_eval', 'torch', 'mhf', 'mmh3', 'datasets'])"
    done = start(missing, "--help")
    assert done.returncode == 0 and "--calibration" in done.stdout and not done.stderr


def test_the_missing_harness_is_one_sentence(checkpoint):
    done = start("sys.modules['lm_eval'] = None", "--checkpoint", checkpoint)
    sentence = "harness.py: error: the evaluation harness is not installed: pip install lm_eval\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


@pytest.fixture
def call(capsys, monkeypatch):
    """Call main() with flags; returns (status, standard output, standard error)."""
    monkeypatch.setattr(harness, "TemplateLM", getattr(harness, "TemplateLM", None) or object)
    if harness.TemplateLM is object:
        monkeypatch.setattr(harness, "TemplateLM", type("TemplateLM", (), {}))

    def call(*flags, **named):
        flags = [*flags, *(part for k, v in named.items() for part in (f"--{k}", *f"{v}".split()))]
        try:
            status = harness.main([str(flag) for flag in flags])
        except SystemExit as stop:  # argparse's way to end
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (dict(calibration=0), "--calibration is fitted or a positive number, not 0"),
        (dict(calibration="paper"), "--calibration is fitted or a positive number, not paper"),
        (dict(calibration="inf"), "--calibration is fitted or a positive number, not inf"),
        (dict(limit=0), "--limit is a whole number from 1, or a share below 1, not 0"),
        (dict(limit=2.5), "--limit is a whole number from 1, or a share below 1, not 2.5"),
        (dict(limit="inf"), "--limit is a whole number from 1, or a share below 1, not inf"),
        (dict(num_fewshot=-1), "--num_fewshot must be from 0 to 4294967295, not -1"),
        (dict(seed=2**32), "--seed must be from 0 to 4294967295, not 4294967296"),
        (dict(batch_size="auto"), "--batch_size: invalid int value: 'auto'"),
        (dict(batch_size=0), "--batch_size must be from 1 to 4294967295, not 0"),
        (dict(include_path="no/folder"), "--include_path: there is no folder no/folder"),
        (dict(output="no/folder/file.json"), "--output no/folder/file.json must name a file, in a"),
        (dict(output="."), "--output . must name a file, in a folder that exists"),
        (dict(revision="main"), "--revision main goes with a hub name, not with a folder"),
        (dict(device="cuda:99"), "--device cuda:99 is not to be had on this machine"),
        (dict(checkpoint="no/such/run"), "there is no checkpoint folder no/such/run"),
        (dict(tokenizer="no/folder"), "no/folder is no folder here"),
    ],
)
def test_mistakes_are_one_sentence(checkpoint, call, flags, sentence):
    """Exit status 2, no traceback, nothing on standard output."""
    status, out, err = call(**dict(checkpoint=checkpoint) | flags)
    assert status == 2 and not out and err.count("\n") == 1 and sentence in err
    assert err.startswith("harness.py: error: ")


def test_no_checkpoint_yet(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = call()
    assert status == 2 and "there is no checkpoint under runs/ yet: run `python train.py`" in err


def test_a_checkpoint_without_a_tokenizer(checkpoint, words, call, tmp_path):
    """It is refused; --tokenizer names one, which must not have more tokens than the model."""
    bare = Path(shutil.copytree(checkpoint, tmp_path / "bare"))
    (bare / "tokenizer.tiktoken").unlink()
    status, _, err = call(checkpoint=bare)
    assert status == 2 and "has no tokenizer: name one with --tokenizer" in err
    mhf.Tokenizer.train(WORDS, 330).save(tmp_path / "large")
    status, _, err = call(checkpoint=bare, tokenizer=tmp_path / "large")
    size = mhf.load(bare).config.vocab_size
    assert status == 2 and f"the tokenizer has 330 tokens, the checkpoint only {size}" in err
    args = harness.parse_arguments(["--checkpoint", str(bare), "--tokenizer", str(checkpoint)])
    assert len(harness.open_checkpoint(args)[1]) == len(words)


@pytest.mark.parametrize("asked, used", [("fitted", 1.25), ("1", 1.0), ("2.5", 2.5)])
def test_calibration(checkpoint, call, asked, used):
    """As stored, the paper's rule, or a number."""
    args = harness.parse_arguments(["--checkpoint", str(checkpoint), "--calibration", asked])
    assert harness.open_checkpoint(args)[0].config.calibration == used


# Through the real harness


@pytest.fixture(scope="module")
def lm_eval():
    """The package, without its four seconds of looking at the machine after each evaluation."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("lm_eval.evaluator").add_env_info = lambda results: None
    return lm_eval


@pytest.fixture
def tasks(checkpoint, words, tmp_path):
    """A folder with the tasks. The answers of mhf_write are, but for one, what the model writes;
    its stop string begins inside a token of the first; a last word of mhf_last_word is greedy."""
    model, folder = mhf.load(checkpoint), tmp_path / "tasks"
    shutil.copytree(FIXTURES / "harness", folder)
    rows = read_rows(folder / "mhf_write.jsonl")
    prompts = [words.encode(row["question"])[-WINDOW + 12 :] for row in rows]
    _, stop = a_stop(model, words, prompts[0])
    for row, prompt in zip(rows[1:], prompts[1:]):
        row["answer"] = plain_text(model, words, prompt, (stop,), 12)
    write_rows(folder / "mhf_write.jsonl", rows)
    last = read_rows(folder / "mhf_last_word.jsonl")
    last.append({"text": greedy_text(model, words)})
    write_rows(folder / "mhf_last_word.jsonl", last)
    for file in folder.glob("*.yaml"):
        text = file.read_text(encoding="utf-8").replace("FOLDER", folder.as_posix())
        text = text.replace('"STOP"', json.dumps(stop))
        file.write_text(text, encoding="utf-8")
    return folder


def greedy_text(model, words):
    """A text whose last word is one token, and the one that the model holds most probable."""
    for token in range(len(words)):
        text = "of" + words.decode([token])
        ids = words.encode(text)
        word = words.decode(model.generate(ids, 1, temperature=0))
        if (
            re.fullmatch(r" \w+", word)
            and words.encode(text + word)[:-1] == ids
            and text[-1:].strip()
        ):
            return text + word
    raise AssertionError("no such text")


def read_rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def evaluate(lm_eval, model, words, folder, task, batch_size=3, **how):
    """One task's numbers and samples, by the harness itself."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    lm = harness.Adapter(model, words, batch_size)
    how = dict(bootstrap_iters=0, log_samples=True) | how
    found = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, **how)
    results = {k.removesuffix(",none"): v for k, v in found["results"][task].items()}
    return results, found["samples"][task], lm


@pytest.fixture(params=[1.0, None], ids=["paper", "fitted"])
def model(request, checkpoint):
    model = mhf.load(checkpoint)
    model.config.calibration = request.param or model.config.calibration
    return model


def test_multiple_choice(lm_eval, model, words, tasks):
    """Every choice's log P, acc and acc_norm are those of log_probs; blanks at a context's end
    belong to the choice, an empty or blank one is end-of-text, a too long one loses its start."""
    found, samples, lm = evaluate(lm_eval, model, words, tasks, "mhf_choice")
    right, right_by_length = [], []
    for row, sample in zip(read_rows(tasks / "mhf_choice.jsonl"), samples, strict=True):
        gap = " "  # the harness's default between question and choice
        pairs = [plain_pair(words, row["question"], gap + c) for c in row["choices"]]
        expected = [plain_score(model, *pair)[0] for pair in pairs]
        close([resp[0][0] for resp in sample["resps"]], expected, atol=1e-4)
        right.append(max(range(len(pairs)), key=expected.__getitem__) == row["answer"])
        lengths = [len(choice) for choice in row["choices"]]
        by_length = [log_p / length for log_p, length in zip(expected, lengths)]
        right_by_length.append(max(range(len(pairs)), key=by_length.__getitem__) == row["answer"])
    close([found["acc"], found["acc_norm"]], [sum(r) / 6 for r in (right, right_by_length)])
    assert (lm.asked, lm.shortened) == (15, 3)


def test_last_word(lm_eval, model, words, tasks):
    """LAMBADA's kind: perplexity of, and accuracy at, the last word; one of them is greedy."""
    found, _, _ = evaluate(lm_eval, model, words, tasks, "mhf_last_word")
    expected = []
    for row in read_rows(tasks / "mhf_last_word.jsonl"):
        context, _, word = row["text"].rpartition(" ")
        expected.append(plain_score(model, *plain_pair(words, context, " " + word)))
    log_p, greedy = zip(*expected)
    close(math.log(found["perplexity"]), -sum(log_p) / len(log_p), atol=1e-4)
    assert found["acc"] == sum(greedy) / len(greedy) > 0


def test_rolling(lm_eval, model, words, tasks):
    """Every token of a text once: the first window after end-of-text, each further one with all
    the context that fits."""
    found, samples, lm = evaluate(lm_eval, model, words, tasks, "mhf_perplexity")
    pages, total = [row["page"] for row in read_rows(tasks / "mhf_perplexity.jsonl")], 0.0
    for page, sample in zip(pages, samples, strict=True):
        ids, done, log_p = words.encode(page), 0, 0.0
        while done < len(ids):
            end = min(done + WINDOW, len(ids))
            before = [words.eot] + ids[:done]
            log_p += plain_score(model, before, ids[done:end])[0]
            done = end
        close(sample["resps"][0][0], log_p, atol=1e-4)
        total += log_p
    assert max(len(words.encode(page)) for page in pages) > 2 * WINDOW  # three windows
    count = sum(len(re.split(r"\s+", page)) for page in pages)
    size = sum(len(page.encode()) for page in pages)
    close(math.log(found["word_perplexity"]), -total / count, atol=1e-4)
    close(math.log(found["byte_perplexity"]), -total / size, atol=1e-4)
    close(found["bits_per_byte"], -total / size / math.log(2), atol=1e-4)
    assert lm.shortened == 0


def test_generation(lm_eval, model, words, tasks):
    """exact_match of greedy texts, cut at a stop string: all but the first answer, which is left
    empty, are what the model writes."""
    found, samples, lm = evaluate(lm_eval, model, words, tasks, "mhf_write")
    rows = read_rows(tasks / "mhf_write.jsonl")
    assert [s["resps"][0][0] for s in samples[1:]] == [row["answer"] for row in rows[1:]]
    whole, stop = a_stop(model, words, words.encode(rows[0]["question"]))
    assert samples[0]["resps"][0][0] == whole[: whole.find(stop)]
    assert found["exact_match"] == 0.75 and (lm.asked, lm.shortened) == (4, 1)


def test_the_batch_size_changes_no_number(lm_eval, checkpoint, words, tasks):
    """Padding and order have no part in it: 1 and 64 requests at a time, within 1e-4."""
    model = mhf.load(checkpoint)
    for task in TASKS:
        one, many = (evaluate(lm_eval, model, words, tasks, task, n)[0] for n in (1, 64))
        for name in one.keys() - {"alias", "name"}:
            if isinstance(one[name], float):
                close(one[name], many[name], atol=1e-4, rtol=1e-4)


def test_few_shot_and_limit(lm_eval, checkpoint, words, tasks):
    """num_fewshot puts examples into the context; limit takes the first examples."""
    found, samples, _ = evaluate(
        lm_eval, mhf.load(checkpoint), words, tasks, "mhf_choice", num_fewshot=1, limit=2
    )
    assert len(samples) == 2 and "\n\n" in samples[0]["arguments"][0][0]


def test_sampling_repeats_with_the_seed(lm_eval, checkpoint, words, tasks):
    """do_sample draws from PyTorch's own generator, which the harness seeds."""
    file = tasks / "mhf_write.yaml"
    text = file.read_text(encoding="utf-8").replace("do_sample: false", "temperature: 1.5")
    file.write_text(text, encoding="utf-8")
    model = mhf.load(checkpoint)
    texts = []
    for seed in (1, 1, 2):
        _, samples, _ = evaluate(lm_eval, model, words, tasks, "mhf_write", torch_random_seed=seed)
        texts.append([sample["resps"][0][0] for sample in samples])
    assert texts[0] == texts[1] != texts[2]


@pytest.fixture
def own_tasks(lm_eval, monkeypatch):
    """The harness's own 14,000 tasks take it ten seconds to list: only those of --include_path."""
    import lm_eval.tasks as module

    whole = module.TaskManager
    monkeypatch.setattr(
        module, "TaskManager", lambda **how: whole(**{"include_defaults": False} | how)
    )


def test_the_command(lm_eval, own_tasks, checkpoint, tasks, words, call, tmp_path, monkeypatch):
    """The table and --output have the harness's numbers, from any directory, with wildcards."""
    monkeypatch.chdir(tmp_path)
    flags = dict(checkpoint=checkpoint, include_path=tasks, calibration=1, batch_size=2, seed=3)
    status, out, err = call(
        tasks="mhf_choice mhf_[lpw]*", output="found.json", device="cpu", **flags
    )
    assert status == 0, err
    text = (tmp_path / "found.json").read_text(encoding="utf-8")
    found, model = json.loads(text), mhf.load(checkpoint)
    model.config.calibration = 1.0
    for task in TASKS:
        expected, _, _ = evaluate(lm_eval, model, words, tasks, task)
        for name, value in expected.items():
            if isinstance(value, float):
                close(found["results"][task][f"{name},none"], value, atol=1e-4, rtol=1e-4)
                assert f"{found['results'][task][f'{name},none']:.4f}" in out
        assert f"|{task}" in out
    assert f"{checkpoint}: calibration τ 1, context {WINDOW} tokens, device cpu\n" in out
    assert "5 of 33 requests lost the beginning of a too long context" in out
    assert found["calibration"] == {"asked": "1", "used": 1.0}
    assert found["checkpoint"] == str(checkpoint) and "--calibration 1" in found["command"]
    assert found["packages"]["lm_eval"] and found["machine"]["device"] == "cpu"
    assert found["config"]["torch_seed"] == 3 and found["model"]["calibration"] == 1.0


def test_limit_and_num_fewshot(lm_eval, own_tasks, checkpoint, tasks, call, tmp_path):
    """The two flags reach the harness; a limit is shown beside the table."""
    flags = dict(checkpoint=checkpoint, include_path=tasks, tasks="mhf_choice")
    file = tmp_path / "found.json"
    status, out, err = call(limit=2, num_fewshot=1, output=file, **flags)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (status, found["n-shot"], ", limit 2\n" in out) == (0, {"mhf_choice": 1}, True), err
    assert found["n-samples"]["mhf_choice"]["effective"] == 2


@pytest.mark.parametrize(
    "name, old, new, sentence",
    [
        ("mhf_choice", ".jsonl", ".gone", "your own the data_files they name"),
        ("mhf_choice", "{{choices}}", "{{choices", "mend the task's file"),
        ("mhf_write", "do_sample: false", "num_beams: 4", "generation_kwargs num_beams: only"),
        (
            "mhf_chioce",
            "",
            "",
            "unknown task mhf_chioce; the harness knows mhf_choice, mhf_write; a task",
        ),
    ],
)
def test_tasks_with_a_mistake(
    lm_eval, own_tasks, checkpoint, tasks, call, name, old, new, sentence
):
    """One sentence, exit status 2."""
    if old:
        file = tasks / f"{name}.yaml"
        text = file.read_text(encoding="utf-8").replace(old, new)
        file.write_text(text, encoding="utf-8")
    status, _, err = call(checkpoint=checkpoint, include_path=tasks, tasks=name)
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith("harness.py: error: ") and sentence in last
    assert "Traceback" not in err


def test_the_tasks_of_the_paper_need_a_network(lm_eval, checkpoints, call, monkeypatch):
    """All ten are tasks of the harness; without a network the sentence says so."""
    import lm_eval.tasks as module

    whole, root = module.TaskManager, Path(module.__file__).parent
    # Listing all the others would take ten seconds.
    names = ("lambada", "hellaswag", "piqa", "arc", "winogrande", "openbookqa", "super_glue")
    how = dict(include_path=[root / name for name in (*names, "sciq")], include_defaults=False)
    monkeypatch.setattr(module, "TaskManager", lambda include_path: whole(**how))
    status, _, err = call(checkpoint=checkpoints / "False")
    last = err.splitlines()[-1]
    assert status == 2 and "named tasks need a network for their data" in last
    assert all(name in last for name in harness.PAPER.split()) and "Traceback" not in err


@pytest.mark.parametrize(
    "context, continuation, sentence",
    [
        ("or not t", "o", "no token is left for the continuation in"),
        ("or", " not" * (WINDOW + 1), "a continuation of 65 tokens is longer than the model's"),
    ],
)
def test_continuations_that_cannot_be_scored(
    lm_eval, checkpoint, words, context, continuation, sentence
):
    """One that merges into the context's last token; one that is longer than the window."""
    from lm_eval.api.instance import Instance

    request = Instance("loglikelihood", {}, (context, continuation), 0)
    with pytest.raises(ValueError, match=sentence):
        harness.Adapter(mhf.load(checkpoint), words).loglikelihood([request])
