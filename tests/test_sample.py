"""sample.py: its text, its table, its mistakes. Most tests call main(); a few start the program."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unicodedata import east_asian_width

import pytest
import torch
from conftest import random_checkpoint

import mhf
import sample

SCRIPT = Path(sample.__file__)
HARD = "né 漢字 🙂"  # characters of one to four bytes
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT = "".join(f"the {a} of {b}, or not to be {a}\n" for a in NUMBERS for b in NUMBERS)
WORDS = TEXT + "漢字仮名交じり文の例 " * 40 + "éééé 🙂🙂 \u200b\u0301 \t\t " * 20
WINDOW = 16


def save(folder, **how):
    """A `random_checkpoint` of the words of these tests."""
    words = mhf.Tokenizer.train(WORDS, 340)
    return random_checkpoint(folder, words, max_position_embeddings=WINDOW, **how)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with one checkpoint, as train.py leaves it."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    save(run / "step-4")
    (run / "last").write_text("step-4\n", encoding="utf-8")
    return run


@pytest.fixture(scope="module")
def checkpoint(run_folder):
    return run_folder / "step-4"


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
    """A standard Transformer with more ids than its tokenizer has tokens."""
    return save(tmp_path_factory.mktemp("standard"), standard=True, unused=5)


@pytest.fixture(scope="module")
def untokenized(tmp_path_factory):
    """A checkpoint as others publish it, without a tokenizer of this project."""
    return save(tmp_path_factory.mktemp("untokenized"), tokenizer=False)


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def call(capsys):
    """Call main() with flags; returns (status, standard output, standard error)."""

    def call(*flags, **named):
        flags = [*flags, *(f"--{name}={value}" for name, value in named.items())]
        try:
            status = sample.main([str(flag) for flag in flags])
        except SystemExit as stop:  # argparse's way to end
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def fake(monkeypatch):
    """Let every model generate the given tokens; returns the list of its calls' arguments."""

    def fake(tokens):
        calls = []

        def generate(self, *args):
            calls.append(args)
            return iter(tokens)

        monkeypatch.setattr(mhf.LanguageModel, "generate", generate)
        return calls

    return fake


def start(*flags, **environment):
    """The program itself, with its two outputs as pipes."""
    command = [sys.executable, str(SCRIPT), *map(str, flags)]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, env=inherited | environment, **pipes)


def width(text):
    return sum(2 if east_asian_width(c) in ("W", "F") else 1 for c in text)


def bytes_as_tokens(folder, raw):
    """The ids of the single-byte tokens that spell `raw`."""
    words = mhf.Tokenizer.load(folder)
    by_name = {words.token_bytes(i): i for i in range(len(words))}
    return [by_name[bytes([b])] for b in raw]


# Text


def test_text_is_the_prompt_and_what_generate_yields(checkpoint, call):
    """Standard output is the prompt, the decoded tokens of generate() and a newline, no more."""
    model, words = mhf.load(checkpoint), mhf.Tokenizer.load(checkpoint)
    flags = dict(max_new_tokens=40, seed=7, temperature=0.8, top_k=50, top_p=0.9)
    tokens = list(model.generate(words.encode("to be"), stop=words.eot, **flags))
    expected = "to be" + words.decode(t for t in tokens if t != words.eot) + "\n"
    assert call(checkpoint=checkpoint, prompt="to be", **flags)[:2] == (0, expected)


def test_samples_use_seed_plus_i(checkpoint, call):
    """Sample i of --seed 5 is the sample of --seed 5 + i; a rule stands between two samples."""
    _, three, _ = call(checkpoint=checkpoint, max_new_tokens=9, seed=5, num_samples=3)
    one = [call(checkpoint=checkpoint, max_new_tokens=9, seed=5 + i)[1] for i in range(3)]
    assert three == ("-" * 40 + "\n").join(one) and len(set(one)) == 3


def test_characters_are_held_back_until_whole(checkpoint, fake, monkeypatch):
    """Of tokens that are single bytes, no flush shows half a character, and none comes late."""
    shown = []

    class Terminal(io.TextIOWrapper):
        def flush(self):
            super().flush()
            shown.append(self.buffer.getvalue().decode("utf-8")[len("".join(shown)) :])

    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO()))
    fake(bytes_as_tokens(checkpoint, HARD.encode()))
    sample.main(["--checkpoint", str(checkpoint), "--prompt", ">"])
    assert [text for text in shown if text] == [">", *HARD, "\n"]


def test_bytes_that_never_become_a_character_are_shown(checkpoint, call, fake):
    """Text that ends within a character ends with one replacement character: nothing is lost."""
    fake(bytes_as_tokens(checkpoint, "a字".encode()[:-1]))
    assert call(checkpoint=checkpoint, prompt=">")[1] == ">a\ufffd\n"


def test_end_of_text_stops_and_is_not_printed(checkpoint, call, fake):
    """By default the tokenizer's end-of-text token is a stop token, and no part of the text."""
    eot = mhf.Tokenizer.load(checkpoint).eot
    calls = fake([*bytes_as_tokens(checkpoint, b"a"), eot])
    assert call(checkpoint=checkpoint, prompt=">")[1] == ">a\n"
    assert eot in calls[-1][5]


def test_no_stop_at_eot_goes_on(checkpoint, call, fake):
    """--no-stop_at_eot gives generate() no stop token and prints the end-of-text token."""
    calls = fake([mhf.Tokenizer.load(checkpoint).eot])
    text = call("--no-stop_at_eot", checkpoint=checkpoint, prompt=">")[1]
    assert text == "><|endoftext|>\n" and not calls[-1][5]


def test_unknown_tokens_show_their_id(standard, call, fake):
    """An id that the tokenizer does not know (after expand(), say) is not dropped silently."""
    last = mhf.Config.from_json(standard / "config.json").vocab_size - 1
    fake([last])
    assert call(checkpoint=standard, prompt=">")[1] == f"><{last}>\n"


def test_prompt_from_standard_input(checkpoint, call, fake, monkeypatch):
    """--prompt - reads all of standard input as UTF-8, whatever encoding it was opened with."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(HARD.encode()), encoding="ascii"))
    calls = fake([])
    assert call(checkpoint=checkpoint, prompt="-")[1] == HARD + "\n"
    assert calls[-1][0] == mhf.Tokenizer.load(checkpoint).encode(HARD)


# What standard error says


def test_standard_error_says_what_was_loaded_and_how_fast(checkpoint, call):
    """First checkpoint, parameters, calibration and device; at the end, tokens per second."""
    status, _, err = call(checkpoint=checkpoint, max_new_tokens=3, device="cpu")
    first, last = err.splitlines()
    size = mhf.load(checkpoint).num_parameters()["total"]
    for part in (str(checkpoint), f"{size:,} parameters", "τ 1.25", "device cpu"):
        assert part in first
    assert status == 0 and re.fullmatch(r"3 tokens, [\d.]+ tok/s", last)


def test_newest_run_is_the_default(run_folder, tmp_path, call, monkeypatch):
    """Without --checkpoint it is the run whose `last` file was written last."""
    for name, when in (("old", 1e9), ("new", 2e9), ("middle", 1.5e9)):
        run = Path(shutil.copytree(run_folder, tmp_path / "runs" / name))
        os.utime(run / "last", (when, when))
    monkeypatch.chdir(tmp_path)
    assert call(max_new_tokens=1)[2].startswith(str(Path("runs", "new", "step-4")))


def test_run_folder_means_its_last_checkpoint(run_folder, call):
    """--checkpoint RUN takes the checkpoint that the run's `last` names."""
    assert str(run_folder / "step-4") in call(checkpoint=run_folder, max_new_tokens=1)[2]


def test_long_prompt_works_and_is_announced(checkpoint, call):
    """A prompt longer than the context is no error; one line names both lengths and the rule."""
    length = len(mhf.Tokenizer.load(checkpoint).encode(TEXT))
    status, out, err = call(checkpoint=checkpoint, prompt=TEXT, max_new_tokens=2)
    notice = err.splitlines()[1]
    assert status == 0 and out.startswith(TEXT) and length > WINDOW
    assert f" {length} " in notice and f" {WINDOW}:" in notice and "newest half" in notice


def test_full_context_is_not_announced(checkpoint, call):
    """A prompt that just fits has no notice."""
    assert (
        len(call(checkpoint=checkpoint, prompt="~" * WINDOW, max_new_tokens=2)[2].splitlines()) == 2
    )


def test_messages_of_loading_do_not_enter_the_text(untokenized, tmp_path, call):
    """What mhf.load says about a checkpoint (here: shared signatures) is not on standard output."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(untokenized, tmp_path / "copy"))
    (folder / "tokens.txt").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.hash_map"][7] = tensors["model.hash_map"][8]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    status, out, err = call(checkpoint=folder, prompt="5", max_new_tokens=3)
    assert status == 0 and re.fullmatch(r"5( \d+)+\n", out) and "share" in err


# Without a tokenizer


def test_without_a_tokenizer_ids_go_in_and_out(untokenized, call):
    """A published checkpoint: the prompt is ids, the text is generate()'s, a notice says so."""
    tokens = list(mhf.load(untokenized).generate([5, 17], 6, seed=3))
    status, out, err = call(checkpoint=untokenized, prompt="5 17", max_new_tokens=6, seed=3)
    assert status == 0 and [int(word) for word in out.split()] == [5, 17, *tokens]
    assert "no tokenizer" in err.splitlines()[1]


def test_without_a_tokenizer_there_is_a_default_prompt(untokenized, call):
    """Without --prompt such a checkpoint continues its end-of-text token."""
    pad = mhf.load(untokenized).config.pad_token_id
    assert call(checkpoint=untokenized, max_new_tokens=1)[1].split()[0] == str(pad)


# The table of --explain


def blocks(out, lines):
    """The table as lists of lines, one for each token, without legend and last line."""
    rows = out.splitlines()[1:-1]
    return [rows[i : i + lines] for i in range(0, len(rows), lines)]


def numbers(line):
    return [float(p) for p in re.findall(r"[ *](\d\.\d{4})(?= |$)", line)]


def rounded(values):
    """As printed: half of the last of four digits, and a little for another order of summation."""
    return pytest.approx(values, abs=6e-5)


@pytest.fixture(scope="module")
def table(checkpoint):
    """(blocks of the printed table, what explain() says, the tokens) over a full context."""
    model, words = mhf.load(checkpoint), mhf.Tokenizer.load(checkpoint)
    context, told = words.encode(TEXT)[:14], []
    tokens = list(model.generate(context, 8, seed=2, stop=words.eot))
    for token in tokens:
        context = context if len(context) <= WINDOW else context[-WINDOW // 2 :]
        p = model.log_probs(torch.tensor([context]))[0, -1].exp()  # (V,)
        told.append((model.explain(context, top_k=5) | {"p": p}, p[token].item()))
        context = [*context, token]
    prompt = words.decode(words.encode(TEXT)[:14])
    out = io.TextIOWrapper(io.BytesIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        flags = ["--explain", "--max_new_tokens=8", "--seed=2", f"--prompt={prompt}"]
        assert sample.main([*flags, f"--checkpoint={checkpoint}"]) == 0
    return blocks(out.buffer.getvalue().decode(), 5), told, tokens


def test_table_has_a_block_for_every_token(table):
    """The blocks name the tokens that generate() yields, in order, also past a full context."""
    printed, _, tokens = table
    assert len(tokens) == 8 and len(printed) == 8
    assert [int(re.search(r" id (\d+) ", block[0])[1]) for block in printed] == tokens


def test_table_has_the_probability_and_the_valid_mass(table):
    """A block's first line: the token's calibrated probability and explain()'s valid mass."""
    for (head, *_), (found, p) in zip(*table[:2], strict=True):
        assert numbers(head)[0] == rounded(p)
        assert float(head.split("valid mass ")[1]) == pytest.approx(found["valid_mass"], rel=5e-3)


def test_table_has_the_buckets_of_explain(table, checkpoint):
    """Each function's line: its id of the token, explain()'s top buckets, * at the token's own."""
    ids = mhf.load(checkpoint).signatures.ids
    for (_, *rows, _), (found, _), token in zip(*table, strict=True):
        for j, (row, step) in enumerate(zip(rows, found["functions"], strict=True)):
            own, cells = ids[token, j].item(), re.findall(r"(\d+)([ *])\d\.\d{4}", row)
            top = step["top"][:4]
            assert re.match(rf"  function {j} +id {own} ", row)
            assert cells == [(str(b["bucket"]), " *"[b["bucket"] == own]) for b in top]
            assert numbers(row)[1:] == rounded([b["prob"] for b in top])


def test_table_has_the_mass_of_the_ids_bucket(table, checkpoint):
    """Behind a token's id: the calibrated probability of all tokens that share the bucket."""
    ids = mhf.load(checkpoint).signatures.ids
    for (_, *rows, _), (found, _), token in zip(*table, strict=True):
        for j, row in enumerate(rows):
            same = ids[:, j] == ids[token, j]
            assert numbers(row)[0] == rounded(found["p"][same].sum().item())


def test_table_has_the_runners_up(table):
    """A block's last line: explain()'s most probable tokens but for the one that was picked."""
    for (*_, row), (found, _), token in zip(*table, strict=True):
        logs = [t["log_prob"] for t in found["top_tokens"] if t["id"] != token][:4]
        assert numbers(row) == rounded(torch.tensor(logs).exp().tolist())


@pytest.mark.parametrize("kind", ["checkpoint", "standard", "untokenized"])
def test_table_fits_100_columns(kind, request, call, fake):
    """No line is over 100 columns, in which a wide character counts two, whatever the tokens."""
    folder = request.getfixturevalue(kind)
    model = mhf.load(folder)
    known = mhf.Tokenizer.load(request.getfixturevalue("checkpoint"))
    longest = sorted(range(len(known)), key=lambda i: -width(known.decode([i])))
    assert any(known.decode([i]) > "\u3000" and width(known.decode([i])) > 8 for i in longest[:20])
    fake([*longest[:20], *range(34), model.config.vocab_size - 1])
    out = call("--explain", checkpoint=folder, prompt="5")[1]
    widths = [width(line) for line in out.splitlines()]
    assert max(widths) <= 100 and len(widths) > 100


def test_standard_model_has_runners_up_only(standard, call):
    """The standard Transformer has no signatures: two lines a token, and explain()'s runners-up."""
    model, words = mhf.load(standard), mhf.Tokenizer.load(standard)
    out = call("--explain", checkpoint=standard, prompt="to", max_new_tokens=1)[1]
    [[head, row]] = blocks(out, 2)
    token = int(re.search(r" id (\d+) ", head)[1])
    best = [t for t in model.explain(words.encode("to"), top_k=5)["top_tokens"] if t["id"] != token]
    logs = torch.tensor([t["log_prob"] for t in best[:4]])
    assert "function" not in out and "valid mass" not in out
    assert numbers(row) == rounded(logs.exp().tolist())


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b" a\n", "␣a↵"),
        (b"\t\x00\x1b[0m\x7f", "␉␀␛[0m\\u007f"),
        ("\u200b\u3000\u2028".encode(), "\\u200b\\u300…"),
        (b"\xe6\xbc", "\\xe6\\xbc"),
        ("漢字漢字漢字漢字".encode(), "漢字漢字漢…"),
    ],
)
def test_blanks_and_control_characters_are_visible(raw, shown):
    """A cell has the given width and nothing in it that cannot be seen, but for its padding."""
    cell = sample.visible(raw, 12)
    assert cell.rstrip(" ") == shown and width(cell) == 12


# Mistakes: one sentence, status 2, nothing on standard output


def refused(result, *parts):
    status, out, err = result
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("sample.py: error: ")
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--temperature=-1", "-1"),
        ("--temperature=nan", "nan"),
        ("--top_p=0", "top_p"),
        ("--top_p=1.5", "1.5"),
        ("--top_k=0", "top_k"),
        ("--num_samples=0", "--num_samples"),
        ("--max_new_tokens=0", "--max_new_tokens"),
        ("--max_new_tokens=many", "many"),
        ("--seed=-1", "--seed"),
        (f"--seed={2**70}", "--seed"),
        ("--threads=0", "--threads"),
        ("--device=tpu", "tpu"),
        ("--temp=1", "--temp"),
        ("--prompt=", "empty"),
        ("--prompt=\udcff", "UTF-8"),
        ("--revision=v2", "--revision v2"),
        ("--checkpoint=missing", "missing"),
        ("--checkpoint=no-such-owner/no-such-model", "no-such-model"),
    ],
)
def test_bad_flags(flags, part, checkpoint, call):
    """A flag that makes no sense is named in one sentence (a later --checkpoint wins)."""
    refused(call(f"--checkpoint={checkpoint}", flags), part)


def test_cuda_asked_for_and_absent(checkpoint, call, monkeypatch):
    """--device cuda on a machine without CUDA is a sentence, not PyTorch's traceback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(call(checkpoint=checkpoint, device="cuda"), "cuda")


def test_no_run_yet(tmp_path, call, monkeypatch):
    """Without any run the sentence says to run train.py first."""
    monkeypatch.chdir(tmp_path)
    refused(call(), "train.py")


def test_standard_input_that_is_not_utf8(checkpoint, call, monkeypatch):
    """Bytes of another encoding are refused, not guessed."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("né".encode("latin-1"))))
    refused(call(checkpoint=checkpoint, prompt="-"), "UTF-8", "0xe9")


@pytest.mark.parametrize("prompt", ["to be", "5 -1", "5 99999"])
def test_prompt_that_is_no_ids(prompt, untokenized, call):
    """Without a tokenizer a prompt of words, or of ids that do not exist, is refused."""
    refused(call(checkpoint=untokenized, prompt=prompt))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_half_written_checkpoint(name, copy, call):
    """A file that is not there is named."""
    (copy / name).unlink()
    refused(call(checkpoint=copy), name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.tiktoken"])
def test_truncated_file(name, copy, call):
    """A file that was cut off is named."""
    raw = (copy / name).read_bytes()
    (copy / name).write_bytes(raw[: len(raw) // 2 - 1])
    refused(call(checkpoint=copy), name)


def test_wrong_shapes(copy, call):
    """Weights that do not fit the configuration are named with both shapes."""
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config["intermediate_size"] = 24
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(call(checkpoint=copy), "_proj", "16", "24")


# The program as the shell sees it


def test_help_needs_no_torch(tmp_path):
    """--help answers without PyTorch (so it is quick), and says nothing if nobody reads it."""
    (tmp_path / "torch.py").write_text("raise SystemError", encoding="utf-8")
    for read in (True, False):
        program = start("--help", PYTHONPATH=str(tmp_path))
        if not read:
            program.stdout.close()
            program.stdout = None
        out, err = program.communicate(timeout=30)
        assert program.returncode == 0 and err == b""
        assert not read or b"--top_p" in out


def test_output_is_utf8_whatever_the_terminal_says(checkpoint):
    """With PYTHONIOENCODING=ascii both outputs are UTF-8, and the status is 0."""
    flags = ["--checkpoint", checkpoint, "--prompt", HARD, "--max_new_tokens", 20]
    program = start(*flags, PYTHONIOENCODING="ascii")
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0
    assert out.decode("utf-8").startswith(HARD) and "τ" in err.decode("utf-8")


def test_a_reader_may_leave(checkpoint):
    """`| head -1`: when the reader closes the pipe, the program ends at once and without a word."""
    flags = ["--checkpoint", checkpoint, "--prompt", "a\nb", "--max_new_tokens", 10**9]
    program = start(*flags, "--no-stop_at_eot")
    assert program.stdout.readline().rstrip() == b"a"
    program.stdout.close()
    assert program.wait(timeout=60) == 0
    assert len(program.stderr.read().splitlines()) == 1  # what was loaded


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_ctrl_c_ends_quietly(checkpoint):
    """Ctrl-C amid the text: status 130, and nothing on standard error but what was loaded."""
    flags = ["--checkpoint", checkpoint, "--prompt", "a\nb", "--max_new_tokens", 10**9]
    program = start(*flags, "--no-stop_at_eot")
    program.stdout.readline()
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 130 and len(err.splitlines()) == 1


def test_a_mistake_has_status_2(checkpoint, tmp_path):
    """The program's own status is main()'s: 2, with one sentence and no traceback."""
    program = start("--checkpoint", checkpoint, "--num_samples", 0)
    out, err = program.communicate(timeout=30)
    refused((program.returncode, out.decode(), err.decode()), "--num_samples")
