/** The turns of a chat, shown above the field for the next one. */

import { byId, element } from "./dom.js";

const NEAR_PX = 40;

export class Conversation {
  constructor() {
    this.turns = [];
    this.box = byId("conversation");
    this.pending = null;
    this.isKept = false; // shown without turns too
  }

  /** Whether the thoughts of the answer so far are unfolded. */
  get isUnfolded() {
    return this.pending?.folded.open ?? false;
  }

  /** A turn is {role, content}, of the visitor also {pictures}, of the model also {thoughts, isUnfolded, note}. */
  set(turns) {
    this.turns = turns;
    this.show();
  }

  /** A question with its answer so far; the answer counts as a turn once it is whole. What is shown stays in place:
   * thoughts can be unfolded while more comes. */
  showPending(question, pictures, { text, reasoning }) {
    if (this.pending === null) {
      this.show();
      this.pending = new Bubble({ role: "assistant" });
      this.box.append(new Bubble({ role: "user", content: question, pictures }).node, this.pending.node);
      this.box.hidden = false;
      this.box.scrollTop = this.box.scrollHeight;
    }
    const wasAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < NEAR_PX;
    this.pending.say({ content: text ?? "", thoughts: reasoning?.text, isBusy: true });
    if (wasAtEnd) this.box.scrollTop = this.box.scrollHeight;
  }

  show(turns = this.turns) {
    this.pending = null;
    this.box.hidden = turns.length === 0 && !this.isKept;
    this.box.replaceChildren(...turns.map((turn) => new Bubble(turn).node));
    this.box.scrollTop = this.box.scrollHeight;
  }
}

class Bubble {
  constructor({ role, content = "", pictures = [], thoughts, isUnfolded = false, note }) {
    this.title = element("summary");
    this.thoughts = element("p");
    this.folded = element("details", { className: "thoughts", open: isUnfolded }, this.title, this.thoughts);
    this.text = element("span", { className: "turn-text" });
    const who = element("span", { className: "sr-only" }, role === "user" ? "You: " : "Model: ");
    const shown = pictures.map(({ url, name }) => element("img", { src: url, alt: name }));
    this.node = element("div", { className: `turn turn-${role}` }, who, ...shown, this.folded, this.text);
    this.say({ content, thoughts });
    if (note) this.node.append(element("span", { className: "answer-note" }, note));
  }

  say({ content, thoughts = "", isBusy = false }) {
    const isThinking = isBusy && content === "";
    this.node.classList.toggle("is-busy", isBusy);
    this.folded.hidden = thoughts === "";
    this.folded.classList.toggle("is-thinking", isThinking);
    this.title.textContent = isThinking ? "Thinking…" : "Reasoning";
    this.thoughts.textContent = thoughts.trim();
    this.text.textContent = content.trim();
  }
}
