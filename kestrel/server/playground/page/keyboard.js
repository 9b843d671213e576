/** Keys that work anywhere on the page; single letters and digits do not while something is being typed. */

import { byId } from "./dom.js";

const IS_MAC = /Mac|iPhone|iPad/.test(navigator.platform);

const RUN_KEYS = IS_MAC ? "⌘ ⏎" : "Ctrl ⏎";

/** Enter in the field for the prompt runs it; Shift and Enter begin a line. */
export function setUpKeyboard({ onRun, onStop, onSkill, onSettings }) {
  byId("foot-run-keys").textContent = RUN_KEYS;
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.isComposing) return;
    event.preventDefault();
    onRun();
  });
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      onRun();
    } else if (event.key === "Escape") onStop();
    else if (!isTyping(event.target) && !event.ctrlKey && !event.metaKey && !event.altKey)
      plainKey(event, { onSkill, onSettings });
  });
}

function plainKey(event, { onSkill, onSettings }) {
  if (/^[1-9]$/.test(event.key)) onSkill(Number(event.key) - 1);
  else if (event.key === "s") onSettings();
  else if (event.key === "/") byId("prompt").focus();
  else return;
  event.preventDefault();
}

const isTyping = (target) => target.matches("textarea, input, select");
