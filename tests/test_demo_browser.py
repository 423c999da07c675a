"""The demo in a real browser: Debian's Chromium, driven by Playwright.

Skipped where either is missing; MHF_BROWSER_TESTS=required fails instead. MHF_SCREENSHOTS names a
folder for pictures of every view. One server serves all tests, each test has contexts of its own:
whatever it does, no error may reach the console and no request may leave this machine.
"""

import os
import re
import socket
import subprocess
import sys
import urllib.parse
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import mhf

CHROMIUM, REQUIRED = "/usr/bin/chromium", os.environ.get("MHF_BROWSER_TESTS") == "required"
try:
    import axe_playwright_python
    from playwright.sync_api import expect, sync_playwright

    missing = None if os.path.exists(CHROMIUM) else f"there is no {CHROMIUM}"
except ImportError as error:
    missing = f"{error}: pip install playwright axe-playwright-python"
if missing and REQUIRED:
    raise RuntimeError(f"MHF_BROWSER_TESTS=required, but {missing}")
if missing:
    pytest.skip(missing, allow_module_level=True)

ROOT = Path(mhf.__file__).resolve().parent
SHIPPED = ROOT / "tutorials" / "checkpoint"
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TABS = ["Signature", "Gate", "Cascade", "Probability", "Generate", "Vocabulary", "Compare", "Train"]
ROMEO = "**ROMEO**  \nBut, soft! what light through yonder"
PHONE = {"viewport": {"width": 390, "height": 844}}
SECONDS = 20  # that a page may take; a wait, not a claim

# Counts every run of the backbone in calls.txt, and sleeps before it as long as slow.txt says.
LAUNCHER = """
import sys, time
sys.path.insert(0, ROOT)
import demo_app, mhf
plain = mhf.Backbone.forward

def forward(*args, **more):
    with open("calls.txt", "ab") as file:
        file.write(b".")
    time.sleep(float(open("slow.txt").read() or 0))
    return plain(*args, **more)

mhf.Backbone.forward = forward
sys.exit(demo_app.main(sys.argv[1:]))
"""

# Counts what the page asked the server and what it answered, to know when the page is at rest.
COUNT = """
window.asked = 0; window.answered = 0;
const plain = window.fetch;
window.fetch = async (...args) => {
  const url = String(args[0].url ?? args[0]);
  const asks = url.includes('/queue/join') || url.includes('/run/');
  if (asks) window.asked++;
  const response = await plain(...args);
  if (asks && (url.includes('/run/') || !response.ok)) window.answered++;
  if (!url.includes('/queue/data')) return response;
  const [page, own] = response.body.tee();
  (async () => {
    let text = '';
    const decoder = new TextDecoder();
    try {
      for await (const part of own) {
        const lines = (text + decoder.decode(part, {stream: true})).split('\\n');
        text = lines.pop();
        window.answered += lines.filter(line => line.includes('"process_completed"')).length;
      }
    } catch {}  // the page is closed
  })();
  return new Response(page, response);
};
"""


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Only this machine can be reached."""
    plain = socket.socket.connect

    def connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise OSError("the tests use no network")
        return plain(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The demo with the shipped checkpoint: its address, its runs of the model, how slow it is."""
    folder = tmp_path_factory.mktemp("demo")
    calls, slow, log = (folder / name for name in ("calls.txt", "slow.txt", "log.txt"))
    calls.touch()
    slow.write_text("0")
    launcher = folder / "launcher.py"
    launcher.write_text(LAUNCHER.replace("ROOT", repr(str(ROOT))))
    other_checkpoint(folder / "runs" / "other")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(launcher), "--out", "runs", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        address = wait_for(
            lambda: re.search(r"http://\S+", log.read_text()) or process.poll() is not None
        )
        assert process.poll() is None, log.read_text()
        yield SimpleNamespace(
            address=address.group(), calls=lambda: calls.stat().st_size, slow=slow.write_text
        )
    finally:
        process.terminate()
        process.wait(30)


def other_checkpoint(run):
    """A run with a tiny random model and a tokenizer of its own."""
    words = mhf.Tokenizer.train(ROMEO * 20, 280)
    config = mhf.Config(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        bottle_neck_dim=4,
        num_hashes=3,
        num_buckets=64,
        max_position_embeddings=64,
        pad_token_id=words.eot,
    )
    signatures = mhf.SignatureTable(3, 64)
    signatures.extend(words.all_bytes(), pad_id=words.eot)
    mhf.MultiHashFormer(config, signatures).save_pretrained(run / "step-1")
    words.save(run / "step-1")
    (run / "last").write_text("step-1\n")


def wait_for(found, seconds=60):
    """The first value of `found()` that is true."""
    import time

    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def library():
    """The shipped checkpoint as the library has it: model and tokenizer."""
    return mhf.load(SHIPPED), mhf.Tokenizer.load(SHIPPED)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, server):
    """Opens the demo in a new context, at rest after its first answer; then checks its manners."""
    contexts, errors, requests = [], [], []

    def visit(query="", **options):
        context = browser.new_context(accept_downloads=True, **options)
        contexts.append(context)
        context.set_default_timeout(1000 * SECONDS)
        context.add_init_script(COUNT)
        context.on("request", lambda request: requests.append(request.url))
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and errors.append(m.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.address + "/" + (query and "?" + urllib.parse.urlencode(query, True)))
        page.wait_for_function("asked > 0 && asked === answered")
        page.wait_for_selector("#tokens button")
        return page

    yield visit
    for context in contexts:
        context.close()
    server.slow("0")
    assert not errors
    away = [url for url in requests if not url.startswith((server.address + "/", "data:", "blob:"))]
    assert requests and not away


@contextmanager
def answered(page):
    """Waits until what was done inside has been asked and answered."""
    before = page.evaluate("asked")
    yield
    page.wait_for_function(f"asked > {before} && asked === answered")


def open_tab(page, name):
    tab = page.get_by_role("tab", name=name, exact=True)
    if tab.get_attribute("aria-selected") != "true":
        with answered(page):
            tab.click()
    expect(page.locator(f"#{name.lower()}")).to_be_visible()


def unfold(page):
    """Opens every accordion that can be seen."""
    folded = page.locator("button.label-wrap:not(.open):visible")
    for _ in range(folded.count()):
        folded.first.click()
    expect(folded).to_have_count(0)


@pytest.fixture
def shoot(tmp_path):
    """Takes a picture of a page, all of it."""
    folder = Path(os.environ.get("MHF_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=folder / f"{name}.png", full_page=True)


def rich(library):
    """A query whose views show all they can: a word, a what-if, generated tokens."""
    model, tokenizer = library
    prompt = ROMEO + " selfie"
    ids = [*tokenizer.encode(ROMEO), len(model.signatures)]
    more = tokenizer.encode(" window breaks?\nIt is the east, 😀")
    bucket = model.signatures.ids[more[0], 0].item()
    return {
        "prompt": prompt,
        "word": " selfie",
        "ids": ",".join(map(str, ids + more)),
        "start": len(ids),
        "position": len(ids) + 1,
        "force": f"0:{bucket}",
        "temperature": 0.8,
        "top_k": 50,
    }


AXE_RUN = """async where => {
  const found = await axe.run(where ?? document, {runOnly: ['wcag2a', 'wcag2aa']});
  return found.violations.flatMap(v => v.nodes.map(n => `${v.id}: ${n.html} ${n.failureSummary}`));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_bars_a_user_with_a_disability(visit, shoot, library, scheme):
    """axe-core finds no violation of WCAG A or AA in any tab, with every accordion open."""
    page = visit(rich(library), color_scheme=scheme)
    page.add_script_tag(path=AXE)
    found = {}
    for tab in TABS:
        open_tab(page, tab)
        if tab == "Compare":
            with answered(page):
                page.locator("#other-prompt textarea").fill("What light")
                page.locator("#against").click()
        unfold(page)
        found[tab] = page.evaluate(AXE_RUN, None if tab == TABS[0] else "#views")
        shoot(page, f"{tab.lower()}-{scheme}")
    assert found == {tab: [] for tab in TABS}
