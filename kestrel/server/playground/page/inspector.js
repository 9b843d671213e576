/** The call behind the page: request, response, curl and Python, one at a time, ready to copy. */

import { byId, element } from "./dom.js";
import { copyText } from "./clipboard.js";
import { highlighted } from "./highlight.js";
import { curlCommand, prettyJson, pythonCode, requestJson } from "./snippets.js";

const TABS = [
  ["request", "Request"],
  ["response", "Response"],
  ["curl", "curl"],
  ["python", "Python"],
];

export class Inspector {
  constructor() {
    this.tab = "request";
    this.call = this.response = null;
    this.usesKey = false;
    this.buttons = TABS.map(([name, title]) => this.tabButton(name, title));
    byId("code-tabs").append(...this.buttons);
    byId("code-tabs").addEventListener("keydown", (event) => this.onKey(event));
    byId("copy").addEventListener("click", () => copyText(this.text(), byId("copy")));
    this.show();
  }

  setCall(call, usesKey) {
    Object.assign(this, { call, usesKey });
    this.show();
  }

  setResponse(response) {
    this.response = response;
    this.show();
  }

  tabButton(name, title) {
    const button = element("button", { type: "button", role: "tab", "aria-controls": "code-panel" }, title);
    button.dataset.name = name;
    button.addEventListener("click", () => this.choose(name));
    return button;
  }

  choose(name) {
    this.tab = name;
    this.show();
  }

  onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    const names = TABS.map(([name]) => name);
    this.choose(names[(names.indexOf(this.tab) + step + names.length) % names.length]);
    this.buttons.find((button) => button.dataset.name === this.tab).focus();
  }

  text() {
    if (this.call === null) return "";
    switch (this.tab) {
      case "request":
        return requestJson(this.call);
      case "response":
        return this.response === null ? "" : prettyJson(this.response);
      case "curl":
        return curlCommand(this.call, this);
      case "python":
        return pythonCode(this.call, this);
    }
  }

  show() {
    for (const button of this.buttons) {
      const isChosen = button.dataset.name === this.tab;
      button.setAttribute("aria-selected", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
    }
    const text = this.text();
    byId("copy").hidden = text === "";
    byId("code").replaceChildren(...(text === "" ? ["The answer appears here as JSON."] : highlighted(text)));
    byId("code").classList.toggle("is-empty", text === "");
  }
}
