"""support/evaluate.py, support/runs.py and support/processes.py, each on its own."""

import contextlib
import json
import math
import runpy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import build

from support import processes, runs
from support.evaluate import evaluate, fit_calibration, share_right


@pytest.mark.parametrize("scale", [0.02, 0.1, 1.0, 30.0])
def test_calibration_is_the_best_of_all_temperatures(scale):
    """No τ of 4,000 between 0.01 and 100 gives random scores less loss than the one found."""
    rng = torch.Generator().manual_seed(0)
    scores = scale * torch.randn(300, 20, generator=rng, dtype=torch.float64)
    targets = (scores / scale / 2).softmax(-1).multinomial(1, generator=rng)[:, 0]
    hole = torch.full((300, 2), -math.inf, dtype=torch.float64)  # of unused ids
    tau = fit_calibration(torch.cat((hole, scores, hole), 1), targets + 2)
    assert tau == pytest.approx(fit_calibration(scores, targets), rel=1e-6)
    taus = [tau, *np.geomspace(0.01, 100, 4000)]
    found, *losses = [F.cross_entropy(scores / tau, targets).item() for tau in taus]
    assert found <= min(losses) + 1e-9


@pytest.mark.parametrize("right", [True, False])
def test_calibration_of_a_certain_model_stays_finite(right):
    """Always right, or always wrong: τ stays between 1e-3 and 1e3, at the right end."""
    scores, targets = 3.0 * F.one_hot(torch.zeros(20).long(), 5), torch.arange(20) % 4 + 1
    found = fit_calibration(scores, targets * (not right))
    assert 1e-3 <= found < 0.2 if right else found == pytest.approx(1e3)


def test_tokens_that_share_the_highest_score_share_the_hit():
    """Of k best ones each counts 1/k; those below it nothing."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert share_right(scores, torch.tensor([2, 0, 3])).tolist() == [0.5, 1.0, 0.25]
    assert share_right(scores, torch.tensor([3, 1, 3])).tolist() == [0.0, 0.0, 0.25]


CASES = [("mhf", "independent", 0), ("mhf", "joint", 3), ("mhf", "exact", 0), ("mhf", "exact", 3)]


@pytest.mark.parametrize(("kind", "objective", "unused"), [*CASES, ("standard", "exact", 0)])
@torch.no_grad()
def test_evaluation_equals_a_direct_computation(kind, objective, unused):
    """On every other window, τ fitted to the rest: scores, loss, enumerated signatures agree."""
    fields = dict(H=3, B=12, V=40 + unused, unassigned=range(40, 40 + unused), objective=objective)
    model = build(standard=kind == "standard", max_position_embeddings=8, **fields)
    sizes = torch.arange(40 + unused) % 5 + 1  # of the tokens, in bytes
    ids = np.array([1, *model.generate([1], 156, seed=0)], np.uint16)  # so that it knows something
    how = model, ids, sizes, contextlib.nullcontext, 11 * 8 + 5
    found = evaluate(*how)
    starts = [int(i * (157 - 1 - 8) / 10) for i in range(11)]
    windows = torch.tensor(np.stack([ids[s : s + 9] for s in starts]).astype(np.int64))
    fitting, x, y = windows[::2], windows[1::2, :-1], windows[1::2, 1:]
    scores = model.token_scores(model(fitting[:, :-1]))
    tau = fit_calibration(scores.flatten(0, 1), fitting[:, 1:].flatten())
    log_p = (model.token_scores(model(x)) / tau).log_softmax(-1)
    nll = F.nll_loss(log_p.flatten(0, 1), y.flatten(), reduction="sum").item()
    expected = dict(val_objective=model.loss(x, y, objective).item(), tau=tau, valid_mass=math.nan)
    right = (log_p.argmax(-1) == y).double().mean().item()
    expected |= dict(perplexity=math.exp(nll / y.numel()), top1=right)
    expected |= dict(bits_per_byte=nll / math.log(2) / sizes[y].sum().item())
    if kind == "mhf":
        signatures = torch.tensor([*{*model.signatures.signatures[:40]}])
        p = model.bucket_log_probs(model(x)).exp()  # (N, T, H, B)
        p = p[:, :, torch.arange(3), signatures].prod(-1)  # (N, T, V)
        expected["valid_mass"] = p.sum(-1).mean().item()
    assert found == pytest.approx(expected, rel=1e-5, nan_ok=True) and 0.01 < tau < 100
    assert evaluate(*how, tau=tau) == pytest.approx(found, nan_ok=True)
    assert math.isfinite(evaluate(*how, tau=1e-4)["perplexity"])  # however hopeless a model is


def test_evaluation_of_everything_takes_every_token():
    """Without a limit the windows lie side by side: as many as fit, the last at the end."""
    model, seen, ids = build(V=40, max_position_embeddings=8), [], np.arange(41) % 40
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    evaluate(model, ids, torch.ones(40), contextlib.nullcontext)
    assert sorted(torch.cat(seen).flatten().tolist()) == sorted(ids[:40].tolist())


def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch, tmp_path):
    """Two processes that start at once, by the same clock, make two folders."""
    monkeypatch.setattr(runs.time, "strftime", lambda _: "now")
    monkeypatch.setattr(runs.os, "getpid", iter((1, 2)).__next__)
    made = {runs.new_folder(tmp_path, None, "mhf") for _ in range(2)}
    assert len(made) == 2 and all(folder.is_dir() for folder in made)


def finished(folder, source, perplexities=(9.0,), final=None, **settings):
    """The folder of a run, without its checkpoints."""
    folder.mkdir()
    for step, perplexity in enumerate(perplexities, 1):
        runs.append_log(folder, {"step": step, "loss": 5.0 / step})
        runs.append_log(folder, {"step": step, "perplexity": perplexity, "top1": 0.25})
    about = dict(config={"hidden_size": 8}, settings=settings, data_hash="1", final=final or {})
    about |= dict(parameters={"total": 123456})
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "mhf.py").write_text(source, encoding="utf-8")


def test_compare_shows_what_differs(tmp_path, capsys):
    """Settings that differ, the last results, the difference of the source, and a picture."""
    finished(tmp_path / "one", "x = 1\ny = 2\n", (9.0, 8.0), seed=1, steps=2, final={"top1": 0.5})
    finished(tmp_path / "two", "x = 1\ny = 3\n", (), seed=2, steps=2)  # not evaluated yet
    finished(tmp_path / "three", "x = 1\ny = 2\n", seed=1, steps=2)
    runs.compare([tmp_path / name for name in ("one", "two", "three")])
    out = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in out if line.strip()}
    assert rows["seed"] == ["1", "2", "1"] and rows["parameters"] == ["123,456"] * 3
    assert rows["perplexity"] == ["8", "-", "9"] and rows["top1"] == ["0.5", "-", "0.25"]
    assert not {"steps", "hidden_size"} & {*rows} and {"-y = 2", "+y = 3"} <= {*out}
    assert "mhf.py of one and three: the same" in out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_lone_rank_is_no_process(monkeypatch):
    """RANK without WORLD_SIZE, which a job array may leave behind, is one whole process."""
    monkeypatch.setenv("RANK", "3")
    for world, rank in (("4", 3), ("1", 0)):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert runpy.run_path(processes.__file__)["RANK"] == rank
    monkeypatch.delenv("WORLD_SIZE")
    assert runpy.run_path(processes.__file__)["RANK"] == 0
