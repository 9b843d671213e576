/** Copying, also where the browser keeps its clipboard from pages without HTTPS. */

import { element } from "./dom.js";

const SAID_FOR_MS = 1400;

/** Copies and says so on the button that was pressed. */
export async function copyText(text, button) {
  const before = button.textContent;
  button.textContent = (await copied(text)) ? "Copied" : "Press Ctrl+C";
  setTimeout(() => (button.textContent = before), SAID_FOR_MS);
}

async function copied(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // refused: the older way may still work
    }
  }
  const field = element("textarea", { value: text, readOnly: true, className: "sr-only" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
