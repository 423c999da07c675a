"""Train a MultiHashFormer, or a standard transformer to compare it with.

    python train.py                                    Shakespeare, settings by hardware
    python train.py --model standard                   the baseline with a V x D embedding
    python train.py --num_hashes 3 --num_buckets 512   any field of mhf.Config is a flag
    python train.py --data notes/ more.jsonl.gz        your own text
    python train.py --resume                           go on with the newest run
    python train.py --compare runs/a runs/b            what differs, and what came of it
    torchrun --standalone --nproc_per_node=2 train.py  two GPUs

Every run has a folder: checkpoints, log.csv, curve.png, samples.txt and the mhf.py it ran.
"""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: a CPU step is faster (Linux)

import argparse
import json
import math
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import mhf
from support import data, processes, runs, tokenizer
from support.evaluate import evaluate, summary, token_sizes
from support.processes import RANK, WORLD_SIZE, all_reduce
from support.runs import RunFailed


# ---- Settings -----------------------------------------------------------------------------------
def setting(default, help, low=-math.inf, high=math.inf):
    return field(default=default, metadata={"help": help, "bounds": (low, high)})


@dataclass
class Settings:
    """What training adds to mhf.Config. None means: chosen by preset or hardware."""

    data: list = setting(None, "text or .jsonl files, folders, patterns (default: shakespeare)")
    tokenizer: str = setting("bpe:8192", "bpe:SIZE, gpt2, cl100k_base, ... or a folder")
    preset: str = setting("auto", "tiny, small, 100m, 1b or 3b; auto: tiny on a CPU, else small")
    extra_layers: int = setting(0, "layers on top of the preset's: the deeper baseline", 0, 1000)
    steps: int = setting(None, "optimizer steps", 1, 2**31)
    tokens_per_step: int = setting(None, "tokens of a step, a multiple of the context", 1, 2**26)
    micro_batch: int = setting(None, "sequences in memory at a time; same gradients", 1, 2**31)
    learning_rate: float = setting(None, "peak, between warm-up and cosine decay", 1e-12, 100)
    min_learning_rate: float = setting(0.1, "end of the cosine, as a share of the peak", 0, 1)
    warmup: float = setting(0.05, "share of the steps with a rising learning rate", 0, 1)
    weight_decay: float = setting(0.1, "of matrices and the table", 0, 100)
    beta2: float = setting(0.95, "of AdamW", 0, 0.999999)
    grad_clip: float = setting(1.0, "largest norm of the gradient", 1e-12)
    seed: int = setting(1337, "of initial weights and batches", 0, 2**31)
    eval_every: int = setting(None, "steps between evaluations, each with a checkpoint", 1, 2**31)
    eval_tokens: int = setting(16384, "held-out tokens an evaluation; the last takes 2^20", 1)
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    precision: str = setting("auto", "auto, fp32, bf16 or fp16")
    threads: int = setting(None, "CPU threads", 1, 2 * (os.cpu_count() or 1))
    checkpoint_activations: bool = setting(False, "recompute the blocks: less memory, slower")
    compile: bool = setting(False, "compile the model with torch.compile")
    out: str = setting("runs", "folder of the run folders")
    name: str = setting(None, "this run's folder (default: date, time and model)")
    stop_after: int = setting(None, "stop after this step, as Ctrl-C does", 1, 2**31)

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            low, high = f.metadata["bounds"]
            if isinstance(value, int | float) and not low <= value <= high:
                raise ValueError(f"--{f.name} must be from {low} to {high}, not {value}")


TRAINING = {  # defaults by preset
    "tiny": dict(steps=450, tokens_per_step=2048, learning_rate=2e-3, eval_every=150),
    "small": dict(steps=2000, tokens_per_step=32768, learning_rate=1e-3, eval_every=250),
    "100m": dict(steps=20000, tokens_per_step=524288, learning_rate=6e-4, eval_every=500),
    "1b": dict(steps=100000, tokens_per_step=1048576, learning_rate=3e-4, eval_every=1000),
    "3b": dict(steps=100000, tokens_per_step=1048576, learning_rate=2e-4, eval_every=1000),
}
CHOICES = mhf.CHOICES | dict(preset=("auto", *TRAINING), precision=("auto", "fp32", "bf16", "fp16"))
# These decide where, how fast and how long a run goes; a resumed run may change them.
FREE_ON_RESUME = {"micro_batch", "device", "threads", "checkpoint_activations", "compile"}
FREE_ON_RESUME |= {"steps", "stop_after"}


def parse(argv=None):
    """The flags that were given, as a dict."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(None, None, __doc__, formatter_class=raw, allow_abbrev=False)
    parser.argument_default = argparse.SUPPRESS
    newest = {"nargs": "?", "const": "newest", "metavar": "RUN"}
    parser.add_argument("--resume", **newest, help="go on with a run (default: the newest)")
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="compare runs")
    parser.add_argument("--prepare", action="store_true", help="only read and tokenise the text")
    title = "model: the fields of mhf.Config, where comments explain them; presets change some"
    for group, owner in (("training", Settings), (title, mhf.Config)):
        group = parser.add_argument_group(group)
        for f in fields(owner):
            default = f" (default {f.default})" if f.default not in (None, False) else ""
            about = {"help": f.metadata.get("help", "") + default.replace("%", "%%")}
            if f.type is bool:
                group.add_argument(f"--{f.name}", action="store_true", **about)
            elif f.name != "extra":
                kind = getattr(f.type, "__args__", (f.type,))[0]  # int of int | None
                about |= {"nargs": "+"} if kind is list else {"type": kind}
                group.add_argument(f"--{f.name}", choices=CHOICES.get(f.name), **about)
    return vars(parser.parse_args(argv))


def split_flags(given):
    """The flags given -> Settings with their defaults, and fields of mhf.Config."""
    own = {f.name for f in fields(Settings)}
    settings = Settings(**{k: v for k, v in given.items() if k in own})
    if settings.preset == "auto":
        settings.preset = "tiny" if mhf.choose_device(settings.device).type == "cpu" else "small"
    for name, value in TRAINING[settings.preset].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    overrides = {k: v for k, v in given.items() if k not in own}
    layers = overrides.get("num_hidden_layers", mhf.PRESETS[settings.preset]["num_hidden_layers"])
    overrides["num_hidden_layers"] = layers + settings.extra_layers
    mhf.Config.preset(settings.preset, **overrides)  # its errors come before the text is read
    return settings, overrides


# ---- Training -----------------------------------------------------------------------------------
def build_model(config, words):
    """The model, with a signature for every token of a tokenizer."""
    tokens = words.hashed_bytes()
    unused = config.vocab_size - len(tokens)  # rows that round the vocabulary up
    if unused < 0 or (unused and config.model == "standard"):
        raise ValueError(f"--vocab_size {config.vocab_size}: the tokenizer has {len(tokens)}")
    if config.model == "standard":
        return mhf.Transformer(config)
    table = mhf.SignatureTable(config.num_hashes, config.num_buckets, config.num_lsh)
    table.extend(tokens + [None] * unused, config.pad_token_id)
    return mhf.MultiHashFormer(config, table)


def make_optimizer(model, settings, device):
    """AdamW; weight decay on matrices and the table only."""
    decay, none = {"weight_decay": settings.weight_decay}, {"weight_decay": 0.0}
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices} | decay, {"params": vectors} | none]
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, settings.beta2), fused=fused)


def learning_rate(step, s):
    """Of step 1 ... steps: linear warm-up, then a cosine down to a share of the peak."""
    warm = max(1, round(s.warmup * s.steps))
    if step <= warm:
        return s.learning_rate * step / warm
    cosine = (1 + math.cos(math.pi * (step - warm) / max(1, s.steps - warm))) / 2
    return s.learning_rate * (s.min_learning_rate + (1 - s.min_learning_rate) * cosine)


class Run:
    """A training run: model, optimizer, data, and where it stands."""

    def __init__(self, settings, config, corpus, folder):
        self.settings, self.corpus, self.folder = settings, corpus, folder
        s, T = settings, config.max_position_embeddings
        self.device = processes.join(mhf.choose_device(s.device))
        if s.threads:
            torch.set_num_threads(s.threads)
        self.rows, rest = divmod(s.tokens_per_step, T * WORLD_SIZE)  # sequences of a step
        if rest:
            raise ValueError(f"--tokens_per_step {s.tokens_per_step} is no multiple of the context "
                             f"{T} times {WORLD_SIZE} processes")  # fmt: skip
        on_cpu = self.device.type == "cpu"
        at_once = s.micro_batch or max(1, (1024 if on_cpu else 16384) // T)
        self.micro_batch = min(self.rows, at_once)
        self.chunk = 256 if on_cpu else 4096  # positions; the caches of a CPU are small
        s.precision = mhf.choose_precision(s.precision, self.device)
        self.autocast = partial(mhf.autocast, self.device, s.precision)
        torch.manual_seed(s.seed)
        self.model = build_model(config, corpus.tokenizer).to(self.device)
        self.config = self.model.config
        for block in self.model.model.layers if s.checkpoint_activations else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self.optimizer = make_optimizer(self.model, s, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=s.precision == "fp16")
        if s.compile:
            self.model.compile()
            self.model.loss_per_position = torch.compile(self.model.loss_per_position)
        self.step, self.seconds, self.interrupted = 0, 0.0, False

    def batch(self, step):
        """Inputs and targets of a step (rows, T): this process's share of its sequences."""
        T, seed = self.config.max_position_embeddings, self.settings.seed
        parts = data.batch(self.corpus.training, seed, step, self.rows, T, RANK, WORLD_SIZE)
        if self.device.type == "cuda":
            parts = [part.contiguous().pin_memory() for part in parts]
        return [part.to(self.device, non_blocking=True) for part in parts]

    def backward(self, x, y, scale):
        """Add the gradients of the summed loss, times scale, of some sequences; return that loss.

        The H * B logits of a position are what takes memory. So the graph is cut at the states h:
        the decoder takes a chunk of positions at a time, forward and straight back, and the
        gradient of h then goes through the backbone. Nothing is computed twice.
        """
        with self.autocast():
            h = self.model(x)  # (N, T, D)
        chunks = [part.detach().requires_grad_() for part in h.flatten(0, 1).split(self.chunk)]
        total = torch.zeros((), device=self.device)
        for states, targets in zip(chunks, y.flatten().split(self.chunk)):
            with self.autocast():
                loss = self.model.loss_per_position(states, targets).sum() * scale
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if h.requires_grad:  # not if embedding and blocks are frozen
            h.backward(torch.cat([states.grad for states in chunks]).view_as(h))
        return total

    def gradients(self, x, y):
        """The mean loss of a step's sequences, and its gradients in the parameters."""
        while True:
            total = torch.zeros((), device=self.device)
            self.optimizer.zero_grad(set_to_none=True)
            try:
                for part in zip(x.split(self.micro_batch), y.split(self.micro_batch)):
                    total += self.backward(*part, scale=1 / y.numel())
                return total
            except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
                if not runs.out_of_memory(error) or self.micro_batch == 1:
                    raise
            self.micro_batch //= 2
            tqdm.write(f"out of memory; going on with {self.micro_batch} sequences at a time")

    def advance(self):
        """One optimizer step; returns its row of the log."""
        began, s = time.perf_counter(), self.settings
        self.step += 1
        rate = learning_rate(self.step, s)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = all_reduce(self.gradients(*self.batch(self.step))) / WORLD_SIZE
        for p in self.model.parameters():
            if p.grad is not None:
                all_reduce(p.grad).div_(WORLD_SIZE)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip).item()
        # In fp16 gradients may overflow: the scaler then skips the step.
        if not math.isfinite(loss.item() + (0 if self.scaler.is_enabled() else norm)):
            last = self.folder and self.folder / runs.name_of(self.folder, "last")
            raise RunFailed(f"step {self.step}: loss {loss.item()}, gradient norm {norm}; lower "
                            f"--learning_rate; {last} is the last good checkpoint")  # fmt: skip
        self.scaler.step(self.optimizer)
        self.scaler.update()
        took = time.perf_counter() - began
        self.seconds += took
        done, speed = self.step * s.tokens_per_step, s.tokens_per_step / took
        row = self.step, done, self.seconds, rate, loss.item(), norm, speed
        return dict(zip(runs.COLUMNS, row))

    def should_stop(self):
        return all_reduce(torch.tensor(float(self.interrupted), device=self.device)).item() > 0

    def save(self):
        state = {"step": self.step, "seconds": self.seconds, "settings": asdict(self.settings)}
        training = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        with runs.new_checkpoint(self.folder, self.step) as folder:
            self.model.save_pretrained(folder)
            self.corpus.tokenizer.save(folder)
            torch.save(training, folder / "optimizer.pt")
            runs.write_text(folder / "train.json", json.dumps(state, indent=2))

    def restore(self, checkpoint, stored, state):
        """Take what a checkpoint holds: its model, as mhf.load gave it, optimizer and counters."""
        if self.config.model == "mhf":
            self.model.use_signatures(stored.signatures)  # a changed mhf.py may make others
        self.model.load_state_dict(stored.state_dict())
        try:
            training = torch.load(checkpoint / "optimizer.pt", self.device, weights_only=True)
            self.optimizer.load_state_dict(training["optimizer"])
        except Exception as error:  # a damaged file has many
            raise ValueError(f"{checkpoint / 'optimizer.pt'} is damaged: {error!r}") from error
        if training["scaler"]:  # empty unless the run was in fp16
            self.scaler.load_state_dict(training["scaler"])
        self.step, self.seconds = state["step"], state["seconds"]

    def measure(self, max_tokens):
        """Evaluate; keep the fitted calibration in the model and in the checkpoint just saved."""
        sizes = token_sizes(self.corpus.tokenizer, self.config.vocab_size)
        self.model.eval()
        found = evaluate(self.model, self.corpus.held_out, sizes, self.autocast, max_tokens)
        self.model.train()
        self.config.calibration = found["tau"]
        last = self.folder / runs.name_of(self.folder, "last")
        self.config.save(last / "config.json.tmp")
        os.replace(last / "config.json.tmp", last / "config.json")
        return found

    def evaluate_and_log(self):
        """Measure the checkpoint just saved, note the best one, and write a sample of text."""
        found = self.measure(self.settings.eval_tokens)
        runs.append_log(self.folder, {"step": self.step} | found)
        runs.note_best(self.folder)
        text = self.sample(80)
        with open(self.folder / "samples.txt", "a", encoding="utf-8") as file:
            file.write(f"--- step {self.step}\n{text}\n")
        tqdm.write(f"step {self.step}: {summary(found)}\n{text}\n")

    def sample(self, length, seed=0):
        """A text at temperature 0.8 that goes on from the start of the held-out text."""
        words, prompt = self.corpus.tokenizer, self.corpus.held_out[:8].tolist()
        if self.corpus.name == "shakespeare":
            prompt = words.encode("**HAMLET**  \n")
        ids = self.model.generate(prompt, length, 0.8, seed=seed, stop=words.ends)
        return words.decode([*prompt, *ids])

    def describe(self):
        s, c, n, corpus = self.settings, self.config, self.model.num_parameters(), self.corpus
        print(f"run         {self.folder}: {c.model}, preset {s.preset}, objective {c.objective}")
        print(f"device      {self.device}, {torch.get_num_threads()} threads, {s.precision} "
              "(auto: cuda, mps, cpu; bf16 where the chip computes it)")  # fmt: skip
        print(f"data        {corpus.name} ({corpus.hash}): {len(corpus.training):,} tokens, "
              f"{len(corpus.held_out):,} held out, vocabulary {c.vocab_size:,}")  # fmt: skip
        print(f"parameters  {n['total']:,}: table {n['table']:,}, blocks {n['blocks']:,}, hashing "
              f"{n['hashing']:,}; a V x D table has {n['standard_table']:,}")  # fmt: skip
        print(f"steps       {s.steps:,} of {s.tokens_per_step:,} tokens, "
              f"{self.micro_batch} sequences at a time")  # fmt: skip


def train(run):
    """Steps, evaluations and checkpoints to the end; a signal finishes the step and saves."""
    s, first = run.settings, RANK == 0
    if first and not runs.name_of(run.folder, "last"):
        run.save()
    due = first and run.step and (run.step % s.eval_every == 0 or run.step == s.steps)
    if due and run.step not in [r["step"] for r in runs.read_log(run.folder, "perplexity")]:
        run.evaluate_and_log()  # a killed run had saved, and did not come to this
    often = 0.1 if sys.stderr.isatty() else 30
    bar = tqdm(total=s.steps, initial=run.step, unit="step", disable=not first, mininterval=often)
    with bar:
        while run.step < min(s.steps, s.stop_after or s.steps):
            row = run.advance()
            if first:
                runs.append_log(run.folder, row)
                speed = f"{row['tokens_per_second']:,.0f}"
                bar.set_postfix(loss=f"{row['loss']:.3f}", tok_s=speed, refresh=False)
                bar.update()
                if run.step % s.eval_every == 0 or run.step == s.steps:
                    run.save()
                    run.evaluate_and_log()
            if run.should_stop():
                break
    return finish(run) if first else None


def finish(run):
    """The last checkpoint, and what came of the run."""
    if runs.name_of(run.folder, "last") != f"step-{run.step}":
        run.save()
    runs.draw_curves([run.folder], run.folder / "curve.png")
    if run.step < run.settings.steps:
        command = f"python train.py --resume {shlex.quote(str(run.folder))}"
        return print(f"stopped after step {run.step}; go on:\n  {command}")
    final = run.measure(2**20)
    more = {"final": final, "final_step": run.step, "settings": asdict(run.settings)}
    about = runs.read_run(run.folder) | more
    runs.write_text(run.folder / "run.json", json.dumps(about, indent=2))
    print(f"held-out text at the end: {summary(final)}\n\n{run.sample(200, seed=1)}\n")
    print(f"next: python sample.py --checkpoint {shlex.quote(str(run.folder))} --explain")


# ---- Starting and resuming ----------------------------------------------------------------------
def prepare(settings):
    """The corpus. The first process tokenises the text; the others then map its files."""
    processes.join(mhf.choose_device(settings.device))
    with processes.first_alone():
        corpus = data.prepare(settings.data, settings.tokenizer)
    settings.data = settings.data or corpus.name.split()[:1]  # a resumed run is to find the same
    return corpus


def new_run(given):
    settings, overrides = split_flags(given)
    corpus = prepare(settings)
    vocabulary = {"vocab_size": len(corpus.tokenizer), "pad_token_id": corpus.tokenizer.eot}
    config = mhf.Config.preset(settings.preset, **vocabulary | overrides)
    least = 2 * config.max_position_embeddings + 2  # a window to fit tau, one to measure
    if min(len(corpus.held_out), len(corpus.training)) < least:
        sizes = f"{len(corpus.training)} tokens and {len(corpus.held_out)} held out"
        raise ValueError(f"too little text for --max_position_embeddings: {sizes}")
    run = Run(settings, config, corpus, None)
    if RANK == 0:
        run.folder = runs.new_folder(settings.out, settings.name, config.model)
        shutil.copy(mhf.__file__, run.folder / "mhf.py")
        about = {"config": asdict(run.config), "settings": asdict(settings)}
        about |= {"data": corpus.name, "data_hash": corpus.hash, "torch": torch.__version__}
        about |= {"device": str(run.device), "parameters": run.model.num_parameters()}
        runs.write_text(run.folder / "run.json", json.dumps(about, indent=2))
    return run


def resumed_run(folder, given):
    """The run at its last checkpoint; its settings hold, except FREE_ON_RESUME."""
    if folder == "newest":
        found = Path(given.pop("out", "runs")).glob("*/last")
        folder = max(found, key=os.path.getmtime, default=Path("runs/none")).parent
    folder = Path(folder)
    if not (last := runs.name_of(folder, "last")):
        raise ValueError(f"--resume: {folder} is not a run with a checkpoint")
    if wrong := given.keys() - FREE_ON_RESUME:
        raise ValueError(f"--resume keeps the run's settings; leave out --{', --'.join(wrong)}")
    about, stored = runs.read_run(folder), mhf.load(folder / last)
    state = runs.read_json(folder / last / "train.json")
    try:
        settings = Settings(**state["settings"] | {"stop_after": None} | given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / last}: train.json is damaged or of another version") from error
    corpus = prepare(settings)
    words = tokenizer.load(folder / last).hashed_bytes()
    if corpus.hash != about["data_hash"] or words != corpus.tokenizer.hashed_bytes():
        raise ValueError(f"--resume {folder}: the text or the tokenizer has changed since")
    run = Run(settings, stored.config, corpus, folder)
    run.restore(folder / last, stored, state)
    if RANK == 0:
        runs.cut_log(folder, run.step)
        runs.note_best(folder)
        if Path(mhf.__file__).read_bytes() != (folder / "mhf.py").read_bytes():
            copy = shutil.copy(mhf.__file__, folder / f"mhf-from-step-{run.step}.py")
            print(f"notice: mhf.py is not the one that the run began with; it is kept as {copy}")
    return run


def run_command(given):
    """Do what the flags say; returns the exit status."""
    if given.get("compare"):
        return runs.compare(given["compare"])
    if given.pop("prepare", False):
        corpus = prepare(split_flags(given)[0])
        return print(f"{corpus.name} ({corpus.hash}): {len(corpus.training):,} training tokens")
    resume = given.pop("resume", None)
    run = resumed_run(resume, given) if resume else new_run(given)
    if run.step >= run.settings.steps and runs.read_run(run.folder).get("final_step") == run.step:
        return print(f"{run.folder} is finished; to train it longer, add --steps")
    if RANK == 0:
        run.describe()
    with processes.stop_signals(run):
        train(run)
    processes.leave()
    return 130 if run.interrupted else 0


def main(argv=None):
    """Run the command line; returns the exit status: 2 for a mistake in it, 1 for a failed run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(encoding="utf-8")
    try:
        return run_command(parse(argv)) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError, MemoryError, RunFailed) as error:
        failed = isinstance(error, RunFailed | MemoryError) or runs.out_of_memory(error)
        if isinstance(error, RuntimeError) and not failed:
            raise
        print(f"train.py: {str(error) or 'out of memory'}", file=sys.stderr)
        return 1 if failed else 2


if __name__ == "__main__":
    sys.exit(main())
