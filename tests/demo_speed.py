"""How fast the demo is with the shipped checkpoint, beside what it is to be.

    python tests/demo_speed.py [--rounds 7] [--json FILE]

Starts `demo_app.py` on a free port and uses it in Chromium as a person does: medians (min–max) of
a new browser's first view, a click on a token, a move of a slider and the first token of a text;
then 5 users at once, 10 requests each, through the JSON endpoint. Needs playwright and Chromium.
"""

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "**ROMEO**  \nBut, soft! what light through yonder"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
AIMS = {  # seconds, on 2 cores
    "first view": 2.5,
    "inspect a token": 0.3,
    "slider": 0.1,
    "first generated token": 0.5,
    "request, 5 users": 1.5,
}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy
# Runs `act`, then draws frames until `done` is true: seconds.
TIMED = """async ([act, done]) => {
  const start = performance.now();
  eval(act);
  while (!eval(done)) await new Promise(requestAnimationFrame);
  return (performance.now() - start) / 1000;
}"""
PICK = (
    "document.querySelectorAll('#tokens button')[{}].click()",
    "document.querySelector('#tokens button[aria-pressed=true]').dataset.pick == {} && "
    "document.querySelector('#signature h3 bdi').textContent == "
    "document.querySelectorAll('#tokens bdi')[{}].textContent",
)
MOVE = (
    "window.before = document.querySelector('#probability tbody').textContent;"
    "const range = document.querySelector('[aria-label=\"range slider for temperature\"]');"
    "range.value = {}; range.dispatchEvent(new Event('input', {{bubbles: true}}))",
    "document.querySelector('#probability tbody').textContent != before",
)
WRITE = (
    "document.querySelector('#go').click()",
    "document.querySelector('#generate .generated')",
)


def start(folder):
    """The running demo: (process, address)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "demo_app.py"), "--out", folder, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if found := re.search(r"http://\S+", line):
            return process, found.group()
    raise SystemExit("demo_speed.py: error: the demo does not start")


def first_view(browser, address):
    """Seconds until the signature is seen, in a browser without a cache; and the page."""
    page = browser.new_context().new_page()
    began = time.perf_counter()
    page.goto(address)
    page.locator("#signature .cells").first.wait_for()
    return time.perf_counter() - began, page


def timed(page, what, value="", rest=300):
    """Seconds from an action to what it changes; then the page may rest (milliseconds)."""
    seconds = page.evaluate(TIMED, [part.format(*[value] * 2) for part in what])
    page.wait_for_timeout(rest)
    return seconds


def in_page(page, rounds):
    """{what: seconds of each round} of what a user does on an open page."""
    page.wait_for_timeout(1000)
    tokens = page.locator("#tokens button").count()
    found = {"inspect a token": [timed(page, PICK, i % tokens) for i in range(rounds)]}
    page.get_by_role("tab", name="Probability").click()
    page.locator("#probability tbody").wait_for()
    page.wait_for_timeout(500)
    found["slider"] = [timed(page, MOVE, 0.5 + i / 10) for i in range(rounds)]
    page.get_by_role("tab", name="Generate").click()
    page.get_by_label("number input for tokens").fill("2")
    found["first generated token"] = []
    for _ in range(rounds):
        page.locator("#look").click()
        page.locator("#generate .generated").first.wait_for(state="detached")
        page.wait_for_timeout(300)
        found["first generated token"].append(timed(page, WRITE, rest=1000))
    return found


def ask(address):
    """Seconds of one request through the public endpoint."""
    url, began = address + "/gradio_api/call/inspect", time.perf_counter()
    body = json.dumps({"data": [PROMPT, -1, 10, None, ""]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with DIRECT.open(request) as answer:
        event = json.load(answer)["event_id"]
    with DIRECT.open(f"{url}/{event}") as answer:
        assert b"event: complete" in answer.read()
    return time.perf_counter() - began


def crowd(address, users=5, requests=10):
    """Seconds of every request of users who ask at the same time, each one after the other."""
    seconds = []
    user = lambda: seconds.extend([ask(address) for _ in range(requests)])  # noqa: E731
    threads = [threading.Thread(target=user) for _ in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seconds) == users * requests, "a request failed"
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="of each (default 7)")
    parser.add_argument("--json", help="file that gets the seconds of every round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        process, address = start(folder)
        try:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
            found = {"first view": []}
            for _ in range(args.rounds):
                seconds, page = first_view(browser, address)
                found["first view"].append(seconds)
                page.context.close()
            found |= in_page(first_view(browser, address)[1], args.rounds)
            browser.close()
            found["request, 5 users"] = crowd(address)
        finally:
            process.terminate()
            process.wait(30)
    print("| seconds | median | min–max | aim | |\n|---|---|---|---|---|")
    for name, seconds in found.items():
        median, aim = statistics.median(seconds), AIMS[name]
        spread, met = f"{min(seconds):.2f}–{max(seconds):.2f}", "met" if median <= aim else "missed"
        print(f"| {name} | {median:.2f} | {spread} | {aim} | {met} |")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
