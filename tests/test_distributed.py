"""Several processes, as torchrun starts them, are one run: same losses, one writer, one end."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import one_sentence
from test_train import FLAGS, TEXT

import train

pytestmark = pytest.mark.skipif(os.name == "nt", reason="torchrun is tried on Linux only")
ROOT = Path(train.__file__).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text and a cache."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def start(place, script, *flags, processes=1):
    """Run a script under torchrun, or alone: the finished process."""
    command = [sys.executable, str(script), *map(str, flags)]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"MHF_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=120
    )


def losses(run):
    with open(run / "log.csv", encoding="utf-8", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def test_two_processes_equal_one_and_resume_alone(place):
    """5 steps of two processes and 5 more of one have the losses of 10 steps of one, within 1e-5.

    Two processes add the gradients of their halves in another order, which AdamW's division by
    their size makes grow a little each step.
    """
    train_py = ROOT / "train.py"
    flags = [*FLAGS, "--eval_every", "20"]
    alone = start(place, train_py, *flags, "--name", "alone")
    assert alone.returncode == 0, alone.stderr
    both = start(place, train_py, *flags, "--name", "both", "--stop_after", 5, processes=2)
    assert both.returncode == 0, both.stderr
    assert "1 × 32 in each of 2 processes" in both.stdout
    assert both.stdout.count("stopped after step 5") == 1
    rest = start(place, train_py, "--resume", "runs/both")
    assert rest.returncode == 0, rest.stderr
    one, two = losses(place / "runs" / "alone"), losses(place / "runs" / "both")
    assert len(one) == 10 and two == pytest.approx(one, rel=1e-5)
    assert sorted(f.name for f in (place / "runs").iterdir()) == ["alone", "both"]
    state = json.loads((place / "runs" / "both" / "step-10" / "train.json").read_text("utf-8"))
    assert state["step"] == 10


PLANTED = """
import os, signal, sys, train

rank, advance = int(os.environ["RANK"]), train.Run.advance

def planted(run):
    if rank == 1 and run.step == 2:
        if sys.argv[-1] == "seven":
            raise train.RunError("process 1 failed for a planted reason")
        os.kill(os.getpid(), signal.SIGTERM)
    return advance(run)

train.Run.advance = planted
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["seven", "signal"])
def test_all_processes_end_together(name, place):
    """An error in one process ends the other, and is printed. A signal to one stops both after the
    same step, which is saved."""
    script = place / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    done = start(place, script, *FLAGS, "--name", name, processes=2)
    assert done.returncode != 0
    last = (place / "runs" / name / "last").read_text(encoding="utf-8")
    if name == "seven":
        assert "train.py: process 1 failed for a planted reason" in done.stderr
        assert last == "step-0"
    else:
        assert "stopped after step 3" in done.stdout and last == "step-3"


def test_sequences_must_divide(place, monkeypatch, capsys):
    """2 sequences a step do not divide among 3 processes: one sentence with the three numbers."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(train, "PROCESSES", 3)
    monkeypatch.setattr(train, "join_processes", lambda device: device)
    assert train.main([*FLAGS, "--name", "three"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part in error for part in ("64", "32", "3 processes"))


@pytest.mark.parametrize(
    ("device", "parts"), [("mps", ["mps", "CPUs"]), ("cuda", ["2 processes", "1 GPUs"])]
)
def test_unfit_devices_are_refused(device, parts, monkeypatch):
    """Two processes on Apple's GPU, or on one CUDA GPU: a ValueError with what is there."""
    monkeypatch.setattr(train, "PROCESSES", 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError) as error:
        train.join_processes(torch.device(device))
    one_sentence(error, *parts)


@pytest.mark.parametrize("what", ["step", "precision", "data", "tokenizer", "configuration"])
def test_processes_must_agree(what, monkeypatch):
    """A process with other text, tokenizer, precision, step or configuration is a ValueError."""
    corpus = SimpleNamespace(hash="a", tokenizer_hash="b")
    config = SimpleNamespace(to_json=lambda: "{}")
    run = SimpleNamespace(step=0, precision="fp32", corpus=corpus, config=config)

    def gather(everyones, mine):
        everyones[:] = [mine, mine | {what: "another"}]

    monkeypatch.setattr(train, "PROCESSES", 2)
    monkeypatch.setattr(train.dist, "all_gather_object", gather)
    with pytest.raises(ValueError) as error:
        train.check_agreement(run)
    one_sentence(error, what)


def test_a_lone_rank_is_no_process(place):
    """RANK without WORLD_SIZE, which a job array may leave behind, is one whole process."""
    code = "import train; print(train.RANK, train.PROCESSES)"
    environment = os.environ | {"RANK": "3", "PYTHONPATH": str(ROOT)}
    out = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert out.split() == ["0", "1"]
