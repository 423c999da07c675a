"""A run's folder: checkpoints, log.csv, run.json, curve.png; and how two runs differ."""

import contextlib
import csv
import difflib
import json
import os
import shutil
import time
from pathlib import Path

from safetensors import SafetensorError

from support.cache import written

COLUMNS = ["step", "tokens", "seconds", "learning_rate", "loss", "grad_norm", "tokens_per_second"]
MEASURES = ["val_objective", "perplexity", "tau", "top1", "valid_mass", "bits_per_byte"]


class RunFailed(Exception):
    """A run that failed although its settings were in order."""


def out_of_memory(error):  # CUDA, MPS and the CPU's allocator have different words
    return any(w in str(error).lower() for w in ("out of memory", "allocate memory"))


def new_folder(out, name, model):
    """A folder of its own for a run, also when several start in the same second."""
    folder = Path(out) / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{os.getpid()}")
    if (folder / "run.json").exists() and not any(folder.glob("step-*[0-9]")):
        shutil.rmtree(folder)  # a run that ended before its first checkpoint
    if folder.exists():
        raise ValueError(f"{folder} exists; choose another --name or --resume it")
    folder.mkdir(parents=True)
    return folder


def name_of(run, which):
    """The checkpoint that the text file `last` or `best` of a run names, or None."""
    file = Path(run) / which
    name = file.read_text(encoding="utf-8", errors="replace").strip() if file.exists() else ""
    return name if name and (Path(run) / name).is_dir() else None


def write_text(path, text):
    with written(Path(path)) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_checkpoint(run, step):
    """A folder to fill, which becomes run/step-N and `last`; a killed save leaves the old."""
    try:
        with written(run / f"step-{step}") as new:
            new.mkdir()
            yield new
        write_text(run / "last", f"step-{step}")
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, for example
        last = name_of(run, "last")
        kept = f"; {run / last} is good: make room, then --resume" if last else ""
        raise RunFailed(f"step {step} could not be saved: {error}{kept}") from None
    note_best(run)


def note_best(run):
    """Keep two checkpoints: `last`, and `best`, that of the lowest perplexity in the log."""
    best = min(read_log(run, "perplexity"), key=lambda row: row["perplexity"], default=None)
    if best and (run / f"step-{best['step']:.0f}").is_dir():
        write_text(run / "best", f"step-{best['step']:.0f}")
    for folder in [*run.glob("step-*"), *run.glob("*.tmp")]:  # .tmp: a killed run left it
        if folder.name not in (name_of(run, "last"), name_of(run, "best")):
            shutil.rmtree(folder, ignore_errors=True)


def append_log(run, row):
    row = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
    try:
        with open(run / "log.csv", "a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*COLUMNS, *MEASURES])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
    except OSError as error:
        raise RunFailed(f"{run}: {error}; make room, then go on with --resume") from None


def log_text(run):
    file = Path(run) / "log.csv"
    return file.read_text(encoding="utf-8-sig", errors="replace") if file.exists() else ""


def read_log(run, need="step"):
    """The rows of a run's log that have a number in column `need`; none before its first step."""
    try:
        rows = [row for row in csv.DictReader(log_text(run).splitlines()) if row[need]]
        return [{k: float(v) for k, v in row.items() if v} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run}/log.csv is not what train.py wrote: {error!r}") from None


def cut_log(run, step):
    """Forget what a killed run logged after the checkpoint that it goes on from."""
    lines = [line for line in log_text(run).splitlines(keepends=True) if line.endswith("\n")]
    steps = [line.partition(",")[0] for line in lines]
    kept = [line for n, line in zip(steps, lines) if not n.isdigit() or int(n) <= step]
    write_text(run / "log.csv", "".join(kept))


def read_json(path):
    """The JSON object in a file; ValueError, with the file's name, if there is none."""
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from None


def read_run(run):
    about = read_json(Path(run) / "run.json")
    if not {"config", "settings", "data_hash", "parameters"} <= about.keys():
        raise ValueError(f"{run}: run.json is damaged or of another version")
    return about


def draw_curves(runs, path):
    """Training loss and held-out perplexity of one run or several, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure((11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run in runs:
        for axis, what in ((left, "loss"), (right, "perplexity")):
            rows = read_log(run, what)
            axis.plot([r["step"] for r in rows], [r[what] for r in rows], label=Path(run).name)
    left.set(xlabel="step", ylabel="training loss (nats per token)")
    right.set(xlabel="step", ylabel="held-out perplexity (calibrated)")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def compare(runs):
    """Print which settings, results and mhf.py lines differ between runs; overlay their curves."""
    names, abouts = [Path(run).name for run in runs], [read_run(run) for run in runs]
    settings = [about["config"] | about["settings"] for about in abouts]
    rows = [("", *names)]
    for key in sorted(set().union(*settings)):
        values = [str(s.get(key, "-")) for s in settings]
        if len(set(values)) > 1:
            rows.append((key, *values))
    rows.append(("parameters", *(f"{a['parameters']['total']:,}" for a in abouts)))
    logs = [dict(pair for row in read_log(run) for pair in row.items()) for run in runs]
    results = [log | about.get("final", {}) for log, about in zip(logs, abouts)]
    for key in ("step", "tokens", "seconds", "loss", *MEASURES):
        rows.append((key, *(f"{r[key]:.6g}" if key in r else "-" for r in results)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    first, *others = [(Path(run) / "mhf.py").read_text(encoding="utf-8") for run in runs]
    for name, other in zip(names[1:], others):
        lines = difflib.unified_diff(first.split("\n"), other.split("\n"), names[0], name, n=1)
        print("\n".join(lines) or f"mhf.py of {names[0]} and {name}: the same")
    picture = Path(runs[-1]).parent / "compare.png"
    draw_curves(runs, picture)
    print(f"curves: {picture}")
