"""The web page in a real browser: headless Chromium over its debugging pipe.

Nothing here waits for a fixed time. The browser gets as long as it needs, within one bound for the whole
module that only a hang can reach: the first start of Chromium on a busy machine takes minutes.
"""

import json
import os
import select
import shutil
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BOUND = 900  # seconds for the whole module


class Browser:
    """One page. Messages of the DevTools protocol go over two pipes, each ended by a NUL byte: no port
    to find, and no driver whose own timeouts would end a slow start."""

    FLAGS = (
        "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions",
        "--disable-sync", "--window-size=1200,800",
    )

    def __init__(self, folder):
        self.deadline = time.monotonic() + BOUND
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        # Chromium reads descriptor 3 and writes 4.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *self.FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.buffer = b""
        self.last_id = 0
        self.session = None
        self.complaints = []  # exceptions and errors of the page
        self.urls = []        # what it has asked for
        self.wait(lambda: self.pages())
        page = self.pages()[0]["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def pages(self):
        return [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]

    def read(self):
        """The next message."""
        while b"\0" not in self.buffer:
            left = self.deadline - time.monotonic()
            assert left > 0 and select.select([self.answers], [], [], left)[0], "the browser hangs"
            piece = os.read(self.answers, 1 << 16)
            assert piece, "the browser has ended"
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.last_id:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.notice(answer)

    def notice(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    def run(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector):
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent).join('|')")

    def wait(self, condition):
        while not condition():
            assert time.monotonic() < self.deadline, f"the page does not get there: {self.complaints}"
            time.sleep(0.05)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    running = Browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.close()


def ask(browser, text, thinking, tokens):
    """Greedy: what comes back is the same every time."""
    browser.run(
        "document.getElementById('temperature').value = 0;"
        f"document.getElementById('thinking').checked = {json.dumps(thinking)};"
        f"document.getElementById('tokens').value = {tokens};"
        f"document.getElementById('input').value = {json.dumps(text)};"
        "document.getElementById('form').requestSubmit()"
    )


def idle(browser):
    return browser.text("#send") == "Send"


def test_chat_and_live_state(server, browser):
    browser.call("Page.navigate", url=server.url + "/")
    browser.wait(lambda: browser.text("#state") == "ready")
    browser.wait(lambda: "context 16,384" in browser.text("#model"))
    assert browser.text("#pools .pool").count("in use") == 2

    # No answer ends before its limit.
    browser.run(
        "const send = window.fetch; window.fetch = (url, options) => {"
        "  if (options.body) options.body = options.body.replace('{', '{\"ignore_eos\": true, ');"
        "  return send(url, options); }; 0"
    )
    ask(browser, "<b>hello</b>", thinking=True, tokens=24)
    browser.wait(lambda: idle(browser))
    assert browser.text(".user .text") == "<b>hello</b>"  # text, not markup
    assert len(browser.text(".assistant details .text")) > 4
    ask(browser, "again", thinking=False, tokens=24)
    browser.wait(lambda: idle(browser))
    assert browser.text(".assistant > .text")
    browser.wait(lambda: browser.text("#generated_tokens") == "48")

    # Stopping frees the request, which would take long to end by itself.
    cancelled = server.metric("cachalot_cancelled_total")
    ask(browser, "more", thinking=True, tokens=16000)
    browser.wait(lambda: server.metric("cachalot_running") == 1)
    browser.run("document.getElementById('form').requestSubmit()")
    browser.wait(lambda: server.metric("cachalot_running") == 0)
    assert server.metric("cachalot_cancelled_total") == cancelled + 1
    browser.wait(lambda: idle(browser))

    assert not browser.complaints
    assert browser.urls and all(url.startswith(server.url) for url in browser.urls)
