"""The assignments: graders accept right solutions and reject typical wrong ones; starters train.

Solutions stand in the starters' place in copies of tutorials/assignments. Graders run in this
process, because a fresh one would spend seconds on importing torch, for each of them.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mhf
import train

FOLDER = Path(__file__).parents[1] / "tutorials" / "assignments"
NAMES = ("mean_gate", "hash_family", "no_mixer", "hard_embedding")
TEXT = "".join(f"line {i}: the king {i * 7919 % 97} speaks {i * i % 13}\n" for i in range(600))
FLAGS = shlex.split("""
    --num_hidden_layers 1 --hidden_size 32 --num_attention_heads 2 --intermediate_size 32
    --num_hashes 3 --num_buckets 64 --bottle_neck_dim 8 --max_position_embeddings 32
    --tokens_per_step 64 --steps 3 --eval_every 3 --eval_tokens 256 --threads 1 --precision fp32
    --data text.txt --tokenizer bpe:300 --out out --name a
""")

RIGHT = {
    "mean_gate": """
class MeanGate(mhf.GatedEmbedding):
    def __init__(self, config):
        super().__init__(config)
        del self.scorer

    def forward(self, e):
        gate = torch.full_like(e[..., 0], 1 / e.shape[-2])
        return self.output_proj(e.mean(-2)).to(e.dtype), gate
""",
    "hash_family": """
def hash_bytes(token, seed):
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(token, digest_size=8, key=key).digest(), "little")


class HashedSignatures(mhf.SignatureTable):
    def _tries(self, token, local):
        def bucket(seed):
            return hash_bytes(token, seed) % (self.num_buckets - 1) + 1

        first = [bucket(j) for j in range(self.num_hashes)]
        yield self.num_hashes - 1, first
        for seed in itertools.count(self.num_hashes):
            yield seed, [*first[:-1], bucket(seed)]
""",
    "no_mixer": """
class NoMixer(mhf.CascadeDecoder):
    def __init__(self, config):
        super().__init__(config)
        self.cascade_mixer = torch.nn.ModuleList()

    def steps(self, h, table, targets=None, force=(), predict=mhf.predict):
        for j, E in enumerate(table):
            yield predict(h, E, None if targets is None else targets[..., j], True)
""",
    "hard_embedding": """
def hard_predict(c, E, target=None, last=False):
    o, loss, _ = mhf.predict(c, E, target, True)
    if last:
        return o, loss, None
    p = o.float().softmax(-1)
    z = F.one_hot(o.argmax(-1), len(E)) + (p - p.detach())
    return o, loss, z.to(E.dtype) @ E


class HardCascade(mhf.CascadeDecoder):
    def steps(self, h, table, targets=None, force=(), predict=None):
        return super().steps(h, table, targets, force, predict=hard_predict)
""",
}
IMPORTS = """
import hashlib
import itertools

import mmh3
import torch
import torch.nn.functional as F
"""

# Other right ones: {(assignment, what): solution, or edits of RIGHT}.
ALSO_RIGHT = {
    ("mean_gate", "einsum, no scorer built"): """
class MeanGate(mhf.GatedEmbedding):
    def __init__(self, config):
        torch.nn.Module.__init__(self)
        self.output_proj = torch.nn.Sequential(
            torch.nn.Linear(config.hidden_size, config.hidden_size)
        )

    def forward(self, e):
        gate = e.new_ones(e.shape[:-1]) / e.shape[-2]
        return self.output_proj(torch.einsum("...hd,...h->...d", e, gate)), gate
""",
    ("mean_gate", "adapter first"): [
        ("self.output_proj(e.mean(-2))", "self.output_proj(e).mean(-2)")
    ],
    ("hash_family", "polynomial"): """
PRIME = 2**61 - 1


def mixed(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def hash_bytes(token, seed):
    base, start = mixed(2 * seed + 1) % PRIME, mixed(2 * seed + 2) % PRIME
    h = start
    for byte in token:
        h = (h * base + byte + 1) % PRIME
    return mixed(h * base % PRIME)


class HashedSignatures(mhf.SignatureTable):
    def _tries(self, token, local):
        size, H = self.num_buckets - 1, self.num_hashes
        ids = [hash_bytes(token, j) % size + 1 for j in range(H)]
        yield H - 1, tuple(ids)
        seed = H
        while True:
            yield seed, (*ids[:-1], hash_bytes(token, seed) % size + 1)
            seed += 1
""",
    ("hash_family", "SHA-256 of seed and token"): [
        ("hashlib.blake2b(token, digest_size=8, key=key).digest()",
         "hashlib.sha256(key + token).digest()[:8]"),
    ],
    ("no_mixer", "mixers that give zero"): """
class Zero(torch.nn.Module):
    def forward(self, both):
        return torch.zeros_like(both[..., : both.shape[-1] // 2])


class NoMixer(mhf.CascadeDecoder):
    def __init__(self, config):
        super().__init__(config)
        self.cascade_mixer = torch.nn.ModuleList(Zero() for _ in range(config.num_hashes - 1))
""",
    ("no_mixer", "soft embeddings that go nowhere"): [
        ("targets[..., j], True)", "targets[..., j], j == len(table) - 1)")
    ],
    ("hard_embedding", "autograd.Function"): """
class Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o):
        ctx.save_for_backward(o.softmax(-1))
        return torch.zeros_like(o).scatter_(-1, o.argmax(-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return p * (g - (p * g).sum(-1, keepdim=True))


def hard_predict(c, E, target=None, last=False):
    o = c @ E.T
    flat = o.reshape(-1, len(E)).float()
    loss = None
    if target is not None:
        loss = F.cross_entropy(flat, target.reshape(-1), reduction="none").view(target.shape)
    return o, loss, None if last else Choose.apply(o) @ E


class HardCascade(mhf.CascadeDecoder):
    def steps(self, h, table, targets=None, force=(), predict=None):
        yield from super().steps(h, table, targets, force, hard_predict)
""",
}  # fmt: skip

# {(assignment, the mistake): (solution or edits, words of the failure)}
WRONG = {
    ("mean_gate", "unchanged"): (
        "class MeanGate(mhf.GatedEmbedding):\n    pass\n", "nothing to learn"),
    ("mean_gate", "scorer kept, unused"): ([("del self.scorer", "pass")], "scorer.0.weight"),
    ("mean_gate", "mean over the numbers"): ([("e.mean(-2)", "e.mean(-1)")], "shapes|size"),
    ("mean_gate", "mean over the tokens"): (
        [("e.mean(-2)", "e.mean(0)[..., 0, :].expand_as(e[..., 0, :])")], "change places"),
    ("mean_gate", "sum"): ([("e.mean(-2)", "e.sum(-2)")], "x = 9, not 3"),
    ("mean_gate", "first row"): ([("e.mean(-2)", "e[..., 0, :]")], "x = 1, not 3"),
    ("mean_gate", "no adapter"): ([("self.output_proj(e.mean(-2))", "e.mean(-2)")], "not 7"),
    ("mean_gate", "adapter deleted"): (
        [("del self.scorer", "del self.scorer, self.output_proj")], "output_proj is gone"),
    ("mean_gate", "no gradient"): ([("e.mean(-2)", "e.detach().mean(-2)")], "no gradient reaches"),
    ("mean_gate", "gate of ones"): ([("1 / e.shape[-2])", "1.0)")], "sum to 1"),
    ("mean_gate", "four functions only"): ([("1 / e.shape[-2])", "0.25)")], "H = 1"),
    ("mean_gate", "gate of another shape"): ([("e[..., 0], 1", "e[..., :1], 1")], "gate"),
    ("mean_gate", "no gate"): ([(".to(e.dtype), gate", ".to(e.dtype)")], "unpack"),
    ("hash_family", "Python's hash"): (
        [("int.from_bytes(hashlib.blake2b(token, digest_size=8, key=key).digest(), \"little\")",
          "hash((token, key)) % 2**64")], "another Python process"),
    ("hash_family", "MurmurHash3 still"): (
        [("int.from_bytes(hashlib.blake2b(token, digest_size=8, key=key).digest(), \"little\")",
          "mmh3.hash128(token, seed)")], "0 to 2\\^64|were to go"),
    ("hash_family", "no seed"): ([(", key=key", "")], "have the same hash"),
    ("hash_family", "seed added to the hash"): (
        [(", key=key", ""), ("return int", "return seed + int"), ("=8", "=7")],
        "agree about tokens too often"),
    ("hash_family", "seed written before the token"): (
        [("blake2b(token,", "blake2b(b'%d' % seed + token,"), (", key=key", "")],
        "have the same hash"),
    ("hash_family", "16 bits"): (
        [("digest_size=8", "digest_size=2")], "modulo bias"),
    ("hash_family", "low bits empty"): (
        [("return int", "return 8 * int"), ("=8", "=7")], "256 buckets"),
    ("hash_family", "a float"): ([("return int", "return 1.0 * int")], "not an int"),
    ("hash_family", "small seeds only"): (
        [("seed.to_bytes(8,", "seed.to_bytes(1,")], "OverflowError|too big"),
    ("hash_family", "zero bytes vanish"): (
        [("blake2b(token,", "blake2b(token.lstrip(bytes(1)),")], "have the same hash"),
    ("hash_family", "ids from 0"): ([("- 1) + 1", "- 1)")], "0 is the pad's alone|mod \\(B − 1\\)"),
    ("hash_family", "ids to B"): ([("% (self.num_buckets - 1)", "% self.num_buckets")], "mod \\(B"),
    ("hash_family", "not seeded by j"): (
        [("bucket(j) for j", "bucket(0) for j")], "the same id under every function"),
    ("hash_family", "functions from 1"): ([("bucket(j) for j", "bucket(j + 1) for j")], "id_0"),
    ("hash_family", "the same last id again"): (
        [("first[:-1], bucket(seed)", "first[:-1], bucket(self.num_hashes)")], "no free last id"),
    ("hash_family", "tries that end"): (
        [("itertools.count(self.num_hashes)", "range(self.num_hashes, self.num_hashes + 1)")],
        "no free last id in 2 tries"),
    ("hash_family", "re-hash of every id"): (
        [("*first[:-1], bucket(seed)", "*[bucket(seed + j) for j in range(self.num_hashes)]")],
        "changed its first id"),
    ("hash_family", "re-hash with other seeds"): (
        [("itertools.count(self.num_hashes)", "itertools.count(self.num_hashes + 5)")],
        "was the rule"),
    ("hash_family", "duplicates"): (
        [("    def _tries", "    def _free_signature(self, token_id, token, local):\n"
          "        return next(self._tries(token, local))[1]\n\n    def _tries")],
        "share another's"),
    ("hash_family", "the pad hashed"): (
        [("    def _tries", "    def _register(self, token_id, token, is_pad, local):\n"
          "        super()._register(token_id, token, False, local)\n\n    def _tries")],
        "the pad has"),
    ("no_mixer", "unchanged"): (
        "class NoMixer(mhf.CascadeDecoder):\n    pass\n", "these are there"),
    ("no_mixer", "mixers kept, unused"): (
        [("self.cascade_mixer = torch.nn.ModuleList()", "pass")], "cascade_mixer.0.0.weight"),
    ("no_mixer", "soft embedding added"): (
        [("            yield predict(h, E, None if targets is None else targets[..., j], True)",
          "            target = None if targets is None else targets[..., j]\n"
          "            yield (found := predict(h, E, target))\n"
          "            h = h + found[2]")], "change what functions 1 and 2"),
    ("no_mixer", "one table for all"): (
        [("predict(h, E,", "predict(h, table[0],")], "not what h and E_j give"),
    ("no_mixer", "the first function's target"): ([("[..., j]", "[..., 0]")], "its own target"),
    ("no_mixer", "a function short"): ([("(table)", "(table[1:])")], "yields 0 predictions"),
    ("no_mixer", "no gradient"): ([("predict(h,", "predict(h.detach(),")], "reaches the state"),
    ("no_mixer", "its own predict"): ([("yield predict", "yield mhf.predict")], "given `predict`"),
    ("no_mixer", "scaled state"): ([("predict(h,", "predict(h / 2,")], "not what h and E_j give"),
    ("no_mixer", "force obeyed"): (
        [("predict(h,", "predict(h if j not in force else table[j][force[j]].expand_as(h),")],
        "force"),
    ("hard_embedding", "soft still"): ([("z.to(E.dtype) @ E", "p @ E")], "mixture"),
    ("hard_embedding", "no straight-through"): (
        [("z.to(E.dtype) @ E", "E[o.argmax(-1)]")], "no gradient flows|gradient of E"),
    ("hard_embedding", "detached"): ([("z.to(E.dtype) @ E", "(z @ E).detach()")], "no gradient"),
    ("hard_embedding", "table detached"): (
        [("z.to(E.dtype) @ E", "z @ E.detach()")], "gradient of E"),
    ("hard_embedding", "soft gradient of the table"): (
        [("z.to(E.dtype) @ E", "(soft := p @ E) + (E[o.argmax(-1)] - soft).detach()")],
        "gradient of E"),
    ("hard_embedding", "gradient of the logits"): (
        [("(p - p.detach())", "(o - o.detach())")], "not that of the softmax"),
    ("hard_embedding", "least probable"): ([("o.argmax", "o.argmin")], "most probable"),
    ("hard_embedding", "wrong axis"): (
        [("F.one_hot(o.argmax(-1), len(E))", "F.one_hot(o.flatten(0, -2).argmax(0)[0], len(E))")],
        "most probable"),
    ("hard_embedding", "teacher forcing"): (
        [("F.one_hot(o.argmax(-1)", "F.one_hot(o.argmax(-1) if target is None else target")],
        "teacher forcing"),
    ("hard_embedding", "an embedding at the end"): (
        [("    if last:\n        return o, loss, None\n", "")], "at the last function"),
    ("hard_embedding", "hard in training only"): (
        [("predict=hard_predict)",
          "predict=mhf.predict if targets is None else hard_predict)")], "inference"),
    ("hard_embedding", "steps unchanged"): (
        [("predict=hard_predict)", "predict=mhf.predict)")], "were not chosen"),
    ("hard_embedding", "no force"): ([("targets, force, predict", "targets, predict")], "force"),
    ("hard_embedding", "loss of the hard choice"): (
        [("return o, loss, z", "return z, loss, z")], "o is not E c"),
}  # fmt: skip
ANOTHER_PROCESS = "test_another_process_gives_the_same"  # 3 seconds: only where it matters
PROCESS_CASES = [("hash_family", "right"), ("hash_family", "Python's hash")]


def cases():
    """Every solution above: (assignment, what it is, source, words; None: it is right)."""
    found = [(name, "right", source, None) for name, source in RIGHT.items()]
    found += [(*key, edited(key[0], change), None) for key, change in ALSO_RIGHT.items()]
    found += [(*key, edited(key[0], change), words) for key, (change, words) in WRONG.items()]
    return [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in found]


def edited(name, change):
    """A solution, or the right one after replacements, each of which must fit."""
    if isinstance(change, str):
        return change
    source = RIGHT[name]
    for old, new in change:
        assert source.count(old) == 1, (name, old)
        source = source.replace(old, new)
    return source


def fill(folder, name, solution=None):
    """A copy of the assignments in which the starter is filled in; returns its file."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / f"{name}.py"
    if solution is not None:
        text = file.read_text(encoding="utf-8")
        head, written, tail = re.split(r"(?ms)(^(?:def|class) .*)(?=^def main)", text)
        assert "not written yet" in written and "not written yet" not in head + tail
        text = f"{head}{IMPORTS}{solution}\n\n{tail}"
        file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """A folder for a copy of the assignments; what is imported from it is forgotten again."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path / "assignments"
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


class Outcomes:
    """A pytest plugin that keeps {test: None if it passed, else its failure's text}."""

    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            failed = report.longreprtext if report.failed else None
            self.found[report.nodeid.rpartition("::")[2]] = failed


def grade(folder, name, deselect=()):
    """Run the grader of an assignment in a copy: {test: None, or its failure's text}."""
    outcomes = Outcomes()
    grader = folder / f"grade_{name}.py"
    quiet = ["--assert=plain", "-c", str(folder / "none.ini"), "--rootdir", str(folder)]
    quiet += [f"-pno:{plugin}" for plugin in ("terminal", "cacheprovider", "hypothesispytest")]
    (folder / "none.ini").touch()
    skip = [f"--deselect={grader.name}::{test}" for test in deselect]
    pytest.main([*quiet, *skip, str(grader)], [outcomes])
    return outcomes.found


@pytest.mark.parametrize(("name", "what", "source", "words"), cases())
def test_the_grader_knows_right_from_wrong(copies, name, what, source, words):
    """A right solution passes every test; a wrong one fails one that says what is wrong."""
    fill(copies, name, source)
    slow = () if (name, what) in PROCESS_CASES else (ANOTHER_PROCESS,)
    failures = {k: v for k, v in grade(copies, name, slow).items() if v is not None}
    if words is None:
        assert failures == {}
    else:
        assert re.search(words, "\n".join(failures.values())), (what, failures)


@pytest.mark.parametrize("name", NAMES)
def test_an_unfilled_starter_is_not_written_yet(copies, name):
    """Every test fails with these words and nothing else; there are 4 to 9 of them."""
    fill(copies, name)
    found = grade(copies, name)
    assert 4 <= len(found) <= 9
    assert all(re.fullmatch(r"not written yet: [\w.]+", text or "") for text in found.values())


@pytest.fixture
def small_runs(tmp_path, monkeypatch):
    """A text and a cache in a folder of their own; no pictures, no samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(train, "draw_curves", lambda *_: None)
    monkeypatch.setattr(train.Run, "sample", lambda *_: "a sample")
    Path("text.txt").write_text(TEXT, encoding="utf-8")


def starter(folder, name, solution=None):
    """The module of a starter, filled in or not."""
    file = fill(folder, name, solution)
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("small_runs")
def test_a_filled_starter_trains_both_models(copies, capsys, name):
    """Both run to the end from one seed, with the same settings; mhf is as it was afterwards."""
    before = dict(vars(mhf))
    assert starter(copies, name, RIGHT[name]).main(FLAGS) == 0
    out = capsys.readouterr().out
    runs = [Path("out") / f"a-{which}" for which in ("unchanged", name)]
    plain, changed = (json.loads((run / "run.json").read_text("utf-8")) for run in runs)
    assert {k for k in plain["settings"] if plain["settings"][k] != changed["settings"][k]} == {
        "name"
    }
    assert plain["config"] == changed["config"]
    fewer = plain["parameters"]["total"] - changed["parameters"]["total"]
    part = {"mean_gate": 8 * 32 + 8 + 8 + 1, "no_mixer": 2 * (8 * 64 + 8 + 32 * 8 + 32)}
    assert fewer == part.get(name, 0)
    assert plain["final"] != changed["final"]
    (row,) = re.findall(r"^perplexity, calibrated +(\S+) +(\S+)$", out, re.M)
    assert row == tuple(f"{about['final']['perplexity']:.4g}" for about in (plain, changed))
    assert f"python train.py --compare {runs[0]} {runs[1]}" in out
    assert (runs[1] / f"{name}.py").is_file()
    assert dict(vars(mhf)) == before


@pytest.mark.usefixtures("small_runs")
def test_the_lean_head_is_refused_for_the_hard_embedding(copies, capsys):
    """--head lean, whose gradients are the soft embedding's, is one sentence and status 2."""
    module = starter(copies, "hard_embedding", RIGHT["hard_embedding"])
    assert module.main([*FLAGS, "--head", "lean"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "lean head" in error and "--head plain" in error


@pytest.mark.usefixtures("small_runs")
def test_an_unfilled_starter_does_not_train(copies, capsys):
    """One sentence, status 2."""
    assert starter(copies, "no_mixer").main(FLAGS) == 2
    assert capsys.readouterr().err == "no_mixer.py: not written yet: NoMixer.__init__\n"


@pytest.mark.parametrize(
    "flags", [["--resume"], ["--model", "standard"], ["--stop_after", "2"], ["--prepare"]]
)
@pytest.mark.usefixtures("small_runs")
def test_flags_for_one_model_are_refused(copies, capsys, flags):
    """What makes no sense for two models is one sentence, with the remedy, and status 2."""
    assert starter(copies, "mean_gate").main([*FLAGS, *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{flags[0]} is not for this script" in error
    assert "use train.py" in error


@pytest.mark.usefixtures("small_runs")
def test_a_wrong_flag_is_train_pys_sentence(copies, capsys):
    """A mistake in a setting ends the first run, with train.py's status 2; no second run."""
    module = starter(copies, "mean_gate", RIGHT["mean_gate"])
    assert module.main([*FLAGS, "--num_buckets", "1"]) == 2
    assert capsys.readouterr().err.startswith("train.py: num_buckets must be")


def test_a_starter_runs_as_a_script(tmp_path):
    """From another folder, it finds mhf.py and shows train.py's flags."""
    command = [sys.executable, str(FOLDER / "mean_gate.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and "--num_buckets" in done.stdout, done.stderr
