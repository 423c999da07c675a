"""The demo in a real browser: Debian's Chromium, driven by Playwright.

Skipped where either is missing; MHF_BROWSER_TESTS=required fails instead. MHF_SCREENSHOTS names a
folder for pictures of every view. One server serves all tests, each test has contexts of its own:
whatever it does, no error may reach the console and no request may leave this machine.
"""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_checkpoint

import mhf
from support.tokenizer import Tokenizer

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
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
TABS = ["Signature", "Gate", "Cascade", "Probability", "Generate", "Vocabulary"]
ROMEO = "**ROMEO**  \nBut, soft! what light through yonder"
PHONE = {"viewport": {"width": 390, "height": 844}}
SECONDS = 20  # that a page may take; a wait, not a claim
expect.set_options(timeout=1000 * SECONDS)
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy

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
window.asked = 0; window.answered = 0; window.queued = 0; window.last = 0;
const answer = (n) => { if (n) { window.answered += n; window.last = performance.now(); } };
const plain = window.fetch;
window.fetch = async (...args) => {
  const url = String(args[0].url ?? args[0]);
  const asks = url.includes('/queue/join') || url.includes('/run/');
  if (asks) { window.asked++; window.last = performance.now(); }
  const response = await plain(...args);
  if (asks && (url.includes('/run/') || !response.ok)) answer(1);
  if (!url.includes('/queue/data')) return response;
  const [page, own] = response.body.tee();
  (async () => {
    let text = '';
    const decoder = new TextDecoder();
    try {
      for await (const part of own) {
        const lines = (text + decoder.decode(part, {stream: true})).split('\\n');
        text = lines.pop();
        const done = lines.filter(line => line.includes('"process_completed"')).length;
        window.queued += done;
        answer(done);
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
    other_checkpoint(folder / "runs" / "bare", tokenizer=False)
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


def other_checkpoint(run, tokenizer=True):
    """A run with a tiny random model and perhaps a tokenizer of its own."""
    words = Tokenizer.train([ROMEO * 20], 280)
    random_checkpoint(run / "step-1", words, tokenizer=tokenizer)
    (run / "last").write_text("step-1\n")


def wait_for(found, seconds=60):
    """The first value of `found()` that is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def library():
    """The shipped checkpoint as the library has it: model and tokenizer."""
    return mhf.load(SHIPPED), Tokenizer.load(SHIPPED)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def visits(browser, server):
    """Opens the demo in new contexts, at rest after its first answer; then checks its manners."""
    contexts, errors, requests = [], [], []

    def visit(query=(), **options):
        """query: names and values of the address, or the address of another page."""
        if isinstance(query, str):
            query = urllib.parse.parse_qsl(urllib.parse.urlparse(query).query)
        tab = dict(query).get("tab", "signature")
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(1000 * SECONDS)
        context.add_init_script(COUNT)
        context.on("request", lambda request: requests.append(request.url))
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and errors.append(m.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.address + "/?" + urllib.parse.urlencode(query))
        page.wait_for_function("queued > 0")
        page.wait_for_selector("#tokens button")
        expect(page.locator(f"#{tab} .mhf")).to_be_visible()
        rest(page, 0, 100)
        return page

    yield visit
    for context in contexts:
        context.close()
    server.slow("0")
    away = [url for url in requests if not url.startswith((server.address + "/", "data:", "blob:"))]
    assert requests and not away
    assert not errors


@pytest.fixture
def visit(browser, server):
    with visits(browser, server) as visit:
        yield visit


@contextmanager
def answered(page):
    """Waits until what was done inside has been asked and answered."""
    before = page.evaluate("asked")
    yield
    rest(page, before)


def rest(page, before, quiet=20):
    """Waits for more requests than `before`, all of them answered `quiet` milliseconds ago."""
    still = f"asked === answered && performance.now() - last > {quiet}"
    page.wait_for_function(f"asked > {before} && {still}")


def open_tab(page, name):
    tab = page.get_by_role("tab", name=name, exact=True)
    if not tab.count():  # on a phone
        page.get_by_label("More tabs").click()
        tab = page.locator(".overflow-dropdown button").get_by_text(name, exact=True)
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


# The texts of a table's cells; the numbers of functions in front of ids are left out.
CELLS = """rows => rows.map(row => [...row.cells].map(cell => {
  const copy = cell.cloneNode(true);
  copy.querySelectorAll('.cell i').forEach(number => number.remove());
  copy.querySelectorAll('.cell, small').forEach(part => part.before(' '));
  return copy.textContent.replace(/\\s+/g, ' ').trim();
}))"""


def cells(page, view, table=0):
    """The texts of the body of a view's table, row by row."""
    return page.locator(f"#{view} table").nth(table).locator("tbody tr").evaluate_all(CELLS)


def html(page, view):
    """What a view that can be seen shows."""
    return page.locator(f"#{view} .mhf").inner_html()


def shows(text, *values):
    """The numbers in a text are these, as far as they are shown.

    1e-5 is what float32 needs between two processes, with room.
    """
    found = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?: %)?", text.replace("−", "-"))
    assert len(found) == len(values), text
    for shown, value in zip(found, values):
        number = shown.replace(",", "").removesuffix(" %")
        mantissa, _, power = number.partition("e")
        scale = 0.01 if shown.endswith("%") else 1
        unit = scale * 10 ** (int(power or 0) - len(mantissa.partition(".")[2]))
        assert abs(scale * float(number) - value) <= 0.501 * unit + 1e-5 * abs(value), (text, value)


def glyphs(where):
    """The tokens that a strip of them shows, as one text."""
    return "".join(where.locator("bdi").all_text_contents())


def signs(text):
    """A text as the tokens show it."""
    return text.replace(" ", "␣").replace("\n", "↵")


def look(page, prompt):
    """Gives the page another prompt."""
    page.locator("#prompt textarea").fill(prompt)
    with answered(page):
        page.locator("#look").click()


def slide(page, name, value):
    """Sets a slider that can be seen, as a user types it."""
    with answered(page):
        box = page.get_by_label(re.compile(f"number input for {name}")).locator("visible=true")
        box.fill(str(value))
        box.press("Enter")


def slider(page, name):
    return page.get_by_label(re.compile(f"range slider for {name}")).locator("visible=true")


def ask(server, prompt, position=-1, force=None):
    """Puts a request to the public endpoint into the queue: where its answer will be."""
    url = server.address + "/gradio_api/call/inspect"
    body = json.dumps({"data": [prompt, position, 10, force, ""]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with DIRECT.open(request, timeout=SECONDS) as answer:
        return f"{url}/{json.load(answer)['event_id']}"


def inspect(server, *what):
    """What the public endpoint says."""
    with DIRECT.open(ask(server, *what), timeout=SECONDS) as answer:
        return json.loads(re.search("event: complete\ndata: (.*)", answer.read().decode())[1])[0]


@pytest.fixture(scope="module")
def romeo(library):
    """What the library's own tensors say of a position in the middle of a prompt."""
    model, tokenizer = library
    ids, at = torch.tensor([tokenizer.encode(ROMEO)]), 9
    with torch.inference_mode():
        h = model(ids)[0, at : at + 1]  # (1, D)
        scores = model.token_scores(h)[0]  # (V,)
        rows = model.model.embed_tokens(model.rows[ids[0]])  # (T, H, D)
        return SimpleNamespace(
            query={"prompt": ROMEO, "position": at},
            ids=ids[0].tolist(),
            at=at,
            signature=model.signatures.ids[ids[0, at]].tolist(),
            hash_map=model.signatures.ids,  # (V, H)
            gate=model.embed(ids, return_gate=True)[1][0],  # (T, H)
            gate_scores=model.model.combiner.scorer(rows).squeeze(-1),  # (T, H)
            row_norms=rows.norm(dim=-1),  # (T, H)
            log_p=model.bucket_log_probs(h)[0],  # (H, B)
            soft=[e for _, e in model.hash_head.steps(h, model.table)],
            scores=scores,
            paper=scores.softmax(-1),  # (V,)
            p=(scores / model.config.calibration).softmax(-1),  # (V,)
            mass=model.valid_mass(ids)[0, at].item(),
            calibration=model.config.calibration,
        )


@pytest.fixture(scope="module")
def shown(browser, server, romeo):
    """A page at that position, for the tests that only read: it opens a tab and is the page."""
    with visits(browser, server) as visit:
        page = visit(romeo.query)

        def shown(tab):
            open_tab(page, tab)
            return page

        yield shown


# ---------------------------------------------------------------------------------------------
# Manners: access, phones, motion
# ---------------------------------------------------------------------------------------------


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


PANEL = "[role=tabpanel]:not([style*='none'])"  # the open one
AXE_RUN = """async where => {
  const found = await axe.run(where ?? document, {
    runOnly: ['wcag2a', 'wcag2aa'], resultTypes: ['violations']});
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
        unfold(page)
        found[tab] = page.evaluate(AXE_RUN, None if tab == TABS[0] else PANEL)
        shoot(page, f"{tab.lower()}-{scheme}")
    assert found == {tab: [] for tab in TABS}


CUT = """() => [...document.querySelectorAll('.block, .prose, .mhf, .mhf *')].filter(
  e => e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !e.closest('.scroll, pre, svg')
).map(e => e.outerHTML.slice(0, 100))"""


def test_a_phone_shows_every_tab_without_sideways_scrolling(visit, shoot, library):
    """At 390 pixels no tab, with every accordion open, is wider than the window.

    Nor is a part of it wider than its place, but for wide tables and source, which scroll alone.
    """
    page, wide, cut = visit(rich(library), **PHONE), {}, {}
    for tab in TABS:
        open_tab(page, tab)
        unfold(page)
        wide[tab] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        cut[tab] = page.evaluate(CUT)
        shoot(page, f"{tab.lower()}-phone")
    assert max(wide.values()) <= 0, wide
    assert cut == {tab: [] for tab in TABS}


MOVING = """() => [...document.querySelectorAll('*')].filter(element => {
  const style = getComputedStyle(element);
  const seconds = style.transitionDuration.split(',').map(parseFloat);
  return style.animationName != 'none'
    || style.transitionProperty != 'none' && Math.max(...seconds) > 0;
}).map(element => element.outerHTML.slice(0, 100))"""


def test_motion_is_left_out_for_those_who_ask(visit):
    """With prefers-reduced-motion no element has an animation or a transition."""
    page = visit({"tab": "cascade"}, reduced_motion="reduce")
    with answered(page):
        page.locator("#cascade .bucket").first.click()
    assert page.evaluate(MOVING) == []
    assert page.evaluate("document.getAnimations().length") == 0


# ---------------------------------------------------------------------------------------------
# Views: filled at load, the same position for all, the library's numbers
# ---------------------------------------------------------------------------------------------


def test_every_view_is_filled_at_load(visit):
    """The first view is there without a click; every tab has text, and the model's have numbers."""
    page = visit()
    expect(page.locator("#signature .cells").first).to_be_visible()
    for tab in TABS:
        open_tab(page, tab)
        text = page.locator(f"#{tab.lower()}").inner_text()
        assert len(re.findall(r"\d", text)) > 20
        assert not re.search(r"\b(NaN|undefined|Infinity|inf|Loading)\b", text)
        assert page.locator(".error:visible").count() == 0
    assert page.locator(".toast-body").count() == 0


def position(page):
    return page.locator("#tokens [aria-pressed=true]").evaluate_all(
        "x => x.map(b => b.dataset.pick)"
    )


def test_a_click_on_a_token_moves_every_view(visit, library):
    """All views then name the token, and what the probability table expects comes after it."""
    page, tokenizer = visit({"prompt": ROMEO}), library[1]
    ids, at = tokenizer.encode(ROMEO), 7
    glyph, follows = (signs(tokenizer.decode([ids[i]])) for i in (at, at + 1))
    with answered(page):
        page.locator("#tokens button").nth(at).click()
    assert position(page) == [str(at)]
    expect(page.locator("#signature h3 bdi").first).to_have_text(glyph)
    for tab, where in (("Gate", "h3 bdi"), ("Cascade", "h3 bdi"), ("Generate", "p .chip bdi")):
        open_tab(page, tab)
        expect(page.locator(f"#{tab.lower()} {where}").first).to_have_text(glyph)
    open_tab(page, "Probability")
    expect(page.locator("#probability button.marked bdi")).to_have_text(follows)


def test_the_keyboard_is_enough_to_choose_a_token(visit):
    """Tab goes from the prompt to the tokens, Enter chooses, and the focus stays where it was."""
    page = visit({"prompt": ROMEO})
    page.locator("#prompt textarea").focus()
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.pick") == "3":
            break
    with answered(page):
        page.keyboard.press("Enter")
    assert position(page) == ["3"]
    assert page.evaluate("document.activeElement.dataset.pick") == "3"
    with answered(page):
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
    assert position(page) == ["4"]


def test_the_tokens_are_the_tokenizers(shown, romeo):
    """Their numbers, and texts that give the prompt when they are put together."""
    page = shown("Signature")
    tokens = page.locator("#tokens .tokens")
    assert list(map(int, tokens.locator("small").all_text_contents())) == romeo.ids
    assert glyphs(tokens) == signs(ROMEO)


def test_the_signatures_numbers_are_the_tables(shown, romeo):
    """Ids, tokens in each bucket and their mean, ids in common."""
    page, hash_map, B = shown("Signature"), romeo.hash_map, romeo.log_p.shape[1]
    shows(page.locator("#signature .cells").first.evaluate(
        "x => [...x.querySelectorAll('.cell')].map(c => c.lastChild.textContent).join(' ')"
    ), *romeo.signature)  # fmt: skip
    rows = cells(page, "signature")
    for j, (row, bucket) in enumerate(zip(rows, romeo.signature, strict=True)):
        shows(row[0], bucket)
        shows(row[1], (hash_map[:, j] == bucket).sum().item(), len(hash_map) / (B - 1))
    shared = (hash_map == hash_map[romeo.ids[romeo.at]]).sum(-1).bincount(minlength=5)
    shared[4] -= 1  # the token itself
    for n, fact in enumerate(page.locator("#signature .fact").all_text_contents()):
        shows(fact, n, 4, shared[n].item())


def test_the_gates_numbers_are_the_models(shown, romeo):
    """Norms, scores and weights of the token's rows, the weights of all tokens, and the bars."""
    page = shown("Gate")
    for j, row in enumerate(cells(page, "gate")):
        shows(row[0], romeo.signature[j])
        for text, values in zip(row[1:], (romeo.row_norms, romeo.gate_scores, romeo.gate)):
            shows(text, values[romeo.at, j].item())
    rows = cells(page, "gate", 1)
    assert len(rows) == len(romeo.ids)
    for t, row in enumerate(rows):
        for text, a, s in zip(row[2:], romeo.gate[t], romeo.gate_scores[t], strict=True):
            shows(text, a.item(), s.item())
    wide = page.locator("#gate .stack div").evaluate_all(
        "x => x.map(b => parseFloat(b.style.width))"
    )
    assert wide == pytest.approx((100 * romeo.gate).flatten().tolist(), rel=1e-4)
    assert float(page.locator("#gate .check b").inner_text()) < 1e-5


def test_the_cascades_numbers_are_the_models(shown, romeo):
    """Entropies, the most probable buckets, the mass of their tokens, candidates, and norms."""
    page, hash_map = shown("Cascade"), romeo.hash_map
    compatible = romeo.scores.isfinite()
    panels = page.locator("#cascade .panel")
    assert panels.count() == len(romeo.log_p)
    for j, log_p in enumerate(romeo.log_p):
        text = panels.nth(j).locator("p").all_inner_texts()
        bits = -(log_p.exp() * log_p).sum().item() / math.log(2)
        shows(text[0], bits, math.log2(len(log_p)))
        top = log_p.topk(10)
        buttons = panels.nth(j).locator(".bucket")
        shown = buttons.evaluate_all("x => x.map(b => Number(b.dataset.bucket))")
        assert shown == top.indices.tolist()
        for b, button in enumerate(buttons.locator(".top").all()):
            bucket, p = shown[b], top.values[b].exp().item()
            mass = romeo.paper[hash_map[:, j] == bucket].sum().item()
            shows(button.inner_text(), bucket, p, mass)
        compatible &= hash_map[:, j] == shown[0]
        shows(text[1], compatible.sum().item(), romeo.paper[compatible].sum().item())
        if romeo.soft[j] is not None:
            shows(text[2], romeo.soft[j].norm().item())


def test_the_probabilities_are_the_models(shown, romeo):
    """Each row's ids, log p of each function, sum, joint, paper's and calibrated probability."""
    page, hash_map = shown("Probability"), romeo.hash_map
    follows = romeo.ids[romeo.at + 1]
    best = romeo.scores.topk(10).indices.tolist()
    rows = cells(page, "probability")
    assert len(rows) == 10 + (follows not in best)
    for row, i in zip(rows, dict.fromkeys([*best, follows]), strict=True):
        shows(row[1], *hash_map[i].tolist())
        logs = [romeo.log_p[j, b].item() for j, b in enumerate(hash_map[i])]
        for text, value in zip(row[2:], [
            *logs, romeo.scores[i].item(), romeo.scores[i].exp().item(), romeo.paper[i].item(),
            romeo.p[i].item(), romeo.p[i].item(),
        ], strict=True):  # fmt: skip
            shows(text, value)
    mass = page.locator("#probability .legend b").all_inner_texts()
    shows(mass[0], romeo.mass)
    shows(mass[1], 1 - romeo.mass)


def test_pointing_at_a_row_shows_its_arithmetic(shown, romeo):
    """Terms that add up to the sum, whose exponential over the valid mass is the probability.

    Tolerances: three decimals of the logs, three digits of the rest.
    """
    page, line = shown("Probability"), "#probability .arithmetic"
    i = romeo.scores.topk(10).indices[3].item()
    page.locator("#probability tbody tr").nth(3).hover()
    logs = [romeo.log_p[j, b].item() for j, b in enumerate(romeo.hash_map[i])]
    text = page.locator(line).inner_text().partition(":")[2].replace("−", "-")
    found = list(map(float, re.findall(r"[-+]?\d+\.?\d*(?:e-\d+)?", text)))
    assert found[:4] == pytest.approx(logs, abs=6e-4)
    assert found[4] == pytest.approx(sum(found[:4]), abs=3e-3)
    assert found[5] == pytest.approx(math.exp(found[4]), rel=2e-2)
    assert found[5] / found[6] == pytest.approx(romeo.paper[i].item(), rel=2e-2)


# ---------------------------------------------------------------------------------------------
# What a user does
# ---------------------------------------------------------------------------------------------


def drawn(scores, temperature, top_k, top_p):
    """{token: probability} of sampling, by sorting: an oracle for `sampling_probs`."""
    p, order = (scores / temperature).softmax(-1).sort(descending=True)
    p = p[:top_k] / p[:top_k].sum()
    p = p[: int((p.cumsum(0) - p < top_p).sum())]
    return dict(zip(order.tolist(), (p / p.sum()).tolist()))


def test_sliders_change_the_table_and_run_no_model(visit, server, romeo):
    """Temperature, top-k and top-p redraw the last column alone; the twins in Generate follow."""
    page = visit(romeo.query | {"tab": "probability"})
    calls, scores, best = server.calls(), romeo.scores / romeo.calibration, None
    before = [row[:-1] for row in cells(page, "probability")]
    best = romeo.scores.topk(10).indices.tolist()
    for name, value, cuts in (
        ("temperature", 0.5, (0.5, None, 1)),
        ("top-k", 7, (0.5, 7, 1)),
        ("top-p", 0.6, (0.5, 7, 0.6)),
    ):
        slide(page, name, value)
        expected = drawn(scores, *cuts)
        rows = cells(page, "probability")
        assert [row[:-1] for row in rows] == before
        for i, row in zip(best, rows):
            if i in expected:
                shows(row[-1], expected[i])
            else:
                assert row[-1] == "cut off"
    page.wait_for_url(lambda url: "top_p=0.6" in url)
    assert {"temperature": ["0.5"], "top_k": ["7"], "top_p": ["0.6"]}.items() <= query(page).items()
    open_tab(page, "Generate")
    assert [slider(page, name).input_value() for name in SLIDERS] == ["0.5", "7", "0.6"]
    slide(page, "temperature", 1.5)
    open_tab(page, "Probability")
    assert slider(page, "temperature").input_value() == "1.5"
    page.wait_for_url(lambda url: "temperature=1.5" in url)
    assert server.calls() == calls


SLIDERS = ["temperature", "top-k", "top-p"]


def query(page):
    """What the page's address says."""
    return urllib.parse.parse_qs(urllib.parse.urlparse(page.url).query)


def test_forcing_a_bucket_is_a_what_if(visit, server, romeo):
    """Later functions and the table follow the row, as the library says; undone, as before."""
    page = visit(romeo.query | {"tab": "cascade"})
    before = html(page, "cascade")
    bucket = page.locator("#cascade .panel").nth(1).locator(".bucket").nth(4)
    forced = int(bucket.get_attribute("data-bucket"))
    with answered(page):
        bucket.click()
    expect(page.locator("#cascade .whatif")).to_contain_text(str(forced))
    expected = inspect(server, ROMEO, romeo.at, {"1": forced})
    for j, function in enumerate(expected["functions"]):
        top = page.locator("#cascade .panel").nth(j).locator(".bucket")
        shown = top.evaluate_all("x => x.map(b => Number(b.dataset.bucket))")
        assert shown == [b["bucket"] for b in function["top"]]
        shows(page.locator("#cascade .panel").nth(j).locator("p b").first.inner_text(),
              function["entropy_bits"])  # fmt: skip
    open_tab(page, "Probability")
    for row, token in zip(cells(page, "probability"), expected["top_tokens"]):
        shows(row[-2], math.exp(token["log_prob"]))
    open_tab(page, "Cascade")
    with answered(page):
        page.locator(f"#cascade [data-function='1'][data-bucket='{forced}']").click()
    assert html(page, "cascade") == before
    with answered(page):
        page.locator("#cascade .panel").nth(0).locator(".bucket").nth(2).click()
    with answered(page):
        page.locator("#cascade [data-clear]").click()
    assert html(page, "cascade") == before


# ---------------------------------------------------------------------------------------------
# Generate
# ---------------------------------------------------------------------------------------------


def written(page):
    """Generated tokens as (text, percent)."""
    tokens = page.locator("#generate .generated")
    parts = (tokens.locator(part).all_text_contents() for part in ("bdi", "small"))
    return list(zip(*parts, strict=True))


def generate(page, tokens, seed):
    """Writes from the page's prompt, to the end."""
    look(page, ROMEO)
    page.get_by_label("number input for tokens").fill(str(tokens))
    page.get_by_label("seed").fill(str(seed))
    with answered(page):
        page.locator("#go").click()
    return written(page)


def test_the_same_seed_gives_the_librarys_text_again(visit, library):
    """Tokens and probabilities are those of the library's own generate; another seed's differ."""
    model, tokenizer = library
    page = visit({"prompt": ROMEO, "tab": "generate", "top_k": 40})
    first = generate(page, 6, 1)
    expected = list(
        model.generate(
            tokenizer.encode(ROMEO), 6, top_k=40, seed=1, stop=(tokenizer.eot,),
            return_log_probs=True,
        )
    )  # fmt: skip
    assert "".join(text for text, _ in first) == "".join(
        signs(tokenizer.decode([i])) for i, _ in expected
    )
    for (_, p), (_, log_p) in zip(first, expected, strict=True):
        shows(p, math.exp(log_p))
    assert generate(page, 6, 1) == first
    assert generate(page, 6, 2) != first


WATCH = """() => {
  window.seen = [];
  const count = () => seen.push(document.querySelectorAll('#generate .generated').length);
  new MutationObserver(count).observe(
    document.querySelector('#generate'), {subtree: true, childList: true});
}"""


def test_tokens_arrive_one_by_one(visit, server):
    """The page shows one more token again and again, not all of them at the end."""
    page = visit({"prompt": ROMEO, "tab": "generate"})
    page.evaluate(WATCH)
    server.slow("0.1")
    text, seen = generate(page, 8, 0), page.evaluate("seen")
    seen = seen[seen.index(1) :]
    assert seen == sorted(seen) and seen[-1] == len(text)
    assert len(set(seen)) >= 5


def test_stop_freezes_the_text_and_the_model(visit, server):
    """After Stop the text keeps what it had, the model does not run on, and all can be used."""
    page = visit({"prompt": ROMEO, "tab": "generate"})
    server.slow("0.1")
    page.locator("#go").click()
    page.locator("#generate .generated").nth(2).wait_for()
    page.locator("#stop").click()
    page.locator("#generate [data-candidate]").first.wait_for()
    text, calls = written(page), server.calls()
    page.wait_for_timeout(700)
    assert written(page) == text
    assert 3 <= len(text) < 30
    assert server.calls() == calls
    with answered(page):
        page.locator("#generate .generated").nth(1).click()
    assert written(page) == text


def test_a_generated_token_moves_the_views_to_its_step(visit, library):
    """The table's marked row is the token, with the probability that it was drawn with."""
    page = visit({"prompt": ROMEO, "tab": "generate"})
    text = generate(page, 6, 3)
    at = len(library[1].encode(ROMEO)) + 2
    with answered(page):
        page.locator("#generate .generated").nth(3).click()
    assert position(page) == [str(at)]
    open_tab(page, "Probability")
    row = page.locator("#probability tr", has=page.locator("button.marked"))
    assert row.locator("bdi").text_content() == text[3][0]
    assert row.locator("td").nth(-2).text_content() == text[3][1]
    for tab in ("Signature", "Gate", "Cascade"):
        open_tab(page, tab)
        expect(page.locator(f"#{tab.lower()} h3 bdi").first).to_have_text(text[2][0])


def test_writing_goes_on_with_another_candidate(visit):
    """What was there before the step stays, then comes the candidate, then new tokens."""
    page = visit({"prompt": ROMEO, "tab": "generate"})
    text = generate(page, 4, 3)
    with answered(page):
        page.locator("#generate .generated").nth(2).click()
    candidates = page.locator("#generate [data-candidate]")
    names = candidates.locator("bdi").all_text_contents()
    other = next(k for k, name in enumerate(names) if name != text[2][0])
    chance = candidates.nth(other).locator("small").text_content()
    with answered(page):
        candidates.nth(other).click()
    new = written(page)
    assert new[:2] == text[:2]
    assert new[2] == (names[other], chance)
    assert 3 < len(new) <= 3 + 4


# ---------------------------------------------------------------------------------------------
# Words, links
# ---------------------------------------------------------------------------------------------

WORDS = ["سيلفي", "自拍", "🤳🏽"]


def test_new_words_are_their_users_alone(visit, library):
    """Words of any script get the library's signatures, work in the prompt, and stay private."""
    page, other = visit({"tab": "vocabulary"}), visit({"tab": "vocabulary"})
    page.locator("#words textarea").fill("\n".join(WORDS))
    with answered(page):
        page.locator("#add").click()
    signatures = mhf.load(SHIPPED).signatures
    V = len(signatures)
    signatures.extend([f" {word}".encode() for word in WORDS])
    for n, row in enumerate(cells(page, "vocabulary")):
        assert row[0] == "␣" + WORDS[n]
        shows(row[1], V + n)
        shows(row[2], *signatures.ids[V + n].tolist())
        shows(row[4], 0)  # parameters added
    assert page.locator("#words textarea").input_value() == ""
    for window in (page, other):
        look(window, "a 自拍 b")
    tokens = page.locator("#tokens button small").all_text_contents()
    assert tokens.count(str(V + 1)) == 1
    tokens = other.locator("#tokens button small").all_text_contents()
    assert len(tokens) > 3 and max(map(int, tokens)) < V
    assert not any(word in other.locator("body").inner_text() for word in (WORDS[0], WORDS[2]))
    with answered(page):
        page.locator("#forget").click()
    assert glyphs(page.locator("#tokens .tokens")) == glyphs(other.locator("#tokens .tokens"))


def state(page):
    """All that a page shows: prompt, sliders, tab, address, views."""
    found = {"prompt": page.locator("#prompt textarea").input_value(), "query": query(page)}
    found["tab"] = page.locator("[role=tab][aria-selected=true]").first.inner_text()
    for tab in TABS:
        open_tab(page, tab)
        found[tab] = html(page, tab.lower())
        if tab == "Probability":
            found["sliders"] = [slider(page, name).input_value() for name in SLIDERS]
    return found | {"tokens": html(page, "tokens")}


def test_a_link_shows_the_same_in_another_browser(visit):
    """Prompt, word, written text, position, what-if, sliders and tab, made by hand, are back."""
    page = visit({"tab": "vocabulary"})
    page.locator("#words textarea").fill("自拍")
    with answered(page):
        page.locator("#add").click()
    open_tab(page, "Generate")
    look(page, "**ROMEO**  \nO, your 自拍")
    page.get_by_label("number input for tokens").fill("5")
    page.get_by_label("seed").fill("7")
    with answered(page):
        page.locator("#go").click()
    with answered(page):
        page.locator("#generate .generated").nth(2).click()
    open_tab(page, "Probability")
    slide(page, "temperature", 0.7)
    slide(page, "top-k", 30)
    open_tab(page, "Cascade")
    with answered(page):
        page.locator("#cascade .bucket").nth(3).click()
    page.wait_for_url(lambda url: "force=" in url)
    again = visit(page.url)
    assert page.locator("#link a").get_attribute("href") in page.url
    assert again.url == page.url
    expected = state(page)
    for part, shown in state(again).items():
        assert shown == expected[part]


# ---------------------------------------------------------------------------------------------
# Hard texts
# ---------------------------------------------------------------------------------------------

ATTACK = "<img/src='x'/onerror=document.title='X'>"  # no blank, which would be shown as a sign
HARD = [
    ATTACK,
    ATTACK.replace("/", " "),
    "${document.title='X'} {{7*7}} {% raw %} #{7*7}",
    r"\u0041 \x3cimg\x3e \\ \n `document.title` ``` ' \" &lt;b&gt;",
    "</script><script>document.title='X'</script>",
    "one\n\n\ntwo\r\nthree\tfour\n",
    "😀 👩‍👩‍👧 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "\u202eسلام\u202c abc \u2066שלום\u2069",
    "a\u0301\u200b\u00ad\ufeff" + "\u0300" * 50,
    "x" * 3000,
    "   ",
    "word " * 2000,
]


def harmless(page):
    """No text became a part of the page or was run."""
    assert page.title() != "X"
    assert page.locator(":is(.mhf, .toast-body) :is(img, script)").count() == 0
    scripts = page.evaluate("[...document.scripts].map(script => script.textContent)")
    assert "document.title='X'" not in scripts


def toast(page):
    """The message of a mistake, which is then closed."""
    text = page.get_by_test_id("toast-text").last.text_content()
    harmless(page)
    page.get_by_test_id("toast-close").last.click()
    expect(page.locator(".toast-body")).to_have_count(0)
    return text


def test_hard_prompts_are_shown_as_text(visit, library):
    """Code, markup, control characters, emoji, right-to-left and long texts are tokens, no more."""
    page, tokenizer = visit(), library[1]
    for hard in HARD:
        look(page, hard)
        text = page.locator("#prompt textarea").input_value()
        assert text == hard.replace("\r\n", "\n")  # as browsers do
        ids = tokenizer.encode(text)
        tokens = page.locator("#tokens .tokens")
        assert list(map(int, tokens.locator("small").all_text_contents())) == ids[-256:]
        if re.fullmatch("[ -~\n]*", text) and len(ids) <= 256:
            assert glyphs(tokens) == signs(text)
        harmless(page)
    assert page.locator(".toast-body").count() == 0


def test_markup_is_text_in_every_view(visit):
    """As prompt and as new word."""
    page = visit({"tab": "vocabulary"})
    page.locator("#words textarea").fill(ATTACK)
    with answered(page):
        page.locator("#add").click()
    look(page, "a " + ATTACK)
    for tab in TABS:
        open_tab(page, tab)
        assert (
            tab == "Probability" or "<img/src='x'" in page.locator(f"#{tab.lower()}").inner_text()
        )
        harmless(page)


def test_markup_in_a_link_is_text(visit):
    """A link whose every part is markup opens: what can be used is, the rest is named."""
    parts = ["checkpoint", "position", "force", "ids", "start", "seed", "temperature", "top_k"]
    page = visit({"prompt": ATTACK, "word": " " + ATTACK} | dict.fromkeys(parts, ATTACK))
    assert glyphs(page.locator("#tokens .tokens")) == signs(ATTACK)
    assert page.locator("#prompt textarea").input_value() == ATTACK
    assert "checkpoint" in page.locator("#tokens .notice").inner_text()
    harmless(page)


def test_markup_in_a_message_is_text(visit):
    """A mistake's sentence quotes the user's text."""
    page = visit({"checkpoint": "bare"})
    look(page, ATTACK)
    assert ATTACK in toast(page)


def test_what_cannot_be_read_costs_nothing(visit):
    """10,001 characters or none: one sentence; the views and the text that was typed stay."""
    page = visit({"prompt": ROMEO})
    before, tokens = html(page, "signature"), html(page, "tokens")
    for text, said in (("x" * 10_001, "10,001"), ("", "empty")):
        look(page, text)
        sentence = toast(page)
        assert said in sentence and "\n" not in sentence
        assert page.locator("#prompt textarea").input_value() == text
        assert (html(page, "signature"), html(page, "tokens")) == (before, tokens)


# ---------------------------------------------------------------------------------------------
# Tour, examples, checkpoints, waiting
# ---------------------------------------------------------------------------------------------


def test_the_tour_opens_the_views_it_is_about(visit):
    """Every step has a text of its own and a filled view; it goes through six views, and back."""
    page, tabs = visit(), []
    steps = [page.locator("#tour").inner_text()]
    for _ in range(9):
        with answered(page):
            page.locator("#tour-next").click()
        steps.append(page.locator("#tour").inner_text())
        tab = page.locator("[role=tab][aria-selected=true]").inner_text()
        tabs += [tab] * (tab not in tabs)
        assert re.search(r"\d", page.locator(f"#{tab.lower()}").inner_text())
    assert len(set(steps)) == 10
    assert tabs == TABS
    with answered(page):
        page.locator("#tour-back").click()
    assert page.locator("#tour").inner_text() == steps[-2]
    assert page.locator(".toast-body").count() == 0


def test_every_example_opens(visit, library):
    """Its prompt stands in the box, and its tokens are the tokenizer's."""
    page = visit()
    page.get_by_role("button", name="Examples").click()
    examples, prompts = page.locator("#examples [data-example]"), set()
    expect(examples.first).to_be_visible()
    for n in range(examples.count()):
        with answered(page):
            examples.nth(n).click()
        prompts.add(prompt := page.locator("#prompt textarea").input_value())
        tokens = page.locator("#tokens button small").all_text_contents()
        assert list(map(int, tokens)) == library[1].encode(prompt)
    assert len(prompts) == examples.count() >= 6
    assert page.locator(".toast-body").count() == 0


def choose(page, name, value):
    """Chooses from a dropdown."""
    with answered(page):  # the choices are looked up
        page.locator(f"#{name} input").click()
    page.get_by_role("option", name=value).click()


def test_another_checkpoint_reads_the_prompt(visit):
    """The tokens and the signatures are then those of the chosen one, which has 3 functions."""
    page = visit({"prompt": ROMEO})
    with answered(page):
        choose(page, "checkpoint", "other")
    assert page.locator("#signature .cells").first.locator(".cell").count() == 3
    page.wait_for_url(lambda url: "checkpoint=other" in url)
    assert glyphs(page.locator("#tokens .tokens")) == signs(ROMEO)


def test_those_who_wait_see_their_place(visit, server):
    """While others' requests run, the page says how many are before it."""
    page = visit({"prompt": ROMEO})
    server.slow("0.5")
    for _ in range(5):
        ask(server, ROMEO)
    with answered(page):
        page.locator("#look").click()
        expect(page.get_by_text(re.compile(r"queue: \d+/\d+")).first).to_be_visible()
        server.slow("0")
