/** The settings drawer: API key, sampling, streaming. The key stays in this tab's session storage. */

import { byId, element } from "./dom.js";
import { SETTINGS } from "./skills.js";

const KEY_STORED_AS = "kestrel-api-key";
const FIELDS = {
  temperature: { title: "Temperature", min: 0, max: 2, step: 0.1, hint: "0 always takes the likeliest word" },
  top_p: { title: "Top p", min: 0, max: 1, step: 0.05, hint: "share of likely words to choose from" },
  max_tokens: { title: "Max tokens", min: 1, step: 1, hint: "longest answer" },
  max_objects: { title: "Max objects", min: 1, step: 1, hint: "most points or boxes: point, detect" },
  seed: { title: "Seed", min: 0, step: 1, hint: "the same seed gives the same answer" },
};

export class Settings {
  constructor({ onChange, onKey }) {
    this.drawer = byId("settings");
    byId("sampling-fields").append(...SETTINGS.map(fieldOf));
    byId("api-key").value = storedKey();
    byId("api-key").addEventListener("input", () => storeKey(byId("api-key").value));
    byId("api-key").addEventListener("change", onKey);
    this.drawer.addEventListener("input", onChange);
    this.drawer.addEventListener("click", (event) => event.target === this.drawer && this.drawer.close());
    byId("open-settings").addEventListener("click", () => this.open());
    byId("key-wanted").addEventListener("click", () => this.open("api-key"));
    byId("reset-settings").addEventListener("click", () => {
      for (const name of SETTINGS) inputOf(name).value = "";
      byId("streaming").checked = true;
      onChange();
    });
  }

  open(focused = null) {
    if (!this.drawer.open) this.drawer.showModal();
    if (focused) byId(focused).focus();
  }

  /** What the server takes when a field is left empty. Models that read no pictures find no objects. */
  showDefaults(defaults, readsPictures) {
    inputOf("max_objects").parentElement.hidden = !readsPictures;
    for (const name of SETTINGS)
      inputOf(name).placeholder = defaults?.[name] === undefined ? "random" : `${defaults[name]}`;
  }

  get key() {
    return byId("api-key").value.trim();
  }

  get isStreaming() {
    return byId("streaming").checked;
  }

  /** Numbers of the fields that are filled in. */
  get values() {
    const filled = SETTINGS.filter((name) => inputOf(name).value !== "");
    return Object.fromEntries(filled.map((name) => [name, inputOf(name).valueAsNumber]));
  }

  set values(values) {
    for (const name of SETTINGS) inputOf(name).value = values[name] ?? "";
  }
}

const inputOf = (name) => byId(`setting-${name}`);

function fieldOf(name) {
  const { title, hint, ...limits } = FIELDS[name];
  const input = element("input", { type: "number", id: `setting-${name}`, inputMode: "decimal", ...limits });
  return element(
    "label",
    { className: "setting", htmlFor: input.id },
    element("span", {}, title, element("small", {}, hint)),
    input,
  );
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY_STORED_AS) ?? "";
  } catch {
    return ""; // storage is blocked: the key lasts for this page
  }
}

function storeKey(key) {
  try {
    sessionStorage.setItem(KEY_STORED_AS, key);
  } catch {
    // as above
  }
}
