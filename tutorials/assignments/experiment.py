"""Train a student's model and the unchanged one, with the same flags and seed, and show both.

The four assignments share this file; there is nothing to write here. Importing it lets Python
find mhf.py and train.py, two folders up.
"""

import shutil
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mhf  # noqa: E402
import train  # noqa: E402

# Small on purpose: half as many rows as tokens, a third of the steps of train.py's own default.
DEFAULTS = "--preset tiny --tokenizer bpe:4096 --num_buckets 512 --steps 150 --eval_every 150"
NOT_HERE = ("model", "resume", "compare", "prepare", "stop_after")
MEASURES = {
    "perplexity": "perplexity, calibrated",
    "tau": "τ, fitted",
    "top1": "top-1",
    "valid_mass": "valid mass",
    "bits_per_byte": "bits a byte",
    "val_objective": "objective",
}


def train_both(file, changes, argv=None, flags=""):
    """Train the changed model, then the unchanged one; print the held-out numbers of both.

    file: the student's. changes: {name in mhf: what stands in its place while the changed model
    is built and trained}. argv: flags of train.py, sys.argv's by default; they win over `flags`,
    which are this assignment's, and over DEFAULTS. Returns the exit status.
    """
    name = Path(file).stem
    argv = [*DEFAULTS.split(), *flags.split(), *(sys.argv[1:] if argv is None else argv)]
    given = train.parse(argv)
    for flag in NOT_HERE:
        if flag in given:
            message = f"--{flag} is not for this script, which trains two models; use train.py"
            print(f"{name}.py: {message}", file=sys.stderr)
            return 2
    stem, out = given.get("name", time.strftime("%Y%m%d-%H%M%S")), Path(given.get("out", "runs"))
    runs = {"unchanged": out / f"{stem}-unchanged", name: out / f"{stem}-{name}"}
    unchanged = {part: getattr(mhf, part) for part in changes}
    for which, parts in ((name, changes), ("unchanged", unchanged)):
        print(f"\n=== {which} ===")
        try:
            with mock.patch.multiple(mhf, **parts):
                status = train.main([*argv, "--name", runs[which].name])
        except NotImplementedError as error:
            if not str(error).startswith("not written yet"):
                raise
            print(f"{name}.py: {error}", file=sys.stderr)
            return 2
        if status:
            return status
    shutil.copy(file, runs[name])  # beside the mhf.py that train.py keeps there
    show(runs)
    return 0


def show(runs):
    """Print a table of the finished runs {label: folder}, and the command that says more."""
    abouts = [train.read_run(run) for run in runs.values()]
    print(f"\n=== held-out text at the end, seed {abouts[0]['settings']['seed']} ===")
    rows = [("", *runs)]
    rows.append(("parameters", *(f"{about['parameters']['total']:,}" for about in abouts)))
    for measure, words in MEASURES.items():
        rows.append((words, *(f"{about['final'][measure]:.4g}" for about in abouts)))
    seconds = [train.read_log(run, "loss")[-1]["seconds"] for run in runs.values()]
    rows.append(("seconds of training", *(f"{s:.0f}" for s in seconds)))
    for first, *cells in rows:
        print(f"{first:<24}" + "".join(f"{cell:>16}" for cell in cells))
    print("\ncurves, and every setting that differs:")
    print(f"  python train.py --compare {' '.join(train.quoted(run) for run in runs.values())}")
