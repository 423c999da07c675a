"""The assignments: graders accept right solutions and reject typical wrong ones; starters train."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mhf
from support import runs

FOLDER = Path(__file__).parents[1] / "tutorials" / "assignments"
FLAGS = """--num_hidden_layers 1 --hidden_size 32 --num_buckets 64 --max_position_embeddings 32
    --steps 3 --tokens_per_step 64 --data text.txt --tokenizer bpe:300 --out out --name a"""
TOOLS = "import hashlib, itertools, mhf, torch, torch.nn.functional as F"
RIGHT = {
    "mean_gate": """
class MeanGate(mhf.GatedEmbedding):
    def __init__(self, config):
        super().__init__(config)
        del self.scorer
    def forward(self, e):
        gate = torch.full_like(e[..., 0], 1 / e.shape[-2])
        return self.output_proj(e.mean(-2)).to(e.dtype), gate""",
    "hash_family": """
def hash_bytes(token, seed):
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(token, digest_size=8, key=key).digest(), "little")
class HashedSignatures(mhf.SignatureTable):
    def candidates(self, token, lsh=()):
        buckets = (hash_bytes(token, j) % (self.num_buckets - 1) + 1 for j in itertools.count())
        first = [next(buckets) for _ in range(self.num_hashes - 1)]
        for last in buckets:
            yield (*first, last)""",
    "no_mixer": """
class NoMixer(mhf.CascadeDecoder):
    def __init__(self, config):
        torch.nn.Module.__init__(self)
    def steps(self, h, table, force=()):
        for E in table:
            yield h @ E.T, None""",
    "hard_embedding": """
def hard_embedding(o, E):
    p = o.float().softmax(-1)
    z = F.one_hot(o.argmax(-1), len(E)) + (p - p.detach())
    return z.to(E.dtype) @ E""",
}
# What a part of a right solution is exchanged for: the failure's words, or None: right (still).
CASES = {
    "mean_gate": {
        "e.mean(-2)": {
            "torch.einsum('...hd,...h->...d', e, gate)": None, "e.sum(-2)": "x = 9, not 3",
            "e.mean(0)[..., 0, :].expand_as(e[..., 0, :])": "change places",
            "e.detach().mean(-2)": "no gradient reaches the rows"},
        "put_proj(e.mean(-2))": {"put_proj(e).mean(-2)": None, "put_proj[:0](e.mean(-2))": "not 7"},
        "del self.scorer": {"pass": r"\['scorer.0", "del self.output_proj": "output_proj is gone"},
        "1 / e.shape[-2])": {"1 / e.shape[-2])": None, "1.0)": "sum to 1", "0.25)": "H = 1"},
        "e[..., 0],": {"e[..., :1],": "come x .* and gate"}},
    "hash_family": {
        "return int": {
            "return pow(37 + seed, int.from_bytes(b'1' + token, 'big'), 2**61 - 1) or int": None,
            "return hash((token, key)) % 2**64 or int": "another Python process",
            "return mhf.hash128(token, seed) % 2**64 or int": "half of MurmurHash3",
            "return ~7 & int": "256 buckets", "return 1.0 * int": "an int", "return -int": r"\^64"},
        "(token, d": {"(token.lstrip(bytes(1)), d": "same hash"}, "=8": {"=2": "modulo bias"},
        "=8, key=key).digest()": {"=8).digest()": "same hash", "=7).digest() + key[:1]": "agree"},
        "buckets - 1) + 1": {"buckets - 1)": r"mod \(B − 1\)", "buckets) + 1": r"mod \(B − 1\)"},
        "itertools.count()": {
            "itertools.count()": None, "itertools.count(1)": "id_0",
            "(0, 0, 0, 0, *range(4, 9999))": "the same id under every function"},
        "in buckets": {"in [next(buckets)]": "1 tries", "in [next(buckets)] * 9000": "3,000 tries"},
        "(*first, last)": {
            "(*first, last + 0 * next(buckets))": "the seeds are H−1",
            "(*first, last)\n            first = [last, *first[1:]]": "changed its first id"}},
    "no_mixer": {
        "torch.nn.Module.__init__(self)": {"super().__init__(config)": "are there: .'cascade_mix"},
        "h @ E.T, None": {
            "torch.einsum('...d,bd->...b', h, E), h": None, "h @ E.T / 2, None": "not what h and E",
            "h @ E.T, None\n            h = h + (h @ E.T) @ E": "change what functions 1 and 2",
            "(h * 0 + E[1] if force else h) @ E.T, None": "force", "h.data @ E.T, None": "state h"},
        "in table": {"in table": None, "in table[1:]": "yields 0 predictions"}},
    "hard_embedding": {
        "z.to(E.dtype) @ E": {
            "E[o.argmax(-1)] + p @ E.detach() - (p @ E).detach()": None, "p @ E": "mixture",
            "(z if torch.is_grad_enabled() else p) @ E": "training and inference",
            "(s := p @ E) + (E[o.argmax(-1)] - s).detach()": "gradient of E is wrong",
            "E[o.argmax(-1)]": "no gradient flows", "z @ E.detach()": "no gradient reaches the"},
        "(p - p.detach())": {"(o - o.detach())": "not that of the softmax"},
        "o.argmax": {"o.argmax": None, "o.argmin": "most probable"}},
}  # fmt: skip
ALL = [(n, old, *new) for n in CASES for old in CASES[n] for new in CASES[n][old].items()]


@pytest.fixture
def fill(tmp_path, monkeypatch):
    """A function that writes a solution into a copy of an assignment and returns its file."""
    folder = shutil.copytree(FOLDER, tmp_path / "copy", ignore=shutil.ignore_patterns("__*"))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for module in ("grading", "experiment", *RIGHT, *(f"grade_{name}" for name in RIGHT)):
        monkeypatch.delitem(sys.modules, module, raising=False)  # of an earlier copy
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a grader needs none
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {i}: {i * i % 97}\n" for i in range(999)), "utf-8")

    def fill(name, solution=""):
        file = folder / f"{name}.py"
        text = file.read_text("utf-8").replace("def main", f"{TOOLS}{solution}\n\ndef main")
        file.write_text(text, "utf-8")
        return file

    return fill


def grade(file, *flags):
    """Run the grader of an assignment in this process, which has torch; returns the exit status."""
    grader = str(file.with_name(f"grade_{file.name}"))
    return pytest.main(["-qs", "--tb=short", *flags, grader])


@pytest.mark.parametrize(("name", "old", "new", "words"), ALL)
def test_the_grader_knows_right_from_wrong(fill, capsys, name, old, new, words):
    """A right solution passes every test; a wrong one fails one that says what is wrong."""
    assert RIGHT[name].count(old) == 1
    slow = [] if old == new or "hash((" in new else ["-k", "not another_process"]
    assert grade(fill(name, RIGHT[name].replace(old, new)), *slow) == bool(words)
    assert re.search(words or " passed", capsys.readouterr().out)


@pytest.mark.parametrize("name", RIGHT)
def test_an_unfilled_starter_is_not_written_yet(fill, capsys, name):
    """Every test fails with these words and nothing else; there are 4 to 9 of them."""
    assert grade(fill(name)) == 1
    out = capsys.readouterr().out
    unwritten = len(re.findall(r"^not written yet: [\w.]+$", out, re.M))
    assert 4 <= unwritten <= 9 and f"\n{unwritten} failed in" in out


@pytest.mark.parametrize("name", RIGHT)
def test_a_filled_starter_trains_both_models(fill, capsys, name):
    """Both run to the end from one seed, with the same settings; mhf is as it was afterwards."""
    before, file = dict(vars(mhf)), fill(name, RIGHT[name])
    assert importlib.import_module(name).main(FLAGS.split()) == 0
    folders = [Path("out") / f"a-{which}" for which in ("unchanged", name)]
    plain, changed = map(runs.read_run, folders)
    assert plain["config"] == changed["config"] and plain["final"] != changed["final"]
    assert plain["settings"] | {"name": ""} == changed["settings"] | {"name": ""}
    fewer = {"mean_gate": 32 * 64 + 64 + 64 + 1, "no_mixer": 3 * (64 * 64 + 64 + 64 * 32 + 32)}
    assert changed["parameters"]["total"] == plain["parameters"]["total"] - fewer.get(name, 0)
    assert f"{changed['final']['perplexity']:.6g}" in capsys.readouterr().out
    assert (folders[1] / file.name).is_file() and dict(vars(mhf)) == before


@pytest.mark.parametrize("flags", ["--resume x", "--model mhf", "--prepare", "--num_buckets 1"])
def test_a_mistake_is_one_sentence(fill, capsys, flags):
    """Status 2 for what makes no sense for two models, and for train.py's own; no second run."""
    module = importlib.import_module(fill("mean_gate", RIGHT["mean_gate"]).stem)
    assert module.main([*FLAGS.split(), *flags.split()]) == 2
    out, error = capsys.readouterr()
    words = f"mean_gate.py: {flags.split()[0]} is not for this script, .*; use train.py"
    assert re.search(rf"^({words}|train.py: num_buckets .*)\n\Z", error, re.M)
    assert out.count("===") <= 2


def test_an_unfilled_starter_does_not_train(fill):
    """One sentence and status 2; as a script, in any folder, it finds mhf.py by itself."""
    command = [sys.executable, str(FOLDER / "no_mixer.py"), *FLAGS.split()]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 2 and "no_mixer.py: not written yet: NoMixer.__init__" in done.stderr
