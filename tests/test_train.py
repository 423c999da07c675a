"""train.py's loop: exact resume, checkpoints that survive, measurements, flags, comparison.

Most tests call main() with a model that takes milliseconds a step. Curves and samples, which take
longer than the training here, are left out except where they are what is tested.
"""

import contextlib
import functools
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import one_sentence
from safetensors.torch import load_file

import mhf
import train

WORDS = ("to be", "or not", "the king", "a horse", "my lord", "speaks", "dies", "sleeps")
TEXT = "".join(f"line {i}: {WORDS[i % 5]} {WORDS[i * i % 8]} {i * 7919 % 97}\n" for i in range(600))
FLAGS = shlex.split("""
    --num_hidden_layers 1 --hidden_size 64 --num_attention_heads 2 --intermediate_size 64
    --num_buckets 256 --bottle_neck_dim 8 --max_position_embeddings 32 --tokens_per_step 64
    --steps 10 --eval_every 5 --eval_tokens 256 --threads 1 --data text.txt --tokenizer bpe:300
    --model mhf --objective independent --num_hashes 4 --adapter_init normal
    --table_initializer_range 0.02 --preset tiny --precision fp32
""")
CPU, DRAW = torch.device("cpu"), train.draw_curves
no_windows = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals or limits")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A cache, in which the tokenizer is trained once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def finished_run(folder, *flags):
    """A whole run, with curves and samples: (its folder, what it printed)."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        assert train.main([*FLAGS, "--out", "my runs é", *flags]) == 0
    (run,) = (folder / "my runs é").iterdir()
    return run, out.getvalue()


@pytest.fixture(scope="module")
def straight(shared, tmp_path_factory):
    """10 steps without a stop, evaluated after 4, 8 and 10: folder and output. To read only."""
    return finished_run(tmp_path_factory.mktemp("straight"), "--eval_every", "4")


@pytest.fixture(autouse=True)
def place(shared, tmp_path, monkeypatch):
    """Every test in a folder of its own with a text, and without pictures and samples."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(train, "draw_curves", lambda *_: None)
    monkeypatch.setattr(train.Run, "sample", lambda *_: "a sample")


def run(*flags, status=0):
    """`python train.py` with the tiny settings and these flags; the folder is runs/a."""
    assert train.main([*FLAGS, "--name", "a", *map(str, flags)]) == status
    return Path("runs/a")


def resume(folder, *flags, status=0):
    assert train.main(["--resume", str(folder), *map(str, flags)]) == status
    return folder


def sentence(capsys, status, command, *parts):
    """Call `command`, which ends with `status`: its one sentence on stderr, with all `parts`."""
    capsys.readouterr()
    assert command() == status
    error = capsys.readouterr().err
    assert error.startswith("train.py: ") and error.count("\n") == 1, error
    for part in parts:
        assert re.search(rf"(?<![\w.]){re.escape(str(part))}(?!\w)", error), (
            f"{part} not in {error}"
        )
    return error


def refused(capsys, *flags, parts=()):
    """A user's mistake: exit 2 and one sentence."""
    return sentence(capsys, 2, lambda: train.main([str(flag) for flag in flags]), *parts)


def checkpoint(folder):
    """The folder that `last` names; its files must be readable."""
    folder = folder / (folder / "last").read_text(encoding="utf-8")
    mhf.load(folder)
    mhf.Tokenizer.load(folder)
    json.loads((folder / "train.json").read_text(encoding="utf-8"))
    return folder


def training_state(folder):
    return torch.load(folder / "optimizer.pt", weights_only=True)


def step_of(folder):
    return json.loads((checkpoint(folder) / "train.json").read_text(encoding="utf-8"))["step"]


def flat(value):
    """All tensors and numbers in nested dicts and lists, in order."""
    if isinstance(value, dict):
        value = [part for item in sorted(value.items(), key=str) for part in item]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in flat(part)]
    return [value]


def log(folder):
    """log.csv without the columns that tell the time, which no two runs share."""
    rows = train.read_log(folder)
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def assert_same(one, two):
    """Weights, optimizer state, loss scale, log and measurements are equal bit for bit."""
    a, b = (load_file(checkpoint(folder) / "model.safetensors") for folder in (one, two))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    a, b = (flat(training_state(checkpoint(folder))) for folder in (one, two))
    assert len(a) == len(b)
    for left, right in zip(a, b):
        assert (
            torch.equal(torch.as_tensor(left), torch.as_tensor(right))
            if isinstance(left, torch.Tensor)
            else left == right
        )
    np.testing.assert_equal(log(one), log(two))  # NaN equals NaN, as in valid_mass of standard


# ---------------------------------------------------------------------------------------------
# A run and what it leaves
# ---------------------------------------------------------------------------------------------


def test_a_run_leaves_all_that_is_promised(straight):
    """Checkpoint, log, curve, samples, the mhf.py it ran, and the sample.py line to type next."""
    folder, out = straight
    names = {path.name for path in folder.iterdir() if not path.name.startswith("step-")}
    names -= {".lock"}  # held while it trains
    assert names == {"last", "best", "log.csv", "curve.png", "samples.txt", "run.json", "mhf.py"}
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (folder / "mhf.py").read_bytes() == Path(mhf.__file__).read_bytes()
    assert (folder / "samples.txt").read_text(encoding="utf-8").count("--- step ") == 3
    line = out.splitlines()[-1]
    assert line.split()[:3] == ["python", "sample.py", "--checkpoint"] and "--explain" in line
    assert Path(shlex.split(line)[3]).name == folder.name


def test_a_run_starts_with_nine_lines(straight):
    """Device, precision, parameters, signatures, steps, memory, loss by chance: a line each."""
    _, out = straight
    names = " ".join(line.split()[0] for line in out.splitlines()[:9])
    assert names == "run device precision data parameters signatures steps memory loss"
    assert "V × D table" in out and "by chance 22.181" in out  # 4 ln 256


def test_every_step_and_evaluation_has_a_row_in_the_log(straight):
    """Rows 1 to 10 have loss, rate and tokens; those of 4, 8 and 10 have a second with measures."""
    folder, _ = straight
    rows = log(folder)
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 11)]
    assert [row["tokens"] for row in rows if "loss" in row] == [64 * n for n in range(1, 11)]
    measured = [row for row in rows if "perplexity" in row]
    assert [row["step"] for row in measured] == [4, 8, 10]
    assert all(row.keys() == {"step", *train.MEASURES} for row in measured)
    assert math.isfinite(sum(flat([list(row.values()) for row in rows])))


def test_a_checkpoint_holds_no_code_and_loads_everywhere(straight):
    """safetensors, JSON, text and one file that torch.load reads with weights_only=True."""
    folder = checkpoint(straight[0])
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "optimizer.pt",
        "tokenizer.tiktoken",
        "tokenizer_meta.json",
        "tokens.txt",
        "train.json",
    }
    assert training_state(folder).keys() == {"optimizer", "scaler"}
    assert mhf.load(folder).signatures.locked is None


def test_the_checkpoint_carries_the_fitted_calibration(straight):
    """τ of the evaluation of all held-out text stands in config.json, and in run.json."""
    folder, _ = straight
    final = json.loads((folder / "run.json").read_text(encoding="utf-8"))["final"]
    assert mhf.load(folder).config.calibration == final["tau"] != 1.0


def test_the_first_lines_of_verbose_name_every_setting(capsys):
    """--verbose prints each setting and each field of the configuration after the eight lines."""
    run("--stop_after", "1", "--verbose")
    printed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    both = {f.name for f in (*fields(train.Settings), *fields(mhf.Config))} - {"extra"}
    assert both <= printed


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "standard"],
        ["--num_hashes", "1"],
        ["--num_lsh", "1"],
        ["--num_hashes", "2", "--num_lsh", "2"],
        ["--objective", "exact", "--extra_layers", "1"],
        ["--objective", "joint", "--adapter_init", "identity", "--table_initializer_range", "0.04"],
    ],
    ids=lambda flags: " ".join(flags).replace("--", ""),
)
def test_every_kind_of_model_trains(flags):
    """Its loss falls in 10 steps, from the first to the mean of the last three, by 5%."""
    losses = [row["loss"] for row in log(run(*flags)) if "loss" in row]
    assert np.mean(losses[-3:]) < 0.95 * losses[0]
    assert mhf.load("runs/a").config.num_hidden_layers == 1 + ("--extra_layers" in flags)


def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch):
    """Twenty runs that start at once, by the same clock, make twenty folders."""
    monkeypatch.setattr(train.time, "strftime", lambda _: "20260101-000000")
    with ThreadPoolExecutor(20) as pool:
        made = [*pool.map(lambda _: train.new_folder(train.Settings(), "mhf"), range(20))]
    assert len(set(made)) == 20 and all(folder.is_dir() for folder in made)


def test_a_name_that_exists_is_refused(capsys):
    """A second run of the same --name is refused and changes nothing."""
    run("--stop_after", "1")
    before = (Path("runs/a") / "log.csv").read_bytes()
    refused(capsys, *FLAGS, "--name", "a", parts=["runs/a", "--name"])
    assert (Path("runs/a") / "log.csv").read_bytes() == before


def test_ids_that_no_token_uses_are_never_sampled():
    """With --vocab_size 320 and 300 tokens, 600 samples at a high temperature are below 300."""
    model = mhf.load(run("--vocab_size", "320", "--stop_after", "1"))
    prompts = torch.zeros(20, 1, dtype=torch.long)
    drawn = torch.stack([*model.generate(prompts, 30, temperature=3.0, seed=0)])
    assert model.config.vocab_size == 320 and 250 < drawn.max() < 300


# ---------------------------------------------------------------------------------------------
# Stopping and resuming
# ---------------------------------------------------------------------------------------------


def test_five_and_five_steps_equal_ten(straight):
    """Weights, AdamW's state, losses and measurements are equal bit for bit on a CPU."""
    folder = run("--eval_every", "4", "--stop_after", "5")
    assert step_of(folder) == 5
    assert_same(resume(folder), straight[0])


def test_a_run_of_many_pieces_equals_one_of_ten_steps(straight):
    """Stops at evaluations, beside them and twice at the same step change nothing."""
    folder = run("--eval_every", "4", "--stop_after", "1")
    for step in (4, 4, 7, 8):
        resume(folder, "--stop_after", step)
    assert_same(resume(folder), straight[0])


def test_a_run_killed_at_its_very_end_is_finished(straight, monkeypatch):
    """Its last step is saved, but not its results and its curve: --resume makes both."""
    folder, drawn = Path(shutil.copytree(straight[0], "a")), []
    about = train.read_run(folder)
    final = about.pop("final")
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    monkeypatch.setattr(train, "draw_curves", lambda *arguments: drawn.append(arguments))
    resume(folder)
    assert train.read_run(folder)["final"] == final and len(drawn) == 1


def test_stop_after_says_how_to_go_on(capsys):
    """--stop_after 3 ends with status 0, a checkpoint of step 3 and the line to type."""
    run("--stop_after", "3")
    assert "--resume runs/a" in capsys.readouterr().out.splitlines()[-1]
    assert step_of(Path("runs/a")) == 3


def test_a_stop_that_was_not_reached_is_forgotten(monkeypatch):
    """Interrupted in step 3 of a run with --stop_after 8, a resume without the flag goes to 10."""
    original = train.batch

    def interrupted(ids, seed, step, *shape):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return original(ids, seed, step, *shape)

    with monkeypatch.context() as patch:
        patch.setattr(train, "batch", interrupted)
        run("--stop_after", "8", status=130)
    assert step_of(resume(Path("runs/a"))) == 10


def test_resume_takes_the_newest_run(capsys):
    """--resume alone goes on with the run whose checkpoint is the latest."""
    for name in "abc":
        run("--stop_after", "1", "--name", name)
    now = time.time()
    for age, name in enumerate("bca"):
        os.utime(f"runs/{name}/last", (now - age, now - age))
    assert train.main(["--resume", "--stop_after", "2"]) == 0
    assert [step_of(Path("runs") / name) for name in "abc"] == [1, 2, 1]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_finishes_the_step_and_saves(name, capsys, monkeypatch):
    """A signal within step 3 leaves a checkpoint of step 3, and the status is 130."""
    which, original = getattr(signal, name), train.learning_rate

    def not_handled(*_):
        raise AssertionError(f"{name} is not handled")

    def interrupted(step, settings):
        if step == 3:
            signal.raise_signal(which)
        return original(step, settings)

    monkeypatch.setattr(train, "learning_rate", interrupted)
    before = signal.signal(which, not_handled)
    try:
        run(status=130)
        assert signal.getsignal(which) is not_handled  # as it was
    finally:
        signal.signal(which, before)
    assert step_of(Path("runs/a")) == 3
    assert "--resume runs/a" in capsys.readouterr().out


def test_a_second_interrupt_ends_at_once(monkeypatch, capsys):
    """Ctrl-C twice within a step does not wait for the step: status 130, no traceback."""

    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step went on")

    monkeypatch.setattr(train, "learning_rate", interrupted)
    run(status=130)
    assert step_of(Path("runs/a")) == 0 and "Traceback" not in capsys.readouterr().err


@no_windows
def test_control_c_in_a_terminal():
    """SIGINT to the program: it saves, prints the line to type, exits with 130; the line works."""
    command = [sys.executable, train.__file__, *FLAGS, "--steps", "100000", "--name", "a"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        deadline = time.monotonic() + 60
        file = Path("runs/a/log.csv")
        while not (file.exists() and file.read_bytes().count(b"\n") > 2):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error == ""
    step = step_of(Path("runs/a"))
    assert f"stopped after step {step}" in out and step >= 2
    assert shlex.split(out.splitlines()[-1]) == ["python", "train.py", "--resume", "runs/a"]
    resume("runs/a", "--stop_after", step + 1)


KILLS = """
import itertools, os, shutil, signal, sys
import torch
import mhf, train

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree")

def resume(folder, moment):
    def hook(event, args, count=itertools.count()):
        if event in EVENTS and isinstance(args[0], (str, os.PathLike)):
            path = os.fspath(args[0])
            if path.startswith(folder + os.sep) and path.count(os.sep) == 2:
                if next(count) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    train.draw_curves, train.Run.sample = (lambda *_: None), (lambda *_: "a sample")
    os._exit(train.main(["--resume", folder, "--stop_after", "8", "--threads", "1"]))

torch.set_num_threads(1)
model = mhf.load("runs/a")  # this, and an optimizer, import what every child will need
train.make_optimizer(model, train.Settings(), torch.device("cpu")).step()
model.save_pretrained("warm-up")
for moment in itertools.count():
    folder = f"killed/{moment}"
    shutil.copytree("runs/a", folder)
    child = os.fork()
    if not child:
        resume(folder, moment)
    if os.WIFEXITED(os.waitpid(child, 0)[1]):
        break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_goes_on(straight):
    """kill -9 before each file operation of four steps and two saves, and then a resume.

    From step 4 to 8 with an evaluation at 8: the log is opened, a checkpoint made, renamed and
    named, pruned, evaluated, and the same step saved again. Each time the checkpoint that `last`
    names loads; going on from it gives the weights and the losses of the run without a kill.
    """
    run("--eval_every", "4", "--stop_after", "4")
    where = os.environ | {"PYTHONPATH": str(Path(train.__file__).parent)}
    command = [sys.executable, "-c", KILLS]
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    runs = sorted(Path("killed").iterdir(), key=lambda path: int(path.name))
    assert len(runs) > 12  # the last one was not killed
    steps = [step_of(folder) for folder in runs]
    assert set(steps) == {4, 8}
    for folder in runs:
        resume(folder)
        a, b = (load_file(checkpoint(f) / "model.safetensors") for f in (folder, straight[0]))
        assert all(torch.equal(a[k], b[k]) for k in a), folder
        losses = [[row for row in log(f) if "loss" in row] for f in (folder, straight[0])]
        assert losses[0] == losses[1], folder


def test_a_run_stopped_before_its_first_step_goes_on(monkeypatch, straight):
    """The checkpoint of step 0 has no log yet; resumed, it gives the ten steps."""
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "advance", lambda _: signal.raise_signal(signal.SIGTERM) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("--eval_every", "4")
    assert step_of(Path("runs/a")) == 0
    assert_same(resume(Path("runs/a")), straight[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", "11"),
        ("learning_rate", "0.1"),
        ("seed", "1"),
        ("num_buckets", "128"),
        ("hidden_size", "32"),
        ("objective", "exact"),
        ("model", "standard"),
        ("tokenizer", "bpe:290"),
        ("tokens_per_step", "128"),
        ("precision", "fp16"),
    ],
)
def test_resume_refuses_another_setting(name, value, straight, capsys):
    """A flag that contradicts the run is refused by name, with both values."""
    refused(capsys, "--resume", straight[0], f"--{name}", value, parts=[f"--{name}", value])


def test_resume_refuses_other_data(straight, capsys):
    """--data with another file is refused by name."""
    Path("other.txt").write_text(TEXT, encoding="utf-8")
    parts = ["--data", "'other.txt'", "'text.txt'"]
    refused(capsys, "--resume", straight[0], "--data", "other.txt", parts=parts)


def test_resume_accepts_the_settings_it_has(straight):
    """The flags of the run's own command line may be typed again."""
    folder = shutil.copytree(straight[0], "again")
    assert train.main([*FLAGS, "--eval_every", "4", "--resume", str(folder)]) == 0


def test_resume_refuses_changed_data_of_the_same_name(straight, capsys):
    """Another text in the same file is refused, with both hashes."""
    Path("text.txt").write_text(TEXT + "One line more.\n", encoding="utf-8")
    was, now = (train.scan([t])[1] for t in (TEXT, TEXT + "One line more.\n"))
    refused(capsys, "--resume", straight[0], parts=["data", was, now])


def test_resume_refuses_a_changed_vocabulary(capsys):
    """The rank file of --tokenizer has changed meanwhile: refused as the vocabulary."""
    mhf.Tokenizer.train(TEXT, 300).save(Path())
    run("--tokenizer", "tokenizer.tiktoken", "--stop_after", "1")
    mhf.Tokenizer.train(TEXT.upper(), 300).save(Path())
    refused(capsys, "--resume", "runs/a", parts=["vocabulary"])


def test_resume_refuses_signatures_that_this_code_does_not_make(capsys, monkeypatch):
    """After an edit of the hash function: how many signatures differ, and what to do."""
    run("--stop_after", "1")
    original = mhf._hash128
    monkeypatch.setattr(mhf, "_hash128", lambda token, seed: original(token, seed + 1))
    capsys.readouterr()
    assert train.main(["--resume", "runs/a"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"^train.py: .* of 300 signatures differ", error), error


def test_resume_refuses_a_model_with_other_parts(capsys, monkeypatch):
    """After an edit that adds a layer: the keys that do not fit are named."""
    run("--stop_after", "1")
    original = mhf.Block.__init__

    def edited(self, config):
        original(self, config)
        self.another = torch.nn.Linear(2, 2)

    monkeypatch.setattr(mhf.Block, "__init__", edited)
    refused(capsys, "--resume", "runs/a", parts=["model.layers.0.another.weight is missing"])


@pytest.mark.parametrize("which", ["nothing", "text.txt", "runs"])
def test_resume_needs_a_run(which, capsys):
    """A folder that is no run, a file, and a folder without one: one sentence."""
    Path("runs").mkdir()
    refused(capsys, "--resume", which, parts=[which])


def test_resume_may_change_where_and_how_fast_it_runs(straight):
    """Every flag of FREE_ON_RESUME is taken; micro batches apart the result is bit for bit equal.

    --compile, --head and --micro_batch, which round otherwise, have their own tests.
    """
    values, flags = dict(device="cpu", threads=1, out="x", name="y", stop_after=10), ["verbose"]
    flags.append("checkpoint_activations")
    assert {*values, *flags, "compile", "micro_batch", "head"} == {*train.FREE_ON_RESUME}
    given = [part for k, v in values.items() for part in (f"--{k}", v)]
    given += [f"--{flag}" for flag in flags]
    assert_same(resume(run("--eval_every", "4", "--stop_after", "5"), *given), straight[0])


@pytest.mark.parametrize("change", [("--micro_batch", 1), ("--head", "plain")], ids=str)
def test_resume_may_change_the_rounding(change, straight):
    """One sequence at a time, or the plain head, from step 5 on: the same losses within 1e-4.

    AdamW divides by the gradients' size, so that what rounding changes grows a little each step.
    """
    folder = resume(run("--eval_every", "4", "--stop_after", "5"), *change)
    losses = [[row["loss"] for row in log(f) if "loss" in row] for f in (folder, straight[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_threads_are_kept_on_resume(monkeypatch):
    """--threads 1 holds for the resumed run, too: the number of threads decides how sums round."""
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    folder = run("--stop_after", "1")
    resume(folder, "--stop_after", "2")
    assert calls == [1, 1]


# ---------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------


def test_the_best_and_the_last_checkpoint_stay(monkeypatch):
    """Perplexities 9, 5, 7, 8 after steps 2, 4, 6, 8: `best` is 4, `last` 9, the rest is gone."""
    numbers = iter([9.0, 5.0, 7.0, 8.0])
    found = dict.fromkeys(train.MEASURES, 1.0)
    monkeypatch.setattr(train, "evaluate", lambda *_: found | {"perplexity": next(numbers)})
    folder = run("--eval_every", "2", "--stop_after", "9")
    assert [(folder / name).read_text(encoding="utf-8") for name in ("last", "best")] == [
        "step-9",
        "step-4",
    ]
    assert {path.name for path in folder.glob("step-*")} == {"step-4", "step-9"}


def test_the_best_is_remembered_across_a_resume(monkeypatch):
    """Perplexity 5 at step 2, 6 at step 4 after a resume: `best` is still step 2."""
    found = dict.fromkeys(train.MEASURES, 1.0)
    monkeypatch.setattr(train, "evaluate", lambda *_: found | {"perplexity": 5.0})
    folder = run("--eval_every", "2", "--stop_after", "3")
    monkeypatch.setattr(train, "evaluate", lambda *_: found | {"perplexity": 6.0})
    resume(folder, "--stop_after", "4")
    assert (folder / "best").read_text(encoding="utf-8") == "step-2"
    assert {path.name for path in folder.glob("step-*")} == {"step-2", "step-4"}


def test_it_saves_before_it_evaluates(monkeypatch):
    """When an evaluation fails, the checkpoint of its step is there."""

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(train, "evaluate", fail)
    with pytest.raises(ZeroDivisionError):
        run()
    assert step_of(Path("runs/a")) == 5


@no_windows
@pytest.mark.parametrize("size", [500_000, 50_000, 20], ids=["optimizer", "weights", "log"])
def test_a_full_disk_leaves_the_old_checkpoint(size, capsys):
    """No file may grow beyond a size: status 1, one sentence, and step 5 is still whole.

    The optimizer's state takes 0.8 MB and the weights 0.4 MB; with 20 bytes even the log is full.
    """
    import resource

    folder, limits = run("--stop_after", "5"), resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            return train.main(["--resume", str(folder), "--stop_after", "7"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    sentence(capsys, 1, limited)
    assert step_of(folder) == 5 and not [*folder.glob("step-*.tmp")]
    resume(folder)
    assert step_of(folder) == 10


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing")],
    ids=["OSError", "RuntimeError"],
)
def test_a_failed_save_names_the_checkpoint_that_is_whole(error, capsys, monkeypatch):
    """Both errors that PyTorch has for a full disk: the sentence names step 5 and --resume."""
    folder = run("--stop_after", "5")

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        command = functools.partial(train.main, ["--resume", "runs/a", "--stop_after", "7"])
        sentence(capsys, 1, command, "step 7", "runs/a/step-5", "--resume")
    assert step_of(folder) == 5 and {p.name for p in folder.glob("step-*")} == {"step-5"}


def test_an_output_folder_that_cannot_be_written(capsys):
    """--out below a regular file: one sentence, exit 2."""
    refused(capsys, *FLAGS, "--out", "text.txt", parts=["--out", "text.txt"])
    refused(capsys, *FLAGS, "--out", "text.txt/below", parts=["--out", "text.txt/below"])


# ---------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------


def tiny(model="mhf", unused=0, scale=8.0, **overrides):
    """A model whose softmax is not flat, its tokens, and the number of bytes of each."""
    tokens = [b"%x" % i for i in range(40)]
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    sizes |= dict(num_hashes=3, num_buckets=12, bottle_neck_dim=4, max_position_embeddings=8)
    config = mhf.Config(vocab_size=40 + unused, model=model, **sizes | overrides)
    torch.manual_seed(0)
    if model == "standard":
        made = mhf.Transformer(config)
    else:
        table = mhf.SignatureTable(3, 12)
        table.extend(tokens + [None] * unused, pad_id=0)
        made = mhf.MultiHashFormer(config, table)
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(scale if p.dim() > 1 else 1.0)
    return made.eval(), torch.tensor([len(t) for t in tokens] + [0] * unused)


@pytest.mark.parametrize("objective", mhf.OBJECTIVES)
def test_micro_batches_give_the_same_gradients(objective):
    """1, 3 and all of 7 sequences at a time: loss and gradients within 1e-5 of the largest.

    The sums are rounded in another order; float32 has 7 digits and sums of 56 terms lose one.
    """
    model, _ = tiny()
    x, y = torch.randint(40, (2, 7, 8), generator=torch.Generator().manual_seed(1))
    results = []
    for micro in (1, 3, 7):
        model.zero_grad()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        value = train.accumulate(model.loss, x, y, objective, micro, contextlib.nullcontext, scaler)
        results.append((float(value), [p.grad.clone() for p in model.parameters()]))
    largest = max(grad.abs().max() for grad in results[2][1])
    for value, grads in results[:2]:
        assert value == pytest.approx(results[2][0], rel=1e-5)
        assert all((a - b).abs().max() < 1e-5 * largest for a, b in zip(grads, results[2][1]))
    assert results[2][0] == pytest.approx(model.loss(x, y, objective).item(), rel=1e-5)


def test_the_micro_batch_by_default_divides_the_step():
    """On a CPU about 1,024 tokens at a time, never more than the step has, never 0 sequences."""
    sizes = [(2, 32), (8, 256), (4, 2048)]
    expected = []
    for rows, T in sizes:
        flags = ["--max_position_embeddings", str(T), "--tokens_per_step", str(rows * T)]
        settings, overrides = train.settings_of(train.parse([*FLAGS, *flags]))
        config = mhf.Config.preset("tiny", vocab_size=300, **overrides)
        tokenizer = mhf.Tokenizer.train(TEXT, 300)
        corpus = train.Corpus("", "", tokenizer, "", None, None)
        expected.append(train.Run(settings, config, corpus, None).micro)
    assert expected == [2, 4, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere getrusage has to do")
def test_peak_memory_is_the_process_own():
    """A process that a larger one started tells its own peak, not its parent's."""
    large = bytearray(2**29)
    code = "import torch, train; print(train.peak_memory(torch.device('cpu')))"
    environment = os.environ | {"PYTHONPATH": str(Path(train.__file__).parent)}
    child = float(subprocess.check_output([sys.executable, "-c", code], env=environment))
    assert 0.1 < child < train.peak_memory(CPU) - 0.25 and len(large) == 2**29


@pytest.mark.parametrize(("gib", "expected"), [(80, 8), (24, 4), (14.6, 2), (2, 1)])
def test_the_micro_batch_follows_the_memory(gib, expected, monkeypatch):
    """Elsewhere: 16,384 positions, or fewer, so that the plan takes half of the memory at most."""
    monkeypatch.setattr(train, "total_memory", lambda device: gib)
    settings, overrides = train.settings_of(train.parse(["--preset", "100m", "--data", "text.txt"]))
    run = train.Run.__new__(train.Run)
    run.device, run.precision, run.loss_head = torch.device("cuda"), "bf16", "lean"
    run.settings, run.config = settings, mhf.Config.preset("100m")
    with torch.device("meta"):
        run.model = train.mhf.Transformer(run.config)
    assert run.default_micro_batch() == expected


def test_weight_decay_is_for_matrices_only():
    """A step with zero gradients shrinks matrices and the table by lr · decay, and nothing else."""
    model, _ = tiny()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = train.make_optimizer(model, train.Settings(weight_decay=0.5), CPU)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        matrix = name.endswith("weight") and "norm" not in name
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if matrix else 1.0))


def test_gradients_are_clipped():
    """After a step their norm is --grad_clip; the log has the norm before, which is larger."""
    made = train.new_run(train.parse([*FLAGS, "--grad_clip", "0.5"]))
    assert made.advance()["grad_norm"] > 1
    norm = torch.stack([p.grad.norm() for p in made.model.parameters()]).norm().item()
    assert norm == pytest.approx(0.5, rel=1e-4)  # the norm is divided by norm + 1e-6


def test_the_learning_rate_rises_and_falls():
    """Linear to the peak in 5% of the steps, half-way of the cosine in the middle, a tenth last."""
    settings = train.Settings(steps=200, learning_rate=1.0)
    rates = [train.learning_rate(step, settings) for step in range(1, 201)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[104] == pytest.approx(0.55)  # step 105: the middle of 10 to 200
    assert rates[57] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 48 / 190)) / 2)
    assert rates[-1] == pytest.approx(0.1)
    assert sorted(rates[9:], reverse=True) == rates[9:]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_learning_rate_of_very_short_runs(steps):
    """Even a run of one step has a positive rate, at most the peak."""
    settings = train.Settings(steps=steps, learning_rate=1.0)
    rates = [train.learning_rate(step, settings) for step in range(1, steps + 1)]
    assert rates[0] == 1.0 and all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize(
    ("model", "objective"), [("standard", "exact"), *(("mhf", name) for name in mhf.OBJECTIVES)]
)
def test_the_first_loss_is_that_of_chance(model, objective, monkeypatch):
    """H ln B, ln V or ln V + λ ln B, within 3%: logits have variance 0.02² · D, not 0."""
    rows = log(run("--model", model, "--objective", objective, "--stop_after", "1"))
    config = mhf.load("runs/a").config
    expected = {
        "standard": math.log(300),
        "independent": 4 * math.log(256),
        "exact": math.log(300),
        "joint": math.log(300) + 0.25 * math.log(256),
    }[model if model == "standard" else objective]
    assert train.chance_loss(config) == pytest.approx(expected, rel=1e-9)
    assert rows[0]["loss"] == pytest.approx(expected, rel=0.03)


def test_a_loss_that_is_not_finite_ends_the_run(capsys, monkeypatch):
    """At step 7: status 1, one sentence with the step and the checkpoint of step 5."""
    original, calls = mhf.MultiHashFormer.loss, []

    def loss(*arguments):
        calls.append(1)
        return original(*arguments) * (math.nan if len(calls) == 7 else 1)

    monkeypatch.setattr(mhf.MultiHashFormer, "loss", loss)
    command = functools.partial(train.main, [*FLAGS, "--name", "a"])
    sentence(capsys, 1, command, "step 7", "nan", "runs/a/step-5")
    assert step_of(Path("runs/a")) == 5
    assert not any(math.isnan(x) for x in flat([list(row.values()) for row in log("runs/a")]))


@pytest.mark.parametrize(("rows", "advice"), [(8, "--micro_batch 4"), (1, "--preset")])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore lines."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
    ids=["gpu", "cpu"],
)
def test_out_of_memory_is_one_sentence(error, rows, advice, capsys, monkeypatch):
    """Status 1, with used, total and the next smaller --micro_batch, or of one a smaller model."""

    def fail(*_):
        raise error

    monkeypatch.setattr(mhf.MultiHashFormer, "loss", fail)
    flags = [*FLAGS, "--tokens_per_step", str(32 * rows)]
    found = sentence(capsys, 1, lambda: train.main(flags), f"{rows} sequences", advice)
    used, total = map(float, re.search(r"([\d.]+) GiB used of ([\d.]+)", found).groups())
    assert 0 < used < total


def test_other_errors_are_not_called_out_of_memory(monkeypatch):
    """A RuntimeError of another kind, a bug in an edit, keeps its traceback."""

    def fail(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(mhf.MultiHashFormer, "loss", fail)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train.main(FLAGS)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_compiled_checkpoints_have_the_same_keys_and_losses(straight, monkeypatch):
    """--compile leaves no `_orig_mod.` in a key and computes the same losses.

    The graph is captured as usual and run without code generation, which takes a minute and a C++
    compiler; so the losses are equal within rounding, 1e-5.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    folder = run("--eval_every", "4", "--compile", "--stop_after", "3")
    keys = [load_file(checkpoint(f) / "model.safetensors").keys() for f in (folder, straight[0])]
    assert keys[0] == keys[1]
    losses = [[row["loss"] for row in log(f)[:3]] for f in (folder, straight[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# ---------------------------------------------------------------------------------------------
# Device and precision
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("cuda", (7, 0), "fp16"),
        ("cuda", (7, 5), "fp16"),
        ("cuda", (8, 0), "bf16"),
        ("cuda", (8, 9), "bf16"),
        ("cuda", (10, 0), "bf16"),
        ("cpu", None, "fp32"),
        ("mps", None, "fp32"),
    ],
)
def test_precision_goes_by_the_hardware(device, capability, expected, monkeypatch):
    """A T4 (7.5), which only emulates bf16, gets fp16; 8.0 and later bf16; others float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    found, reason = train.choose_precision("auto", torch.device(device), capability)
    assert found == expected and reason
    if capability:
        assert "{}.{}".format(*capability) in reason


def changed_cascade(self, h, table, targets=None, force=(), predict=mhf.predict):
    """A cascade changed in a way that only the plain head follows."""
    for o, loss, e in mhf_steps(self, h, table, targets, force, predict):
        yield o, loss if predict is mhf.predict else 2 * loss, e


mhf_steps = mhf.CascadeDecoder.steps


def test_a_lean_head_that_differs_is_refused(monkeypatch, capsys):
    """The first micro-batch is computed by both heads; a difference stops the run before it is."""
    monkeypatch.setattr(mhf.CascadeDecoder, "steps", changed_cascade)
    flags = [*FLAGS, "--name", "a"]
    sentence(capsys, 2, lambda: train.main(flags), "lean", "100%", "the loss", "--head plain")
    assert train.main([*FLAGS, "--head", "plain", "--steps", "1"]) == 0


def test_a_lean_head_that_fails_is_refused(monkeypatch, capsys):
    """A cascade that the lean head cannot run at all is named with the error and the remedy."""

    def sums(self, h, table, *others, **more):
        return mhf_steps(self, h, table.sum(-1, keepdim=True) + table, *others, **more)

    monkeypatch.setattr(mhf.CascadeDecoder, "steps", sums)
    sentence(capsys, 2, lambda: train.main(FLAGS), "lean", "AttributeError", "--head plain")
    assert train.main([*FLAGS, "--head", "plain", "--steps", "1"]) == 0


@pytest.mark.parametrize("field", ["table", "c"])
def test_wrong_lean_gradients_are_refused(field, monkeypatch, capsys):
    """A mistake in one of the gradients by hand is found, and the quantity named."""
    backward = mhf.LeanPrediction.backward

    def wrong(ctx, *grads):
        dc, *others = backward(ctx, *grads)
        if field == "table":
            ctx.dE.mul_(1.01)
        return (dc if field == "table" else 1.01 * dc), *others

    monkeypatch.setattr(mhf.LeanPrediction, "backward", staticmethod(wrong))
    what = "model.embed_tokens.weight" if field == "table" else "the states"
    sentence(capsys, 2, lambda: train.main(FLAGS), "the gradient of", what, "--head plain")


def test_a_parameter_that_only_plain_trains_is_found(monkeypatch, capsys):
    """A new parameter outside the decoder, which the lean head would leave untrained, is named."""
    nll, build = mhf.MultiHashFormer.nll, train.build_model

    def scaled(self, h, targets, objective, head=None):
        return nll(self, h * self.gain, targets, objective, head)

    def built(*arguments):
        model = build(*arguments)
        model.gain = torch.nn.Parameter(torch.ones(()))
        return model

    monkeypatch.setattr(mhf.MultiHashFormer, "nll", scaled)
    monkeypatch.setattr(train, "build_model", built)
    sentence(capsys, 2, lambda: train.main(FLAGS), "gain", "--head plain")


def test_checkpointed_activations_change_nothing():
    """The gradients are bit for bit those without, for the same operations are run twice."""
    model, _ = tiny()
    x, y = torch.randint(40, (2, 7, 8), generator=torch.Generator().manual_seed(1))
    results = []
    for recompute in (False, True):
        model.zero_grad()
        model.model.checkpoint_activations = recompute
        model.loss(x, y).backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def saved_bytes(model, ids, low):
    """Bytes of the tensors that autograd keeps up to the states, the parameters apart."""
    fixed = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found, kept = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # or its memory would be used again
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, low),
    ):
        model(ids).sum()
    return sum(found.values())


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_plan_is_what_autograd_keeps(low, recompute):
    """The estimate of embedding and blocks is within 15% of what 8 layers really save.

    With recomputation it counts one block's activations more, which exist in the backward pass.
    """
    fields = dict(num_hidden_layers=8, num_buckets=64, max_position_embeddings=512)
    config = mhf.Config(intermediate_size=512, num_key_value_heads=2, **fields)
    table = mhf.SignatureTable(4, 64)
    table.extend([b"%d" % i for i in range(40)], 0)
    model = mhf.MultiHashFormer(config, table)
    model.model.checkpoint_activations = recompute
    n = sum(p.numel() for p in model.model.layers.parameters())
    plan = train.memory_plan(model.config, n, 512, low, recompute, "lean", CPU)["blocks"]
    one = saved_bytes(model, torch.ones(1, 512, dtype=torch.long), low)
    if recompute:
        model.model.checkpoint_activations = False
        whole = saved_bytes(model, torch.ones(1, 512, dtype=torch.long), low)
        one += whole / 8 + (n * 2 * 7 / 8 if low else 0)
    assert plan == pytest.approx(one, rel=0.15)


@pytest.mark.parametrize(("preset", "gib"), [("100m", 2.1), ("1b", 17.0), ("3b", 43.3)])
def test_state_of_the_papers_models(preset, gib):
    """16 bytes a parameter: weights, gradients and AdamW's two moments in float32.

    The figures, from elsewhere, leave out gate and mixers: up to 0.15 GiB.
    """
    with torch.device("meta"):
        config = mhf.Config.preset(preset)
        parameters = sum(p.numel() for p in mhf.Backbone(config, 4 * 16384).parameters())
        for module in (mhf.GatedEmbedding(config), mhf.CascadeDecoder(config)):
            parameters += sum(p.numel() for p in module.parameters())
    state = train.memory_plan(config, parameters, 2048, True, False, "lean", CPU)["state"]
    assert gib - 0.05 < state / 2**30 < gib + 0.15


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_bf16"])
def test_a_cpu_that_computes_bf16_is_given_it(feature, monkeypatch):
    """Either of the two instruction sets that multiply bf16 matrices will do."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True}, raising=False)
    assert train.choose_precision("auto", CPU)[0] == "bf16"


def test_a_run_keeps_its_precision():
    """What auto came to is stored: a run goes on in it on a machine with another default."""
    folder = run("--precision", "auto", "--stop_after", "1")
    state = json.loads((checkpoint(folder) / "train.json").read_text(encoding="utf-8"))
    assert state["settings"]["precision"] == train.choose_precision("auto", CPU)[0]


def test_precision_can_be_set():
    """--precision wins over the hardware."""
    for name in ("fp32", "bf16", "fp16"):
        assert train.choose_precision(name, torch.device("cuda"), (7, 5))[0] == name


@pytest.fixture
def loss_scale(monkeypatch):
    """Sets the loss scale of the first step in fp16, as a power of 2."""
    original = torch.amp.GradScaler

    def start_at(power):
        scaler = functools.partial(original, init_scale=2.0**power)
        monkeypatch.setattr(torch.amp, "GradScaler", scaler)

    return start_at


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_lower_precision_trains_on_a_cpu(precision, straight, loss_scale):
    """The losses of ten steps are those of float32 within 1%, three digits of bf16."""
    loss_scale(10)  # no overflow
    losses = [
        [row["loss"] for row in log(folder) if "loss" in row]
        for folder in (run("--precision", precision, "--eval_every", "20"), straight[0])
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_skipped_steps_are_counted(loss_scale):
    """A step that overflows halves the scale, is counted, and is none of AdamW's updates."""
    loss_scale(16)
    folder = run("--precision", "fp16", "--stop_after", "9")
    skipped = [row["skipped_steps"] for row in log(folder) if "loss" in row]
    state = training_state(checkpoint(folder))
    assert 2 < skipped[-1] < 9 and skipped[0] == 1 and sorted(skipped) == skipped
    assert state["scaler"]["scale"] == 2.0 ** (16 - skipped[-1])
    assert {s["step"].item() for s in state["optimizer"]["state"].values()} == {9 - skipped[-1]}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_skipped_steps_leave_weights_alone(loss_scale):
    """After a first step that overflows the weights are those of the start, bit for bit."""
    loss_scale(20)
    folder = run("--precision", "fp16", "--stop_after", "1")
    model = mhf.load(folder)
    tokenizer = mhf.Tokenizer.load(checkpoint(folder))
    torch.manual_seed(1337)
    start = train.build_model(model.config, tokenizer)
    a, b = model.state_dict(), start.state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("stop", ["2", "8"])
def test_the_loss_scale_is_restored(stop, loss_scale):
    """In fp16, stopped amid the overflows or after them, two pieces equal one, scale and all."""
    loss_scale(16)
    run("--precision", "fp16", "--name", "whole")
    whole = Path("runs/whole")
    run("--precision", "fp16", "--stop_after", stop)
    assert_same(resume(Path("runs/a")), whole)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("first", "second"), [("fp32", "fp16"), ("fp16", "fp32")])
def test_a_run_goes_on_where_another_precision_is_chosen(first, second, monkeypatch):
    """With --precision auto a run may move from a CPU to a T4 and back."""
    monkeypatch.setattr(train, "choose_precision", lambda *_: (first, "for a test"))
    folder = run("--stop_after", "2")
    monkeypatch.setattr(train, "choose_precision", lambda *_: (second, "for a test"))
    resume(folder, "--stop_after", "3")
    assert step_of(folder) == 3


# ---------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------


def drawn_exactly(tau, rows=(range(1, 9), (5, 1, 1, 30, 2, 2, 7, 3))):
    """Scores τ · log p and targets that have the frequencies p exactly."""
    scores, targets = [], []
    for counts in rows:
        counts = torch.tensor(list(counts))
        targets.append(torch.repeat_interleave(torch.arange(len(counts)), counts))
        scores.append((tau * counts.log()).expand(int(counts.sum()), -1))
    return torch.cat(scores), torch.cat(targets)


@pytest.mark.parametrize("tau", [0.05, 0.3, 1.0, 2.7, 30.0])
def test_calibration_recovers_a_known_temperature(tau):
    """Scores are τ times the log probabilities of the targets: τ comes out, to 4 digits.

    Newton's method stops at steps of 1e-5.
    """
    scores, targets = drawn_exactly(tau)
    assert train.fit_calibration(scores, targets) == pytest.approx(tau, rel=1e-4)


def test_calibration_is_where_the_loss_is_flat():
    """At the τ found for random scores the loss has no slope, and more on both sides.

    The slope in ln τ is 1e-4 at most where the curvature is about 1: Newton's last step is 1e-5.
    """
    generator = torch.Generator().manual_seed(0)
    scores = 5 * torch.randn(400, 30, generator=generator)
    targets = (scores / 3).softmax(-1).multinomial(1, generator=generator)[:, 0]
    log_tau = torch.tensor(train.fit_calibration(scores, targets)).log().requires_grad_()
    F.cross_entropy(scores / log_tau.exp(), targets).backward()
    assert abs(log_tau.grad) < 1e-4
    loss = [F.cross_entropy(scores / (log_tau + d).exp(), targets) for d in (-0.05, 0, 0.05)]
    assert loss[1] < loss[0] and loss[1] < loss[2]


def test_calibration_with_ids_that_no_token_uses():
    """Columns of −inf, among them in front, change nothing."""
    scores, targets = drawn_exactly(2.0)
    hole = torch.full((len(scores), 2), -math.inf)
    found = train.fit_calibration(torch.cat((hole, scores, hole), 1), targets + 2)
    assert found == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("right", [True, False])
def test_calibration_of_a_certain_model_stays_finite(right):
    """Always right, or always wrong: τ is the least or the largest, 1e-3 or 1e3, not 0 or inf."""
    scores = torch.zeros(20, 5)
    scores[:, 0] = 3.0
    targets = torch.zeros(20, dtype=torch.long) if right else 1 + torch.arange(20) % 4
    found = train.fit_calibration(scores, targets)
    assert found == pytest.approx(1e-3 if right else 1e3, rel=1e-3) or 0 < found < 0.2 * right


def by_hand(model, ids, count):
    """The windows of evaluate(), spread evenly from the first to the last that fits."""
    T = model.config.max_position_embeddings
    starts = [int(i * (len(ids) - 1 - T) / (count - 1)) for i in range(count)]
    rows = torch.tensor([ids[s : s + T + 1].tolist() for s in starts])
    return rows[:, :-1], rows[:, 1:]


CASES = [("mhf", "independent", 0), ("mhf", "joint", 3), ("mhf", "exact", 0)]


@pytest.mark.parametrize(("kind", "objective", "unused"), [*CASES, ("standard", "exact", 0)])
@torch.no_grad()
def test_evaluation_equals_a_direct_computation(kind, objective, unused):
    """Its numbers are those of model.log_probs, model.loss and enumerated signatures, to 5 digits.

    On every other window, with τ fitted to the rest; float32 sums in another order.
    """
    model, sizes = tiny(kind, unused, objective=objective)
    ids = np.random.default_rng(0).integers(0, 40, 301).astype(np.uint16)
    found = train.evaluate(model, ids, sizes, contextlib.nullcontext, max_tokens=11 * 8 + 5)
    x, y = by_hand(model, ids, 11)
    tau = train.fit_calibration(model.log_probs(x[::2]).flatten(0, 1), y[::2].flatten())
    model.config.calibration = tau  # it was 1
    x, y = x[1::2], y[1::2]
    log_p = model.log_probs(x)
    nll = -log_p.gather(-1, y.unsqueeze(-1)).double().sum().item()
    expected = {
        "val_objective": model.loss(x, y, objective).item(),
        "perplexity": math.exp(nll / y.numel()),
        "tau": tau,
        "top1": (log_p.argmax(-1) == y).double().mean().item(),
        "valid_mass": math.nan,
        "bits_per_byte": nll / math.log(2) / sum(len(b"%x" % i) for i in y.flatten().tolist()),
    }
    if kind == "mhf":
        log_buckets = model.head_logits(x).log_softmax(-1)  # (N, T, H, B)
        mass = sum(
            log_buckets[:, :, [0, 1, 2], list(signature)].sum(-1).exp()
            for signature in {tuple(row) for row in model.signatures.ids[:40].tolist()}
        )
        expected["valid_mass"] = mass.mean().item()
    assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert expected["perplexity"] > 5


def test_a_hopeless_model_has_a_finite_perplexity(monkeypatch):
    """A loss of thousands of nats, whose exponential no float holds, is still logged."""
    monkeypatch.setattr(train, "fit_calibration", lambda *_: 1e-3)
    model, sizes = tiny()
    ids = np.random.default_rng(0).integers(0, 40, 100)
    found = train.evaluate(model, ids, sizes, contextlib.nullcontext)
    assert found["bits_per_byte"] > 1000 and math.isfinite(found["perplexity"])


def test_evaluation_of_everything_takes_every_token():
    """Without a limit the windows lie side by side: as many as fit, the last at the end."""
    model, sizes = tiny()
    seen = []
    ids = np.arange(8 * 5 + 1) % 40
    original = model.forward
    model.forward = lambda x: seen.append(x) or original(x)
    train.evaluate(model, ids, sizes, contextlib.nullcontext)
    assert sorted(torch.cat(seen).flatten().tolist()) == sorted(ids[:-1].tolist())


def test_evaluation_in_parts_equals_the_run(straight):
    """A checkpoint, loaded, measures on the held-out text what the run printed at its end."""
    folder, _ = straight
    model = mhf.load(folder)
    found = json.loads((folder / "run.json").read_text(encoding="utf-8"))["final"]
    corpus = train.prepare(train.Settings(data=["text.txt"], tokenizer="bpe:300"))
    sizes = torch.tensor([len(token) for token in corpus.tokenizer.all_bytes()])
    again = train.evaluate(model, corpus.held_out, sizes, contextlib.nullcontext)
    assert again == pytest.approx(found, rel=1e-6)


# ---------------------------------------------------------------------------------------------
# Comparison
# ---------------------------------------------------------------------------------------------


def test_compare_shows_what_differs(straight, tmp_path, capsys, monkeypatch):
    """Settings that differ, the results of each, the difference of the source, and a picture."""
    monkeypatch.setattr(train, "draw_curves", DRAW)
    one = shutil.copytree(straight[0], tmp_path / "one")
    two, _ = finished_run(tmp_path, "--objective", "exact", "--learning_rate", "0.001")
    two = shutil.move(two, tmp_path / "two")
    source = (two / "mhf.py").read_text(encoding="utf-8").replace("x = self.norm(x)", "x = x  # !")
    (two / "mhf.py").write_text(source, encoding="utf-8")
    assert train.main(["--compare", "one", "two"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["objective"] == ["independent", "exact"]
    assert rows["learning_rate"] == ["0.002", "0.001"] and rows["eval_every"] == ["4", "5"]
    assert "hidden_size" not in rows and "seed" not in rows
    for folder, column in ((one, 0), (two, 1)):
        final = json.loads((folder / "run.json").read_text(encoding="utf-8"))["final"]
        for name in train.MEASURES:
            assert float(rows[name][column]) == pytest.approx(final[name], rel=1e-5)
    assert "they differ" in out and "+        x = x  # !" in out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_compare_of_runs_with_the_same_source(straight, capsys):
    """Nothing differs: no setting is listed and the sources are called the same."""
    shutil.copytree(straight[0], "one")
    shutil.copytree(straight[0], "two")
    assert train.main(["--compare", "one", "two"]) == 0
    out = capsys.readouterr().out
    assert "the same" in out and "learning_rate" not in out


def test_compare_needs_runs(straight, capsys):
    """A folder that is no run is named."""
    refused(capsys, "--compare", straight[0], "nowhere", parts=["nowhere"])


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------

MISTAKES = [
    ("--preset huge", ["huge", "tiny", "small"]),
    ("--tokenizer nothing", ["nothing", "gpt2"]),
    ("--tokenizer bpe:x", ["bpe:x"]),
    ("--device nothing", ["nothing"]),
    ("--device meta", ["meta"]),
    ("--precision fp8", ["fp8", "bf16"]),
    ("--num_buckets 1", ["num_buckets", "1"]),
    ("--num_hashes 0", ["num_hashes", "0"]),
    ("--num_lsh 5", ["num_lsh", "5", "4"]),
    ("--hidden_size 65", ["hidden_size", "65", "2"]),
    ("--head_dim 5", ["head_dim", "5"]),
    ("--num_attention_heads 4 --num_key_value_heads 3", ["num_key_value_heads", "4", "3"]),
    ("--num_hashes 2 --num_buckets 8", ["300 tokens", "50 signatures"]),
    ("--vocab_size 200", ["vocab_size", "200", "300"]),
    ("--calibration 0", ["calibration", "0.0"]),
    ("--extra_layers -1", ["num_hidden_layers", "0"]),
    ("--steps 0", ["--steps", "0"]),
    ("--tokens_per_step 65", ["--tokens_per_step", "65", "32"]),
    ("--tokens_per_step 0", ["--tokens_per_step", "0"]),
    ("--micro_batch 0", ["--micro_batch", "0"]),
    ("--eval_every 0", ["--eval_every", "0"]),
    ("--eval_tokens 0", ["--eval_tokens", "0"]),
    ("--threads 0", ["--threads", "0"]),
    ("--stop_after 0", ["--stop_after", "0"]),
    ("--learning_rate 0", ["--learning_rate", "0.0"]),
    ("--learning_rate nan", ["--learning_rate", "nan"]),
    ("--grad_clip -1", ["--grad_clip", "-1.0"]),
    ("--beta2 1.5", ["1.5"]),
    ("--seed -1", ["--seed", "-1"]),
    ("--max_position_embeddings 4096 --tokens_per_step 4096", ["held-out", "4096"]),
]


@pytest.mark.parametrize(("flags", "parts"), MISTAKES, ids=[flags for flags, _ in MISTAKES])
def test_a_wrong_setting_is_one_sentence(flags, parts, capsys):
    """Exit 2, one sentence with the name and the value, no traceback, and no folder of a run."""
    refused(capsys, *FLAGS, *flags.split(), parts=parts)
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_cuda_where_there_is_none(name, capsys):
    """--device cuda on a machine without: exit 2, and what to use instead."""
    refused(capsys, *FLAGS, "--device", name, parts=[f"--device {name}", "--device auto"])


@pytest.mark.parametrize(
    "flags",
    ["--nothing 1", "--steps many", "--model gpt", "--objective best", "--step 3", "--extra 1"],
)
def test_a_flag_that_argparse_refuses(flags, capsys):
    """Unknown, abbreviated and mistyped flags: exit 2, the last line names the flag."""
    with pytest.raises(SystemExit) as stopped:
        train.main(flags.split())
    assert stopped.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_help_names_every_setting(capsys, monkeypatch):
    """Every field of Config but `extra`, and of Settings, is a flag; help needs no data."""
    monkeypatch.setattr(train, "prepare", None)
    monkeypatch.setattr(train, "choose_device", None)
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    words = set(re.findall(r"--\w+", capsys.readouterr().out))
    names = [f.name for f in (*fields(mhf.Config), *fields(train.Settings)) if f.name != "extra"]
    assert stopped.value.code == 0
    assert words == {f"--{name}" for name in (*names, "resume", "compare", "prepare", "help")}


def test_every_flag_reaches_its_field():
    """A value given for a field arrives in the configuration or the settings, with its type."""
    argv, expected = [], {}
    for f in fields(mhf.Config):
        if f.name not in ("extra", "model", "objective"):
            kind = next(t for t in (int, float, str) if str(t.__name__) in str(f.type))
            expected[f.name] = kind(3)
            argv += [f"--{f.name}", "3"]
    assert {k: v for k, v in train.parse(argv).items()} == expected


def test_output_that_is_not_utf8_does_not_end_a_run(monkeypatch):
    """On a terminal or pipe that knows ASCII only, τ and × do not end the training."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    run("--stop_after", "5")
    stream.flush()
    assert b"parameters" in stream.buffer.getvalue()


def test_the_presets_have_training_defaults():
    """Every preset of mhf.py has its steps, batch and rate here, whole contexts long."""
    assert train.TRAINING.keys() == mhf.PRESETS.keys()
    for name in mhf.PRESETS:
        settings, _ = train.settings_of({"preset": name, "device": "cpu"})
        length = mhf.Config.preset(name).max_position_embeddings
        assert settings.tokens_per_step % length == 0 and settings.eval_every <= settings.steps


def test_the_preset_goes_by_the_device(monkeypatch):
    """auto is tiny on a CPU and small on a GPU."""
    for device, expected in (("cpu", "tiny"), ("cuda", "small"), ("mps", "small")):
        monkeypatch.setattr(train, "choose_device", lambda _, d=device: (torch.device(d), ""))
        assert train.settings_of({})[0].preset == expected


def test_an_evaluation_lost_to_a_kill_is_made_up_for(monkeypatch):
    """A run killed between saving and measuring measures as it goes on, so `best` loses nothing."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train.Run, "measure", lambda self: sys.exit("killed"))
        run()
    rows = train.read_log(resume(Path("runs/a")), "perplexity")
    assert [row["step"] for row in rows] == [5, 10]


def test_the_standard_model_has_no_unused_ids(capsys):
    """Its softmax would give them probability, so more than the tokenizer has is refused."""
    refused(capsys, *FLAGS, "--model", "standard", "--vocab_size", 320, parts=(320, 300))


@no_windows
def test_a_reader_that_has_enough_ends_the_run_quietly():
    """`python train.py | head -1`: no traceback when the pipe is gone."""
    script = Path(train.__file__)
    command = shlex.join([sys.executable, str(script), *FLAGS]) + " | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("run ") and "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_an_infinite_gradient_stops_before_it_is_applied(monkeypatch, capsys):
    """A gradient that is not finite would put NaN into every weight, and into a checkpoint."""
    accumulate = train.accumulate

    def planted(loss, *others):
        value = accumulate(loss, *others)
        if steps.append(1) or len(steps) == 5:  # an evaluation step, which saves
            next(loss.parameters()).grad[0] = math.inf
        return value

    steps = []
    monkeypatch.setattr(train, "accumulate", planted)
    sentence(capsys, 1, lambda: train.main([*FLAGS, "--name", "a"]), "step-0", "inf")
    assert step_of(Path("runs/a")) == 0


@pytest.mark.parametrize("damage", ["short optimizer", "no optimizer", "key", "extra", "not JSON"])
def test_damaged_training_state_is_one_sentence(damage, capsys):
    """A cut optimizer.pt, a train.json of another version: named, and no traceback."""
    folder = checkpoint(run("--stop_after", 2))
    state = json.loads((folder / "train.json").read_text(encoding="utf-8"))
    if damage.endswith("optimizer"):
        data = (folder / "optimizer.pt").read_bytes()
        (folder / "optimizer.pt").write_bytes(data[: 1000 * damage.startswith("short")])
    elif damage == "key":
        del state["skipped_steps"]
    elif damage == "extra":
        state["settings"]["from_the_future"] = 1
    text = "{" if damage == "not JSON" else json.dumps(state)
    (folder / "train.json").write_text(text, encoding="utf-8")
    refused(capsys, "--resume", "runs/a", parts=("step-2",))


def test_a_run_that_fell_back_goes_on_with_the_same_text(monkeypatch):
    """What was taken instead of the plays is what a resumed run asks for, network or not."""
    monkeypatch.setattr(train, "shakespeare", lambda: (_ for _ in ()).throw(ValueError("no")))
    flags = [f for f in FLAGS if f not in ("--data", "text.txt")]
    assert train.main([*flags, "--name", "a", "--stop_after", "2"]) == 0
    monkeypatch.setattr(train, "shakespeare", lambda: [TEXT])
    assert step_of(resume(Path("runs/a"), "--data", "pydocs")) == 10


def test_an_edited_source_is_kept_beside_the_first(monkeypatch, tmp_path, capsys):
    """--compare can only show what was kept: a resumed run keeps the mhf.py it goes on with."""
    folder = run("--stop_after", 2)
    edited = tmp_path / "mhf.py"
    edited.write_text(
        Path(mhf.__file__).read_text(encoding="utf-8") + "# edited\n", encoding="utf-8"
    )
    monkeypatch.setattr(mhf, "__file__", str(edited))
    resume(folder)
    assert (folder / "mhf-from-step-2.py").read_text(encoding="utf-8").endswith("# edited\n")
    assert "mhf-from-step-2.py" in capsys.readouterr().out


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path):
    """A second one is refused in a sentence, or waits; the folder is free again afterwards."""
    refused = pytest.raises(ValueError, match="another process is training there")
    with train.alone(tmp_path), refused as error, train.alone(tmp_path):
        pass
    one_sentence(error)
    with train.alone(tmp_path, wait=True):
        pass


def test_tokens_that_share_the_highest_score_share_the_hit():
    """Of k best ones each counts 1/k; those below it nothing."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert train.share_right(scores, torch.tensor([2, 0, 3])).tolist() == [0.5, 1.0, 0.25]
    assert train.share_right(scores, torch.tensor([3, 1, 3])).tolist() == [0.0, 0.0, 0.25]
