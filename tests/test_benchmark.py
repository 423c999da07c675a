"""The benchmark runs, at its smallest size."""

import re

import benchmark
import pytest

SMALL = {"tiny": dict(num_hidden_layers=1, max_position_embeddings=32)}
TINY = benchmark.QUICK | dict(rounds=1, steps=SMALL, contexts=(4, 8), tables=(300,))


@pytest.mark.parametrize("flags", [[], ["--gpu"]], ids=["all", "gpu"])
def test_every_row_has_figures(flags, monkeypatch, tmp_path, capsys):
    """The page has the machine, and a median within its range for whatever is measured."""
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "README.md")
    monkeypatch.setattr(benchmark, "FULL" if not flags else "QUICK", TINY)
    monkeypatch.setattr(benchmark.mhf, "choose_device", lambda name: benchmark.torch.device("cpu"))
    benchmark.main(flags)
    if not flags:
        page = benchmark.RESULTS.read_text(encoding="utf-8")
        assert page.startswith("# Speed and memory") and f"{benchmark.os.cpu_count()} cores" in page
        assert page.count("## ") == len(benchmark.PARTS)
    said = capsys.readouterr().out.replace(",", "")
    rows = re.findall(r"^\| (.+) \| ([0-9.e+]+) \S+ \| (\S+) to (\S+) \|", said, re.MULTILINE)
    figures = [tuple(map(float, row[1:])) for row in rows]
    assert all(0 < low <= median <= high for median, low, high in figures)
    expected = ["tiny fp32 256 tokens", "mhf joint", "standard"]
    expected += [] if flags else ["behind 8", "300 tokens"]
    assert all(part in said for part in expected)
    assert len(rows) == said.count("\n| ") - said.count("\n| | ")
