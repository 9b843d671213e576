/** Places the visitor marks on the picture: a click is a point, a drag is a box. Chips list them. */

import { byId, element } from "./dom.js";
import { markName } from "./overlay.js";

const DRAG_PX = 6;
const NUDGE = { ArrowLeft: [-0.01, 0], ArrowRight: [0.01, 0], ArrowUp: [0, -0.01], ArrowDown: [0, 0.01] };

export class Marks {
  constructor({ overlay, onChange }) {
    this.list = [];
    this.overlay = overlay;
    this.onChange = onChange;
    this.isOn = !matchMedia("(pointer: coarse)").matches; // a finger scrolls the page unless told otherwise
    this.isOffered = false;
    this.canvas = byId("canvas");
    byId("marking").addEventListener("click", () => this.offer(this.isOffered, !this.isOn));
    this.canvas.addEventListener("pointerdown", (event) => this.begin(event));
  }

  /** Whether the chosen skill takes marks and there is a picture to mark. */
  offer(isOffered, isOn = this.isOn) {
    Object.assign(this, { isOffered, isOn });
    byId("marking").hidden = !isOffered;
    byId("marking").setAttribute("aria-pressed", String(isOn));
    this.canvas.classList.toggle("is-marking", isOffered && isOn);
    this.overlay.showMarks(isOffered ? this.list : []);
    this.showChips();
  }

  set(list) {
    this.list = list;
    this.offer(this.isOffered);
    this.onChange();
  }

  begin(event) {
    if (!this.isOffered || !this.isOn || event.button !== 0) return;
    event.preventDefault();
    const start = this.placeOf(event);
    const moved = (now) => Math.hypot(now.clientX - event.clientX, now.clientY - event.clientY) >= DRAG_PX;
    const markTo = (now) => (moved(now) ? boxOf(start, this.placeOf(now)) : start);
    const onMove = (now) => this.overlay.showMarks([...this.list, markTo(now)]);
    const end = (now) => {
      this.canvas.removeEventListener("pointermove", onMove);
      this.canvas.removeEventListener("pointerup", end);
      this.canvas.removeEventListener("pointercancel", end);
      if (now.type === "pointerup") this.set([...this.list, markTo(now)]);
      else this.overlay.showMarks(this.list);
    };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointermove", onMove);
    this.canvas.addEventListener("pointerup", end);
    this.canvas.addEventListener("pointercancel", end);
  }

  placeOf(event) {
    const frame = this.canvas.getBoundingClientRect();
    return [(event.clientX - frame.left) / frame.width, (event.clientY - frame.top) / frame.height].map(share);
  }

  showChips() {
    const row = byId("marks");
    row.hidden = !this.isOffered || (this.list.length === 0 && !this.isOn);
    const add = element(
      "button",
      { type: "button", className: "chip-add", title: "Add a point in the middle; arrow keys move it" },
      "+ mark a point",
    );
    add.addEventListener("click", () => {
      this.set([...this.list, [0.5, 0.5]]);
      row.querySelectorAll(".chip-name")[this.list.length - 1].focus();
    });
    row.replaceChildren(...this.list.map((mark, index) => this.chipOf(mark, index)), add);
  }

  chipOf(mark, index) {
    const kind = mark.length === 2 ? "point" : "box";
    const numbers = mark.map((value) => value.toFixed(2)).join(", ");
    const name = element(
      "button",
      { type: "button", className: "chip-name", title: "Arrow keys move it, Delete removes it" },
      element("b", {}, markName(index)),
      ` ${kind} `,
      element("span", {}, numbers),
    );
    name.addEventListener("keydown", (event) => this.onChipKey(event, index));
    const remove = element(
      "button",
      { type: "button", className: "chip-remove", "aria-label": `Remove ${kind} ${markName(index)}` },
      "×",
    );
    remove.addEventListener("click", () => this.remove(index));
    return element("span", { className: "chip" }, name, remove);
  }

  onChipKey(event, index) {
    if (["Delete", "Backspace"].includes(event.key)) return this.remove(index);
    if (!(event.key in NUDGE)) return;
    event.preventDefault();
    const [right, down] = NUDGE[event.key];
    const moved = this.list[index].map((value, place) => share(value + (place % 2 === 0 ? right : down)));
    this.set(this.list.with(index, moved));
    byId("marks").querySelectorAll(".chip-name")[index].focus();
  }

  remove(index) {
    this.set(this.list.toSpliced(index, 1));
    (byId("marks").querySelectorAll(".chip-name")[index] ?? byId("marking")).focus();
  }
}

const share = (value) => Math.round(Math.min(Math.max(value, 0), 1) * 10000) / 10000;

const boxOf = ([x, y], [toX, toY]) => [Math.min(x, toX), Math.min(y, toY), Math.max(x, toX), Math.max(y, toY)];
