"""train.py: gradients in chunks, exact resume, stops, damaged files, settings."""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import build
from safetensors.torch import load_file

import mhf
import train
from support import cache, data, runs
from support import tokenizer as tokenizers

WORDS = ("to be", "or not", "the king", "a horse", "my lord", "speaks", "dies", "sleeps")
TEXT = "".join(f"line {i}: {WORDS[i % 5]} {WORDS[i * i % 8]} {i * 7919 % 97}\n" for i in range(300))
FLAGS = shlex.split("""
    --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 2 --intermediate_size 32
    --num_buckets 64 --bottle_neck_dim 8 --max_position_embeddings 16 --tokens_per_step 32
    --steps 10 --eval_every 4 --eval_tokens 64 --threads 1 --data text.txt --tokenizer bpe:300
    --model mhf --objective independent --num_hashes 4 --adapter_init normal
    --table_initializer_range 0.02 --preset tiny --precision fp32
""")
A = Path("runs/a")
OBJECTIVES = "independent", "exact", "joint"
no_windows = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals or limits")
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of compiled and low precision


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """10 steps without a stop, evaluated after 4, 8 and 10: folder and output. To read only."""
    folder, out = tmp_path_factory.mktemp("straight"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHF_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        with contextlib.redirect_stdout(out):
            assert train.main([*FLAGS, "--out", "my runs é"]) == 0
        (run,) = (folder / "my runs é").iterdir()
        yield run, out.getvalue()


@pytest.fixture(autouse=True)
def place(straight, tmp_path, monkeypatch):
    """Every test in a folder of its own with a text, and without what takes long."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["train.py"])  # what argparse calls the program
    monkeypatch.setattr(runs, "draw_curves", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(train.Run, "sample", lambda *_, **__: "a sample")


def run(*flags, status=0):
    """`python train.py` with the tiny settings and these flags; the folder is runs/a."""
    assert train.main([*FLAGS, "--name", "a", *map(str, flags)]) == status
    return A


def resume(folder, *flags):
    assert train.main(["--resume", str(folder), *map(str, flags)]) == 0
    return Path(folder)


def sentence(capsys, status, flags, *parts):
    """main(flags) ends with `status` and one sentence on stderr that has all `parts`."""
    capsys.readouterr()
    try:
        found = train.main([*map(str, flags)])
    except SystemExit as stopped:  # argparse's
        found = stopped.code
    *before, last = re.split(r"[\r\n]+", capsys.readouterr().err.strip())
    assert found == status and last.startswith("train.py: "), last
    assert "train.py: " not in "".join(before)
    for part in parts:
        assert re.search(rf"(?<![\w.]){re.escape(str(part))}(?!\.?\w)", last), f"{part}: {last}"
    return last


class Killed(BaseException):
    """Stands for kill -9: nothing in the program catches it."""


def plant(patch, owner, name, then, moment=None):
    """Raise or call `then` instead of owner.name, in its call number `moment` or in all."""
    original, calls = getattr(owner, name), itertools.count(1)

    def called(*args, **kwargs):
        if moment not in (None, next(calls)):
            return original(*args, **kwargs)
        if isinstance(then, BaseException):
            raise then
        return then(*args, **kwargs)

    patch.setattr(owner, name, called)


def saved(folder):
    """All that is in the last checkpoint of a run, every file of which must load."""
    folder = folder / (folder / "last").read_text(encoding="utf-8")
    found = {"config": mhf.load(folder).config, "tokenizer": tokenizers.load(folder)}
    found |= json.loads((folder / "train.json").read_text(encoding="utf-8"))
    found |= torch.load(folder / "optimizer.pt", weights_only=True)
    return found | {"weights": load_file(folder / "model.safetensors"), "folder": folder}


def log(folder, need="step"):
    """The log without the columns that tell the time, which no two runs share."""
    rows = runs.read_log(folder, need)
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def assert_same(one, two):
    """Weights, optimizer state, loss scale, calibration and log are equal bit for bit."""
    a, b = saved(one), saved(two)
    for key in ("weights", "optimizer", "scaler"):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)
    np.testing.assert_equal(log(one), log(two))  # nan equals nan
    assert a["config"] == b["config"] and (one / "best").read_text() == (two / "best").read_text()


def bare(model, micro_batch=3, chunk=5):
    """A Run of the model, without a text and a folder."""
    settings = train.Settings(tokens_per_step=8 * 32, micro_batch=micro_batch, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build_model", lambda *_: model)
        made = train.Run(settings, model.config, data.Corpus("", "", None, [], []), None)
    made.chunk = chunk
    return made


X, Y = torch.randint(20, (2, 7, 8), generator=torch.Generator().manual_seed(1))


def assert_plain(made):
    """The loss and the gradients of a Run are those of model.loss, within 1e-5 of the largest."""
    parts = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    made.model.requires_grad_(True)  # what is frozen changes no other gradient
    loss = made.model.loss(X, Y)
    slopes = torch.autograd.grad(loss, parts.values(), allow_unused=True)
    for name, p in made.model.named_parameters():
        p.requires_grad = name in parts
    expected = {name: grad for name, grad in zip(parts, slopes) if grad is not None}
    assert made.gradients(X, Y).item() == pytest.approx(loss.item(), rel=1e-5)
    found = {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}
    largest = max(grad.abs().max().item() for grad in expected.values())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest)
    return expected


KINDS = [("standard", ""), *((objective, "") for objective in OBJECTIVES)]
FROZEN = ["hash_head", "embed_tokens", "layers", "combiner", "^(?!hash_head)"]  # all but the head


@pytest.mark.parametrize(("kind", "frozen"), [*KINDS, *(("joint", part) for part in FROZEN)])
@pytest.mark.parametrize(("micro_batch", "chunk"), [(1, 3), (3, 5), (7, 1000)])
def test_gradients_in_chunks_are_those_of_the_plain_loss(kind, frozen, micro_batch, chunk):
    """Whatever the objective, the sizes and what is frozen: frozen parts have no gradient."""
    objective = {} if kind == "standard" else {"objective": kind}
    model = build(standard=kind == "standard", **objective)
    for name, p in model.named_parameters():
        p.requires_grad = not (frozen and re.search(frozen, name))
    assert assert_plain(bare(model, micro_batch, chunk))
    assert all(p.requires_grad for p in model.parameters()) != bool(frozen)


def mean_gate(self, e):
    return self.output_proj(e.mean(-2)), torch.full_like(e[..., 0], 1 / e.shape[-2])


SOFT, SILU = mhf.soft_embedding, torch.nn.SiLU
CHANGES = {
    "mean gate": (mhf.GatedEmbedding, "forward", mean_gate),
    "e = 0": (mhf, "soft_embedding", lambda o, E: torch.zeros_like(SOFT(o, E))),
    "e detached": (mhf, "soft_embedding", lambda o, E: SOFT(o, E).detach()),
    "LayerNorm": (torch.nn, "SiLU", lambda: torch.nn.Sequential(SILU(), torch.nn.LayerNorm(8))),
}


@pytest.mark.parity  # each change assumes that its part is still the published one
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_what_is_trained(change, monkeypatch):
    """After an edit of a part the gradients are those of the edited model's plain loss."""
    before = assert_plain(bare(build()))
    monkeypatch.setattr(*CHANGES[change])
    after = assert_plain(bare(build()))
    assert any((after[name] - before[name]).abs().max() > 1e-4 for name in after)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_logits_of_all_positions_are_never_kept_at_once(objective):
    """Autograd keeps less than half of N·T·H·B numbers, of which the plain loss keeps all."""
    model, x = build(H=4, B=2048, objective=objective), torch.arange(256).view(8, 32) % 20
    logits, most = 4 * 256 * 4 * 2048, []  # bytes
    for work in (bare(model, 8, 8).gradients, lambda x, y: model.loss(x, y).backward()):
        kept = [0]  # how many bytes there were, whenever a tensor is kept or used

        def note(tensor, kept=kept, sign=1):
            kept.append(kept[-1] + sign * tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, functools.partial(note, sign=-1)):
            work(x, x)
        most.append(max(kept))
    assert most[0] < logits / 2 < logits < most[1]


@pytest.mark.parametrize("words", ["CUDA out of memory.", "CPUAllocator: can't allocate memory"])
def test_out_of_memory_halves_the_micro_batch(words, capsys, monkeypatch):
    """Half of the step's gradients are there when it happens; the step begins again, in halves."""
    made = bare(build(), micro_batch=4, chunk=1000)
    error = torch.OutOfMemoryError(words) if "CUDA" in words else RuntimeError(words)
    plant(monkeypatch, made.model, "loss_per_position", error, 3)  # 1: the plain loss
    assert_plain(made)
    assert made.micro_batch == 2 and "2 sequences" in capsys.readouterr().out


def test_gradients_are_clipped_and_matrices_decay():
    """The norm after a step is --grad_clip, that in the log the larger one; biases do not decay."""
    made = train.new_run(train.parse([*FLAGS, "--grad_clip", "0.5", "--weight_decay", "0.7"]))
    groups = made.optimizer.param_groups
    decay = {p: group["weight_decay"] for group in groups for p in group["params"]}
    assert decay == {p: 0.7 if p.dim() == 2 else 0 for p in made.model.parameters()}
    assert made.advance()["grad_norm"] > 1
    slopes = [p.grad for p in made.model.parameters() if p.grad is not None]
    norm = torch.stack([grad.norm() for grad in slopes]).norm().item()
    assert norm == pytest.approx(0.5, rel=1e-4)  # the norm is divided by norm + 1e-6


def test_the_learning_rate_rises_and_falls():
    """Linear to the peak in 5% of the steps, half-way of the cosine in the middle, a tenth last."""
    settings = train.Settings(steps=200, learning_rate=1.0)
    rates = [train.learning_rate(step, settings) for step in range(1, 201)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[104] == pytest.approx(0.55)  # step 105: the middle of 10 to 200
    assert rates[57] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 48 / 190)) / 2)
    assert rates[-1] == pytest.approx(0.1) and sorted(rates[9:], reverse=True) == rates[9:]
    for steps in (1, 2, 3):  # the shortest runs, too, begin at the peak
        assert train.learning_rate(1, train.Settings(steps=steps, learning_rate=1.0)) == 1.0


WAYS = [("--micro_batch 1", 1e-4), ("--compile", 1e-5), ("--precision bf16", 0.01)]


@pytest.mark.parametrize(("flags", "tolerance"), [*WAYS, ("--precision fp16", 0.01)])
def test_the_losses_are_the_same(flags, tolerance, straight, monkeypatch):
    """One sequence at a time, compiled (the graph alone), or in 16 bits: losses and keys."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**10)  # no overflow
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    run(*flags.split())
    for column, room in (("loss", 1), ("grad_norm", 10)):
        a, b = ([row[column] for row in log(folder, column)] for folder in (A, straight[0]))
        assert a == pytest.approx(b, rel=room * tolerance)
    assert saved(A)["weights"].keys() == saved(straight[0])["weights"].keys()


def test_a_step_that_overflows_is_left_out(monkeypatch):
    """In fp16 the first step only halves the scale; two pieces equal one, with the scale."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**14)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    start = train.new_run(train.parse(FLAGS)).model.state_dict()
    first = saved(run("--precision", "fp16", "--stop_after", "1"))
    torch.testing.assert_close(first["weights"], dict(start), rtol=0, atol=0)
    run("--precision", "fp16", "--name", "whole")
    assert_same(resume(A), Path("runs/whole"))
    last, steps = saved(A), {s["step"].item() for s in saved(A)["optimizer"]["state"].values()}
    skipped = math.log2(2.0**14 / last["scaler"]["scale"])
    assert first["scaler"]["scale"] == 2.0**13 and steps == {10 - skipped} and 1 <= skipped < 10


def test_a_run_leaves_all_that_is_promised(straight):
    """Checkpoint, log, curve, samples, the mhf.py it ran, and the sample.py line to type next."""
    folder, out = straight
    names = {path.name for path in folder.iterdir() if not path.name.startswith("step-")}
    assert names == {"last", "best", "log.csv", "curve.png", "samples.txt", "run.json", "mhf.py"}
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (folder / "mhf.py").read_bytes() == Path(mhf.__file__).read_bytes()
    assert (folder / "samples.txt").read_text(encoding="utf-8").count("--- step ") == 3
    starts = {line.split()[0] for line in out.splitlines()[:7]}
    assert starts >= {"run", "device", "data", "parameters", "steps"}
    line = shlex.split(out.splitlines()[-1].partition(":")[2])
    assert line[:3] == ["python", "sample.py", "--checkpoint"] and Path(line[3]).name == folder.name
    trained, measured = log(folder, "loss"), log(folder, "perplexity")
    assert [(row["step"], row["tokens"]) for row in trained] == [(n, 32 * n) for n in range(1, 11)]
    assert [row["step"] for row in measured] == [4, 8, 10]
    assert all(row.keys() == {"step", *runs.MEASURES} for row in measured)
    assert np.isfinite([[*row.values()] for row in measured]).all()
    names = "config.json model.safetensors optimizer.pt tokenizer.tiktoken tokenizer_meta.json"
    last, final = saved(folder), runs.read_run(folder)["final"]
    found = {path.name for path in last["folder"].iterdir()}
    assert found == {*names.split(), "tokens.txt", "train.json"}
    assert last["config"].calibration == final["tau"] != 1.0


MODELS = """--model standard; --num_hashes 1; --num_lsh 1; --num_hashes 2 --num_lsh 2;
    --objective exact --extra_layers 1; --objective joint --adapter_init identity
    --table_initializer_range 0.04 --vocab_size 320 --precision auto"""


@pytest.mark.parametrize("flags", [" ".join(kind.split()) for kind in MODELS.split(";")])
def test_every_kind_of_model_trains(flags):
    """Its loss falls in 10 steps, from the first to the mean of the last three, by 5%."""
    losses = [row["loss"] for row in log(run("--learning_rate", 0.01, *flags.split()), "loss")]
    assert np.mean(losses[-3:]) < 0.95 * losses[0]
    assert saved(A)["config"].num_hidden_layers == 1 + ("--extra_layers" in flags)
    auto = mhf.choose_precision("auto", torch.device("cpu"))  # stored: it holds on any machine
    assert saved(A)["settings"]["precision"] == (auto if "auto" in flags else "fp32")


def test_the_best_and_the_last_checkpoint_stay(monkeypatch):
    """Perplexities 9, 5, 7, 8 after steps 2, 4, 6, 8, with a resume: the rest is pruned."""
    numbers, found = iter([9.0, 5.0, 7.0, 8.0]), dict.fromkeys(runs.MEASURES, 1.0)
    monkeypatch.setattr(train.Run, "measure", lambda *_: found | {"perplexity": next(numbers)})
    resume(run("--eval_every", "2", "--stop_after", "5"), "--stop_after", "9")
    named = [(A / name).read_text(encoding="utf-8") for name in ("last", "best")]
    assert named == ["step-9", "step-4"] and {p.name for p in A.glob("step-*")} == {*named}


@pytest.mark.parametrize("stops", [(5,), (1, 4, 4, 7, 8)], ids=str)
def test_a_run_of_pieces_equals_one_of_ten_steps(stops, straight, capsys):
    """Stops anywhere, twice at one step, too, and free flags change nothing, bit for bit."""
    free = ["--device", "cpu", "--threads", 1, "--checkpoint_activations", "--stop_after"]
    others = {"--steps", "--micro_batch", "--compile"}  # each has a test of its own
    assert {f"--{name}" for name in train.FREE_ON_RESUME} <= {*free} | others
    run("--stop_after", stops[0])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command == ["python", "train.py", "--resume", "runs/a"]
    for step in stops[1:]:
        assert saved(resume(A, "--stop_after", step))["step"] == step
    assert_same(resume(A, *free, 10), straight[0])
    seconds = [row["seconds"] for row in runs.read_log(A, "loss")]
    assert seconds == sorted(seconds)


def test_resume_takes_the_newest_run():
    """--resume alone goes on with the run whose checkpoint is the latest."""
    for age, name in enumerate("bca"):
        run("--stop_after", "1", "--name", name)
        os.utime(f"runs/{name}/last", (1e9 - age, 1e9 - age))
    assert train.main(["--resume", "--stop_after", "2"]) == 0
    assert [saved(Path("runs") / name)["step"] for name in "abc"] == [1, 2, 1]


def test_a_finished_run_is_left_alone_or_trained_longer(straight, capsys):
    """--resume says that it is finished; with --steps 12 it has 12 steps and other results."""
    resume(shutil.copytree(straight[0], "a"))
    assert "--steps" in capsys.readouterr().out
    assert_same(Path("a"), straight[0])
    before, after = (runs.read_run(folder) for folder in (straight[0], resume("a", "--steps", 12)))
    assert saved(Path("a"))["step"] == 12 and log("a", "perplexity")[-1]["step"] == 12
    assert after["final"]["perplexity"] != before["final"]["perplexity"]


ARMED = {"left": -1}  # -1: not armed; n: the write to happen after n others is the last


def kill_at_a_write(event, args):
    """An audit hook: stop at a write in the folder a; a file to be written is still opened."""
    write = event in ("os.mkdir", "os.rename", "os.remove") or event == "open" and args[2] & 64
    if ARMED["left"] < 0 or not write or not str(args[0]).startswith("a/"):
        return
    ARMED["left"] -= 1
    if ARMED["left"] < 0:
        if event == "open":  # what is there then: a new, empty or cut file
            os.close(os.open(args[0], args[2], 0o666))
        raise Killed


@pytest.mark.skipif(sys.platform != "linux", reason="64 is O_CREAT on Linux")
def test_a_kill_at_any_moment_costs_nothing(straight):
    """At each write of the last step: the last checkpoint loads, and it ends as without."""
    run("--stop_after", "9")
    sys.addaudithook(kill_at_a_write)
    killed, moment = True, -1
    while killed:
        shutil.rmtree("a", ignore_errors=True)
        shutil.copytree(A, "a")
        ARMED["left"] = moment = moment + 1
        with contextlib.suppress(Killed):
            resume("a")
        killed, ARMED["left"] = ARMED["left"] < 0, -1
        assert saved(Path("a"))["step"] in (9, 10)
        assert_same(resume("a"), straight[0])
        assert runs.read_run("a")["final"] == runs.read_run(straight[0])["final"]
    assert moment > 12


KILLS = {
    "before evaluating": ("measure", 1, lambda log: log),
    "in step 1, no log": ("advance", 1, None),
    "in step 1, an empty log": ("advance", 1, lambda _: ""),
    "in step 1, half a header": ("advance", 1, lambda _: "step,tok"),
    "in step 7, half a row": ("advance", 7, lambda log: log + "7,22"),
    "in step 7, saved by a spreadsheet": ("advance", 7, lambda log: "\ufeff" + log),
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_goes_on(kill, straight, monkeypatch):
    """What was logged after the last checkpoint, and half a checkpoint, are forgotten."""
    name, moment, change = KILLS[kill]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        plant(patch, train.Run, name, Killed(), moment)
        run()
    if change:
        before = (A / "log.csv").read_bytes().decode() if (A / "log.csv").exists() else ""
        (A / "log.csv").write_bytes(change(before).encode())
    (A / "step-9.tmp").mkdir()
    assert_same(resume(A), straight[0])
    assert not [*A.glob("*.tmp")]


def test_only_a_run_without_a_checkpoint_may_be_started_again(straight, capsys, monkeypatch):
    """After a full disk or a kill, too; any other of the same --name is refused, and kept."""
    again = [*FLAGS, "--name", "a"]
    with monkeypatch.context() as patch:
        plant(patch, torch, "save", OSError(28, "No space left on device"))
        error = sentence(capsys, 1, again, "No space left")
        assert "nothing" not in error and "--resume" not in error  # there is nothing to resume
        plant(patch, torch, "save", Killed())
        with pytest.raises(Killed):
            run()
    assert_same(run(), straight[0])
    sentence(capsys, 2, again, "runs/a", "--name")
    (A / "last").rename("last")
    sentence(capsys, 2, again, "runs/a", "--name")
    Path("last").rename(A / "last")
    assert_same(A, straight[0])


DAMAGE = {
    "step-2/optimizer.pt": [b"junk\nof two lines", b"", 1000],
    "step-2/train.json": [b"{", b"[]", b"{}", b'{"settings": {"warm-up": 1}}'],
    "step-2/config.json": [b"", b"[]"],
    "step-2/model.safetensors": [b"", 1000],
    "run.json": [b"[]", b"{}", b"\xff"],
    "log.csv": [b"step;loss\r\n1;0,1\r\n", "step,loss\r\n1,0.1".encode("utf-16")],
    "last": [b"\xff", b"step-3"],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named(name, capsys):
    """In one sentence, exit 2; nothing is trained or removed."""
    file = run("--stop_after", 2) / name
    for content in DAMAGE[name]:  # a number: as many bytes of what is there
        before, files = file.read_bytes(), sorted(A.rglob("*"))
        file.write_bytes(before[:content] if isinstance(content, int) else content)
        parts = [file.name] if file.name in ("optimizer.pt", "run.json", "log.csv") else []
        sentence(capsys, 2, ["--resume", A], "runs/a", *parts)
        assert sorted(A.rglob("*")) == files
        file.write_bytes(before)


@pytest.mark.parametrize("model", ["mhf", "standard"])
def test_resume_refuses_what_has_changed(model, capsys):
    """Another text in the same file; another rank file, whose ids mean other tokens."""
    tokenizers.Tokenizer.train([TEXT], 300).save(Path())
    run("--tokenizer", "tokenizer.tiktoken", "--model", model, "--stop_after", "1")
    Path("text.txt").write_text(TEXT + "One line more.\n", encoding="utf-8")
    sentence(capsys, 2, ["--resume", "runs/a"], "text")
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    tokenizers.Tokenizer.train([TEXT.upper()], 300).save(Path())
    sentence(capsys, 2, ["--resume", "runs/a"], "tokenizer")


def test_an_edited_mhf_is_kept_and_the_signatures_stay(monkeypatch, capsys):
    """After an edit of the hash the stored signatures win; the edited file is kept, too."""
    first, original = saved(run("--stop_after", "2"))["weights"]["model.hash_map"], mhf.hash128
    source = (A / "mhf.py").read_bytes()
    Path("mhf.py").write_bytes(source + b"# edited\n")
    monkeypatch.setattr(mhf, "__file__", "mhf.py")
    monkeypatch.setattr(mhf, "hash128", lambda token, seed: original(token, seed + 1))
    assert torch.equal(saved(resume(A))["weights"]["model.hash_map"], first)
    tokenizers.check(mhf.load(A), tokenizers.load(A))
    assert (A / "mhf-from-step-2.py").read_bytes() == source + b"# edited\n"
    assert (A / "mhf.py").read_bytes() == source and "step-2.py" in capsys.readouterr().out


def test_a_run_that_fell_back_goes_on_with_the_same_text(monkeypatch):
    """What was taken instead of the plays, by --prepare, too, is what a resumed run reads."""
    flags = [flag for flag in FLAGS if flag not in ("--data", "text.txt")]
    Path("plays.txt").write_text(TEXT.upper(), encoding="utf-8")
    monkeypatch.setattr(cache, "pydocs", lambda: Path("text.txt"))
    plant(monkeypatch, cache, "shakespeare", ValueError("no network"))
    assert train.main([*flags, "--prepare"]) == 0 and not Path("runs").exists()
    assert train.main([*flags, "--name", "a", "--stop_after", "2"]) == 0
    monkeypatch.setattr(cache, "shakespeare", lambda: Path("plays.txt"))
    assert saved(resume(A))["step"] == 10


STOPS = {"SIGINT": 3, "SIGTERM": 3, "SIGHUP": 3, "SIGINT SIGINT": 0, "SIGHUP ignored": 10}


@no_windows
@pytest.mark.parametrize("case", STOPS)
def test_a_signal_finishes_the_step_and_saves(case, straight, capsys, monkeypatch):
    """Status 130; a second one does not wait for the step, one ignored by nohup does nothing."""
    number, ignored = getattr(signal, case.split()[0]), case.endswith("ignored")
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    original = train.learning_rate

    def interrupted(*args):
        for _ in case.split():
            signal.raise_signal(number)
        return original(*args)

    with monkeypatch.context() as patch:
        plant(patch, train, "learning_rate", interrupted, 3)
        before = signal.signal(number, handler)  # the shell's may ignore it
        run("--stop_after", 10 if ignored else 8, status=0 if ignored else 130)
    assert signal.getsignal(number) is handler
    signal.signal(number, before)
    assert saved(A)["step"] == STOPS[case] and "Traceback" not in capsys.readouterr().err
    assert_same(resume(A), straight[0])  # the stop after 8 is forgotten


@pytest.mark.parametrize("name", ["step-5/optimizer.pt", "step-5/model.safetensors", "log.csv"])
def test_a_full_disk_leaves_the_old_checkpoint(name, capsys):
    """This file may not be written, or not grow: status 1, one sentence, and step 5 is whole."""
    resource = pytest.importorskip("resource")  # not on Windows
    size = (run("--stop_after", "5") / name).stat().st_size - ("step" in name)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        error = sentence(capsys, 1, ["--resume", A, "--stop_after", "7"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "log" in name or re.search(r"step 7 .* runs/a/step-5 ", error)
    assert {p.name for p in A.glob("step-*")} >= {"step-5"} and not [*A.glob("*.tmp")]
    assert saved(A)["step"] == 5 and saved(resume(A))["step"] == 10


FAILURES = {
    "nan": (train.Run, "gradients", lambda *_: torch.tensor(math.nan)),
    "inf": (torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf)),
    "memory": (train.Run, "gradients", RuntimeError("out of memory")),  # of one sequence
}


@pytest.mark.parametrize("word", FAILURES)
def test_a_failure_ends_the_run(word, capsys, monkeypatch):
    """In step 4, before anything is applied or saved: status 1, the step and what is good."""
    plant(monkeypatch, *FAILURES[word], 4)
    where = [] if word == "memory" else ["step 4", "runs/a/step-0"]
    sentence(capsys, 1, [*FLAGS, "--name", "a"], word, *where)
    assert saved(A)["step"] == 0 and log(A)[-1]["step"] == 3


def test_a_reader_that_has_enough_ends_the_run_quietly(capsys, monkeypatch):
    """`python train.py | head -1`: no word on stderr when the pipe is gone."""
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w", buffering=1, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        train.main(FLAGS)
    assert capsys.readouterr().err == ""


def test_a_mistake_in_an_edit_has_a_traceback(monkeypatch):
    """It is no user's mistake, and it is not out of memory."""
    plant(monkeypatch, mhf.MultiHashFormer, "loss_per_position", RuntimeError("mat1, mat2"))
    with pytest.raises(RuntimeError, match="mat1"):
        train.main(FLAGS)


# Each message has the name and the value of the last flag, or the words behind "->".
MISTAKES = """
    --tokenizer nothing; --device nothing; --device cuda:77; --device meta;
    --num_buckets 3000000000; --num_lsh 5; --head_dim 5; --num_attention_heads 64 -> head_dim 0;
    --extra_layers -1; --num_hashes 2 --num_buckets 8 -> num_buckets free;
    --vocab_size 320 --model standard -> --vocab_size 320 300; --vocab_size 3000000000;
    --vocab_size 200; --pad_token_id 999 -> 999; --calibration 0.0; --rope_theta nan;
    --table_initializer_range -1.0; --table_initializer_range nan; --joint_weight inf;
    --steps 0; --tokens_per_step 33; --tokens_per_step 0; --micro_batch 0; --eval_every 0;
    --eval_tokens 0; --threads 0; --threads 100000; --stop_after 0; --learning_rate 0.0;
    --learning_rate nan; --learning_rate inf; --min_learning_rate 2.0; --warmup -0.1;
    --weight_decay -5.0; --weight_decay nan; --beta2 2.0; --grad_clip -1.0; --seed -1;
    --tokens_per_step 4096 --max_position_embeddings 4096 -> --max_position_embeddings held;
    --out text.txt -> text.txt; --out text.txt/below -> text.txt/below;
    --nothing 1; --step 3; --extra 1; --steps many; --model gpt; --preset huge; --precision fp8;
    --out . --name thesis -> thesis; --compare nowhere -> nowhere;
    --resume nothing -> nothing; --resume text.txt -> text.txt; --resume . -> .; --resume -> runs;
    --resume a --learning_rate 0.1 -> --learning_rate; --resume a --num_buckets 64 -> --num_buckets;
    --resume a --name b -> --name; --resume a --micro_batch 0; --resume a --threads 100000
"""


@pytest.mark.parametrize("mistake", [" ".join(part.split()) for part in MISTAKES.split(";")])
def test_a_wrong_setting_is_one_sentence(mistake, straight, capsys):
    """Exit 2, one sentence with the name and the value, no traceback, and no folder of a run."""
    shutil.copytree(straight[0], "a")
    Path("thesis").mkdir()
    flags, _, parts = mistake.partition(" -> ")
    parts = parts.split() or flags.replace("--", "").split()[-2:]
    flags = [*([] if re.match("--(resume|compare)", flags) else FLAGS), *flags.split()]
    assert len(sentence(capsys, 2, flags, *parts)) < 400 and not Path("runs").exists()


def test_help_names_every_setting(capsys, monkeypatch):
    """Every field is a flag, with its default; help needs no data and no device."""
    monkeypatch.setattr(data, "prepare", None)
    monkeypatch.setattr(mhf, "choose_device", None)
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0 and "--resume [RUN]" in out and "--compare RUN" in out
    for f in (*fields(mhf.Config), *fields(train.Settings)):
        default = f"(default {f.default})" if f.default not in (None, False) else ""
        entry = rf" --{f.name}\b(?:(?! --\w).)*{re.escape(default)}"
        assert f.name == "extra" or re.search(entry, out), f.name
