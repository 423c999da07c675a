"""The benchmark at a tiny size: what it writes, and that what it compares is the same thing."""

import json

import benchmark
import formulations
import measure
import pytest
import torch
from conftest import build, close
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SMALL = dict(hidden_size=16, intermediate_size=8, num_buckets=64, vocab_size=100)
SMALL |= dict(num_hidden_layers=1, bottle_neck_dim=8)
SMOKE = benchmark.FULL | dict(
    rounds=2, positions=32, decoders={"tiny": (16, 64)}, steps={"tiny": (2, 16)}, fields=SMALL,
    contexts=(4, 12), generated=(4, 2), tables=(100, 200), added=10, vocabularies=((200, 64),),
    cost_shape=(16, 8), cost_tokens=16, B=(32, 64), H=(1, 2), V=(50, 100), T=(4, 8),
)  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The JSON of all parts, at sizes that take seconds; a PNG beside it."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "FULL", SMOKE)
        patch.setattr(benchmark, "RESULTS", folder)
        patch.setattr(measure, "MATRIX", 64)
        assert benchmark.main(["--device", "cpu"]) == 0
    assert (folder / "full.png").stat().st_size > 1000
    return json.loads((folder / "full.json").read_text(encoding="utf-8"))


def test_json_holds_every_sample(result):
    """Every part has rows; a row has all its rounds, and a comparison its number and words."""
    assert result["schema"] == 1 and {r["part"] for r in result["rows"]} == set(benchmark.PARTS)
    assert {"cpu", "cores", "torch", "date", "threads", "command"} <= result["about"].keys()
    for row in result["rows"]:
        assert row.keys() >= {"setting", "form", "precision", "tokens", "extra_memory", "checks"}
        assert len(row["seconds"]) == SMOKE["rounds"] and min(row["seconds"]) > 0
        assert all(entry["text"] and entry["value"] > 0 for entry in row["checks"])


def test_step_rows_compare_equal_work(result):
    """Every form trains in every precision, published all at once, with a share of the peak."""
    rows = [row for row in result["rows"] if row["part"] == "b"]
    forms = {*formulations.FORMS, "plain, exact", "lean, exact"}
    assert {(r["form"], r["precision"]) for r in rows} == {
        (form, precision) for form in forms for precision in SMOKE["precisions"]
    }
    assert all(r["share"] > 0 and r["tokens"] == 32 for r in rows)
    assert all(r["micro_batch"] == 2 for r in rows if r["form"] == "published")


def test_table_has_every_row_but_the_pictures(result):
    """The Markdown table has one line a row, nine cells each; bars are named with their aims."""
    rows = [row for row in result["rows"] if row["part"] != "f"]
    lines = measure.markdown(result["rows"]).splitlines()
    assert len(lines) == len(rows) + 2 and {line.count("|") for line in lines} == {10}
    assert "(aim 0.75, bar 0.6: " in "\n".join(lines)


@pytest.mark.parametrize("objective", ["independent", "exact"])
def test_formulations_are_one_loss(objective):
    """On the same data the forms' sums, and the gradients of the table, agree to rounding."""
    model, g = build(), torch.Generator().manual_seed(3)
    h, targets = torch.randn(50, 16, generator=g), torch.randint(20, (50,), generator=g)
    found = []
    for form in ("published", "plain", "lean") if objective == "independent" else ("plain", "lean"):
        model.zero_grad()
        loss = formulations.FORMS[form](model, h, targets, objective)
        loss.backward()
        found.append((loss.detach(), model.model.embed_tokens.weight.grad))
    for loss, gradient in found[1:]:
        close(loss / found[0][0], 1.0, atol=1e-6)
        close(gradient, found[0][1], atol=1e-4)  # sums of 50 positions


def test_step_losses_are_one_loss(ids):
    """As train.py calls them, too: the mean of published, plain and lean is the same."""
    trainee = formulations.Trainee(build())
    losses = [trainee.loss(form)(ids, ids, "independent").detach() for form in formulations.FORMS]
    close(torch.stack(losses), losses[0].expand(4), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("standard", [False, True], ids=["mhf", "standard"])
def test_flops_by_formula_are_those_counted(standard):
    """PyTorch counts the matrix products of the plain form, attention in full: exactly as many."""
    model = build(standard=standard, max_position_embeddings=32)
    ids = torch.randint(20, (3, 32))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.loss(ids, ids).backward()
    expected = ids.numel() * formulations.flops_per_token(model, 32, causal=False)
    assert counter.get_total_flops() == expected


def test_extra_memory_is_the_peak_less_gradients():
    """100 MB for a moment and 50 MB of 'gradients': 50 MB within 5, where the system tells."""

    def job():
        torch.ones(25_000_000).sum()
        return 50_000_000

    found = measure.extra_memory(job, torch.device("cpu"))
    assert found is None or abs(found - 50e6) < 5e6


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--only", "a,x"], "a,x"),
        (["--threads", "0"], "0"),
        (["--threads", "two"], "two"),
        (["--device", "abacus"], "abacus"),
        (["--gpu", "--quick"], "--quick"),
        (["--budget", "-1"], "-1"),
        (["--fast"], "--fast"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, word, capsys):
    """Bad arguments: one line that names what is wrong, and exit status 2."""
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and word in said


def test_gpu_mode_leaves_out_what_does_not_fit(tmp_path, monkeypatch, capsys):
    """With no time left nothing runs: each group is named as left out, and a file is written."""
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    assert benchmark.main(["--gpu", "--budget", "1", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("left out: ") == 3
    assert (tmp_path / "gpu-tried-on-cpu.json").exists()


def test_gpu_mode_runs_on_the_cpu():
    """Its steps, eager, in bf16 and in fp16 with loss scaling, at a tiny size."""
    bench = measure.Bench(SMOKE, torch.device("cpu"))
    config = benchmark.mhf.Config.preset("tiny", **SMALL)
    trainee = benchmark.Trainee(benchmark.build(config, bench.device))
    for precision in ("bf16", "fp16"):
        benchmark.gpu_group(bench, "tiny", trainee, precision, False, 2, 8, 1e12)
    assert [row["form"] for row in bench.rows] == ["plain", "lean"] * 2
    assert all(row["share"] > 0 for row in bench.rows)
