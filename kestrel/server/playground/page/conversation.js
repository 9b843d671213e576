/** The turns of a chat, shown above the field for the next one. */

import { byId, element } from "./dom.js";

export class Conversation {
  constructor() {
    this.turns = [];
  }

  set(turns) {
    this.turns = turns;
    this.show();
  }

  /** A question with its answer so far; the answer counts as a turn once it is whole. */
  showPending(question, answer) {
    this.show([
      ...this.turns,
      { role: "user", content: question },
      { role: "assistant", content: answer, isBusy: true },
    ]);
  }

  show(turns = this.turns) {
    byId("conversation").hidden = turns.length === 0;
    byId("conversation").replaceChildren(
      ...turns.map(({ role, content, isBusy }) => {
        const who = role === "user" ? "You" : "Model";
        const bubble = element(
          "p",
          { className: `turn turn-${role}${isBusy ? " is-busy" : ""}` },
          element("span", { className: "sr-only" }, `${who}: `),
          content.trim(),
        );
        return bubble;
      }),
    );
    byId("conversation").scrollTop = byId("conversation").scrollHeight;
  }
}
