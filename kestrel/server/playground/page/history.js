/** What was asked, in this visit and earlier in this browser, newest first. */

import { byId, element } from "./dom.js";
import { MOST_ENTRIES, forgetAll, keep, kept } from "./history_store.js";
import { summaryOf } from "./outcome.js";
import { skillNamed } from "./skills.js";

export class History {
  /** `whyNot` says why an entry cannot be opened here: it may be of another model's skill. */
  constructor({ onOpen, whyNot }) {
    this.entries = [];
    Object.assign(this, { onOpen, whyNot });
    byId("history-bound").textContent = MOST_ENTRIES;
    byId("clear-history").addEventListener("click", () => {
      this.entries = [];
      this.show();
      forgetAll();
    });
  }

  async load() {
    const earlier = await kept();
    this.entries = [...this.entries, ...earlier].slice(0, MOST_ENTRIES);
    this.show(this.opened);
  }

  /** An entry is {form, call, outcome, response, error, seen, label}. */
  add(entry) {
    const added = { ...entry, at: new Date() };
    this.entries = [added, ...this.entries].slice(0, MOST_ENTRIES);
    this.show(added);
    keep(added);
  }

  show(opened = null) {
    this.opened = opened;
    byId("history-empty").hidden = this.entries.length > 0;
    byId("clear-history").hidden = this.entries.length === 0;
    byId("history").replaceChildren(...this.entries.map((entry) => this.itemOf(entry, entry === opened)));
  }

  itemOf(entry, isOpened) {
    const { form, outcome, error, wasStopped, at } = entry;
    const thumbnail = form.picture
      ? element("img", { src: form.picture.url, alt: "" })
      : element("span", { className: "no-picture", "aria-hidden": "true" }, "Aa");
    const asked = form.adapter ? `${entry.label} · ${form.adapter}` : entry.label;
    const summary = error?.title ?? (wasStopped ? "stopped" : summaryOf(outcome));
    const button = element(
      "button",
      { type: "button", className: `past${error ? " is-error" : ""}` },
      thumbnail,
      element(
        "span",
        { className: "past-text" },
        element("span", { className: "past-ask" }, element("b", {}, skillNamed(form.skill).title), ` ${asked}`),
        element("span", { className: "past-answer" }, summary),
      ),
      element("time", {}, shownTime(at)),
    );
    button.title = this.whyNot(entry);
    button.disabled = button.title !== "";
    if (isOpened) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => {
      this.show(entry);
      this.onOpen(entry);
    });
    return element("li", {}, button);
  }
}

function shownTime(at) {
  const isToday = at.toDateString() === new Date().toDateString();
  const day = isToday ? {} : { day: "numeric", month: "short" };
  return at.toLocaleString([], { ...day, hour: "2-digit", minute: "2-digit" });
}
