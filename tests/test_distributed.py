"""train.py as a program: several processes under torchrun are one run; terminals and pipes."""

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import refused
from test_train import FLAGS, TEXT, log, resume, saved, sentence

import train
from support import processes, runs

pytestmark = pytest.mark.skipif(os.name == "nt", reason="torchrun and signals: not on Windows")
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Every test in a folder of its own, with a text and an empty cache."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setenv("MHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(train.__file__).parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(train.Run, "sample", lambda *_, **__: "a sample")


def start(script, *flags, under=()):
    """Start a script with the tiny settings; the signals act as they do in a terminal."""
    command = [sys.executable, *under, str(script), *FLAGS, *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    reset = [functools.partial(signal.signal, number, signal.SIG_DFL) for number in SIGNALS]
    return subprocess.Popen(command, preexec_fn=lambda: [f() for f in reset], **pipes)


PLANTED = """
import os, signal, sys, train

rank, original = int(os.environ["RANK"]), train.learning_rate

def planted(step, settings):
    if rank == 1 and step == 5:
        if settings.name == "failed":
            raise train.RunFailed("process 1 failed for a planted reason")
        os.kill(os.getpid(), signal.SIGTERM)
    return original(step, settings)

train.learning_rate = planted
sys.exit(train.main(sys.argv[1:]))
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def torchrun(name):
    """What two processes print, of which the second is stopped, or fails, in step 5."""
    Path("planted.py").write_text(PLANTED, encoding="utf-8")
    with start("planted.py", "--name", name, "--eval_every", "20", under=TORCHRUN) as process:
        try:
            out, error = process.communicate(timeout=90)
        finally:
            process.terminate()  # if they wait for each other
    assert process.returncode != 0
    return out, error


def test_two_processes_equal_one():
    """One tokenises; a signal to one stops both; the losses are those of one, within 1e-5."""
    out, error = torchrun("both")
    assert out.count("tokenising") == out.count("stopped after step 5") == 1, error
    assert train.main([*FLAGS, "--name", "one", "--eval_every", "20"]) == 0
    one, both = log("runs/one", "loss"), log(resume("runs/both"), "loss")
    for column, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected = pytest.approx([row[column] for row in one], rel=tolerance)
        assert [row[column] for row in both] == expected and len(both) == 10
    assert {path.name for path in Path("runs").iterdir()} == {"both", "one"}


def test_an_error_in_one_process_ends_all():
    """It is printed, and the last checkpoint is good."""
    assert "train.py: process 1 failed for a planted reason" in torchrun("failed")[1]
    assert saved(Path("runs/failed"))["step"] == 0


def test_too_many_processes_are_refused(capsys, monkeypatch):
    """2 sequences among 3 processes, or more processes than GPUs: one sentence that says so."""
    monkeypatch.setenv("LOCAL_RANK", "77")
    with monkeypatch.context() as patch:
        patch.setattr(processes, "WORLD_SIZE", 100)
        refused(lambda: processes.join(train.torch.device("cuda")), "cuda:77")
    monkeypatch.setattr(train, "WORLD_SIZE", 3)
    monkeypatch.setattr(processes, "join", lambda device: device)
    sentence(capsys, 2, FLAGS, "--tokens_per_step", 32, 16, 3)


def test_control_c_in_a_terminal(monkeypatch):
    """It saves, prints the line to type, in UTF-8 on any terminal, and exits with 130."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with start(train.__file__, "--out", "é", "--name", "a", "--steps", "100000") as process:
        deadline = time.monotonic() + 60
        while not Path("é/a/log.csv").exists() or len(runs.read_log("é/a")) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Error" not in error
    step = saved(Path("é/a"))["step"]
    assert f"stopped after step {step}" in out and step >= 2
    assert shlex.split(out.splitlines()[-1]) == ["python", "train.py", "--resume", "é/a"]
    resume("é/a", "--stop_after", step + 1)
