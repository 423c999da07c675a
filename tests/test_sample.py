"""sample.py: its text, its table, its mistakes. Most tests call main(); a few start the program."""

import contextlib
import io
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import FIXTURES, random_checkpoint

import mhf
import sample
from support.explain import explain
from support.tokenizer import Tokenizer, load

HARD = "né 漢字 🙂"  # characters of one to four bytes
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT = "".join(f"the {a} of {b}, or not to be {a}\n" for a in NUMBERS for b in NUMBERS)
WORDS = Tokenizer.train([TEXT + "漢" * 999 + "字仮名交じり文 " * 40 + "éé 🙂 \u200b\t " * 20], 340)
WINDOW = 16  # tokens in a context
SHIPPED = Path(sample.__file__).parent / "tutorials" / "checkpoint"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Work beside a run, a standard model with more ids than tokens, and one without tokenizer."""
    folder, how = tmp_path_factory.mktemp("sample"), dict(max_position_embeddings=WINDOW)
    random_checkpoint(folder / "run" / "step-4", WORDS, **how)
    (folder / "run" / "last").write_text("step-4\n", encoding="utf-8")
    random_checkpoint(folder / "standard", WORDS, standard=True, unused=5, **how)
    random_checkpoint(folder / "ids", WORDS, tokenizer=False, **how)
    Tokenizer.train([TEXT.upper()], 280).save(folder / "other")
    (folder / "x.model").write_bytes(b"\x0a\xff")
    cut = Path(shutil.copytree(folder / "run" / "step-4", folder / "cut")) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:99])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def call(*flags, **named):
    """main() with flags; returns (status, standard output, standard error)."""
    named = {"checkpoint": "run"} | named
    flags = [f"--{name}={value}" for name, value in named.items() if value is not None] + [*flags]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = sample.main(flags)
        except SystemExit as stop:  # argparse's way to end
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def fake(monkeypatch, tokens):
    """Let every model generate the given tokens; returns the list of its calls' arguments."""
    calls = []
    made = lambda *args, **_: calls.append(args) or ((t, -1.0) for t in tokens)  # noqa: E731
    monkeypatch.setattr(mhf.LanguageModel, "generate", made)
    return calls


def start(*flags, **environment):
    """The program itself, with its two outputs as pipes."""
    command = [sys.executable, sample.__file__, "--checkpoint=run", *map(str, flags)]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # nohup has it ignored
    how = dict(env=os.environ | environment, stdout=-1, stderr=-1, preexec_fn=heard)
    return subprocess.Popen(command, **how)


def spell(text, cut=None):
    """The ids of the single-byte tokens that spell a text."""
    return [WORDS.hashed_bytes().index(bytes([b])) for b in text.encode()[:cut]]


def test_text_is_the_prompt_and_what_generate_yields():
    """Sample i has the seed + i, and a rule stands between two samples; there is nothing else."""
    flags, expected = dict(max_new_tokens=40, temperature=0.8, top_k=50, top_p=0.9), []
    for seed in (7, 8):
        ids = WORDS.encode("to be")
        tokens = mhf.load("run").generate(ids, stop=WORDS.ends, seed=seed, **flags)
        expected.append("to be" + WORDS.decode(t for t in tokens if t != WORDS.eot) + "\n")
    status, out, _ = call(prompt="to be", seed=7, num_samples=2, **flags)
    assert status == 0 and out == ("-" * 40 + "\n").join(expected)


def test_characters_are_held_back_until_whole(monkeypatch):
    """No flush shows half a character, and none comes late; half a one at the end is U+FFFD."""
    shown = []

    class Terminal(io.StringIO):
        def flush(self):
            shown.append(self.getvalue()[len("".join(shown)) :])

    monkeypatch.setattr(sys, "stdout", Terminal())
    fake(monkeypatch, spell(HARD + "字", -1))
    sample.main(["--checkpoint=run", "--prompt=>"])
    assert [text for text in shown if text] == [">n", *HARD[1:], "\ufffd\n"]


def test_which_tokens_are_shown(monkeypatch, tmp_path):
    """End-of-text on demand, those of expand by names, an id that no token has as a number."""
    calls = fake(monkeypatch, [*spell("a"), WORDS.eot])
    assert call(prompt=">")[1] == ">a\n"
    assert call("--no-stop_at_eot", prompt=">")[1] == ">a<|endoftext|>\n"
    assert [args[6] for args in calls] == [[WORDS.eot], []]
    model = mhf.load("run")
    model.expand([b" new"])
    model.save_pretrained(tmp_path)
    WORDS.save(tmp_path)
    fake(monkeypatch, [len(WORDS)])
    assert call(checkpoint=tmp_path, prompt=">")[1] == "> new\n"
    assert call(checkpoint="standard", prompt=">")[1] == f"><{len(WORDS)}>\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_prompt_from_standard_input(monkeypatch, encoding):
    """UTF-8, whatever the terminal has, without a byte order mark; other bytes are refused."""
    raw = io.BytesIO(HARD.encode(encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="ascii"))
    calls = fake(monkeypatch, spell("a"))
    if encoding == "utf-16":
        return refused(call(prompt="-"), "--prompt", "0xff")
    assert call(prompt="-")[1] == HARD + "a\n" and calls[0][1] == WORDS.encode(HARD)


def test_standard_error_says_what_was_loaded_and_how_fast(monkeypatch):
    """With the length of the prompt, which may be longer than the context."""
    cores, threads = os.cpu_count(), []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    status, out, err = call(prompt=TEXT, max_new_tokens=3, device="cpu", threads=cores)
    first, last = err.splitlines()
    size, length = mhf.load("run").num_parameters()["total"], len(WORDS.encode(TEXT))
    about = f"prompt {length}/{WINDOW} tokens, {size:,} parameters, calibration τ 1.25"
    assert first == f"{Path('run', 'step-4')} on cpu: {about}" and threads == [cores]
    assert status == 0 and re.fullmatch(r"3 tokens, [\d.]+ tok/s", last) and out.startswith(TEXT)


def test_default_checkpoint(folder, tmp_path, monkeypatch):
    """The run whose `last` was written last, at its last checkpoint; without any, the shipped."""
    monkeypatch.chdir(tmp_path)
    assert call(checkpoint=None, max_new_tokens=1)[2].startswith(f"{SHIPPED} on")
    for name, when in (("old", 1e9), ("new", 2e9), ("middle", 1.5e9)):
        run = Path(shutil.copytree(folder / "run", tmp_path / "runs" / name))
        os.utime(run / "last", (when, when))
    assert str(Path("runs", "new", "step-4")) in call(checkpoint=None, max_new_tokens=1)[2]


@pytest.mark.parametrize("prompt", [[5, 17], []])
def test_without_a_tokenizer_ids_go_in_and_out(prompt):
    """Prompt and text are ids, as a notice says; no prompt means the end of text, the stop."""
    given = dict(checkpoint="ids", prompt=" ".join(map(str, prompt)))
    status, out, err = call(**given, max_new_tokens=6, seed=3)
    tokens = mhf.load("ids").generate(prompt or WORDS.ends, 6, seed=3, stop=WORDS.ends)
    expected = [*prompt, *(t for t in tokens if t != WORDS.eot)]
    assert status == 0 and [*map(int, out.split())] == expected and err.count("no tokenizer") == 1


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_published_tokenizers_write_text(kind, tmp_path, monkeypatch):
    """Named, or beside the checkpoint: no blank is lost behind the prompt, nor in the table."""
    pytest.importorskip("tokenizers")
    shutil.copy(FIXTURES / "tokenizers" / f"{kind}.json", tmp_path / "tokenizer.json")
    words, text = load(tmp_path), " the cat sat on né 漢🙂\n"
    words.ends = [2]
    folder = random_checkpoint(tmp_path / "checkpoint", words, tokenizer=False)
    (folder / "tokens.txt").unlink()
    fake(monkeypatch, [*words.encode(text[words.adds_blank :]), 2])
    assert call(checkpoint=folder, tokenizer=tmp_path, prompt="on")[1] == f"on{text}\n"
    words.save(folder)
    assert call(checkpoint=folder, prompt="on")[1] == f"on{text}\n"
    assert "\n' the' " in call("--explain", checkpoint=folder, prompt="on")[1]


def test_table():
    """--explain has a block for every token of generate, with the numbers of `explain`."""
    model, context, flags = mhf.load("run"), WORDS.encode(TEXT)[:14], dict(seed=2, top_k=3)
    tokens = model.generate(context, 8, stop=WORDS.ends, return_log_probs=True, **flags)
    out = call("--explain", prompt=WORDS.decode(context), max_new_tokens=8, **flags)[1]
    lines = iter(out.split("\n")[:-1])
    assert "before temperature" in next(lines)
    for token, log_p in tokens:
        context = context if len(context) <= WINDOW else context[-WINDOW // 2 :]
        found, context, line = explain(model, context, top_k=4), [*context, token], next(lines)
        name = WORDS.token_bytes(token).decode(errors="surrogateescape")
        p = f"P {math.exp(log_p):.4f}"
        assert line.startswith(repr(name)[:20]) and f" id {token} " in line
        assert line.endswith(f"  {p}  valid mass {found['valid_mass']:.3g}")
        for own, function in zip(model.signatures.signatures[token], found["functions"]):
            cells = [(b["bucket"], "* "[b["bucket"] != own], b["prob"]) for b in function["top"]]
            expected = ["{}{}{:.4f}".format(*cell) for cell in cells]
            assert re.findall(r"\d+[ *]\d\.\d{4}", line := next(lines)) == expected
            assert f" id {own} " in line
        best = [f"{math.exp(entry['log_prob']):.4f}" for entry in found["top_tokens"][:3]]
        assert re.findall(r" (\d\.\d{4})(?=  |$)", next(lines)) == best
    assert [*lines] == [""]


def refused(result, *parts):
    """One sentence with these parts, status 2, nothing on standard output."""
    status, out, err = result
    line = err.splitlines()[-1]
    assert (status, out, line[:18]) == (2, "", "sample.py: error: ") and "Traceback" not in err
    assert all(str(part) in line for part in parts), line


@pytest.mark.parametrize("flag, part", [
    ("--temperature=-1", "-1"), ("--temperature=nan", "nan"), ("--top_p=0", "top_p"),
    ("--top_p=1.5", "1.5"), ("--top_k=0", "top_k"), ("--num_samples=0", "--num_samples"),
    ("--max_new_tokens=0", "--max_new_tokens"), ("--max_new_tokens=many", "many"),
    ("--seed=-1", "--seed"), (f"--seed={2**70}", "--seed"), ("--threads=0", "--threads"),
    ("--threads=100000", "100000"), ("--device=tpu", "tpu"), ("--temp=1", "--temp"),
    ("--prompt=", "empty"), ("--prompt=\udcff", "--prompt"), ("--revision=v2", "--revision v2"),
    ("--checkpoint=missing", "missing"), ("--checkpoint=cut", "cut"),
    ("--checkpoint=no-owner/no-model", "no-model"),
    ("--tokenizer=missing", "missing"), (f"--tokenizer={__file__}", ".tiktoken"),
    (f"--tokenizer={SHIPPED}", "8192"), ("--tokenizer=other", "not the model's"),
    ("--tokenizer=x.model", "tokenizer.json"), ("--prompt=x", ""), ("--prompt=5 -1", ""),
    ("--prompt=5 999", "339"), (f"--prompt={'9' * 30}", ""),
], ids=str)  # fmt: skip
def test_bad_flags(flag, part):
    """A flag that makes no sense is named; without a tokenizer a prompt that is no ids, too."""
    refused(call(flag, checkpoint="ids" if flag[9:10] in ("x", "5", "9") else "run"), part)


@pytest.mark.parametrize("flag", ["--help", "--num_samples=0", f"--prompt={HARD}"])
def test_the_program(flag, tmp_path):
    """UTF-8 whatever the terminal says; a mistake has status 2, and needs no torch, like --help."""
    if flag[2] != "p":
        (tmp_path / "torch.py").write_text("raise SystemError", encoding="utf-8")
    program = start(flag, PYTHONIOENCODING="ascii", PYTHONPATH=str(tmp_path))
    out, err = (stream.decode("utf-8") for stream in program.communicate(timeout=60))
    if flag == "--num_samples=0":
        return refused((program.returncode, out, err), "--num_samples")
    assert program.returncode == 0 and ("--top_p" in out or out.startswith(HARD) and "τ" in err)


@pytest.mark.parametrize("end", ["reader", "Ctrl-C"])
def test_an_early_end_is_quiet(end):
    """`| head -1`, whose reader closes the pipe, and Ctrl-C: not a word but what was loaded."""
    program = start("--prompt=a\nb", "--max_new_tokens=1000000000", "--no-stop_at_eot")
    assert program.stdout.readline().rstrip() == b"a"
    program.stdout.close() if end == "reader" else program.send_signal(signal.SIGINT)
    assert program.wait(timeout=60) == (0 if end == "reader" else 130)
    assert len(program.stderr.read().splitlines()) == 1
