/* The chosen picture, large, with all that was found in it. Beside the list, or over it on a small screen. */

class Detail {
  constructor(box, { onChoose, onDecide, onStep, onClose }) {
    Object.assign(this, { box, onChoose, onDecide, onStep, onClose });
    this.picture = null;
    this.rows = new Map();
  }

  /** `place` is "3 of 20". */
  show(picture, place) {
    if (picture !== this.picture) this.build(picture);
    if (picture) this.head.textContent = place;
  }

  build(picture) {
    this.picture = picture;
    this.rows.clear();
    if (!picture) return this.box.replaceChildren();
    this.drawing = pictureFigure(picture, { hasTags: true, onChoose: this.onChoose });
    this.head = element("p", { className: "detail-place" });
    const words = { accepted: "Accept", rejected: "Reject" };
    this.whole = decisionButtons("this picture", words, (decision) => this.onDecide(PICTURE, decision));
    const step = (by, name, path) => {
      const button = element("button", { type: "button", className: "quiet icon", title: name, ariaLabel: name });
      button.append(icon(path));
      button.addEventListener("click", () => (by ? this.onStep(by) : this.onClose()));
      return button;
    };
    const close = step(0, "Back to the list", "M6 6l12 12M18 6L6 18");
    close.classList.add("detail-close");
    this.box.replaceChildren(
      element("div", { className: "detail-head" },
        step(-1, "Previous picture", "M15 5l-7 7 7 7"), this.head, step(1, "Next picture", "M9 5l7 7-7 7"), close),
      element("h2", { tabIndex: -1 }, isolated(picture.file)),
      element("p", { className: "hint" }, factsOf(picture)),
      thumbnailOf(picture) ? element("div", { className: "stage" }, this.drawing.figure) : "",
      ...this.textOf(picture),
      picture.isLabelled ? element("div", { className: "whole" }, this.whole.box) : "",
      this.listOf(picture),
    );
    this.box.scrollTop = 0;
  }

  textOf({ question, answer, error, unread, objects }) {
    const parts = [];
    if (question !== undefined) parts.push(element("p", { className: "question", dir: "auto" }, question));
    if (answer !== undefined) parts.push(element("p", { className: "answer", dir: "auto" }, answer));
    const tell = (text, reason) => parts.push(element("p", { className: "notice" }, `${text}: `, isolated(reason)));
    if (error !== undefined) tell("This picture was not labelled", error);
    if (unread !== undefined) tell("The picture cannot be shown", unread);
    const isEmpty = !objects.length && answer === undefined && error === undefined;
    if (isEmpty) parts.push(element("p", { className: "hint" }, "Nothing was found."));
    return parts;
  }

  listOf(picture) {
    const list = element("ol", { className: "objects", ariaLabel: "Objects" });
    picture.objects.forEach((object, index) => {
      const name = element("button", { type: "button", className: "object-name" });
      const bar = element("span", { className: "score-bar" }, element("span"));
      bar.firstChild.style.width = `${(object.score ?? 0) * 100}%`;
      name.append(swatch(object.label, String(index + 1)), isolated(object.label, "object-label"));
      if (object.score !== null) name.append(bar, element("span", { className: "num" }, scoreText(object.score)));
      name.addEventListener("click", () => this.onChoose(index));
      const about = `object ${index + 1}, ${object.label}`;
      const buttons = decisionButtons(about, null, (decision) => this.onDecide(index, decision));
      const row = element("li", { className: "object" }, name, buttons.box);
      row.addEventListener("pointerenter", () => this.fill(this.shown, this.chosen, index));
      row.addEventListener("pointerleave", () => this.fill(this.shown, this.chosen));
      row.dataset.index = index;
      this.rows.set(index, { row, name, buttons });
      list.append(row);
    });
    return list;
  }

  /** Decisions, and which objects are drawn; the chosen one is lit, or the one under the pointer. */
  fill(shown, chosen, hovered = null) {
    if (!this.picture) return;
    Object.assign(this, { shown, chosen });
    this.drawing.fill(shown, hovered ?? chosen);
    this.whole.fill(decisions.of(this.picture));
    this.box.dataset.decision = decisions.of(this.picture);
    for (const [index, { row, name, buttons }] of this.rows) {
      const decision = decisions.of(this.picture, index);
      row.hidden = !shown.includes(index);
      row.className = `object is-${decision}`;
      row.classList.toggle("is-chosen", index === chosen);
      if (index === chosen) name.setAttribute("aria-current", "true");
      else name.removeAttribute("aria-current");
      buttons.fill(decision);
    }
    if (hovered === null && chosen !== null) this.rows.get(chosen)?.row.scrollIntoView({ block: "nearest" });
  }
}

function factsOf({ width, height, frame }) {
  const size = width ? `${width} × ${height} px` : "";
  const from = frame ? `frame ${frame.index} at ${frame.time_s.toFixed(2)} s of ` : "";
  return element("span", {}, size, size && from ? " · " : "", from, frame ? isolated(frame.video) : "");
}
