/** Keys that work anywhere on the page; single letters and digits do not while something is being typed. */

import { byId } from "./dom.js";
import { SKILLS } from "./skills.js";

const IS_MAC = /Mac|iPhone|iPad/.test(navigator.platform);

export function setUpKeyboard({ onRun, onStop, onSkill, onSettings }) {
  for (const id of ["run-keys", "foot-run-keys"]) byId(id).textContent = IS_MAC ? "⌘ ⏎" : "Ctrl ⏎";
  document.addEventListener("keydown", (event) => {
    if (byId("settings").open) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      onRun();
    } else if (event.key === "Escape") onStop();
    else if (!isTyping(event.target) && !event.ctrlKey && !event.metaKey && !event.altKey)
      plainKey(event, { onSkill, onSettings });
  });
}

function plainKey(event, { onSkill, onSettings }) {
  const skill = SKILLS[Number(event.key) - 1];
  if (skill) onSkill(skill.name);
  else if (event.key === "s") onSettings();
  else if (event.key === "/") byId("prompt").focus();
  else return;
  event.preventDefault();
}

const isTyping = (target) => target.matches("textarea, input, select");
