"""The web page in a real browser, over the WebDriver protocol."""

import json
import subprocess
import urllib.request

import pytest

from conftest import wait_until


class Browser:
    """Headless Chromium behind chromedriver; no library is needed for the few calls of its protocol."""

    def __init__(self):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        line = ""
        while "started successfully on port" not in line:
            line = self.driver.stdout.readline()
            assert line, "chromedriver did not start"
        self.base = f"http://127.0.0.1:{line.strip().rstrip('.').rsplit(' ', 1)[1]}/session"
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self.base += "/" + self.call("", {"capabilities": capabilities})["sessionId"]

    def call(self, path, body):
        request = urllib.request.Request(self.base + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def open(self, url):
        self.call("/url", {"url": url})

    def run(self, script):
        return self.call("/execute/sync", {"script": script, "args": []})

    def complaints(self):
        return [entry["message"] for entry in self.call("/se/log", {"type": "browser"})]

    def close(self):
        request = urllib.request.Request(self.base, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
        self.driver.terminate()
        self.driver.wait(30)


@pytest.fixture(scope="module")
def browser():
    running = Browser()
    yield running
    running.close()


def text_of(browser, selector):
    return browser.run(f"return Array.from(document.querySelectorAll('{selector}')).map(e => e.textContent).join('|')")


def ask(browser, text, thinking, tokens):
    browser.run(
        f"document.getElementById('thinking').checked = {json.dumps(thinking)};"
        f"document.getElementById('tokens').value = {tokens};"
        f"document.getElementById('input').value = {json.dumps(text)};"
        "document.getElementById('form').requestSubmit();"
    )


def idle(browser):
    return browser.run("return document.getElementById('send').textContent") == "Send"


def test_chat_and_live_state(server, browser):
    browser.open(server.url + "/")
    wait_until(lambda: text_of(browser, "#state") == "ready")
    wait_until(lambda: "context 16,384" in text_of(browser, "#model"))
    assert text_of(browser, "#pools .pool").count("in use") == 2

    ask(browser, "<b>hello</b>", thinking=True, tokens=24)
    wait_until(lambda: idle(browser))
    assert text_of(browser, ".user .text") == "<b>hello</b>"  # text, not markup
    assert len(text_of(browser, ".assistant details .text")) > 4
    ask(browser, "again", thinking=False, tokens=24)
    wait_until(lambda: idle(browser))
    assert text_of(browser, ".assistant > .text")
    wait_until(lambda: int(text_of(browser, "#generated_tokens").replace(",", "")) >= 48)

    # Stopping frees the request, which would not end by itself.
    browser.run(
        "const send = window.fetch; window.fetch = (url, options) => {"
        "  if (options.body) options.body = options.body.replace('{', '{\"ignore_eos\": true, ');"
        "  return send(url, options); }"
    )
    ask(browser, "more", thinking=True, tokens=8000)
    wait_until(lambda: text_of(browser, "#running") == "1")
    browser.run("document.getElementById('form').requestSubmit()")
    wait_until(lambda: server.metric("cachalot_running") == 0)
    assert idle(browser)

    # An error of the server is shown, once the form lets it through.
    browser.run("document.getElementById('tokens').min = 0")
    ask(browser, "bad", thinking=True, tokens=0)
    wait_until(lambda: "max_tokens" in text_of(browser, ".error"))
    # Nothing was blocked, missing or loaded from elsewhere; the one complaint is that refused request.
    assert [c for c in browser.complaints() if "400 (Bad Request)" not in c] == []
    loaded = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith(server.url) or name.startswith("data:") for name in loaded)
