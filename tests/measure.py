"""How tests/benchmark.py measures, and what it makes of the numbers: rows, a table, a picture."""

import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import train

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATRIX = 2048  # side of the matrices whose product is the peak, on a CPU; four times that on a GPU
COLOURS = {"standard": "#000000", "published": "#D55E00", "plain": "#009E73", "lean": "#0072B2"}


def timed(job, device):
    """Seconds of one run."""
    gc.collect(1)  # the young: what the run before left; all would take long
    for wait in (True, False):
        if device.type == "cuda":
            torch.cuda.synchronize()
        if wait:
            began = time.perf_counter()
            job()
    return time.perf_counter() - began


def _resident():
    """What this process has in memory now, in bytes."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def extra_memory(job, device):
    """Bytes by which the job grows the memory at its peak, less what it returns: its gradients.

    CUDA: of PyTorch's allocator. Linux: of the process, whose high-water mark is reset after what
    it holds unused is given back. Elsewhere None.
    """
    gc.collect(1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before, gradients = torch.cuda.memory_allocated(), job() or 0
        return max(0, torch.cuda.max_memory_allocated() - before - gradients)
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _resident()
    except (OSError, AttributeError, TypeError):  # not Linux with glibc
        job()
        return None
    gradients = job() or 0
    return max(0, 2**30 * train.peak_memory(device) - before - gradients)


class Bench:
    """The rows of a run, and what it was told."""

    def __init__(self, sizes, device, deadline=float("inf")):
        self.sizes, self.device, self.deadline = SimpleNamespace(**sizes), device, deadline
        self.rows, self.peaks = [], {}

    def measure(self, part, setting, jobs, tokens=None, prepare=None, more=None):
        """Run jobs {(form, precision): function} in turn; returns {(form, precision): row}.

        tokens: of a run, an int or one for each job. prepare: functions whose results, made
        untimed, are the jobs' arguments. more: entries for each row. After the deadline no further
        round begins.
        """
        gc.collect()
        seconds, memory, rows = {key: [] for key in jobs}, {}, {}
        for number in range(self.sizes.rounds + 1):
            if number > 1 and time.perf_counter() > self.deadline:
                break
            for key, job in jobs.items():
                run = partial(job, prepare[key]()) if prepare else job
                if number == 0:
                    memory[key] = extra_memory(run, self.device)
                else:
                    seconds[key].append(timed(run, self.device))
        for (form, precision), s in seconds.items():
            row = {"part": part, "setting": setting, "form": form, "precision": precision}
            row |= {"seconds": s, "extra_memory": memory[form, precision], "checks": []}
            row["tokens"] = n = tokens[form, precision] if isinstance(tokens, dict) else tokens
            row["tokens_per_second"] = n and n / statistics.median(s)
            rows[form, precision] = row | (more or {}).get((form, precision), {})
        self.rows += rows.values()
        return rows

    def matrix_peak(self, precision):
        """FLOP/s of the best of several products of large square matrices."""
        if precision not in self.peaks:
            size = 4 * MATRIX if self.device.type == "cuda" else MATRIX
            a = torch.randn(size, size, device=self.device).to(KINDS[precision])
            fastest = min(timed(lambda: torch.mm(a, a), self.device) for _ in range(8))
            self.peaks[precision] = 2 * size**3 / fastest
        return self.peaks[precision]


def check(row, text, value, bars=(), low=False):
    """Note a number to compare, with (aim, bar) or (aim,) if it has them; low: less is better."""
    entry = {"text": text.format(f"{value:.3g}"), "value": value}
    if bars:
        good = [value <= x if low else value >= x for x in bars]
        entry |= dict(zip(("aim", "bar"), bars)) | dict(zip(("aim_met", "bar_met"), good))
        names = ", ".join(f"{name} {x:g}" for name, x in zip(("aim", "bar"), bars))
        met = "aim met" if good[0] else "bar met" if good[-1] else "missed"
        entry["text"] += f" ({names}: {met})"
    row["checks"].append(entry)


def compare(row, other, speed=(), memory=()):
    """Speed and extra memory as multiples of another row's; returns that of the speed."""
    per = (row["tokens"] or 1) / (other["tokens"] or 1)
    ratio = statistics.median(b / a * per for a, b in zip(row["seconds"], other["seconds"]))
    check(row, f"{{}} × {other['form']}'s speed", ratio, speed)
    if row["extra_memory"] and other["extra_memory"]:
        share = row["extra_memory"] / other["extra_memory"]
        check(row, f"{{}} × {other['form']}'s extra memory", share, memory, low=True)
    return ratio


def machine(device):
    """Where the numbers were measured, and how."""
    name, file = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    about = {
        "cpu": name,
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    about["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about |= {"system": platform.system(), "threads": torch.get_num_threads()}
    about["load_before"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    about |= {"python": platform.python_version(), "torch": torch.__version__}
    command = ["python", "tests/benchmark.py", *sys.argv[1:]]
    return about | {"date": time.strftime("%Y-%m-%d"), "command": " ".join(command)}


def save(bench, about, path):
    path.parent.mkdir(exist_ok=True)
    result = {"schema": 1, "about": about | {"matrix_peak": bench.peaks}, "rows": bench.rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def markdown(rows):
    """The rows as a table; those of part f are a picture instead."""
    lines = ["part", "setting", "form", "precision", "median (min–max)", "tok/s", "extra memory"]
    lines = [[*lines, "share of peak", "compared"], ["---"] * 9]
    for row in rows:
        if row["part"] == "f":
            continue
        low, middle, high = (1e3 * f(row["seconds"]) for f in (min, statistics.median, max))
        digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
        line = [row[k] for k in ("part", "setting", "form", "precision")]
        if "micro_batch" in row:
            line[2] += f" ({row['micro_batch']} at a time)"
        line.append(f"{middle:,.{digits}f} ms ({low:,.{digits}f}–{high:,.{digits}f})")
        line.append(f"{row['tokens_per_second']:,.0f}" if row["tokens"] else "")
        memory = row["extra_memory"]
        line.append("" if memory is None else f"{memory / 1e6:,.0f} MB")
        line.append(f"{row['share']:.0%}" if "share" in row else "")
        lines.append([*line, "; ".join(entry["text"] for entry in row["checks"])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(rows, path):
    """Part f in four panels, as a PNG: medians, and from the fastest to the slowest round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, panels = plt.subplots(1, 4, figsize=(16, 4), layout="constrained")
    labels = {"B": "buckets B (H 4)", "H": "hash functions H (B 2048)"}
    labels |= {"V": "tokens V (exact objective, H 4, B 2048)", "T": "context T (tiny)"}
    for axes, (panel, label) in zip(panels, labels.items()):
        mine = [row for row in rows if row.get("panel") == panel]
        for form, marker in zip(COLOURS, "sovD"):
            line = [row for row in mine if row["form"] == form]
            if not line:
                continue
            x = [row["x"] for row in line]
            scale = (lambda s, n: n / s) if panel == "T" else (lambda s, n: 1e6 * s / n)
            ys = [[scale(f(row["seconds"]), row["tokens"]) for row in line]
                  for f in (statistics.median, min, max)]  # fmt: skip
            axes.plot(x, ys[0], color=COLOURS[form], marker=marker, markersize=5, label=form)
            axes.fill_between(x, *ys[1:], color=COLOURS[form], alpha=0.15)
        ticks = sorted({row["x"] for row in mine})
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.set_xticks(ticks, [f"{t // 1024}K" if t >= 2048 else str(t) for t in ticks])
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        axes.minorticks_off()
        unit = (
            "whole step (tokens/s)"
            if panel == "T"
            else "forward and backward of the loss (µs/token)"
        )
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
