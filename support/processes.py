"""Several processes, one for each GPU, as torchrun starts them; and signals to stop."""

import contextlib
import datetime
import os
import signal

import torch
import torch.distributed as dist

import mhf

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if WORLD_SIZE > 1 else 0


def join(device):
    """Meet the other processes, if there are any; returns this process's device."""
    if WORLD_SIZE > 1 and device.type == "cuda":
        device = mhf.choose_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1 and not dist.is_initialized():
        kind = "nccl" if device.type == "cuda" else "gloo"  # hours: the first one evaluates
        dist.init_process_group(kind, timeout=datetime.timedelta(hours=6))
    return device


def leave():
    """Wait until the first process has written everything: an early exit of another may end it."""
    if WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def first_alone():
    """The first process does the block while the others wait; they do it after it."""
    if RANK > 0:
        dist.barrier()
    yield
    if RANK == 0 and WORLD_SIZE > 1:
        dist.barrier()


def all_reduce(tensor):
    """Sum a tensor over the processes, in place."""
    if WORLD_SIZE > 1:
        dist.all_reduce(tensor)
    return tensor


@contextlib.contextmanager
def stop_signals(run):
    """Set run.interrupted when a signal to stop arrives; a second one acts at once."""

    def note(*_):
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted = True

    with contextlib.ExitStack() as afterwards:
        for number in signal.Signals:
            stops = number.name in ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
            if stops and signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored
                afterwards.callback(signal.signal, number, signal.signal(number, note))
        yield
