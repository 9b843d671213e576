/** The menu of adapters: those that the server lists behind its model. Hidden where there are none. */

import { fetchJson } from "./api.js";
import { byId, element } from "./dom.js";

const NO_ADAPTER = "";

export class Adapters {
  constructor({ onChange }) {
    this.menu = byId("adapter");
    this.menu.addEventListener("change", onChange);
    this.set([]);
  }

  /** The list needs a key where the server does. Without it, or without adapters, requests name none. */
  async ask(key) {
    try {
      const { data } = await fetchJson("v1/models", key);
      this.set(data.filter(({ parent }) => parent).map(({ id, parent }) => id.slice(parent.length + 1)));
    } catch {
      this.set([]);
    }
  }

  get chosen() {
    return this.menu.value;
  }

  /** Of an earlier form: it may have gone from the list since. */
  set chosen(name) {
    const listed = [...this.menu.options].map(({ value }) => value);
    if (!listed.includes(name)) this.set([...listed.slice(1), name]);
    this.menu.value = name;
  }

  set(names) {
    const { chosen } = this;
    const options = names.map((name) => element("option", { value: name }, name));
    this.menu.replaceChildren(element("option", { value: NO_ADAPTER }, "none"), ...options);
    this.menu.value = names.includes(chosen) ? chosen : NO_ADAPTER;
    byId("adapter-row").hidden = names.length === 0;
  }
}
