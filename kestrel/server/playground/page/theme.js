/** Light, dark, or as the system has it; a choice is remembered where the browser allows it. */

import { byId } from "./dom.js";

const STORED_AS = "kestrel-theme";
const ORDER = ["system", "light", "dark"];
const SAID = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };

let theme = remembered();
apply();

export function setUpTheme() {
  byId("theme-switch").addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    apply();
    remember();
    describe();
  });
  describe();
}

function apply() {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function describe() {
  byId("theme-state").textContent = SAID[theme];
  byId("theme-switch").title = `${SAID[theme]} (click to change)`;
}

function remembered() {
  try {
    const stored = localStorage.getItem(STORED_AS);
    return ORDER.includes(stored) ? stored : "system";
  } catch {
    return "system"; // storage is blocked: the choice lasts for this page
  }
}

function remember() {
  try {
    localStorage.setItem(STORED_AS, theme);
  } catch {
    // as above
  }
}
