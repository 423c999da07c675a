"""support/evaluate.py, support/runs.py and support/processes.py, each on its own."""

import contextlib
import json
import math
import runpy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import processes, runs
from support.evaluate import evaluate, fit_calibration, share_right

from conftest import build, one_sentence

# ---- Calibration and evaluation -----------------------------------------------------------------


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("tau", [0.05, 0.3, 1.0, 2.7, 30.0])
def test_calibration_recovers_a_known_temperature(tau):
    """Scores are τ times the log probabilities of the targets: τ comes out, to 4 digits.

    Newton's method stops at steps of 1e-5. Columns of −inf, of unused ids, change nothing.
    """
    counts = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [5, 1, 1, 30, 2, 2, 7, 3]])
    targets = torch.cat([torch.arange(8).repeat_interleave(row) for row in counts])
    scores = (tau * counts.log()).repeat_interleave(counts.sum(1), 0)
    assert fit_calibration(scores, targets) == pytest.approx(tau, rel=1e-4)
    hole = torch.full((len(scores), 2), -math.inf)
    found = fit_calibration(torch.cat((hole, scores, hole), 1), targets + 2)
    assert found == pytest.approx(tau, rel=1e-4)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_calibration_is_the_best_of_all_temperatures(scale):
    """No τ of 4,000 between 0.01 and 100 gives random scores less loss than the one found."""
    scores = scale * torch.randn(300, 20, generator=rng(), dtype=torch.float64)
    targets = (scores / scale / 2).softmax(-1).multinomial(1, generator=rng(1))[:, 0]

    def loss(tau):
        return F.cross_entropy(scores / tau, targets).item()

    least = min(map(loss, np.geomspace(0.01, 100, 4000)))
    assert loss(fit_calibration(scores, targets)) <= least + 1e-9


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


def text(model, length=301):
    """Held-out ids of the tokens in use, and made-up sizes of all tokens."""
    ids = np.random.default_rng(0).integers(0, 40, length).astype(np.uint16)
    return ids, torch.arange(model.config.vocab_size) % 5 + 1, contextlib.nullcontext


CASES = [("mhf", "independent", 0), ("mhf", "joint", 3), ("mhf", "exact", 0), ("mhf", "exact", 3)]


@pytest.mark.parametrize(("kind", "objective", "unused"), [*CASES, ("standard", "exact", 0)])
@torch.no_grad()
def test_evaluation_equals_a_direct_computation(kind, objective, unused):
    """Its numbers are those of log_probs, loss and enumerated signatures, to 5 digits: on every
    other window of 11, with τ fitted to the rest. Float32 sums in another order."""
    fields = dict(H=3, B=12, V=40 + unused, unassigned=range(40, 40 + unused), objective=objective)
    model = build(standard=kind == "standard", max_position_embeddings=8, **fields)
    ids, sizes, autocast = text(model)
    found = evaluate(model, ids, sizes, autocast, max_tokens=11 * 8 + 5)
    starts = [int(i * (301 - 1 - 8) / 10) for i in range(11)]
    windows = torch.tensor(np.stack([ids[s : s + 9] for s in starts]).astype(np.int64))
    fitting, (x, y) = windows[::2], (windows[1::2, :-1], windows[1::2, 1:])
    scores = model.token_scores(model(fitting[:, :-1]))
    tau = fit_calibration(scores.flatten(0, 1), fitting[:, 1:].flatten())
    log_p = (model.token_scores(model(x)) / tau).log_softmax(-1)
    nll = F.nll_loss(log_p.flatten(0, 1), y.flatten(), reduction="sum").item()
    mass = torch.tensor(math.nan)
    if kind == "mhf":
        signatures = torch.tensor([*{*model.signatures.signatures[:40]}])
        p = model.bucket_log_probs(model(x)).exp()  # (N, T, H, B)
        mass = p[:, :, torch.arange(3), signatures].prod(-1).sum(-1).mean()
    expected = dict(val_objective=model.loss(x, y, objective).item(), tau=tau)
    expected |= dict(perplexity=math.exp(nll / y.numel()), valid_mass=mass.item())
    expected |= dict(top1=(log_p.argmax(-1) == y).double().mean().item())
    expected |= dict(bits_per_byte=nll / math.log(2) / sizes[y].sum().item())
    assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
    given = evaluate(model, ids, sizes, autocast, max_tokens=11 * 8 + 5, tau=tau)
    assert given == pytest.approx(found, nan_ok=True)


def test_evaluation_of_everything_takes_every_token():
    """Without a limit the windows lie side by side: as many as fit, the last at the end."""
    model, seen = build(V=40, max_position_embeddings=8), []
    ids, sizes, autocast = text(model, 8 * 5 + 1)
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    evaluate(model, ids, sizes, autocast)
    assert sorted(torch.cat(seen).flatten().tolist()) == sorted(ids[:-1].tolist())


def test_a_hopeless_model_has_a_finite_perplexity():
    """A loss of thousands of nats, whose exponential no float holds, is still logged."""
    model = build(V=40, max_position_embeddings=8)
    found = evaluate(model, *text(model), tau=1e-4)
    assert found["bits_per_byte"] > 1000 and math.isfinite(found["perplexity"])


# ---- Runs ---------------------------------------------------------------------------------------


def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch, tmp_path):
    """Twenty runs that start at once, by the same clock, make twenty folders."""
    monkeypatch.setattr(runs.time, "strftime", lambda _: "20260101-000000")
    with ThreadPoolExecutor(20) as pool:
        made = [*pool.map(lambda _: runs.new_folder(tmp_path, None, "mhf"), range(20))]
    assert len({*made}) == 20 and all(folder.is_dir() for folder in made)


def test_a_folder_of_something_else_is_not_taken(tmp_path):
    """A --name that a folder of other files, or a file, has already is refused."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder" / "thesis.txt", tmp_path / "file"):
        path.write_text("dear to somebody", encoding="utf-8")
    for name in ("folder", "file"):
        with pytest.raises(ValueError) as error:
            runs.new_folder(tmp_path, name, "mhf")
        one_sentence(error, name)


def finished(folder, source, perplexities=(9.0,), final=None, **settings):
    """The folder of a run, without its checkpoints."""
    folder.mkdir()
    for step, perplexity in enumerate(perplexities, 1):
        runs.append_log(folder, {"step": step, "loss": 5.0 / step})
        runs.append_log(folder, {"step": step, "perplexity": perplexity, "top1": 0.25})
    about = dict(config={"hidden_size": 8}, settings=settings, data_hash="1", data="text")
    about |= dict(parameters={"total": 123456}) | ({"final": final} if final else {})
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "mhf.py").write_text(source, encoding="utf-8")


def test_compare_shows_what_differs(tmp_path, capsys):
    """Settings that differ, the last results, the difference of the source, and a picture."""
    finished(tmp_path / "one", "x = 1\ny = 2\n", (9.0, 8.0), seed=1, steps=2, final={"top1": 0.5})
    finished(tmp_path / "two", "x = 1\ny = 3\n", (), seed=2, steps=2)  # not evaluated yet
    runs.compare([tmp_path / "one", tmp_path / "two"])
    out = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in out if line.strip()}
    assert rows["seed"] == ["1", "2"] and rows["parameters"] == ["123,456"] * 2
    assert rows["perplexity"] == ["8", "-"] and rows["top1"] == ["0.5", "-"]
    assert not {"steps", "hidden_size"} & {*rows} and {"-y = 2", "+y = 3"} <= {*out}
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_compare_of_runs_with_the_same_source(tmp_path, capsys, monkeypatch):
    """The sources are called the same."""
    monkeypatch.setattr(runs, "draw_curves", lambda *_: None)
    for name in ("one", "two"):
        finished(tmp_path / name, "x = 1\n")
    runs.compare([tmp_path / "one", tmp_path / "two"])
    assert "one and two: the same" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "[]", "{}", "{"])
def test_compare_needs_runs(content, tmp_path):
    """A folder that is none, or whose run.json is damaged, is named."""
    if content:
        (tmp_path / "run.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="run.json") as error:
        runs.compare([tmp_path])
    one_sentence(error)


# ---- Processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "rank"), [({}, 0), ({"WORLD_SIZE": "4"}, 3)])
def test_a_lone_rank_is_no_process(world, rank, monkeypatch):
    """RANK without WORLD_SIZE, which a job array may leave behind, is one whole process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in ({"RANK": "3"} | world).items():
        monkeypatch.setenv(name, value)
    assert runpy.run_path(processes.__file__)["RANK"] == rank


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_goes_first(rank, monkeypatch):
    """It meets the others after the block; they meet it before."""
    order = []
    monkeypatch.setattr(processes, "WORLD_SIZE", 2)
    monkeypatch.setattr(processes, "RANK", rank)
    monkeypatch.setattr(processes.dist, "barrier", lambda: order.append("meet"))
    with processes.first_alone():
        order.append("work")
    assert order == (["meet", "work"] if rank else ["work", "meet"])


def test_more_processes_than_gpus_are_refused(monkeypatch):
    """The process that finds no GPU says which one is missing."""
    monkeypatch.setattr(processes, "WORLD_SIZE", 100)
    monkeypatch.setenv("LOCAL_RANK", "77")
    with pytest.raises(ValueError) as error:
        processes.join(torch.device("cuda"))
    one_sentence(error, "cuda:77")
