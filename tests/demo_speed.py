"""How fast the demo is with the shipped checkpoints, beside what it is to be.

    python tests/demo_speed.py [rounds]

Starts `demo_app.py` and uses it in Chromium as people do: medians (min–max) of what AIMS lists; ten
others write 200 tokens each, and 20 users put 5 requests each to the JSON endpoint, none lost.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import sync_playwright

DEMO = str(Path(__file__).resolve().parents[1] / "demo_app.py")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
AIMS = {  # seconds, on 2 cores
    "first view": 2.5,
    "click on a token": 0.15,
    "slider": 0.06,
    "first generated token": 0.5,
    "click, ten others generate": 2.0,
    "request, 20 users": 3.0,
}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy
# Runs `act`, then draws frames until `done` is true: seconds.
TIMED = """async ([act, done]) => {
  const start = performance.now();
  eval(act);
  while (!eval(done)) await new Promise(requestAnimationFrame);
  return (performance.now() - start) / 1000;
}"""
PICK = (  # an action, and how it is seen to be done
    "document.querySelectorAll('#way .context button')[{0}].click()",
    "document.querySelector('#way .context [aria-pressed=true]').dataset.index == {0}",
)
MOVE = (
    "window.range = document.querySelector('#probability-above [name=temperature]');"
    "range.value = {0}; range.dispatchEvent(new Event('input', {{bubbles: true}}))",
    "document.querySelector('#probability').textContent.includes('Temperature {0},')",
)
WRITE = "document.querySelector('#go').click()", "document.querySelector('#generate .text [role]')"


def start(folder):
    command, one = [sys.executable, DEMO, "--out", folder], os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one)
    for line in process.stdout:
        if found := re.search(r"http://\S+", line):
            return process, found.group()
    raise SystemExit("the demo does not start")


def first_view(browser, address):
    page, began = browser.new_context().new_page(), time.perf_counter()
    page.goto(address)
    page.locator("#way .share").last.wait_for()
    return time.perf_counter() - began, page


def timed(page, what, value="", rest=300):
    """Seconds from an action to what it changes; then the page may rest (milliseconds)."""
    seconds = page.evaluate(TIMED, [part.format(value) for part in what])
    page.wait_for_timeout(rest)
    return seconds


def in_page(page, rounds):
    for name in ("Probability", "Generate"):  # which are not in the page before
        page.get_by_role("tab", name=name).click()
    page.wait_for_timeout(1000)
    found = {"click on a token": [timed(page, PICK, i % 5) for i in range(rounds)]}
    found["slider"] = [timed(page, MOVE, f"{0.51 + i / 10:g}") for i in range(rounds)]
    page.locator("[name=many]").fill("2")
    found["first generated token"] = []
    for i in range(rounds):
        page.locator("#prompt").fill(f"My lord, I do beseech your {i}")
        page.wait_for_timeout(1000)
        found["first generated token"].append(timed(page, WRITE, rest=1000))
    return found


def among_others(browser, address, rounds, users=10):
    pages = [first_view(browser, address)[1] for _ in range(users + 1)]
    pages[0].wait_for_timeout(1000)
    for page in pages[1:]:
        page.get_by_role("tab", name="Generate").click()
        page.locator("[name=many]").fill("200")
        page.locator("#go").click()
    return [timed(pages[0], PICK, i % 5, rest=100) for i in range(rounds)]


def ask(address):
    url, began = address + "/gradio_api/call/inspect", time.perf_counter()
    body = json.dumps({"data": ["My lord, I do beseech your", -1, 10, None, "", None]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    event = json.load(DIRECT.open(request))["event_id"]
    assert b"event: complete" in DIRECT.open(f"{url}/{event}").read()
    return time.perf_counter() - began


def crowd(address, users=20, requests=5):
    with ThreadPoolExecutor(users) as pool:  # which raises what a request does
        each = list(pool.map(lambda _: [ask(address) for _ in range(requests)], range(users)))
    return sum(each, [])


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        process, address = start(folder)
        try:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
            views = [first_view(browser, address) for _ in range(rounds)]
            [page.context.close() for _, page in views[1:]]
            found = {"first view": [seconds for seconds, _ in views]}
            found |= in_page(views[0][1], rounds)
            found["click, ten others generate"] = among_others(browser, address, rounds)
            browser.close()
            found["request, 20 users"] = crowd(address)
        finally:
            process.terminate()
            process.wait(30)
    print("| seconds | median | min–max | aim | |\n|---|---|---|---|---|")
    for name, seconds in found.items():
        median, spread = statistics.median(seconds), f"{min(seconds):.2f}–{max(seconds):.2f}"
        met = "met" if median <= AIMS[name] else "missed"
        print(f"| {name} | {median:.2f} | {spread} | {AIMS[name]} | {met} |")


if __name__ == "__main__":
    main()
