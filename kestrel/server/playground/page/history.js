/** What was asked in this visit. Kept in memory alone: leaving or reloading the page forgets it. */

import { byId, element } from "./dom.js";
import { summaryOf } from "./outcome.js";
import { skillNamed } from "./skills.js";

const MOST_ENTRIES = 60;

export class History {
  constructor({ onOpen }) {
    this.entries = [];
    this.onOpen = onOpen;
    byId("clear-history").addEventListener("click", () => {
      this.entries = [];
      this.show();
    });
  }

  /** An entry is {form, call, outcome, response, error, seen, label}. */
  add(entry) {
    this.entries = [{ ...entry, at: new Date() }, ...this.entries].slice(0, MOST_ENTRIES);
    this.show(this.entries[0]);
  }

  show(opened = null) {
    byId("history-empty").hidden = this.entries.length > 0;
    byId("clear-history").hidden = this.entries.length === 0;
    byId("history").replaceChildren(...this.entries.map((entry) => this.itemOf(entry, entry === opened)));
  }

  itemOf(entry, isOpened) {
    const { form, outcome, error, wasStopped, at } = entry;
    const thumbnail = form.picture
      ? element("img", { src: form.picture.url, alt: "" })
      : element("span", { className: "no-picture", "aria-hidden": "true" }, "Aa");
    const summary = error?.title ?? (wasStopped ? "stopped" : summaryOf(outcome));
    const button = element(
      "button",
      { type: "button", className: `past${error ? " is-error" : ""}` },
      thumbnail,
      element(
        "span",
        { className: "past-text" },
        element("span", { className: "past-ask" }, element("b", {}, skillNamed(form.skill).title), ` ${entry.label}`),
        element("span", { className: "past-answer" }, summary),
      ),
      element("time", {}, at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })),
    );
    if (isOpened) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => {
      this.show(entry);
      this.onOpen(entry);
    });
    return element("li", {}, button);
  }
}
