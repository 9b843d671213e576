/** Further pictures of the next message, for models whose chats take several. */

import { byId, element } from "./dom.js";

export class Attachments {
  /** `onFile` makes a picture of a file and gives it to `add`. */
  constructor({ onFile, onChange }) {
    this.list = [];
    this.onChange = onChange;
    this.isOffered = false;
    byId("attach").addEventListener("click", () => byId("attachment").click());
    byId("attachment").addEventListener("change", async ({ target }) => {
      for (const file of [...target.files]) await onFile(file);
      target.value = ""; // the same file may be picked again
    });
  }

  /** `room` is how many pictures this chat still takes beside those of the list. */
  offer(isOffered, room) {
    this.isOffered = isOffered;
    this.isFull = this.list.length >= room;
    byId("attach").hidden = !isOffered;
    byId("attach").disabled = this.isFull;
    byId("attach").title = this.isFull ? "The model's context has no room for another picture" : "";
    byId("attached").hidden = !isOffered || this.list.length === 0;
    byId("attached").replaceChildren(...this.list.map((picture, index) => this.chipOf(picture, index)));
  }

  add(picture) {
    this.set([...this.list, picture]);
  }

  set(list) {
    this.list = list;
    this.onChange();
  }

  chipOf(picture, index) {
    const remove = element(
      "button",
      { type: "button", className: "chip-remove", "aria-label": `Remove ${picture.name}` },
      "×",
    );
    remove.addEventListener("click", () => this.set(this.list.toSpliced(index, 1)));
    const name = element("span", { className: "chip-picture" }, picture.name);
    return element("span", { className: "chip" }, element("img", { src: picture.url, alt: "" }), name, remove);
  }
}
